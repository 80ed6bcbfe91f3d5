from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.errors import LayoutError, WorkloadError
from overlapsim.workload.families import gpt
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job, check_layout, layout_reasons
from overlapsim.workload.model import Attention, Layer, Mlp, ModelSpec, MoE
from overlapsim.workload.presets import load_preset
from overlapsim.workload.stages import chunk_layers, spread_layers, stage_layers
from tests.workload.layouts import layouts

DENSE = gpt(num_layers=40, hidden=5120, num_heads=40, vocabulary=50257, max_positions=4096)
GATED = Mlp(14336, gated=True, activation="silu")
ROUTED = ModelSpec(
    "routed",
    4096,
    (Layer(Attention(32, 8, 128), MoE(8, 2, GATED, num_shared_experts=1, shared=GATED)),) * 32,
    32000,
    32768,
)


def test_1472_gpus_and_a_batch_of_32() -> None:
    """A user's question: 13B, TP 8, PP 8 on 1472 GPUs, batch 32: 23 replicas, which do not divide 32."""
    layout = Layout.parse("tp=8,pp=8", world_size=1472)
    (reason,) = layout_reasons(layout, DENSE, Job(2048, global_batch=32, world_size=1472))
    assert "a global batch of 32 sequences does not divide into 23 data-parallel replicas" in reason
    assert "expected a multiple of 23" in reason
    with pytest.raises(LayoutError, match=re.escape(reason)):
        check_layout(layout, DENSE, Job(2048, global_batch=32, world_size=1472))


@pytest.mark.parametrize(
    ("model", "layout", "job", "reason"),
    [
        (DENSE, Layout(tp=8), Job(4096, world_size=16), "tp=8,dp=1 has 8 ranks .* for 16 GPUs"),
        (DENSE, Layout(tp=16), Job(4096), "40 query heads and 40 key and value heads on 16"),
        (DENSE, Layout(sp=16), Job(4096), "sp is 16 and a tensor-parallel rank has 40 query heads"),
        (ROUTED, Layout(tp=8, sp=2), Job(4096), "sp is 2 and .* 4 query heads and 1 key and value heads"),
        (DENSE, Layout(ep=2, dp=2), Job(4096), "gpt has no experts"),
        (DENSE, Layout(tp=2, etp=1), Job(4096), "gpt has no experts"),
        (ROUTED, Layout(ep=16, dp=16), Job(4096), "ep is 16 and a layer has 8 experts"),
        (ROUTED, Layout(ep=3, dp=3), Job(4096), "ep is 3 and a layer has 8 experts"),
        (ROUTED, Layout(etp=3, dp=3), Job(4096), "etp is 3 and a feed-forward block is 14336 wide"),
        (ROUTED, Layout(tp=2, ep=8, etp=1, dp=4, sequence_parallel=False), Job(4096), "expected it on"),
        (DENSE, Layout(cp=2), Job(4095), r"4095 tokens does not divide by 2 x cp = 4"),
        (DENSE, Layout(cp=2), Job(4098), r"4098 tokens does not divide by 2 x cp = 4"),
        (DENSE, Layout(tp=8, cp=2), Job(4095), r"4095 tokens does not divide by 2 x cp = 4"),
        (DENSE, Layout(sp=8), Job(4100), "4100 tokens does not divide by sp = 8"),
        (DENSE, Layout(sp=8, cp=2), Job(4096 + 16), "divide by sp = 8 x 2 x cp = 4"),
        (DENSE, Layout(tp=8), Job(4100), "4100 tokens of a sequence on each rank do not divide by tp = 8"),
        (DENSE, Layout(pp=16), Job(4096), "40 layers do not divide into pp x vpp = 16 x 1 = 16 chunks"),
        (DENSE, Layout(pp=4, vpp=4), Job(4096), "40 layers do not divide into pp x vpp = 4 x 4 = 16 chunks"),
        (DENSE, Layout(pp=3), Job(4096, stage_layers=(14, 14)), "expected 3 counts from 0 with the sum 40"),
        (DENSE, Layout(pp=3), Job(4096, stage_layers=(14, 14, 13)), "expected 3 counts from 0 with the sum 40"),
        (DENSE, Layout(pp=3), Job(4096, stage_layers=(21, 20, -1)), "expected 3 counts from 0 with the sum 40"),
        (DENSE, Layout(dp=8), Job(4096, micro_batch=3, global_batch=32), "x micro-batches of 3; expected a multiple"),
        (DENSE, Layout(pp=4, vpp=2), Job(4096, global_batch=6), "6 micro-batches do not divide by pp = 4"),
    ],
)
def test_a_bad_layout_has_one_clear_reason(model: ModelSpec, layout: Layout, job: Job, reason: str) -> None:
    found = layout_reasons(layout, model, job)
    assert len(found) == 1 and re.search(reason, found[0]), found
    assert "expected" in found[0]


@pytest.mark.parametrize(
    ("model", "layout", "job"),
    [
        (DENSE, Layout(tp=8, pp=8, dp=16), Job(2048, global_batch=32, world_size=1024)),
        (DENSE, Layout(tp=8), Job(4096, micro_batch=4, global_batch=64)),
        (DENSE, Layout(pp=3), Job(4096, stage_layers=(14, 14, 12))),
        (DENSE, Layout(tp=8, sequence_parallel=False), Job(4100)),
        (ROUTED, Layout(tp=16, dp=2, etp=1, ep=8), Job(4096)),
        (ROUTED, Layout(sp=8, ep=8, pp=4, vpp=2, dp=2), Job(4096, global_batch=64)),
    ],
)
def test_what_fits_has_no_reason(model: ModelSpec, layout: Layout, job: Job) -> None:
    assert layout_reasons(layout, model, job) == ()
    check_layout(layout, model, job)


def test_published_layouts_are_valid() -> None:
    """What ran: none of these may be refused."""
    ran = [
        ("internal-352b", "sp=8,ep=8,pp=15", 1440, Job(8192, global_batch=720)),
        ("sc21-145.6b", "tp=8,pp=8", 1536, Job(2048, global_batch=2304)),
        ("sc21-529.6b", "tp=8,pp=35,vpp=3", 2520, Job(2048, global_batch=2520)),
        ("megascale-175b", "tp=8,pp=8,vpp=6", 12288, Job(2048, global_batch=6144)),
        ("korthikanti-1t", "tp=8,pp=64", 512, Job(2048, global_batch=512)),
        ("llama3-405b", "tp=8,pp=16", 8192, Job(8192, global_batch=2048, stage_layers=spread_layers(126, 16))),
    ]
    for name, text, gpus, job in ran:
        assert layout_reasons(Layout.parse(text, world_size=gpus), load_preset(name), job) == (), name


def test_several_subjects_are_told_together() -> None:
    layout = Layout(tp=3, cp=2, pp=7, dp=5)
    reasons = layout_reasons(layout, DENSE, Job(4095, global_batch=32, world_size=8))
    assert len(reasons) == 6  # ranks, heads, widths, sequence, layers, batch
    with pytest.raises(LayoutError, match="; ") as caught:
        check_layout(layout, DENSE, Job(4095, global_batch=32, world_size=8))
    assert all(reason in str(caught.value) for reason in reasons)


def test_job() -> None:
    assert Job(4096, micro_batch=2, global_batch=64).num_micro_batches(Layout(dp=4)) == 8
    with pytest.raises(LayoutError, match="does not divide into 3 data-parallel replicas"):
        Job(4096, global_batch=64).num_micro_batches(Layout(dp=3))
    with pytest.raises(LayoutError, match="the global batch is not given"):
        Job(4096).num_micro_batches(Layout())
    with pytest.raises(WorkloadError, match="micro_batch is 0"):
        Job(4096, micro_batch=0)
    with pytest.raises(WorkloadError, match=r"global_batch is 1\.5"):
        Job(4096, global_batch=1.5)  # type: ignore[arg-type]


def test_layers_of_stages() -> None:
    mixed = ModelSpec("mixed", 4096, (Layer(Attention(32, 8, 128), GATED),) * 2 + ROUTED.layers[:6], 32000, 4096)
    layout = Layout(pp=2, vpp=2)
    # Stage 0 holds chunks 0 and 2, so layers 0, 1 and 4, 5.
    assert stage_layers(mixed, layout, 0) == (mixed.layers[0:2], mixed.layers[4:6])
    assert stage_layers(mixed, layout, 1) == (mixed.layers[2:4], mixed.layers[6:8])
    assert stage_layers(mixed, layout, 1, (0, 5, 2, 1)) == (mixed.layers[0:5], mixed.layers[7:8])
    with pytest.raises(LayoutError, match="stage is 2; expected 0 to 1"):
        stage_layers(mixed, layout, 2)
    with pytest.raises(LayoutError, match="0 chunks"):
        spread_layers(8, 0)


@given(num_layers=st.integers(0, 200), chunks=st.integers(1, 40))
def test_spread_layers_are_even_and_fewest_at_the_ends(num_layers: int, chunks: int) -> None:
    counts = spread_layers(num_layers, chunks)
    assert len(counts) == chunks and sum(counts) == num_layers and max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)
    assert chunk_layers(Layout(pp=chunks), num_layers, counts) == counts


@settings(max_examples=100, deadline=None)
@given(layout=layouts())
def test_every_layer_is_on_one_stage(layout: Layout) -> None:
    counts = spread_layers(len(ROUTED.layers), layout.pp * layout.vpp)
    stages = [stage_layers(ROUTED, layout, stage, counts) for stage in range(layout.pp)]
    assert sum(len(chunk) for stage in stages for chunk in stage) == len(ROUTED.layers)
    assert all(len(stage) == layout.vpp for stage in stages)

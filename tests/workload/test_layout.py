from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from overlapsim.errors import LayoutError
from overlapsim.workload.layout import Layout
from tests.workload.layouts import layouts


def test_megascale_moe_352b() -> None:
    """240 to 1440 GPUs: SP 8 and EP 8 in the node, 15 stages, data parallelism of GPUs / 120 (arXiv 2505.11432)."""
    for gpus in (240, 480, 720, 960, 1440):
        layout = Layout.parse("sp=8,ep=8,pp=15", world_size=gpus)
        assert (layout.dp, layout.edp, layout.world_size) == (gpus // 120, gpus // 120, gpus)
        assert layout.dense_replicas == 8 * layout.dp
        assert str(layout) == f"sp=8,ep=8,pp=15,dp={gpus // 120}"


def test_published_layouts_have_their_gpus() -> None:
    assert Layout(tp=8, pp=8, vpp=6, dp=192).world_size == 12288  # MegaScale 175B
    assert Layout(tp=8, pp=35, vpp=3, dp=40).world_size == 11200  # MegaScale 530B
    deepseek = Layout(ep=64, pp=16, dp=128, zero=1)
    assert (deepseek.world_size, deepseek.edp) == (2048, 2)
    llama = Layout(tp=8, pp=16, dp=64)
    assert llama.world_size == 8192


def test_experts_may_fold_over_every_other_axis() -> None:
    """MoE Parallel Folding: TP x CP of attention becomes EP; expert data parallelism takes what is left."""
    layout = Layout(tp=4, cp=2, ep=8, etp=1, pp=4, dp=4)
    assert (layout.world_size, layout.edp) == (128, 4)
    assert Layout(tp=2, ep=8, etp=1, pp=1, dp=8).edp == 2


def test_one_spelling_for_one_layout() -> None:
    assert Layout(cp=8, cp_kind="ulysses") == Layout(sp=8)
    assert Layout(sp=8).cp_kind == "ulysses"
    assert Layout(sp=4, cp=2) == Layout(sp=4, cp=2, cp_kind="hybrid")
    assert Layout(sp=4, cp=2).cp_kind == "hybrid"
    assert Layout(cp=4).cp_kind == "ring"
    assert Layout(cp=4, cp_kind="allgather") != Layout(cp=4)
    assert Layout(tp=8) == Layout(tp=8, etp=8)
    assert Layout(sequence_parallel=False) == Layout()
    assert Layout(tp=2, sequence_parallel=False) != Layout(tp=2)
    assert Layout.parse(" tp = 2 , dp=3, ") == Layout(tp=2, dp=3)
    assert Layout.parse("") == Layout()


def test_how_it_is_split() -> None:
    layout = Layout(tp=4, sp=2, cp=3, dp=2)
    assert (layout.context, layout.sequence_split, layout.dense_replicas) == (6, 24, 12)
    assert replace(layout, sequence_parallel=False).sequence_split == 6
    sharded = Layout(tp=4, cp=2, dp=8, ep=2, etp=1, zero=3, hsdp=2)
    assert (sharded.dense_shards, sharded.expert_shards) == (8, 16)
    assert (replace(sharded, zero=0, hsdp=1).dense_shards, replace(sharded, zero=0, hsdp=1).expert_shards) == (1, 1)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"tp": 0}, "tp is 0; expected a whole number from 1"),
        ({"pp": -2}, "pp is -2"),
        ({"dp": 2.0}, "dp is 2.0; expected a whole number"),
        ({"ep": True}, "ep is True"),
        ({"zero": 4}, "zero is 4; expected a whole number from 0 to 3"),
        ({"cp_kind": "zigzag"}, "cp_kind is 'zigzag'; expected one of ring, allgather, ulysses, hybrid"),
        ({"sequence_parallel": 1}, "sequence_parallel is 1; expected true or false"),
        ({"cp": 4, "cp_kind": "hybrid"}, "expected sp of at least 2 as well"),
        ({"sp": 2, "cp": 4, "cp_kind": "allgather"}, "cp_kind is allgather with sp=2 and cp=4"),
        ({"tp": 8, "ep": 8}, "etp x ep x pp = 8 x 8 x 1 = 64 does not divide the 8 ranks"),
        ({"tp": 8, "ep": 8}, "or etp=1 to keep experts whole"),
        ({"ep": 3, "dp": 4}, "etp x ep x pp = 1 x 3 x 1 = 3 does not divide the 4 ranks"),
        ({"vpp": 2}, "vpp is 2 with pp=1"),
        ({"hsdp": 2, "dp": 4}, "hsdp is 2 with zero=0"),
        ({"hsdp": 3, "dp": 4, "zero": 1}, "hsdp is 3 with dp=4 and edp=4"),
        ({"hsdp": 2, "dp": 4, "ep": 4, "zero": 3}, "hsdp is 2 with dp=4 and edp=1"),
        ({"dp": 2**23, "tp": 4}, "expected at most 16777216"),
    ],
)
def test_what_contradicts_itself_has_one_reason(degrees: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)) as caught:
        Layout(**degrees)
    assert "\n" not in str(caught.value) and "; " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "'tp' is no part of a layout; expected key=value"),
        ("gtp=2", "'gtp=2' is no part of a layout"),
        ("tp=2,tp=4", "tp is given twice"),
        ("tp=two", "tp is 'two'; expected a whole number"),
        ("tp=-1", "tp is '-1'; expected a whole number"),
        ("dp=9999999999", "dp is '9999999999'"),
        ("tp=2,sequence_parallel=yes", "sequence_parallel is 'yes'; expected on or off"),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(message)):
        Layout.parse(text)


def test_ranks_of_the_machine() -> None:
    assert Layout.parse("tp=8,pp=8", world_size=1472).dp == 23
    with pytest.raises(LayoutError, match=r"1470 ranks do not divide into copies of the model on .* = 64 ranks"):
        Layout.parse("tp=8,pp=8", world_size=1470)
    with pytest.raises(LayoutError, match=r"has 128 ranks .* expected 64, or leave out dp"):
        Layout.parse("tp=8,pp=8,dp=2", world_size=64)


@settings(max_examples=300, deadline=None)
@given(layout=layouts())
def test_the_two_grids_agree_and_text_reads_back(layout: Layout) -> None:
    dense = layout.tp * layout.sp * layout.cp * layout.pp * layout.dp
    assert layout.world_size == dense == layout.etp * layout.ep * layout.pp * layout.edp
    assert Layout.parse(str(layout)) == layout
    text = re.sub(r",?\bdp=\d+", "", str(layout))
    assert Layout.parse(text, world_size=layout.world_size) == layout

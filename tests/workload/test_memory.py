from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from overlapsim.errors import LayoutError, UsageError, WorkloadError
from overlapsim.workload.families import gpt
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job, layout_reasons
from overlapsim.workload.memory import MemoryModel
from overlapsim.workload.model_count import parameters
from overlapsim.workload.presets import list_presets, load_preset
from overlapsim.workload.recipe import RECIPES, Recipe
from overlapsim.workload.recompute import Recompute
from overlapsim.workload.stage_weights import LocalParameters, layer_parameters_local, stage_parameters
from overlapsim.workload.stages import spread_layers
from overlapsim.workload.state_precision import StatePrecision, state_precision
from tests.workload.layouts import layouts

MEGATRON_2021 = RECIPES["megatron-2021"]
SMALL = gpt(num_layers=12, hidden=768, num_heads=12, vocabulary=50304, max_positions=1024)


def test_widths_of_states() -> None:
    """18 bytes a parameter with fp32 gradients, 16 without; ZeRO-1 over d ranks leaves 6 + 12 / d (ZeRO, SC'20)."""
    assert state_precision("bf16") == StatePrecision(2, 4, 4, 8)
    assert state_precision("bf16").total_bytes == 18
    assert state_precision("fp16", gradient="fp16").total_bytes == 16
    assert state_precision("fp32").total_bytes == 16
    assert state_precision("bf16", moments="bf16").total_bytes == 14
    assert state_precision("bf16", fp8=True).parameter_bytes == 4
    assert state_precision("bf16", fp8=True, fp8_parameters=True).parameter_bytes == 2
    memory = MemoryModel(SMALL, Job(1024)).stage(Layout(dp=8, zero=1), 0, (1,))
    count = parameters(SMALL).total
    assert memory.parameters + memory.gradients + memory.optimizer == count * (6 + 12 / 8)


def test_zero_stages_shard_what_they_say() -> None:
    """Table 1 of ZeRO (SC'20): 7.5B parameters, 64 ranks, 16-bit gradients: 120, 31.4, 16.6 and 1.9 GB."""
    model = gpt(num_layers=36, hidden=4096, num_heads=32, vocabulary=51200, max_positions=2048, dtype="fp16")
    scale = 7.5e9 / parameters(model).total
    base = MemoryModel(model, Job(2048), precision=state_precision("fp16", gradient="fp16"))
    for zero, gigabytes in ((0, 120), (1, 31.4), (2, 16.6), (3, 1.88)):
        memory = base.stage(Layout(dp=64, zero=zero), 0, (1,))
        states = memory.parameters + memory.gradients + memory.optimizer
        assert states * scale / 1e9 == pytest.approx(gigabytes, rel=5e-3)


def test_parameters_of_stages() -> None:
    """Megatron: an embedding on the first stage and, tied, on the last; TP splits all but norms and row biases."""
    h, layers, v, s = 1024, 8, 51200, 2048
    model = gpt(num_layers=layers, hidden=h, num_heads=16, vocabulary=v, max_positions=s)
    first, last = (stage_parameters(model, Layout(tp=8, pp=2), stage) for stage in (0, 1))
    layer = 12 * h * h // 8 + 7 * h // 8 + 6 * h
    assert layer_parameters_local(model, model.layers[0], Layout(tp=8)) == LocalParameters(layer)
    assert first.dense == 4 * layer + v // 8 * h + s * h
    assert last.dense == 4 * layer + v // 8 * h + 2 * h
    alone = stage_parameters(model, Layout(), 0)
    assert alone.dense == parameters(model).total


def test_keys_and_values_are_copied_beyond_their_heads() -> None:
    llama = load_preset("llama3-70b")
    h, q, kv = 8192, 8192, 1024
    for tp, kv_local in ((8, 128), (16, 128)):
        local = layer_parameters_local(llama, llama.layers[0], Layout(tp=tp)).dense
        assert local == h * (q // tp + 2 * kv_local) + h * q // tp + 3 * h * 28672 // tp + 2 * h
    assert kv // 8 == 128


def test_experts_on_their_own_grid() -> None:
    model = load_preset("internal-352b")
    local = stage_parameters(model, Layout.parse("sp=8,ep=8,pp=15"), 7)
    one = 3 * 4096 * 14336
    assert local.expert == 4 * 32 // 8 * one
    # Attention is replicated over the eight ranks of SP, and so is the shared expert.
    assert local.dense == 4 * (int(2.5 * 4096**2) + one + 32 * 4096 + 2 * 4096)
    folded = stage_parameters(model, Layout(tp=8, pp=15, ep=4, etp=2), 7)
    assert folded.expert == local.expert


@pytest.mark.parametrize("name", list_presets())
def test_all_ranks_together_hold_the_model(name: str) -> None:
    """Stages and expert ranks add up to the published parameters, tied tables and padding taken off."""
    model = load_preset(name)
    experts = max((layer.mlp.num_experts for layer in model.layers if layer.kind == "moe"), default=1)  # type: ignore[union-attr]
    layout = Layout(pp=4, ep=experts, dp=experts)
    counts = spread_layers(model.num_layers, 4)
    held = [stage_parameters(model, layout, stage, counts, vocabulary_multiple=1) for stage in range(4)]
    total = sum(local.dense + experts * local.expert for local in held)
    tied = model.vocabulary * model.hidden if model.tied_embeddings else 0
    assert total - tied == parameters(model).total + parameters(model).mtp


def test_korthikanti_first_stage() -> None:
    """Activations of the first stage: s b h L / t (34 + 5as/h) (1 + (p-1)/(pv)), and s b h p / t of the embedding's
    dropout (arXiv 2205.05198, equations 5 and 7)."""
    a, h, layers, t, p, v, s, b = 96, 12288, 96, 8, 8, 3, 2048, 1
    model = gpt(num_layers=layers, hidden=h, num_heads=a, vocabulary=51200, max_positions=s, dtype="fp16")
    memory = MemoryModel(model, Job(s, b), MEGATRON_2021)
    expected = s * b * h * layers / t * (34 + 5 * a * s / h)
    plain = memory.stage(Layout(tp=t, pp=p, dp=1), 0, (p,))
    assert plain.activations == pytest.approx(expected + s * b * h * p / t, rel=1e-3)
    interleaved = memory.stage(Layout(tp=t, pp=p, vpp=v), 0, (p, p, p + p - 1))
    factor = (3 * p + p - 1) / (p * v)
    assert factor == pytest.approx(1 + (p - 1) / (p * v))
    assert interleaved.activations == pytest.approx(expected * factor + s * b * h * p / t, rel=1e-3)


def test_korthikanti_last_stage() -> None:
    """The loss adds 4 s b h / t (1 + v / h): norm, its output, and logits in fp32."""
    h, t, s, b, v = 6144, 8, 2048, 4, 51200
    model = gpt(num_layers=48, hidden=h, num_heads=64, vocabulary=v, max_positions=s, dtype="fp16")
    memory = MemoryModel(model, Job(s, b), MEGATRON_2021).stage(Layout(tp=t), 0, (1,))
    assert memory.logits == pytest.approx(4 * s * b * h / t * (1 + v / h), rel=1e-9)
    fused = MemoryModel(model, Job(s, b), replace(MEGATRON_2021, loss="fused")).stage(Layout(tp=t), 0, (1,))
    assert fused.logits == pytest.approx(4 * s * b * h / t + 2 * s * b * v / t, rel=1e-9)
    assert MemoryModel(model, Job(s, b)).stage(Layout(tp=t, pp=2), 0, (2,)).logits == 0


def test_selective_rematerialisation_pays_as_published() -> None:
    """Mixtral-8x22B on 128 GPUs: activations fall by 57 % measured; the formula, which leaves out what is not a
    layer's, says 69 % of all tensors (MegaScale-MoE, section 6.3)."""
    model = load_preset("megascale-mixtral-8x22b")
    layout = Layout(sp=8, ep=8, pp=2, dp=8, zero=1)
    recipe = Recipe(dispatcher="all_gather")
    whole, less = (
        MemoryModel(model, Job(8192), recipe, Recompute.parse(text)).stage(layout, 0, (2,)) for text in ("none", "sar")
    )
    assert 0.35 < 1 - less.activations / whole.activations < 0.69
    assert less.total_bytes < whole.total_bytes and less.parameters == whole.parameters


def test_what_is_assumed_is_said() -> None:
    base = MemoryModel(SMALL, Job(1024))
    memory = base.stage(Layout(), 0, (1,))
    (finding,) = memory.findings
    assert finding.code == "memory_allowance_assumed" and "not measured" in finding.message
    sure = replace(base, fragmentation=0.0, context_bytes=0.0).stage(Layout(), 0, (1,))
    assert sure.findings == () and sure.allowance == 0
    assert memory.total_bytes - sure.total_bytes == pytest.approx(memory.allowance)


def test_refusals() -> None:
    base = MemoryModel(SMALL, Job(1024))
    for counts in ((), (1, 1), (-1,), (float("inf"),), (float("nan"),)):
        with pytest.raises(WorkloadError, match="expected one number of at least 0"):
            base.stage(Layout(), 0, counts)
    with pytest.raises(LayoutError, match="stage is 2"):
        base.stage(Layout(pp=2), 2, (1,))
    with pytest.raises(LayoutError, match="12 layers do not divide"):
        base.stage(Layout(pp=5), 0, (1,))
    with pytest.raises(WorkloadError, match="weights of 'fp8'"):
        state_precision("fp8")
    with pytest.raises(WorkloadError, match="fp8_parameters without fp8"):
        state_precision("bf16", fp8_parameters=True)
    with pytest.raises(UsageError, match="dtype 'bf17' is unknown"):
        state_precision("bf16", gradient="bf17")


MODELS = ("gpt2-126m", "llama3-8b", "mixtral-8x7b", "deepseek-moe-16b", "qwen3-30b-a3b")


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    layout=layouts(),
    recipe=st.sampled_from((Recipe(), MEGATRON_2021, Recipe(fp8=True))),
    recompute=st.sampled_from(("none", "selective", "full", "sar")),
    data=st.data(),
)
def test_kinds_add_up_and_more_zero_never_uses_more(
    name: str, layout: Layout, recipe: Recipe, recompute: str, data: st.DataObject
) -> None:
    model = load_preset(name)
    job = Job(4096 * 3, stage_layers=spread_layers(model.num_layers, layout.pp * layout.vpp))
    assume(not layout_reasons(layout, model, job))
    memory = MemoryModel(model, job, recipe, Recompute.parse(recompute))
    stage = data.draw(st.integers(0, layout.pp - 1))
    counts = data.draw(st.lists(st.integers(0, 8), min_size=layout.vpp, max_size=layout.vpp))
    sizes = [memory.stage(replace(layout, zero=zero, hsdp=1), stage, counts) for zero in range(4)]
    for size in sizes:
        kinds = size.by_kind()
        assert ",".join(kinds) == "parameters,gradients,optimizer,activations,logits,buffers,allowance"
        assert size.total_bytes == sum(kinds.values()) and min(kinds.values()) >= 0
    totals = [size.total_bytes for size in sizes]
    assert all(more <= fewer * (1 + 1e-12) for fewer, more in pairwise(totals))
    if layout.zero:
        # Shards over fewer ranks are larger.
        whole, parts = (memory.stage(replace(layout, hsdp=sets), stage, counts) for sets in (1, layout.hsdp))
        assert whole.optimizer <= parts.optimizer * (1 + 1e-12)
    # One micro-batch more in flight costs what a chunk keeps.
    more = memory.stage(layout, stage, [count + 1 for count in counts])
    less = memory.stage(layout, stage, counts)
    kept = sum(memory.recompute.kept_bytes(chunk) for chunk in memory.chunk_tensors(layout, stage))
    assert more.activations - less.activations >= kept * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(MODELS), stage=st.integers(0, 3))
def test_recompute_never_keeps_more(name: str, stage: int) -> None:
    model = load_preset(name)
    counts = spread_layers(model.num_layers, 4)
    kept = [
        MemoryModel(model, Job(4096, stage_layers=counts), MEGATRON_2021, Recompute.parse(text))
        .stage(Layout(pp=4), stage, (4 - stage,))
        .activations
        for text in ("full", "core_attn+layernorm+mlp+moe", "core_attn+layernorm", "selective", "none")
    ]
    assert kept == sorted(kept)


def test_zero_2_holds_whole_gradients_while_micro_batches_add_up() -> None:
    layout = Layout(dp=8, zero=2)
    one, several = (MemoryModel(SMALL, Job(1024, 1, batch)).stage(layout, 0, (1,)) for batch in (8, 16))
    first = MemoryModel(SMALL, Job(1024, 1, 16)).stage(replace(layout, zero=1), 0, (1,))
    assert one.gradients < several.gradients == first.gradients
    assert "gradients_held_whole" in {finding.code for finding in several.findings}
    assert "gradients_held_whole" not in {finding.code for finding in one.findings}

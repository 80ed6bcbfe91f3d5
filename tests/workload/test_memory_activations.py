"""Activation formulas as published, to 0.1 %, then properties."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.errors import LayoutError, WorkloadError
from overlapsim.workload.activations import layer_activations
from overlapsim.workload.families import gpt
from overlapsim.workload.layout import Layout
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import RECIPES, Recipe
from overlapsim.workload.recompute import MODULES, SAR, SELECTIVE, Activation, Recompute

# Numbers of rows and heads that both papers leave out as small: statistics of norms and softmax, the router's scores.
SMALL = {"statistics", "lse", "scores", "choices"}
# Korthikanti et al., table 3: heads, hidden, tensor parallelism, micro-batch; s = 2048.
KORTHIKANTI = {"22B": (64, 6144, 8, 4), "175B": (96, 12288, 8, 1), "530B": (128, 20480, 8, 1), "1T": (160, 25600, 8, 1)}
MEGATRON_2021 = RECIPES["megatron-2021"]


def kept(tensors: Iterable[Activation], modules: frozenset[str] = frozenset()) -> float:
    return sum(tensor.size_bytes for tensor in tensors if tensor.kept(modules) and tensor.tensor not in SMALL)


def tensors_of(model: ModelSpec, layout: Layout, seq_len: int, micro_batch: int, recipe: Recipe) -> list[Activation]:
    return list(layer_activations(model, model.layers[0], layout, seq_len, micro_batch, recipe))


@pytest.mark.parametrize("name", KORTHIKANTI)
def test_korthikanti_table_2(name: str) -> None:
    """Bytes of a layer for each technique (arXiv 2205.05198, equations 1 to 4 and table 2)."""
    a, h, t, b = KORTHIKANTI[name]
    s = 2048
    model = gpt(num_layers=1, hidden=h, num_heads=a, vocabulary=51200, max_positions=s, dtype="fp16")
    sbh, scores = s * b * h, 5 * a * s / h
    alone = tensors_of(model, Layout(), s, b, MEGATRON_2021)
    tensor = tensors_of(model, Layout(tp=t, sequence_parallel=False), s, b, MEGATRON_2021)
    sequence = tensors_of(model, Layout(tp=t), s, b, MEGATRON_2021)
    assert kept(alone) == pytest.approx(sbh * (34 + scores), rel=1e-3)
    assert kept(tensor) == pytest.approx(sbh * (10 + 24 / t + scores / t), rel=1e-3)
    assert kept(sequence) == pytest.approx(sbh / t * (34 + scores), rel=1e-3)
    assert kept(tensor, SELECTIVE) == pytest.approx(sbh * (10 + 24 / t), rel=1e-3)
    assert kept(sequence, SELECTIVE) == pytest.approx(34 * sbh / t, rel=1e-3)
    assert Recompute("full").kept_bytes([tensor]) == pytest.approx(2 * sbh, rel=1e-3)
    # What both papers leave out is small beside what they count.
    everything = sum(item.size_bytes for item in sequence if item.needed)
    assert everything == pytest.approx(kept(sequence), rel=1e-3)


def test_korthikanti_parts() -> None:
    """Attention keeps 11 s b h + 5 a s^2 b, the feed-forward block 19 s b h, the two norms 4 s b h."""
    a, h, s, b = 16, 2048, 1024, 2
    model = gpt(num_layers=1, hidden=h, num_heads=a, vocabulary=51200, max_positions=s, dtype="fp16")
    tensors = tensors_of(model, Layout(), s, b, MEGATRON_2021)
    norms = [tensor for tensor in tensors if tensor.tensor == "input" and tensor.operator.endswith("norm")]
    assert kept(norms) == 4 * s * b * h
    attention = [tensor for tensor in tensors if tensor.operator.startswith("attn.") and tensor not in norms]
    mlp = [tensor for tensor in tensors if tensor.operator.startswith("mlp.") and tensor not in norms]
    assert kept(attention) == 11 * s * b * h + 5 * a * s * s * b
    assert kept(mlp) == 19 * s * b * h


MEGASCALE = {
    "internal-352b": (66.75, 25.5, 534, 204),
    "megascale-mixtral-8x7b": (54.25, 18.5, 434, 148),
    "megascale-mixtral-8x22b": (48.83, 15.0, 586, 180),
    "megascale-hunyuan-large": (39.08, 9.92, 488, 124),
    "megascale-phi-3.5-moe": (42.62, 10.75, 341, 86),
    "megascale-deepseekmoe": (57.38, 14.25, 230, 57),
}


@pytest.mark.parametrize("name", MEGASCALE)
def test_megascale_moe_selective_rematerialisation(name: str) -> None:
    """All tensors (2n + 2k + 3kf + 12 + 5/m) bsh/n, kept ones (2kf + 4 + 2/m) bsh/n (arXiv 2505.11432, 4.1)."""
    model, n, s, b = load_preset(name), 8, 8192, 1
    layer = model.layers[0]
    moe, attention = layer.mlp, layer.attention
    k, f, m = moe.top_k, moe.expert.ffn / model.hidden, attention.num_heads / attention.num_kv_heads  # type: ignore[union-attr]
    recipe = Recipe(dispatcher="all_gather")
    routed = [
        tensor
        for tensor in layer_activations(model, layer, Layout(sp=n, ep=n), s, b, recipe)
        if not tensor.operator.startswith("moe.shared") and tensor.tensor not in SMALL
    ]
    unit = 2 * b * s * model.hidden / n
    everything = sum(tensor.size_bytes for tensor in routed)
    assert everything == pytest.approx(unit * (2 * n + 2 * k + 3 * k * f + 12 + 5 / m), rel=1e-3)
    assert kept(routed, SAR) == pytest.approx(unit * (2 * k * f + 4 + 2 / m), rel=1e-3)
    # The figures as printed there, which are rounded.
    units_all, units_kept, mib_all, mib_kept = MEGASCALE[name]
    assert everything / unit == pytest.approx(units_all, abs=0.01)
    assert kept(routed, SAR) / unit == pytest.approx(units_kept, abs=0.01)
    assert everything / 2**20 == pytest.approx(mib_all, abs=0.51)
    assert kept(routed, SAR) / 2**20 == pytest.approx(mib_kept, abs=0.51)


def test_flash_attention_keeps_a_number_a_row() -> None:
    a, h, s = 32, 4096, 4096
    model = gpt(num_layers=1, hidden=h, num_heads=a, vocabulary=51200, max_positions=s)
    flash = tensors_of(model, Layout(), s, 1, Recipe())
    unfused = tensors_of(model, Layout(), s, 1, Recipe(attention="unfused"))
    only = {tensor.tensor: tensor.size_bytes for tensor in flash if tensor.operator == "attn.core"}
    assert only == {"qkv": 3 * 2 * s * h, "lse": 4 * s * a}
    total = [sum(tensor.size_bytes for tensor in found if tensor.needed) for found in (flash, unfused)]
    assert total[1] - total[0] == 2 * a * s * s - 4 * s * a


def test_grouped_query_and_latent_attention() -> None:
    llama = load_preset("llama3-70b")
    core = {
        t.tensor: t.size_bytes for t in tensors_of(llama, Layout(tp=8), 8192, 1, Recipe()) if t.operator == "attn.core"
    }
    assert core["qkv"] == 2 * 8192 * (8192 / 8 + 2 * 128)
    deepseek = load_preset("deepseek-v3")
    tensors = tensors_of(deepseek, Layout(), 4096, 1, Recipe())
    by_name = {(t.operator, t.tensor): t.size_bytes for t in tensors}
    assert by_name["attn.core", "qkv"] == 2 * 4096 * 128 * (192 + 192 + 128)
    assert by_name["attn.qkv", "q_down"] == 2 * 4096 * 1536
    assert by_name["attn.qkv", "kv_norm"] == 2 * 4096 * 512
    rebuilt = kept(tensors) - kept(tensors, frozenset({"mla_up_proj"}))
    assert rebuilt == by_name["attn.core", "qkv"]


def test_fp8_gemms_keep_narrow_inputs() -> None:
    h, s = 4096, 2048
    model = gpt(num_layers=1, hidden=h, num_heads=32, vocabulary=51200, max_positions=s)
    wide, narrow = (tensors_of(model, Layout(), s, 1, Recipe(fp8=fp8)) for fp8 in (False, True))
    # Two norms, the attention output (kept in full beside it) and the activation, a byte less each.
    assert kept(wide) - kept(narrow) == s * h * (1 + 1 - 1 + 4)


def test_experts_over_tensor_parallel_ranks() -> None:
    """A rank's rows: its own tokens x top-k with whole experts; those of its expert-tensor group otherwise."""
    model = load_preset("mixtral-8x7b")
    for layout, rows, width in (
        (Layout(tp=8, ep=8, etp=1), 4096 / 8 * 2, 14336),
        (Layout(tp=8), 4096 * 2, 14336 / 8),
        (Layout(tp=8, sequence_parallel=False), 4096 * 2, 14336 / 8),
        (Layout(tp=4, ep=2, etp=2), 4096 / 4 * 2 * 2, 14336 / 2),
        (Layout(ep=8, dp=8), 4096 * 2, 14336),
    ):
        found = {t.operator: t.size_bytes for t in tensors_of(model, layout, 4096, 1, Recipe())}
        assert found["moe.permute"] == 2 * rows * 4096, layout
        assert found["moe.act"] == 2 * rows * width, layout
    fuller = layer_activations(model, model.layers[0], Layout(ep=8, dp=8), 4096, 1, imbalance=1.5)
    assert {t.operator: t.size_bytes for t in fuller}["moe.act"] == 1.5 * 2 * 4096 * 2 * 14336


def test_recompute_of_chunks() -> None:
    model = gpt(num_layers=6, hidden=1024, num_heads=16, vocabulary=1000, max_positions=512)
    layer = tensors_of(model, Layout(), 512, 1, MEGATRON_2021)
    whole, first = sum(t.size_bytes for t in layer if t.needed), 2 * 512 * 1024
    chunk = [layer] * 6
    assert Recompute().kept_bytes(chunk) == 6 * whole and Recompute().rebuilt_bytes(chunk) == 0
    assert Recompute("full").kept_bytes(chunk) == 6 * first
    assert Recompute("full").rebuilt_bytes(chunk) == whole - first
    assert Recompute("full", num_layers=4).kept_bytes(chunk) == 2 * first
    assert Recompute("full", num_layers=4).rebuilt_bytes(chunk) == 4 * (whole - first)
    block = Recompute("full", method="block", num_layers=2)
    assert block.kept_bytes(chunk) == 2 * first + 4 * whole and block.rebuilt_bytes(chunk) == whole - first
    none = Recompute("full", method="block", num_layers=0)
    assert none.kept_bytes(chunk) == 6 * whole and none.rebuilt_bytes(chunk) == 0
    selective = Recompute("selective", SELECTIVE)
    assert selective.kept_bytes(chunk) + 6 * selective.rebuilt_bytes(chunk) == 6 * whole
    assert Recompute().kept_bytes([]) == Recompute("full").rebuilt_bytes([]) == 0


def test_refusals() -> None:
    for call, message in (
        (lambda: Recompute.parse("attention"), "recompute modules attention are unknown; expected of core_attn"),
        (lambda: Recompute("selective"), "expected modules with selective"),
        (lambda: Recompute("full", SELECTIVE), "expected modules with selective and none otherwise"),
        (lambda: Recompute("some"), "recompute granularity is 'some'"),  # type: ignore[arg-type]
        (lambda: Recompute("full", num_layers=0), "recompute num_layers is 0"),
    ):
        with pytest.raises(WorkloadError, match=message):
            call()
    model = gpt(num_layers=1, hidden=1024, num_heads=16, vocabulary=1000, max_positions=512)
    with pytest.raises(WorkloadError, match="seq_len is 0"):
        layer_activations(model, model.layers[0], Layout(), 0, 1)
    with pytest.raises(WorkloadError, match=r"imbalance is 0\.5"):
        layer_activations(model, model.layers[0], Layout(), 8, 1, imbalance=0.5)
    with pytest.raises(LayoutError, match="16 query heads"):
        layer_activations(model, model.layers[0], Layout(tp=3), 8, 1)


MODELS = ("gpt2-126m", "llama3-8b", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "wan2.1-t2v-14b", "step-video-t2v")


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(MODELS),
    layout=st.sampled_from(
        (Layout(), Layout(tp=2), Layout(tp=4, sequence_parallel=False), Layout(sp=4), Layout(cp=2, sp=2))
    ),
    recipe=st.builds(
        Recipe,
        attention=st.sampled_from(("flash", "unfused")),
        dropout=st.booleans(),
        dispatcher=st.sampled_from(("all_to_all", "all_gather")),
        fp8=st.booleans(),
    ),
    modules=st.sets(st.sampled_from(MODULES)),
    extra=st.sampled_from(MODULES),
)
def test_recompute_only_saves_and_bytes_scale(
    name: str, layout: Layout, recipe: Recipe, modules: set[str], extra: str
) -> None:
    model = load_preset(name)
    layer = model.layers[-1]
    if model.hidden == 768:
        layout = Layout()
    tensors = layer_activations(model, layer, layout, 1024, 2, recipe)
    assert tensors[0].tensor == "input" and tensors[0].kept(frozenset(MODULES))
    fewer, more = (sum(t.size_bytes for t in tensors if t.kept(frozenset(m))) for m in (modules | {extra}, modules))
    assert 0 < fewer <= more <= sum(t.size_bytes for t in tensors)
    # Twice the sequences, twice the bytes; nothing is counted twice by name.
    doubled = layer_activations(model, layer, layout, 1024, 4, recipe)
    assert [t.size_bytes * 2 for t in tensors] == pytest.approx([t.size_bytes for t in doubled])
    names = [(t.operator, t.tensor) for t in tensors]
    assert len(set(names)) == len(names)

"""Arithmetic of MegaScale-MoE's tables that must come out exactly: parameters, FLOP, tensors, bytes, rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from overlapsim.accuracy.suite import Row
from overlapsim.cost.structural import bus_factor
from overlapsim.plan import Finding
from overlapsim.workload.activations import layer_activations
from overlapsim.workload.build import GraphBuilder
from overlapsim.workload.layout import Layout
from overlapsim.workload.model import ModelSpec, MoE
from overlapsim.workload.model_count import parameters, step_flop_per_token
from overlapsim.workload.operators import CollectiveOp
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recompute import SAR
from overlapsim.workload.utilization import tokens_per_s, utilization

SEQ: Final = 8192
NODE: Final = 8
PEAK: Final = 989e12
"""Dense bf16 peak of an H800, FLOP/s."""
BATCH: Final = 720
FLAGSHIP: Final = "internal-352b"
# Units of b s h / n in a layer, all tensors and kept ones, as tabulated from section 4.1.
UNITS: Final[Mapping[str, tuple[float, float]]] = {
    FLAGSHIP: (66.75, 25.5),
    "megascale-mixtral-8x7b": (54.25, 18.5),
    "megascale-mixtral-8x22b": (48.83, 15.0),
    "megascale-hunyuan-large": (39.08, 9.92),
    "megascale-phi-3.5-moe": (42.62, 10.75),
    "megascale-deepseekmoe": (57.38, 14.25),
}
# Statistics and indices of a few numbers a token, which the paper leaves out.
SMALL: Final = ("statistics", "lse", "scores", "choices")
# Table 3: GPUs, system, seconds of an iteration (the first corrected, see `FINDINGS`), tokens a second, days for 10^12
# tokens, MFU in %.
RATES: Final = (
    (240, "megatron", 39.04, 151.1e3, 76.61, 17.98),
    (240, "megascale", 21.61, 272.9e3, 42.41, 32.48),
    (1440, "megatron", 7.90, 746.6e3, 15.50, 14.81),
    (1440, "megascale", 4.19, 1407.7e3, 8.22, 27.92),
)
PRINTED_MFU: Final = 27.89
"""Of MegaScale-MoE on 1,440 GPUs, %: its own tokens a second make 27.92."""
# FLUX's repository on A800, ms: library GEMM and total, FLUX's GEMM and total; exposed and efficiency as printed.
FLUX: Final = (
    ("all_gather", 2.438, 3.099, 2.378, 2.469, 0.091, 0.87),
    ("reduce_scatter", 2.453, 3.100, 2.429, 2.508, 0.080, 0.88),
)
FINDINGS: Final = (
    Finding(
        "table_misprint",
        "table 3 prints 39.94 s for Megatron-LM on 240 GPUs; its tokens a second, days and speed-up are those of "
        "39.04 s, which is used",
    ),
    Finding(
        "table_misprint",
        "table 3 prints 550.2 thousand tokens a second for Megatron-LM on 960 GPUs; its days and speed-up are those of "
        "545.1 thousand",
    ),
    Finding(
        "hidden_shared_expert",
        "table 2 alone makes 341.3 billion parameters of the 352B model; one shared expert a layer makes 351.9 billion "
        "and the published MFU",
    ),
)


def identity_rows() -> tuple[tuple[Row, ...], tuple[Finding, ...]]:
    """Rows that must agree to 0.1 % (group ``identity``) or to the last digit printed, and what was corrected."""
    return (*_models(), *_tensors(), *_volumes(), *_rates(), *_rounded()), FINDINGS


def overlap_efficiency(total: float, gemm: float, serial: float) -> float:
    """Share of the communication that overlap hides: 1 - ECT / ECT without overlap (FLUX, arXiv 2406.06858, 2.3).

    Parameters
    ----------
    total, serial : time with overlap, and of the GEMM and the collective one after another
    gemm : the best GEMM alone, which both are measured against
    """
    return 1 - (total - gemm) / (serial - gemm)


def forward_bytes(model: ModelSpec, layout: Layout, room: str, recipe: Recipe) -> float:
    """Bytes that one GPU sends in a layer's forward pass for ``attn`` or for routed experts (``moe``)."""
    graph = GraphBuilder(model, layout, recipe, 1, SEQ).layer(model.layers[0], "forward")
    return sum(
        op.size_bytes * bus_factor(op.kind, op.ranks)
        for op in graph.of_type(CollectiveOp)
        if op.name.startswith(f"{room}.") and not op.name.startswith("moe.shared")
    )


def _models() -> Iterator[Row]:
    flagship, mixtral = load_preset(FLAGSHIP), load_preset("megascale-mixtral-8x7b")
    yield _row(f"model={FLAGSHIP}|parameters", 351.86e9, float(parameters(flagship).total), "parameters")
    yield _row(f"model={FLAGSHIP}|flop a token", 282.46e9, step_flop_per_token(flagship, SEQ), "FLOP")
    yield _row("model=megascale-mixtral-8x7b|flop a token", 83.75e9, step_flop_per_token(mixtral, SEQ), "FLOP")


def _tensors() -> Iterator[Row]:
    for name, (every, kept) in UNITS.items():
        model, layout = load_preset(name), Layout(sp=NODE, ep=NODE)
        found = layer_activations(model, model.layers[0], layout, SEQ, 1, Recipe(dispatcher="all_gather"))
        routed = [t for t in found if not t.operator.startswith("moe.shared") and t.tensor not in SMALL]
        unit = 2 * SEQ * model.hidden / NODE
        yield _row(f"model={name}|all tensors", every, sum(t.size_bytes for t in routed) / unit, "bsh/n")
        left = sum(t.size_bytes for t in routed if t.kept(SAR)) / unit
        yield _row(f"model={name}|kept tensors", kept, left, "bsh/n")


def _volumes() -> Iterator[Row]:
    exchange, gather = Recipe(), Recipe(dispatcher="all_gather")
    for name in UNITS:
        model = load_preset(name)
        attention, experts = model.layers[0].attention, model.layers[0].mlp
        assert isinstance(experts, MoE)
        m, k = attention.num_heads / attention.num_kv_heads, experts.top_k
        whole = 2 * SEQ * model.hidden * (NODE - 1) / NODE
        split, whole_experts = Layout(tp=NODE, ep=1, etp=NODE), Layout(sp=NODE, ep=NODE)
        expected = {
            "attention=tp": (2 * whole, forward_bytes(model, split, "attn", gather)),
            "attention=sp": (whole * (2 + 2 / m) / NODE, forward_bytes(model, whole_experts, "attn", exchange)),
            "experts=tp": (2 * whole, forward_bytes(model, split, "moe", gather)),
            "experts=ep": (2 * whole * k / NODE, forward_bytes(model, whole_experts, "moe", exchange)),
            "experts=ep gathered": (2 * whole, forward_bytes(model, whole_experts, "moe", gather)),
        }
        for part, (formula, counted) in expected.items():
            yield _row(f"model={name}|{part}", formula, counted, "bytes")


def _rates() -> Iterator[Row]:
    flop = step_flop_per_token(load_preset(FLAGSHIP), SEQ)
    for gpus, system, step_s, tokens, days, mfu in RATES:
        rate, name = tokens_per_s(step_s, BATCH, SEQ), f"gpus={gpus}|system={system}"
        yield _row(f"{name}|tokens", tokens, rate, "tokens/s")
        yield _row(f"{name}|days", days, 1e12 / (rate * 86400), "days")
        yield _row(f"{name}|mfu", mfu, 100 * utilization(flop, rate, gpus, PEAK), "%")


def _rounded() -> Iterator[Row]:
    flop, rate = step_flop_per_token(load_preset(FLAGSHIP), SEQ), tokens_per_s(RATES[-1][2], BATCH, SEQ)
    mfu = 100 * utilization(flop, rate, RATES[-1][0], PEAK)
    yield _row("gpus=1440|system=megascale|printed mfu", PRINTED_MFU, mfu, "%", "identity rounded")
    for kind, library_gemm, serial, gemm, total, exposed, efficiency in FLUX:
        yield _row(f"flux={kind}|exposed", exposed, total - gemm, "ms", "identity rounded")
        found = overlap_efficiency(total, min(gemm, library_gemm), serial)
        yield _row(f"flux={kind}|efficiency", efficiency, found, "ratio", "identity rounded")


def _row(name: str, published: float, found: float, unit: str, group: str = "identity") -> Row:
    return Row(f"{group}|{name}", group, published, found, found, found, unit, None)

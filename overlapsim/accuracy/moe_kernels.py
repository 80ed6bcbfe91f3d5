"""Published times of fused expert and exchange kernels: figure 16 of MegaScale-MoE, FLUX's MoE layers, COMET's SMs.

Sources (hwprofiles/SOURCES.md): MSMOE-FIG16, FLUX-MOE, COMET-SMS. No constant was fitted to any of them.
"""

from __future__ import annotations

import importlib.resources
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from overlapsim.accuracy.moe_rows import Predicted, check_keys
from overlapsim.accuracy.moe_systems import MODELS, STACK, model_spec
from overlapsim.accuracy.suite import Row
from overlapsim.accuracy.value_file import SCALE, Figure, parse_figures
from overlapsim.cost.launch import launch_stack
from overlapsim.cost.prices import PriceBook
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import Finding
from overlapsim.planner.candidates import propose
from overlapsim.planner.operator import FAMILIES
from overlapsim.step.blocks import simulate_piece
from overlapsim.strategy.base import Context, Parameters
from overlapsim.strategy.chains import is_gemm
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.registry import load_strategy
from overlapsim.units import dtype_bytes
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.model import MoE
from overlapsim.workload.operators import (
    CollectiveKind,
    CollectiveOp,
    GemmOp,
    GroupedGemmOp,
    KernelOp,
    Operator,
    OperatorGraph,
)

RANKS: Final = 8
TOKENS: Final = 8192
"""Tokens that a node gathers, in all rows but COMET's: one sequence of MegaScale-MoE, FLUX's M."""
ELEMENT: Final = dtype_bytes("bf16")
RUNS: Final = 12
FLUX: Final = {"h800": "h800-sxm8", "l20": "l20-pcie8"}
FILE: Final = "moe_kernels.csv"
COMET: Final = (4096, 14336, 8, 2)
"""Hidden and expert widths, experts, and experts of a token of Mixtral-8x7B, with which COMET's SMs are given."""
COMET_SMS: Final[Mapping[tuple[int, int], int]] = {(4096, 8): 18, (16384, 8): 26, (16384, 4): 46}
"""By tokens and ranks that split an expert."""
FINDINGS: Final = (
    Finding(
        "fig16_tokens_assumed",
        "figure 16 is taken with 8192 tokens a node and both input GEMMs of an expert; with 16384 and one of them the "
        "unfused sums come out within 7 %, but its fused kernels would gather at 183 of 200 GB/s and project at 870 "
        "TFLOP/s",
    ),
    Finding(
        "fig16_unfused_assumed",
        "unfused kernels of figure 16 are taken as a framework runs them: queries, keys and values exchanged apart "
        "behind and in front of a transposition, rows ordered by gather and scatter_add with the indices of the "
        "routing, launched as in every system of the suite; what its combine takes beyond these (1.1 and 1.3 ms) is "
        "unexplained",
    ),
    Finding(
        "flux_tokens_assumed",
        "FLUX's layers are taken with 8192 tokens after the gather in every row; its file gives M=16384 for layers "
        "with two experts a token, which are then the rows of both copies",
    ),
)


@dataclass(frozen=True)
class Attention:
    """Projections of one rank's tokens next to an exchange: hidden width, and query heads over those of keys."""

    hidden: int
    group: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Columns of queries, keys and values."""
        return self.hidden, self.hidden // self.group, self.hidden // self.group


@dataclass(frozen=True)
class Experts:
    """Experts of one rank: hidden and expert width, experts, experts of a token, ranks that split one, GEMMs of fc1."""

    hidden: int
    ffn: int
    experts: int
    topk: int
    tp: int = 1
    gates: int = 2
    tokens: int = TOKENS

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each expert that a rank has."""
        return (self.tokens * self.topk // self.experts,) * (self.experts * self.tp // RANKS)


KERNELS: Final = ("qkv_exchange", "exchange_out", "gather_fc1", "fc2_scatter")
KEYS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "fig16": {"model": tuple(MODELS), "kernel": (*KERNELS, "sum"), "variant": ("fused", "unfused")},
    "flux-moe": {"gpu": tuple(FLUX), "kernel": KERNELS[2:], "tp": (), "experts": (), "topk": ()},
}
"""Keys of a row by group, and what they may be."""


def attention_graph(shape: Attention, kernel: str, *, fused: bool) -> OperatorGraph:
    """A projection and its exchange: all at once, or as a framework runs them."""
    local, columns = TOKENS // RANKS, sum(shape.widths) if kernel == "qkv_exchange" else shape.hidden
    name = "attn.qkv" if kernel == "qkv_exchange" else "attn.out"
    parts = shape.widths if kernel == "qkv_exchange" and not fused else (columns,)
    exchanges: list[Operator] = [_collective("all_to_all", local * width, name) for width in parts]
    if not fused:
        turn = KernelOp(MemoryOp("transpose", local, columns), "attn.core")
        exchanges = [turn, *exchanges, turn]
    gemm = GemmOp(local, columns, shape.hidden, name=name)
    return _line([gemm, *exchanges] if kernel == "qkv_exchange" else [*exchanges, gemm])


def experts_graph(shape: Experts, kernel: str, *, fused: bool) -> OperatorGraph:
    """Experts and the collective of all tokens, with the kernels that order rows: one each, or a framework's."""
    rows, tokens, inner = sum(shape.rows), shape.tokens, shape.ffn // shape.tp
    if kernel == "gather_fc1":
        gather = _collective("all_gather", tokens * shape.hidden, "moe.dispatch")
        first = KernelOp(GroupedGemmOp(shape.rows, shape.gates * inner, shape.hidden), "moe.fc1")
        index = KernelOp(MemoryOp("routing_index", tokens, shape.experts), "moe.router")
        order = KernelOp(MemoryOp("moe_permute" if fused else "torch_permute", rows, shape.hidden), "moe.permute")
        return _line([gather, order, first] if fused else [index, gather, order, first])
    second = KernelOp(GroupedGemmOp(shape.rows, shape.hidden, inner), "moe.fc2")
    scatter = _collective("reduce_scatter", tokens * shape.hidden, "moe.combine")
    add = MemoryOp("torch_unpermute", rows, shape.hidden)
    if fused:
        add = MemoryOp("moe_unpermute", max(1, rows // shape.topk), shape.hidden, topk=shape.topk)
    return _line([second, KernelOp(add, "moe.unpermute"), scatter])


def _collective(kind: CollectiveKind, elements: float, name: str) -> CollectiveOp:
    return CollectiveOp(kind, float(elements * ELEMENT), RANKS, name=name)


def _line(operators: list[Operator]) -> OperatorGraph:
    return OperatorGraph(tuple(operators), tuple(itertools.pairwise(range(len(operators)))))


def serial_s(graph: OperatorGraph, book: PriceBook) -> float:
    """Time of a graph one operator after another, the host launching; behind another one like it."""
    stack, end = launch_stack(STACK, book.cluster.device), book.ends.get("launch")
    launch_s = stack.host_s * (getattr(stack.spread, end) if end else 1.0)
    return simulate_piece(Context(graph, book), Composition(), launch_s=launch_s).duration_s


def fused_s(graph: OperatorGraph, book: PriceBook, parameters: Parameters) -> float:
    """Time of a graph as one kernel."""
    (name, pass_), strategy = _fusing(graph)
    pairs = {(name, pass_): Chosen(load_strategy(strategy), parameters)}
    return simulate_piece(Context(graph, book), Composition(pairs=pairs)).duration_s


def best_parameters(graph: OperatorGraph, book: PriceBook, **fixed: Any) -> Parameters:
    """The strategy's best parameters in the engine, of the first by its closed form; some may be given."""
    _, strategy = _fusing(graph)
    space = load_strategy(strategy).parameters(Context(graph, book))
    wanted = (p.parameters for p in propose(space) if all(p.parameters[key] == fixed[key] for key in fixed))
    return min(itertools.islice(wanted, RUNS), key=lambda point: fused_s(graph, book, point))


def _fusing(graph: OperatorGraph) -> tuple[tuple[str, str], str]:
    (gemm,) = (op for op in graph.operators if is_gemm(op))
    return (gemm.name, gemm.pass_), "fused_exchange" if isinstance(gemm, GemmOp) else "fused_experts"


@cache
def _book(cluster: str) -> PriceBook:
    return PriceBook(load_cluster(cluster), RANKS)


def rows() -> tuple[tuple[Row, ...], tuple[Finding, ...]]:
    """Every published time beside its prediction, and what was assumed; nothing was fitted, so ``fitted`` is None.

    Groups ``fig16 unfused`` and ``fig16 fused`` (four kernels of a layer and their sum) and ``flux-moe``.
    """
    folder = importlib.resources.files("overlapsim.accuracy") / "splits"
    asked = parse_figures((folder / FILE).read_text(encoding="utf-8"), FILE)
    return tuple(_scored(row, predict_row(row)) for row in asked), FINDINGS


def _scored(row: Figure, found: Predicted) -> Row:
    group, scale = f"{row.group} {row.keys.get('variant', '')}".strip(), SCALE[row.unit]
    low, high = found.low * scale, found.high * scale
    return Row(row.id, group, row.value, found.value * scale, low, high, row.unit, None)


def predict_row(row: Figure) -> Predicted:
    """Prediction of a row of the groups ``fig16`` or ``flux-moe``, in seconds.

    Raises
    ------
    CalibrationError
        If its keys or unit are none of the group's.
    """
    check_keys(row, KEYS[row.group], {"time": ("s", "ms", "us")})
    fused = row.keys.get("variant") != "unfused"
    if row.group == "flux-moe":
        experts, topk, tp = (int(row.keys[key]) for key in ("experts", "topk", "tp"))
        graphs = [experts_graph(Experts(8192, 8192, experts, topk, tp, gates=1), row.keys["kernel"], fused=True)]
    else:
        kernels = KERNELS if row.keys["kernel"] == "sum" else (row.keys["kernel"],)
        graphs = [_kernel_graph(row.keys["model"], kernel, fused=fused) for kernel in kernels]
    book = _book(FLUX[row.keys.get("gpu", "h800")])
    if not fused:
        return _ranged(book, lambda prices: sum(serial_s(graph, prices) for graph in graphs))
    # Parameters are those that are best at the middle of all ranges.
    timed = [(graph, best_parameters(graph, book)) for graph in graphs]
    return _ranged(book, lambda prices: sum(fused_s(graph, prices, point) for graph, point in timed))


def _kernel_graph(model: str, kernel: str, *, fused: bool) -> OperatorGraph:
    """Operators of one kernel of a model of Table 2, split over a node by sequence and experts."""
    spec = model_spec(model)
    attention, moe = spec.layers[-1].attention, spec.layers[-1].mlp
    assert isinstance(moe, MoE), "models of Table 2 have experts"
    if kernel in ("qkv_exchange", "exchange_out"):
        shape = Attention(spec.hidden, attention.num_heads // attention.num_kv_heads)
        return attention_graph(shape, kernel, fused=fused)
    return experts_graph(Experts(spec.hidden, moe.expert.ffn, moe.num_experts, moe.top_k), kernel, fused=fused)


def _ranged(book: PriceBook, seconds: Callable[[PriceBook], float]) -> Predicted:
    """Value and its central 90 %: one family at a time at its ends, in quadrature."""
    middle = seconds(book)
    down = up = 0.0
    for family in (*FAMILIES, "memory"):
        down += min(0.0, seconds(book.at(family, "low")) - middle) ** 2
        up += max(0.0, seconds(book.at(family, "high")) - middle) ** 2
    return Predicted(middle, middle - down**0.5, middle + up**0.5)


@dataclass(frozen=True)
class CommSms:
    """SMs that communicate behind Mixtral's experts on eight H800, by columns in COMET's tiles of 128 x 256.

    Attributes
    ----------
    m, tp : tokens, and ranks that split an expert
    published, chosen : by COMET, and by the model
    cost : the model's time with COMET's number over that with its own
    """

    m: int
    tp: int
    published: int
    chosen: int
    cost: float


def comm_sms_choices() -> tuple[CommSms, ...]:
    """COMET's adaptive split beside the model's, where COMET gives it."""
    hidden, ffn, experts, topk = COMET
    book, found = _book(FLUX["h800"]), []
    for (m, tp), published in COMET_SMS.items():
        graph = experts_graph(Experts(hidden, ffn, experts, topk, tp, tokens=m), "fc2_scatter", fused=True)
        fixed = {"order": "columns", "tile": (128, 256)}
        own, theirs = (best_parameters(graph, book, **fixed, **more) for more in ({}, {"comm_sms": published}))
        cost = fused_s(graph, book, theirs) / fused_s(graph, book, own)
        found.append(CommSms(m, tp, published, int(own["comm_sms"]), cost))
    return tuple(found)

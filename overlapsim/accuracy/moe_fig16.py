"""Rows of figure 16 of MegaScale-MoE given with ``--data``: any model, one of four kernels or their sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from overlapsim.accuracy.moe_kernels import (
    KERNELS,
    RANKS,
    Attention,
    Experts,
    attention_graph,
    best_parameters,
    experts_graph,
    fused_s,
    serial_s,
)
from overlapsim.accuracy.moe_rows import MoeRow, Predicted, Shift, check_keys
from overlapsim.accuracy.moe_systems import CLUSTERS, MODELS, model_spec
from overlapsim.cost.prices import PriceBook
from overlapsim.hardware.loading import load_cluster
from overlapsim.workload.model import MoE
from overlapsim.workload.operators import OperatorGraph

VARIANTS = ("unfused", "fused")


def predict_row(row: MoeRow) -> Predicted:
    """Seconds of a kernel, or of all four.

    Raises
    ------
    CalibrationError
        If the row's keys, metric or unit are not those of the group.
    """
    keys = row.keys
    allowed = {"model": tuple(MODELS), "kernel": (*KERNELS, "sum"), "variant": VARIANTS}
    check_keys(row, allowed, {"time": ("ms", "us", "s")})
    kernels = KERNELS if keys["kernel"] == "sum" else (keys["kernel"],)
    fused, book = keys["variant"] == "fused", PriceBook(load_cluster(CLUSTERS["h800"]), RANKS)
    timed = [_timed(kernel_graph(keys["model"], kernel, fused=fused), book, fused=fused) for kernel in kernels]

    def value(shift: Shift) -> float:
        moved = book if shift is None else book.at(*shift)  # type: ignore[arg-type]
        return sum(seconds(moved) for seconds in timed)

    return Predicted.of(value)


def _timed(graph: OperatorGraph, book: PriceBook, *, fused: bool) -> Callable[[PriceBook], float]:
    if not fused:
        return lambda prices: serial_s(graph, prices)
    parameters = best_parameters(graph, book)
    return lambda prices: fused_s(graph, prices, parameters)


@cache
def kernel_graph(model: str, kernel: str, *, fused: bool) -> OperatorGraph:
    """Operators of one kernel of a model of Table 2, on one of eight ranks."""
    layer = model_spec(model).layers[-1]
    assert isinstance(layer.mlp, MoE)
    hidden, attention, moe = model_spec(model).hidden, layer.attention, layer.mlp
    if kernel in ("qkv_exchange", "exchange_out"):
        return attention_graph(Attention(hidden, attention.num_heads // attention.num_kv_heads), kernel, fused=fused)
    shape = Experts(hidden, moe.expert.ffn, moe.num_experts, moe.top_k)
    return experts_graph(shape, kernel, fused=fused)

"""Collectives of tensor parallelism in fp8: bytes, scales, casts; what stays in full; and the recipe's rules."""

from __future__ import annotations

import pytest

from overlapsim.errors import WorkloadError
from overlapsim.workload.build import GraphBuilder, Which
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.memory import MemoryModel
from overlapsim.workload.memory_bound import MemoryOp, memory_bytes
from overlapsim.workload.operators import CollectiveOp, KernelOp, OperatorGraph
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import COMPRESSIONS, Recipe, parse_compress
from overlapsim.workload.state_precision import recipe_precision

MODEL = load_preset("megascale-mixtral-8x7b")
N, SEQ, H = 8, 8192, 4096
WHOLE = 2.0 * SEQ * H


def graph(which: Which, recipe: Recipe, layout: Layout | None = None) -> OperatorGraph:
    return GraphBuilder(MODEL, layout or Layout(tp=N, ep=1, etp=N), recipe, 1, SEQ).layer(MODEL.layers[0], which)


def moved(found: OperatorGraph, name: str, pass_: str) -> list[tuple[str, float, str]]:
    """Kind, bytes and type of an operator's collectives."""
    ops = [op for op in found.of_type(CollectiveOp) if (op.name, op.pass_) == (name, pass_)]
    return [(op.kind, op.size_bytes, op.dtype) for op in ops]


@pytest.mark.parametrize("name", ["attn.out", "moe.combine"])
@pytest.mark.parametrize("dispatcher", ["all_gather", "all_to_all"])
def test_forward_sums_are_exchanged_in_fp8(name: str, dispatcher: str) -> None:
    """Half of the bytes, and four for the scale of each token: 4/h of them."""
    full = graph("forward", Recipe(dispatcher=dispatcher))  # type: ignore[arg-type]
    narrow = graph("forward", Recipe(dispatcher=dispatcher, compress=("tp-fp8",)))  # type: ignore[arg-type]
    ((kind, before, dtype),) = moved(full, name, "fwd")
    assert (kind, dtype) == ("reduce_scatter", "bf16")
    assert moved(narrow, name, "fwd") == [("all_to_all", pytest.approx(before / 2 * (1 + 4 / H)), "fp8")]
    # What is gathered forward is no sum of partial results: it stays.
    assert moved(narrow, "attn.qkv", "fwd") == moved(full, "attn.qkv", "fwd") == [("all_gather", WHOLE, "bf16")]
    works = [op.work for op in narrow.of_type(KernelOp) if op.name == name and isinstance(op.work, MemoryOp)]
    kinds = [work.kind for work in works]
    assert kinds[:2] == ["quantize_fp8", "shard_sum_half"]
    rows = before / (2 * H)
    # All of a rank's partial output is cast; N narrow copies of its own part are read, their sum is written.
    assert works[0].hbm_bytes == memory_bytes("quantize_fp8", rows, H)
    assert works[1].hbm_bytes == pytest.approx(rows / N * H * (N + 2), rel=1e-3)


@pytest.mark.parametrize("fp8", [False, True])
def test_backward_gathers_of_gradients_are_narrow(fp8: bool) -> None:
    """Half of the bytes and 3.1 % of scales, one for 128 tokens of a channel; fp8 GEMMs read them as they come."""
    full, narrow = graph("backward", Recipe(fp8=fp8)), graph("backward", Recipe(fp8=fp8, compress=("tp-fp8",)))
    assert moved(full, "attn.out", "dgrad") == [("all_gather", WHOLE, "bf16")]
    assert moved(narrow, "attn.out", "dgrad") == [("all_gather", pytest.approx(WHOLE / 2 * 1.03125), "fp8")]
    assert moved(narrow, "attn.qkv", "dgrad") == moved(full, "attn.qkv", "dgrad")
    kinds = [op.work.kind for op in narrow.of_type(KernelOp) if op.name == "attn.out" and isinstance(op.work, MemoryOp)]
    assert ("dequantize_fp8" in kinds) is not fp8
    # The output gradients of the two experts' GEMMs, gathered over the ranks that split each expert.
    ((kind, size, dtype),) = moved(narrow, "moe.combine", "dgrad")
    ((_, before, _),) = moved(full, "moe.combine", "dgrad")
    assert (kind, dtype) == ("all_gather", "fp8") and size == pytest.approx(before / 2 * 1.03125)


@pytest.mark.parametrize(
    "layout", [Layout(sp=N, ep=N), Layout(tp=N, ep=1, etp=N, sequence_parallel=False), Layout(dp=N, ep=N)]
)
def test_nothing_to_compress(layout: Layout) -> None:
    """Without a sequence split over tensor-parallel ranks, and for whole experts, graphs stay as they are."""
    for which in ("forward", "backward"):
        assert graph(which, Recipe(compress=("tp-fp8",)), layout) == graph(which, Recipe(), layout)  # type: ignore[arg-type]


def test_memory_of_compression() -> None:
    layout, job = Layout(tp=N, ep=N, etp=1, dp=4, zero=1), Job(SEQ)

    def stage(**changes: object):
        return MemoryModel(MODEL, job, Recipe(**changes)).stage(layout, 0, (1,))  # type: ignore[arg-type]

    plain, fp8 = stage(), stage(fp8=True)
    # Gradients are compressed in place; fp8 parameters take the place of those in two bytes beside their fp8 copies.
    assert stage(compress=("grads-bf16",)) == plain
    less = stage(fp8=True, compress=("params-fp8",))
    assert less.parameters == fp8.parameters / 2 and less.optimizer == fp8.optimizer
    # Narrow copies of a tensor-parallel group's activations, sent and received.
    assert stage(compress=("tp-fp8",)).buffers - plain.buffers == WHOLE


def test_parameters_are_gathered_in_one_byte() -> None:
    widths = [
        recipe_precision("bf16", recipe)
        for recipe in (Recipe(), Recipe(fp8=True), Recipe(fp8=True, compress=("params-fp8",)))
    ]
    assert [width.gathered_bytes for width in widths] == [2, 2, 1]
    assert [width.parameter_bytes for width in widths] == [2, 4, 2]


def test_what_is_read_and_refused() -> None:
    assert parse_compress("") == ()
    assert parse_compress("params-fp8, tp-fp8,grads-bf16") == COMPRESSIONS
    for text in ("bf16", "tp-fp8,tp-fp8"):
        with pytest.raises(WorkloadError, match="expected some of grads-bf16, tp-fp8, params-fp8"):
            parse_compress(text)
    with pytest.raises(WorkloadError, match="in this order"):
        Recipe(compress=("tp-fp8", "grads-bf16"))
    with pytest.raises(WorkloadError, match="expected fp8 as well"):
        Recipe(compress=("params-fp8",))

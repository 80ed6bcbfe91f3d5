"""Linear layers of a tensor-parallel pair: gradients, what they move, and the residual stream around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from overlapsim.workload.build_compressed import gather_narrow, scatter_sum
from overlapsim.workload.build_part import Part, norm_kind
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import COMPUTE
from overlapsim.workload.recorder import Recorder

TP_STREAM: Final = "tp"
"""Stream of tensor-parallel collectives that run beside GEMMs."""


def reduce_output(r: Recorder, part: Part, name: str) -> None:
    """Sum the output of a row-split layer over the tensor-parallel ranks."""
    scatter_sum(r, part, name, part.hidden_bytes, part.layout.tp)


def gather_gradient(r: Recorder, part: Part, name: str) -> None:
    """Gather the gradient of a row-split layer's output, where the sequence is split."""
    if part.layout.sequence_parallel:
        gather_narrow(r, part, name, part.hidden_bytes, part.layout.tp)


def reduce_gradient(r: Recorder, part: Part, name: str) -> None:
    """Sum the gradient of a column-split layer's input over the tensor-parallel ranks."""
    r.collective(part.reduction, name, part.hidden_bytes, part.layout.tp, group="tp", pass_="dgrad")


def residual(r: Recorder, part: Part, name: str, *, bias: bool) -> None:
    """Add the branch to the residual stream, with dropout and bias where the model and recipe have them."""
    recipe = part.recipe
    if recipe.dropout and recipe.fused_bias:
        _local(r, part, name, "bias_dropout_add")
        return
    if bias:
        _local(r, part, name, "bias_add")
    if recipe.dropout:
        _local(r, part, name, "dropout")
    _local(r, part, name, "add")


def residual_backward(r: Recorder, part: Part, name: str, *, bias: bool, keep: frozenset[str]) -> None:
    """Gradient of the branch at the residual sum: of its dropout, and of its bias."""
    if part.recipe.dropout and "dgrad" in keep:
        _local(r, part, name, "bias_dropout_add" if part.recipe.fused_bias else "dropout", "bwd", "dgrad")
    if bias and "wgrad" in keep:
        _local(r, part, name, "bias_add", "bwd", "wgrad")
        accumulate(r, part, name, part.model.hidden)


def norm_backward(r: Recorder, part: Part, name: str, *, summed: bool = True) -> None:
    """Gradients of a norm and its weights; then what the residual stream brings is added."""
    kind = norm_kind(part.model)
    _local(r, part, name, kind, "bwd", "dgrad")
    for _ in range(2 if kind == "layernorm" else 1):
        accumulate(r, part, name, part.model.hidden)
    if summed:
        _local(r, part, name, "add", pass_="dgrad")


def _local(r: Recorder, part: Part, name: str, kind: str, direction: str = "fwd", pass_: str = "") -> None:
    """A kernel over the hidden activations of one rank; no gradient of an input waits for one of a weight."""
    work = MemoryOp(kind, part.tokens.local, part.model.hidden, part.model.dtype, direction)
    r.kernel(name, work, pass_=pass_, main=pass_ != "wgrad")


@dataclass(frozen=True)
class Linear:
    """A linear layer on one rank: rows of its input, and its sizes."""

    rows: int
    inputs: int
    outputs: int
    bias: bool = False


def gemm_backward(
    r: Recorder, part: Part, name: str, rows: int, inputs: int, outputs: int, keep: frozenset[str]
) -> None:
    """Record the two GEMMs of a linear layer's backward pass, and the sum of its weight gradient where it is apart."""
    linear, given = Linear(rows, inputs, outputs), r.last
    if "dgrad" in keep:
        _input_gradient(r, part, name, linear)
    if "wgrad" in keep:
        _weight_gradient(r, part, name, linear, given)


def column_backward(r: Recorder, part: Part, name: str, linears: Sequence[Linear], keep: frozenset[str]) -> None:
    """Record the backward pass of column-split layers with one input, and what tensor parallelism moves for it.

    Where the sequence is split, inputs are kept in pieces and gathered again for the weight gradient. With the
    recipe's ``tp_overlap`` that gather runs beside the input gradient, and the sum of the input gradient beside the
    weight gradient, where both are computed in one pass.
    """
    tp = part.layout.tp
    split = "wgrad" in keep and tp > 1 and part.layout.sequence_parallel
    beside = part.recipe.tp_overlap and tp > 1 and {"dgrad", "wgrad"} <= keep
    gathered = -1
    if split:
        gathered = r.collective(
            "all_gather", name, part.hidden_bytes, tp, group="tp", pass_="wgrad",
            stream=TP_STREAM if beside else COMPUTE, needs=[r.last], main=not beside,
        )  # fmt: skip
    if not beside:
        for linear in linears:
            _bias_gradient(r, part, name, linear, keep)
            gemm_backward(r, part, name, linear.rows, linear.inputs, linear.outputs, keep)
        if "dgrad" in keep:
            reduce_gradient(r, part, name)
        return
    given = r.last
    for linear in linears:
        _bias_gradient(r, part, name, linear, keep)
        _input_gradient(r, part, name, linear)
    reduced = r.collective(
        part.reduction, name, part.hidden_bytes, tp, group="tp", pass_="dgrad", stream=TP_STREAM, needs=[r.last],
        main=False,
    )  # fmt: skip
    for linear in linears:
        _weight_gradient(r, part, name, linear, given, gathered)
    r.also(reduced)


def _bias_gradient(r: Recorder, part: Part, name: str, linear: Linear, keep: frozenset[str]) -> None:
    if linear.bias and "wgrad" in keep:
        work = MemoryOp("bias_add", linear.rows, linear.outputs, part.model.dtype, "bwd")
        r.kernel(name, work, pass_="wgrad", needs=[r.last], main=False)
        accumulate(r, part, name, linear.outputs)


def _input_gradient(r: Recorder, part: Part, name: str, linear: Linear) -> None:
    r.gemm(name, linear.rows, linear.inputs, linear.outputs, pass_="dgrad", dtype=part.gemm_dtype)


def _weight_gradient(r: Recorder, part: Part, name: str, linear: Linear, *needs: int) -> None:
    r.gemm(
        name, linear.outputs, linear.inputs, linear.rows, pass_="wgrad", dtype=part.gemm_dtype,
        needs=needs, main=False, adds=part.recipe.accumulation == "fused",
    )  # fmt: skip
    accumulate(r, part, name, linear.inputs * linear.outputs)


def accumulate(r: Recorder, part: Part, name: str, parameters: int) -> None:
    """Add the gradient recorded last to the main one by a kernel of its own, where nothing else does."""
    if part.recipe.accumulation == "separate":
        work = MemoryOp("grad_accumulate", parameters, 1, part.model.dtype)
        r.kernel(name, work, pass_="wgrad", needs=[len(r) - 1], main=False)

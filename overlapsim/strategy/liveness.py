"""Bytes that live between operators of a graph, in the order in which they are issued."""

from __future__ import annotations

from overlapsim.units import dtype_bytes
from overlapsim.workload.attention import AttentionOp
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import CollectiveOp, GemmOp, GroupedGemmOp, Operator, OperatorGraph


def peak_live_bytes(graph: OperatorGraph) -> float:
    """Most bytes of results that wait for a reader, with the inputs of weight gradients not computed yet.

    Results live from their operator to their last reader in issue order; those
    that nothing in the graph reads are left out, and so is all that the
    forward keeps, but for inputs of weight gradients: those are freed by them.

    Examples
    --------
    >>> first = GemmOp(8, 8, 8, name="mlp.fc1", pass_="dgrad")
    >>> peak_live_bytes(OperatorGraph((first, first), ((0, 1),)))
    128.0
    """
    last: dict[int, int] = {}
    rebuilt = set()
    for src, dst in graph.dependencies:
        last[src] = max(last.get(src, dst), dst)
        if graph.operators[src].pass_ == "recompute":
            rebuilt.add(dst)
    change = [0.0] * (len(graph.operators) + 1)
    for position, op in enumerate(graph.operators):
        if position in last:
            change[position] += result_bytes(op)
            change[last[position] + 1] -= result_bytes(op)
        if op.pass_ == "wgrad" and position not in rebuilt:
            change[0] += _input_bytes(op)
            change[position + 1] -= _input_bytes(op)
    best = now = 0.0
    for step in change:
        now += step
        best = max(best, now)
    return best


def result_bytes(op: Operator) -> float:
    """Bytes that an operator writes; 0 for work of a kind that does not say."""
    if isinstance(op, GemmOp):
        return float(op.output_bytes)
    if isinstance(op, CollectiveOp):
        return op.size_bytes
    work = op.work
    if isinstance(work, GroupedGemmOp):
        return float(sum(work.rows) * work.n * dtype_bytes(work.dtype))
    if isinstance(work, MemoryOp):
        return float(work.rows * work.columns * dtype_bytes(work.dtype))
    if isinstance(work, AttentionOp):
        return float(work.batch * work.q_len * work.heads * (work.value_dim or work.head_dim) * dtype_bytes(work.dtype))
    return 0.0


def _input_bytes(op: Operator) -> float:
    """The layer's input that a weight gradient reads: its products are as deep as there are rows."""
    if isinstance(op, GemmOp):
        return float(op.n * op.k * dtype_bytes(op.dtype))
    if isinstance(op, CollectiveOp) or not isinstance(op.work, GroupedGemmOp):
        return 0.0
    return float(len(op.work.rows) * op.work.n * op.work.k * dtype_bytes(op.work.dtype))

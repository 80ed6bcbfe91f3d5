"""Who reads what the backward pass rebuilds: rebuilt operators are free to run until then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from overlapsim.workload.attention import AttentionOp, UnfusedAttention
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import CollectiveOp, GemmOp, GroupedGemmOp, KernelOp, Operator, OperatorGraph

MOVES: Final = frozenset(
    {"rope", "torch_rope", "moe_permute", "moe_unpermute", "torch_permute", "torch_unpermute", "transpose"}
)
"""Memory-bound kernels that are linear: their backward reads gradients alone, so a reader is looked for behind them."""
ROUTER: Final = "moe.router"
"""Tokens are permuted behind their routing, which is kept: what the router reads, the permutation reads too."""
SUMS: Final = frozenset({"add", "bias_dropout_add"})
"""Sums into the residual stream, which is kept."""


def join_rebuilt(graph: OperatorGraph, forward: OperatorGraph, placed: Mapping[int, int]) -> OperatorGraph:
    """Let each operator of a backward pass wait for the rebuilt tensors that it reads, and for no others.

    A weight gradient reads the input of its linear layer, the gradient of an
    activation or a norm reads its input, and attention its own result too.
    Exchanges and permutations read nothing: what lies behind them does.

    Parameters
    ----------
    graph : backward pass, rebuilt operators first, which nothing waits for yet
    forward : the pass whose operators are rebuilt
    placed : position in `graph` of each rebuilt position of `forward`
    """
    after: dict[int, list[int]] = {}
    for src, dst in forward.dependencies:
        after.setdefault(src, []).append(dst)
    edges = set(graph.dependencies)
    for old, new in placed.items():
        edges |= {(new, reader) for reader in _own_readers(graph, forward.operators[old])}
        open_, seen = list(after.get(old, ())), set[int]()
        while open_:
            position = open_.pop()
            if position in seen:
                continue
            seen.add(position)
            edges |= {(new, reader) for reader in _readers(graph, forward.operators[position])}
            if position in placed:
                edges.add((new, placed[position]))
            elif _moves(forward.operators[position]) or forward.operators[position].name == ROUTER:
                open_ += after.get(position, ())
    return OperatorGraph(graph.operators, tuple(sorted(edges)), graph.streams, graph.memory)


def _readers(graph: OperatorGraph, op: Operator) -> Iterator[int]:
    """Positions of a backward pass that read the input of an operator of the forward pass."""
    for position, other in enumerate(graph.operators):
        if other.name != op.name or other.pass_ not in ("dgrad", "wgrad"):
            continue
        if _is_gemm(op):
            reads = _is_gemm(other) and other.pass_ == "wgrad"
        elif isinstance(op, CollectiveOp):
            # Gathered once more for the weight gradient.
            reads = isinstance(other, CollectiveOp) and (other.kind, other.pass_) == (op.kind, "wgrad")
        else:
            reads = isinstance(other, KernelOp) and not _is_gemm(other) and not _moves(op) and not _sums(op)
        if reads:
            yield position


def _own_readers(graph: OperatorGraph, op: Operator) -> Iterator[int]:
    """Attention's backward reads its result."""
    if isinstance(op, KernelOp) and isinstance(op.work, AttentionOp | UnfusedAttention):
        yield from _readers(graph, op)


def _is_gemm(op: Operator) -> bool:
    return isinstance(op, GemmOp) or (isinstance(op, KernelOp) and isinstance(op.work, GroupedGemmOp))


def _moves(op: Operator) -> bool:
    return isinstance(op, CollectiveOp) or (
        isinstance(op, KernelOp) and isinstance(op.work, MemoryOp) and op.work.kind in MOVES
    )


def _sums(op: Operator) -> bool:
    return isinstance(op, KernelOp) and isinstance(op.work, MemoryOp) and op.work.kind in SUMS

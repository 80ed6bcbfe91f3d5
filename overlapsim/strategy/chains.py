"""Operators that one strategy takes together: a GEMM, the collective next to it, and kernels on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from overlapsim.errors import StrategyError
from overlapsim.workload.operators import (
    STEP_PREFIXES,
    CollectiveKind,
    CollectiveOp,
    GemmOp,
    GroupedGemmOp,
    KernelOp,
    Operator,
    OperatorGraph,
)

Relation = Literal["after", "before", "independent"]
"""Where the collective of a pair stands: on the GEMM's output, on its input, or needing nothing of it."""


def is_gemm(op: Operator) -> bool:
    """Whether strategies may be chosen for an operator: a GEMM, or the grouped GEMM of experts.

    Examples
    --------
    >>> is_gemm(GemmOp(8, 8, 8)), is_gemm(KernelOp(GroupedGemmOp((4, 4), 8, 8), "moe.fc1"))
    (True, True)
    """
    return isinstance(op, GemmOp) or is_grouped(op)


def is_grouped(op: Operator) -> bool:
    """Whether an operator is the grouped GEMM of experts."""
    return isinstance(op, KernelOp) and isinstance(op.work, GroupedGemmOp)


@dataclass(frozen=True)
class Chain:
    """A GEMM (plain or grouped), the collective next to it, and kernels on the way, by position in their graph.

    Attributes
    ----------
    gemm, collective, relation : as in `base.Pair`
    gemm_at, collective_at : positions
    near, far : positions of kernels between the two, and on the far side of the collective
    """

    gemm: GemmOp | KernelOp
    collective: CollectiveOp
    relation: Relation
    gemm_at: int
    collective_at: int
    near: tuple[int, ...] = ()
    far: tuple[int, ...] = ()


def read_chain(graph: OperatorGraph) -> Chain:
    """What a graph of one GEMM, one collective and kernels on the way holds.

    Raises
    ------
    StrategyError
        If the graph has another number of either.
    """
    gemms = [i for i, op in enumerate(graph.operators) if is_gemm(op)]
    collectives = [i for i, op in enumerate(graph.operators) if isinstance(op, CollectiveOp)]
    if len(gemms) != 1 or len(collectives) != 1:
        raise StrategyError(
            f"the graph has {len(gemms)} GEMMs and {len(collectives)} collectives; this strategy takes one of each"
        )
    (gemm_at,), (collective_at,) = gemms, collectives
    gemm, collective = graph.operators[gemm_at], graph.operators[collective_at]
    assert isinstance(gemm, GemmOp | KernelOp) and isinstance(collective, CollectiveOp)
    relation: Relation = "independent" if collective_at not in relatives(graph, gemm_at) else "after"
    if relation == "after" and collective_at < gemm_at:
        relation = "before"
    low, high = sorted((gemm_at, collective_at))
    kernels = [i for i in range(len(graph.operators)) if i not in (low, high)]
    near = tuple(i for i in kernels if low < i < high)
    return Chain(gemm, collective, relation, gemm_at, collective_at, near, tuple(i for i in kernels if i not in near))


def find_chain(
    graph: OperatorGraph,
    gemm: int,
    kinds: Mapping[Relation, Collection[CollectiveKind]],
    *,
    near: Callable[[KernelOp], bool],
    far: Callable[[KernelOp], bool],
    taken: Collection[int] = (),
) -> tuple[int, ...] | None:
    """Rising positions of a GEMM, its collective, and the kernels that go along; None where no collective is such.

    Parameters
    ----------
    graph, gemm : where to look, and the position of the GEMM
    kinds : collectives that are taken, by where they stand; the first relation with one counts
    near, far : kernels that are taken between the GEMM and the collective, and on its far side
    taken : positions that are not free
    """
    for relation, wanted in kinds.items():
        at, found, collective = gemm, [gemm], False
        while True:
            ends = [b if relation == "after" else a for a, b in graph.dependencies if at == (b, a)[relation == "after"]]
            free = [(i, graph.operators[i]) for i in ends if i not in taken]
            step = [i for i, op in free if isinstance(op, CollectiveOp) and not collective and _fits(op, wanted)]
            kernels = far if collective else near
            step = step or [i for i, op in free if isinstance(op, KernelOp) and kernels(op)]
            if not step:
                break
            at = step[0]
            found.append(at)
            collective = collective or isinstance(graph.operators[at], CollectiveOp)
        if collective:
            return tuple(sorted(found))
    return None


def _fits(op: CollectiveOp, wanted: Collection[CollectiveKind]) -> bool:
    return op.kind in wanted and not op.name.startswith(STEP_PREFIXES)


def nearest_collective(
    graph: OperatorGraph, gemm: int, relations: Sequence[Relation], taken: Collection[int]
) -> int | None:
    """Position of the free collective that one of the relations points to: of the GEMM's own name first."""
    # Gradients, parameters and pipeline transfers belong to strategies that arrange the whole step.
    free = [
        i
        for i, op in enumerate(graph.operators)
        if isinstance(op, CollectiveOp) and i not in taken and not op.name.startswith(STEP_PREFIXES)
    ]
    op = graph.operators[gemm]
    own = [i for i in free if (graph.operators[i].name, graph.operators[i].pass_) == (op.name, op.pass_)]
    # A collective bears the name of the operator that it serves: others beside the GEMM come second.
    for some in (own, free):
        for relation in relations:
            if relation == "after":
                found = [i for i in some if (gemm, i) in graph.dependencies]
            elif relation == "before":
                found = [i for i in some if (i, gemm) in graph.dependencies]
            else:
                apart = relatives(graph, gemm)
                found = sorted((i for i in some if i not in apart), key=lambda i: abs(i - gemm))
            if found:
                return found[0]
    return None


def relatives(graph: OperatorGraph, position: int) -> set[int]:
    """Everything that the operator depends on, or that depends on it, and itself."""
    up, down = {position}, {position}
    for a, b in sorted(graph.dependencies):
        if a in down:
            down.add(b)
    for a, b in sorted(graph.dependencies, key=lambda pair: -pair[1]):
        if b in up:
            up.add(a)
    return up | down

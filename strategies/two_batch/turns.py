"""Two halves of a batch in one graph: each runs to its next exchange, then it is the other one's turn."""

from __future__ import annotations

from overlapsim.errors import StrategyError
from overlapsim.workload.batches import in_batches
from overlapsim.workload.operators import COMPUTE, CollectiveOp, Operator, OperatorGraph

STREAM = "two_batch comm"
LAYERS = ("attn.", "mlp.", "moe.")
FIRST = "param."
"""Parameters are gathered once, for the first half; what else belongs to the whole step waits for both halves."""


def is_exchange(op: Operator) -> bool:
    """Whether an operator communicates inside a layer; embedding, head and optimizer have no turns to take."""
    return isinstance(op, CollectiveOp) and op.ranks > 1 and op.name.startswith(LAYERS)


def is_shared(op: Operator) -> bool:
    """Whether both halves share an operator: gradients and parameters of a step."""
    return isinstance(op, CollectiveOp) and op.name.startswith(("grad.", FIRST))


def halves(graph: OperatorGraph) -> list[tuple[Operator, ...]]:
    """Each operator as those of both halves, or alone where they share it.

    Raises
    ------
    StrategyError
        Naming the operator that cannot be cut.
    """
    found = []
    for op in graph.operators:
        parts: tuple[Operator, ...] | None = (op,) if is_shared(op) else in_batches(op, 2)
        if parts is None:
            raise StrategyError(f"{op.name} {op.pass_} cannot be cut in two batches: {why(op)}")
        found.append(parts)
    return found


def why(op: Operator) -> str:
    """Reason that an operator cannot be cut."""
    if op.name == "attn.core":
        return "attention of one sequence is one piece (expected micro-batches, or steps, of at least two sequences)"
    return "it has fewer than two rows, or a time that is known for the whole only"


def in_turn(graph: OperatorGraph) -> OperatorGraph:
    """The graph of both halves, exchanges beside computation.

    Raises
    ------
    StrategyError
        If an operator cannot be cut.
    """
    parts = halves(graph)
    order = _issue(graph)
    place: dict[tuple[int, int], int] = {}
    for number, (position, half) in enumerate(order):
        place[position, half] = number
        if len(parts[position]) == 1:
            place[position, 1 - half] = number
    edges = {(place[src, half], place[dst, half]) for src, dst in graph.dependencies for half in (0, 1)}
    memory: tuple[tuple[float, float], ...] = ()
    if graph.memory:
        shares = [1 / len(parts[position]) for position, _ in order]
        memory = tuple(
            (graph.memory[position][0] * share, graph.memory[position][1] * share)
            for (position, _), share in zip(order, shares, strict=True)
        )
    return OperatorGraph(
        tuple(parts[position][half if len(parts[position]) > 1 else 0] for position, half in order),
        tuple(sorted(edges)),
        tuple(_stream(graph, position) for position, _ in order),
        memory,
    )


def _issue(graph: OperatorGraph) -> list[tuple[int, int]]:
    """(Position, half) as issued: stretches that end with an exchange, in turn."""
    stretches: list[list[int]] = [[]]
    for position, op in enumerate(graph.operators):
        stretches[-1].append(position)
        if is_exchange(op):
            stretches.append([])
    order = []
    for stretch in stretches:
        for half in (0, 1):
            for position in stretch:
                op = graph.operators[position]
                if is_shared(op) and half != (0 if op.name.startswith(FIRST) else 1):
                    continue
                order.append((position, half))
    return order


def _stream(graph: OperatorGraph, position: int) -> str:
    given = graph.stream_of(position)
    return STREAM if given == COMPUTE and is_exchange(graph.operators[position]) else given

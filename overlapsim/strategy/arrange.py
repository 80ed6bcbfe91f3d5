"""Arranging a graph: operators move, are merged and go to streams; dependencies follow them to their new places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from overlapsim.errors import StrategyError
from overlapsim.workload.operators import COMPUTE, CollectiveOp, Operator, OperatorGraph


@dataclass(eq=False)
class Slot:
    """One operator of the graph to be, and where it is issued.

    Attributes
    ----------
    operator : what runs
    at : where in the old order it is issued, between old positions where it is no whole number; equals keep the
        order in which they are given
    stands_for : old positions whose producers it waits for and whose consumers wait for it
    stream : name of its stream
    allocates_bytes, frees_bytes : at its start, and at its end
    after : further slots that must have ended before it starts
    """

    operator: Operator
    at: float
    stands_for: tuple[int, ...]
    stream: str = COMPUTE
    allocates_bytes: float = 0.0
    frees_bytes: float = 0.0
    after: list[Slot] = field(default_factory=list)


def slots_of(graph: OperatorGraph) -> list[Slot]:
    """Slots of a graph as it is, one an operator in order."""
    slots = [Slot(op, i, (i,), graph.stream_of(i)) for i, op in enumerate(graph.operators)]
    for slot, (allocated, freed) in zip(slots, graph.memory, strict=False):
        slot.allocates_bytes, slot.frees_bytes = allocated, freed
    return slots


def assemble(graph: OperatorGraph, slots: Sequence[Slot]) -> OperatorGraph:
    """Return the graph of `slots`, which together stand for every operator of `graph`.

    Raises
    ------
    StrategyError
        If an operator would be issued before one that it needs.
    """
    ordered = sorted(slots, key=lambda slot: slot.at)
    new = {slot: number for number, slot in enumerate(ordered)}
    place = {old: new[slot] for slot in ordered for old in slot.stands_for}
    edges = {(place[a], place[b]) for a, b in graph.dependencies if place[a] != place[b]}
    edges |= {(new[before], new[slot]) for slot in ordered for before in slot.after}
    for src, dst in edges:
        if src >= dst:
            first, second = ordered[src].operator, ordered[dst].operator
            raise StrategyError(
                f"{second.name} {second.pass_} would be issued before {first.name} {first.pass_}, which it needs"
            )
    memory = tuple((slot.allocates_bytes, slot.frees_bytes) for slot in ordered)
    return OperatorGraph(
        tuple(slot.operator for slot in ordered),
        tuple(sorted(edges)),
        tuple(slot.stream for slot in ordered),
        memory if any(map(any, memory)) else (),
    )


def merged(graph: OperatorGraph, positions: Sequence[int], name: str, at: float, stream: str) -> Slot:
    """One collective in place of several of one kind over the same ranks."""
    first = graph.operators[positions[0]]
    assert isinstance(first, CollectiveOp), "only collectives are merged"
    size_bytes = sum(op.size_bytes for i in positions if isinstance(op := graph.operators[i], CollectiveOp))
    whole = first if len(positions) == 1 else replace(first, size_bytes=size_bytes, name=name)
    return Slot(whole, at, tuple(positions), stream)


def collectives(graph: OperatorGraph, prefix: str, kinds: Sequence[str], passes: Sequence[str] = ()) -> list[int]:
    """Positions of the collectives of more than one rank whose name starts with `prefix`, in order."""
    return [
        i
        for i, op in enumerate(graph.operators)
        if isinstance(op, CollectiveOp)
        and op.ranks > 1
        and op.name.startswith(prefix)
        and op.kind in kinds
        and (not passes or op.pass_ in passes)
    ]


def alike(graph: OperatorGraph, positions: Iterable[int]) -> list[list[int]]:
    """Split collectives by what they must have in common to be one: kind, ranks, group, dtype and engine."""
    found: dict[tuple[object, ...], list[int]] = {}
    for i in positions:
        op = graph.operators[i]
        assert isinstance(op, CollectiveOp)
        found.setdefault((op.kind, op.ranks, op.group, op.dtype, op.engine), []).append(i)
    return list(found.values())


def layers(graph: OperatorGraph, positions: Sequence[int]) -> Iterator[list[int]]:
    """Cut operators into layers: the next one begins where a name comes again, or the pass changes.

    Examples
    --------
    >>> from overlapsim.workload.operators import CollectiveOp
    >>> names = ("param.embed", "param.mlp.fc1", "param.mlp.fc2", "param.mlp.fc1", "param.mlp.fc2")
    >>> graph = OperatorGraph(tuple(CollectiveOp("all_gather", 8.0, 2, name=name) for name in names))
    >>> list(layers(graph, range(5)))
    [[0, 1, 2], [3, 4]]
    """
    layer: list[int] = []
    names: set[str] = set()
    for i in positions:
        op = graph.operators[i]
        if layer and (op.name in names or op.pass_ != graph.operators[layer[-1]].pass_):
            yield layer
            layer, names = [], set()
        layer.append(i)
        names.add(op.name)
    if layer:
        yield layer


def consumers(graph: OperatorGraph) -> Mapping[int, list[int]]:
    """Positions that wait for each position, rising."""
    found: dict[int, list[int]] = {}
    for a, b in sorted(graph.dependencies):
        found.setdefault(a, []).append(b)
    return found

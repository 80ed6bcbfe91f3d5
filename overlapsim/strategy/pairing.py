"""An F&B pair: the forward of one micro-batch and the backward of another, each one's communication under the other."""

from __future__ import annotations

from collections.abc import Callable

from overlapsim.workload.operators import COMPUTE, CollectiveOp, Operator, OperatorGraph

STREAMS = ("pair forward", "pair backward")
"""Streams of the two micro-batches' collectives."""


def paired(forward: OperatorGraph, backward: OperatorGraph, seconds: Callable[[Operator], float]) -> OperatorGraph:
    """Join two graphs that need nothing of one another; their collectives leave the compute stream.

    Operators are issued by the progress of their own graph, so that the one
    with more computation is not left alone at the end.

    Parameters
    ----------
    forward, backward : graphs of one layer each
    seconds : time of an operator alone

    Examples
    --------
    >>> from overlapsim.workload.operators import GemmOp
    >>> one = OperatorGraph((GemmOp(8, 8, 8, name="mlp.fc1"), GemmOp(8, 8, 8, name="mlp.fc2")), ((0, 1),))
    >>> [op.name for op in paired(one, one, lambda op: 1.0).operators]
    ['mlp.fc1', 'mlp.fc1', 'mlp.fc2', 'mlp.fc2']
    """
    marks: list[tuple[float, int, int]] = []
    for side, graph in enumerate((forward, backward)):
        times = [seconds(op) for op in graph.operators]
        done, total = 0.0, sum(times) or 1.0
        for position, time in enumerate(times):
            marks.append((done / total, side, position))
            done += time
    order = sorted(marks)
    place = {(side, position): number for number, (_, side, position) in enumerate(order)}
    graphs = (forward, backward)
    operators = tuple(graphs[side].operators[position] for _, side, position in order)
    streams = tuple(_stream(graphs[side], side, position) for _, side, position in order)
    dependencies = sorted(
        (place[side, src], place[side, dst]) for side, graph in enumerate(graphs) for src, dst in graph.dependencies
    )
    return OperatorGraph(operators, tuple(dependencies), streams)


def side_by_side(forward: OperatorGraph, backward: OperatorGraph) -> OperatorGraph:
    """Both graphs in one, one behind the other, neither waiting for the other: for whoever orders them."""
    size = len(forward.operators)
    both = ((graph, position) for graph in (forward, backward) for position in range(len(graph.operators)))
    return OperatorGraph(
        (*forward.operators, *backward.operators),
        (*forward.dependencies, *((src + size, dst + size) for src, dst in backward.dependencies)),
        tuple(graph.stream_of(position) for graph, position in both),
    )


def parted(graph: OperatorGraph) -> tuple[OperatorGraph, OperatorGraph] | None:
    """The forward and the backward of which a graph consists; None where it is no such pair.

    Examples
    --------
    >>> from overlapsim.workload.operators import GemmOp
    >>> one, other = (OperatorGraph((GemmOp(8, 8, 8, name="mlp.fc1", pass_=p),)) for p in ("fwd", "dgrad"))
    >>> [len(graph.operators) for graph in parted(side_by_side(one, other))], parted(one)
    ([1, 1], None)
    """
    forward = [i for i, op in enumerate(graph.operators) if op.pass_ == "fwd"]
    first = set(forward)
    if any((src in first) != (dst in first) for src, dst in graph.dependencies):
        return None
    backward = [i for i in range(len(graph.operators)) if i not in first]
    return (graph.part(forward), graph.part(backward)) if forward and backward else None


def _stream(graph: OperatorGraph, side: int, position: int) -> str:
    if isinstance(graph.operators[position], CollectiveOp):
        return STREAMS[side]
    return graph.stream_of(position) or COMPUTE

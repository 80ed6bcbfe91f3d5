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


def _stream(graph: OperatorGraph, side: int, position: int) -> str:
    if isinstance(graph.operators[position], CollectiveOp):
        return STREAMS[side]
    return graph.stream_of(position) or COMPUTE

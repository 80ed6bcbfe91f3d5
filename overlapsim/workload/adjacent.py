"""Passes of adjacent layers as one graph: what is rebuilt, and gradients of weights, may move from one to the next."""

from __future__ import annotations

from collections.abc import Sequence

from overlapsim.workload.operators import Operator, OperatorGraph


def adjacent(graphs: Sequence[OperatorGraph]) -> OperatorGraph:
    """One graph of passes in the order in which they run: a backward of layer l stands before that of layer l - 1.

    What a pass begins with needs the activation, or its gradient, that the
    pass before ends with.  What is rebuilt from kept tensors needs neither,
    and nothing needs a weight gradient.

    Parameters
    ----------
    graphs : a pass of each layer, in order

    Examples
    --------
    >>> from overlapsim.workload.operators import GemmOp
    >>> again = GemmOp(8, 8, 8, name="mlp.fc1", pass_="recompute")
    >>> one = OperatorGraph((again, GemmOp(8, 8, 8, name="mlp.fc1", pass_="dgrad")), ((0, 1),))
    >>> adjacent([one, one]).dependencies
    ((0, 1), (1, 3), (2, 3))
    """
    operators: list[Operator] = []
    edges, streams = list[tuple[int, int]](), list[str]()
    memory: list[tuple[float, float]] = []
    end = -1
    for graph in graphs:
        offset = len(operators)
        if end >= 0:
            edges += [(end, offset + start) for start in _starts(graph)]
        operators += graph.operators
        edges += [(offset + src, offset + dst) for src, dst in graph.dependencies]
        streams += [graph.stream_of(position) for position in range(len(graph.operators))]
        memory += graph.memory or [(0.0, 0.0)] * len(graph.operators)
        last = end_of_pass(graph)
        end = end if last < 0 else offset + last
    return OperatorGraph(
        tuple(operators), tuple(sorted(set(edges))), tuple(streams), tuple(memory) if any(map(any, memory)) else ()
    )


def end_of_pass(graph: OperatorGraph) -> int:
    """Position of the operator whose result the next pass takes: the last of no weight gradient; -1 without one.

    In an order that was changed it is the last on the way of activations or their gradients.
    """
    needed = {src for src, dst in graph.dependencies if graph.operators[dst].pass_ in ("fwd", "dgrad")}
    ends = [i for i, op in enumerate(graph.operators) if op.pass_ in ("fwd", "dgrad") and i not in needed]
    return max(ends, default=-1)


def _starts(graph: OperatorGraph) -> list[int]:
    """What needs the result of the pass before: all that needs nothing but rebuilt tensors, and is none itself."""
    waiting = {dst for src, dst in graph.dependencies if graph.operators[src].pass_ != "recompute"}
    return [i for i, op in enumerate(graph.operators) if op.pass_ != "recompute" and i not in waiting]

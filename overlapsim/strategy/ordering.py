"""In which order to issue a graph's operators so that communication runs under computation: a beam search on times.

Operators stand on lines (streams) that run one after another: computation on one, the collectives of each kind of group
on one of their own. What is searched is the order on each line; the time that counts is that of the last operator. What
lines cost each other (SMs, HBM) is left to the engine, which confirms the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from overlapsim.cost.prices import PriceBook
from overlapsim.errors import StrategyError
from overlapsim.workload.operators import COMPUTE, STEP_PREFIXES, CollectiveOp, OperatorGraph

MOST_OPERATORS: Final = 256
"""Larger graphs are arranged layer by layer, by whoever makes them."""
BESIDE: Final = "ordered"
"""What names of the streams of ordered collectives begin with; their group follows."""


@dataclass(frozen=True)
class Lines:
    """A graph as a problem of order.

    Attributes
    ----------
    seconds : of each operator alone
    line : number of the line of each
    before : what each waits for
    names : of the lines; the first is computation's
    """

    seconds: tuple[float, ...]
    line: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Order:
    """An order and its time on lines that do not disturb each other.

    Attributes
    ----------
    positions : old positions as they are issued
    seconds : end of the last operator
    """

    positions: tuple[int, ...]
    seconds: float


def lines_of(graph: OperatorGraph, prices: PriceBook, taken: Collection[int] = ()) -> Lines:
    """Put collectives on lines of their kind of group; those of the whole step, and all else, stay where they are.

    Parameters
    ----------
    graph, prices : what is to be ordered, and what it costs
    taken : collectives that strategies of pairs run with their GEMMs: they stay, and take no time of their own

    Raises
    ------
    StrategyError
        If the graph has more operators than are searched.
    """
    if len(graph.operators) > MOST_OPERATORS:
        raise StrategyError(
            f"a graph of {len(graph.operators)} operators is too large to order; give at most {MOST_OPERATORS}, a layer"
        )
    names = [COMPUTE]
    line = []
    for position in range(len(graph.operators)):
        name = stream_of(graph, position, taken)
        if name not in names:
            names.append(name)
        line.append(names.index(name))
    seconds = tuple(0.0 if i in taken else prices.operator_s(op) for i, op in enumerate(graph.operators))
    before: list[list[int]] = [[] for _ in graph.operators]
    for src, dst in graph.dependencies:
        before[dst].append(src)
    return Lines(seconds, tuple(line), tuple(map(tuple, before)), tuple(names))


def stream_of(graph: OperatorGraph, position: int, taken: Collection[int] = ()) -> str:
    """Stream of an operator once it is ordered; what is `taken` stays."""
    op, given = graph.operators[position], graph.stream_of(position)
    inside = isinstance(op, CollectiveOp) and op.ranks > 1 and not op.name.startswith(STEP_PREFIXES)
    if not inside or given != COMPUTE or position in taken:
        return given
    assert isinstance(op, CollectiveOp)
    return f"{BESIDE} {op.group or 'comm'}"


def best_order(lines: Lines, beam: int) -> Order:
    """Order found by a beam search: `beam` partial orders are kept, those whose bound is least.

    With a beam of 1 it is list scheduling by the longest chain behind each
    operator.

    Parameters
    ----------
    lines : the problem
    beam : partial orders kept, at least 1

    Returns
    -------
    Order
        Never worse than the order given.
    """
    count = len(lines.seconds)
    behind = _behind(lines)
    waiting = [len(before) for before in lines.before]
    after: list[list[int]] = [[] for _ in range(count)]
    for position, before in enumerate(lines.before):
        for producer in before:
            after[producer].append(position)
    loads = [0.0] * len(lines.names)
    for seconds, line in zip(lines.seconds, lines.line, strict=True):
        loads[line] += seconds
    start = _State((), (0.0,) * len(lines.names), (0.0,) * count, tuple(loads), tuple(waiting), 0.0)
    states = [start]
    for _ in range(count):
        grown: dict[tuple[object, ...], _State] = {}
        for state in states:
            for position in range(count):
                if state.waiting[position]:
                    continue
                new = _place(state, position, lines, after, behind)
                key = (frozenset(new.positions), new.free)
                if key not in grown or new.bound < grown[key].bound:
                    grown[key] = new
        states = sorted(grown.values(), key=lambda s: (s.bound, sum(s.free), s.positions))[:beam]
    found = states[0]
    given = time_of(lines, range(count))
    best = max(found.free, default=0.0)
    return Order(found.positions, best) if best < given else Order(tuple(range(count)), given)


def time_of(lines: Lines, order: Sequence[int]) -> float:
    """End of the last operator where each line runs its operators in this order."""
    free, end = [0.0] * len(lines.names), [0.0] * len(lines.seconds)
    for position in order:
        ready = max((end[p] for p in lines.before[position]), default=0.0)
        end[position] = max(ready, free[lines.line[position]]) + lines.seconds[position]
        free[lines.line[position]] = end[position]
    return max(end, default=0.0)


def arrange_by(
    graph: OperatorGraph, order: Sequence[int], sms: int | Mapping[int, int] = 0, taken: Collection[int] = ()
) -> OperatorGraph:
    """The graph issued in an order, collectives beside computation.

    Parameters
    ----------
    graph : in its old order
    order : old positions as they are issued
    sms : SMs that each collective is limited to, or those of old positions; 0, or none: the library's
    taken : old positions of collectives that stay in line
    """
    ordered = graph.reordered(order)
    streams = tuple(stream_of(graph, position, taken) for position in order)
    operators = []
    for position, op, stream in zip(order, ordered.operators, streams, strict=True):
        limit = sms if isinstance(sms, int) else sms.get(position, 0)
        beside = isinstance(op, CollectiveOp) and stream.startswith(BESIDE)
        operators.append(replace(op, sms=limit) if limit and beside and isinstance(op, CollectiveOp) else op)
    return replace(ordered, operators=tuple(operators), streams=streams)


@dataclass(frozen=True)
class _State:
    """A partial order: what is placed, when lines are free, when operators end, what is left of each line.

    `waiting` counts the producers of an operator that are not placed, and is -1 once it is placed itself.
    """

    positions: tuple[int, ...]
    free: tuple[float, ...]
    end: tuple[float, ...]
    left: tuple[float, ...]
    waiting: tuple[int, ...]
    bound: float


def _place(
    state: _State, position: int, lines: Lines, after: Sequence[Sequence[int]], behind: Sequence[float]
) -> _State:
    line, seconds = lines.line[position], lines.seconds[position]
    ready = max((state.end[p] for p in lines.before[position]), default=0.0)
    begin = max(ready, state.free[line])
    free, end, left, waiting = list(state.free), list(state.end), list(state.left), list(state.waiting)
    free[line] = end[position] = begin + seconds
    left[line] -= seconds
    waiting[position] = -1
    for follower in after[position]:
        waiting[follower] -= 1
    bound = max(state.bound, begin + behind[position], *(at + rest for at, rest in zip(free, left, strict=True)))
    return _State((*state.positions, position), tuple(free), tuple(end), tuple(left), tuple(waiting), bound)


def _behind(lines: Lines) -> list[float]:
    """Longest chain that begins with each operator."""
    found = list(lines.seconds)
    for position in range(len(found) - 1, -1, -1):
        for producer in lines.before[position]:
            found[producer] = max(found[producer], lines.seconds[producer] + found[position])
    return found

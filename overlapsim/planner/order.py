"""The order of a layer's operators and the SMs of its collectives: searched, confirmed in the engine, bounded below."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from overlapsim.engine import compiled
from overlapsim.engine.deadlock import raise_if_deadlocked
from overlapsim.engine.timeline import Timeline
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import lower
from overlapsim.strategy.ordering import arrange_by, best_order, lines_of
from overlapsim.strategy.tasks import Site
from overlapsim.workload.operators import CollectiveOp, OperatorGraph

BEAMS: Final = (1, 4, 16, 64)
SHARES: Final = (1.0, 0.75, 0.5, 0.25)
"""Of the SMs that the library's collectives take."""
MOST_MOVES: Final = 200


@dataclass(frozen=True, eq=False)
class OrderResult:
    """What was found for one graph.

    Attributes
    ----------
    graph : as it is issued
    order, sms : positions as issued, SMs that collectives are limited to (0: the library's)
    seconds, given_s : in the engine, of this order and of the one given
    bound_s : no order with any number of SMs is faster: the fullest line, or the longest chain
    timeline, given_timeline : what happened
    """

    graph: OperatorGraph
    order: tuple[int, ...]
    sms: int
    seconds: float
    given_s: float
    bound_s: float
    timeline: Timeline
    given_timeline: Timeline


def order_operators(context: Context, *, contention: bool = True, moves: int = MOST_MOVES) -> OrderResult:
    """Find the order in which a graph's operators hide most communication.

    Beams of several widths propose orders on times alone; each is run in the
    engine with several shares of the collectives' SMs; then operators of the
    best are moved one place at a time while that helps.

    Parameters
    ----------
    context : a layer's pass, or several, and prices
    contention : False leaves HBM and link sharing out
    moves : engine runs that the last step may take

    Raises
    ------
    StrategyError
        If the graph is too large to order.
    """
    graph, prices = context.graph, context.prices
    lines = lines_of(graph, prices)
    given = _run(context, graph, contention)
    best = (given.duration_s, tuple(range(len(graph.operators))), 0)
    orders = dict.fromkeys(best_order(lines, beam).positions for beam in BEAMS)
    for order in (tuple(range(len(graph.operators))), *orders):
        for sms in _shares(context):
            seconds = _run(context, arrange_by(graph, order, sms), contention).duration_s
            best = min(best, (seconds, order, sms))
    best = _improve(context, best, contention, moves)
    seconds, order, sms = best
    arranged = graph if seconds >= given.duration_s else arrange_by(graph, order, sms)
    timeline = _run(context, arranged, contention)
    return OrderResult(arranged, order, sms, timeline.duration_s, given.duration_s, lines.bound_s, timeline, given)


def _shares(context: Context) -> list[int]:
    """SMs to try: the library's, and shares of them."""
    kinds = {op.kind for op in context.graph.of_type(CollectiveOp)}
    most = max((context.prices.comm_sms(kind) for kind in kinds), default=0)
    return list(dict.fromkeys(0 if share == 1.0 else max(1, round(most * share)) for share in SHARES)) if most else [0]


def _improve(
    context: Context, best: tuple[float, tuple[int, ...], int], contention: bool, moves: int
) -> tuple[float, tuple[int, ...], int]:
    """Move operators of the best order while the engine says that it helps."""
    graph = context.graph
    while moves > 0:
        start = best
        for order in _neighbours(graph, best[1]):
            moves -= 1
            if moves < 0:
                break
            seconds = _run(context, arrange_by(graph, order, best[2]), contention).duration_s
            if seconds < best[0]:
                best = (seconds, order, best[2])
                break
        if best is start:
            break
    return best


def _neighbours(graph: OperatorGraph, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Orders in which two neighbours that need nothing of one another have changed places."""
    depends = set(graph.dependencies)
    for at in range(len(order) - 1):
        first, second = order[at], order[at + 1]
        if (first, second) not in depends:
            yield (*order[:at], second, first, *order[at + 2 :])


def _run(context: Context, graph: OperatorGraph, contention: bool) -> Timeline:
    builder = ProgramBuilder()
    lower(Context(graph, context.prices), Site(builder, context.prices))
    timeline = compiled.run(builder.freeze(), contention=contention)
    raise_if_deadlocked(timeline)
    return timeline

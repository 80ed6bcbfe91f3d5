"""The order of a layer's operators and the SMs of its collectives: searched, confirmed in the engine, bounded below."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from overlapsim.engine.timeline import Timeline
from overlapsim.step.run_graph import run_graph, with_engine
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import find_pieces
from overlapsim.strategy.order_bound import Load, loads_of, order_bound_s
from overlapsim.strategy.order_search import MOST_MOVES, search_order, taken_by
from overlapsim.strategy.ordering import arrange_by, lines_of
from overlapsim.workload.operators import OperatorGraph


@dataclass(frozen=True, eq=False)
class OrderResult:
    """What was found for one graph.

    Attributes
    ----------
    graph : as it is issued
    order : old positions as issued
    sms_of : SMs that collectives are limited to, by old position; those left out take the library's
    seconds, given_s : in the engine, of this order and of the one given
    bound_s : no order with any number of SMs is faster (`order_bound_s`)
    timeline, given_timeline : what happened
    """

    graph: OperatorGraph
    order: tuple[int, ...]
    sms_of: Mapping[int, int]
    seconds: float
    given_s: float
    bound_s: float
    timeline: Timeline
    given_timeline: Timeline

    @property
    def over_bound(self) -> float:
        """Time over the bound, from 1."""
        return self.seconds / self.bound_s if self.bound_s else 1.0


def order_operators(context: Context, *, contention: bool = True, moves: int = MOST_MOVES) -> OrderResult:
    """Find the order in which a graph's operators hide most communication, and the SMs of each collective.

    The search is `order_search.search_order`, run in the engine.

    Parameters
    ----------
    context : a layer's pass, or several, and prices. What strategies of pairs take stays together, and runs in the
        engine as they have it; such operators are left out of the bound
    contention : False leaves HBM and link sharing out
    moves : engine runs that the last step may take

    Raises
    ------
    StrategyError
        If the graph is too large to order.
    """
    graph = context.graph
    pieces = tuple(find_pieces(graph, context.pairs))
    taken = taken_by(graph, pieces)
    search = search_order(with_engine(context, contention=contention), moves)
    given = run_graph(context, contention=contention)
    count = len(graph.operators)
    arranged = graph if search.seconds >= given.duration_s else arrange_by(graph, search.order, search.sms, taken)
    timeline = run_graph(replace(context, graph=arranged), contention=contention)
    return OrderResult(
        arranged,
        search.order if arranged is not graph else tuple(range(count)),
        search.sms if arranged is not graph else {},
        timeline.duration_s,
        given.duration_s,
        _bound_s(context, {position for piece in pieces for position in piece.operators}, contention),
        timeline,
        given,
    )


def _bound_s(context: Context, left_out: Collection[int], contention: bool) -> float:
    """The bound, without the time of operators that are not the library's."""
    lines = lines_of(context.graph, context.prices)
    loads = loads_of(context.graph, context.prices, contention=contention)
    if left_out:

        def without(times: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(0.0 if position in left_out else time for position, time in enumerate(times))

        lines = replace(lines, seconds=without(lines.seconds))
        loads = tuple(Load(without(load.seconds), without(load.lost_s)) for load in loads)
    return order_bound_s(lines, loads)

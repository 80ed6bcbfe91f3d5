"""The order of a graph's operators, and the SMs of each collective, by running candidates: beams first, then moves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Piece, find_pieces
from overlapsim.strategy.ordering import BESIDE, arrange_by, best_order, lines_of, stream_of
from overlapsim.workload.operators import CollectiveOp, OperatorGraph

BEAMS: Final = (1, 4, 16, 64)
WIDE_OPERATORS: Final = 48
"""Graphs of more operators (two layers) are searched without the widest beam, which would take a second."""
SHARES: Final = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125)
"""Of the SMs that the library's collectives take."""
MOST_MOVES: Final = 1500
LEAST_GAIN: Final = 1e-4
"""Of the time: a move that gains less is not worth the engine's runs behind it."""


def search_order(context: Context, moves: int = MOST_MOVES) -> Search:
    """Search the order in which a graph takes least time by `Context.seconds_of`.

    Beams of several widths propose orders on times alone; each is run with
    several shares of the collectives' SMs.  From the best, one collective
    after another gets other SMs, and operators change places on their
    streams, while that helps.

    Parameters
    ----------
    context : graph, prices, pairs and what runs graphs
    moves : runs that the last step may take

    Raises
    ------
    StrategyError
        If the graph is too large to order.
    """
    graph = context.graph
    assert context.seconds_of is not None, "an order is searched where graphs can be run"
    taken = taken_by(graph, tuple(find_pieces(graph, context.pairs)))
    search = Search(context, context.seconds_of, taken)
    half = _half_of(graph)
    if half is not None:
        # Two layers are at least as fast as each on its own.
        found = search_order(replace(context, graph=half), moves)
        size = len(half.operators)
        search.look(
            (*found.order, *(position + size for position in found.order)),
            {position + shift: limit for position, limit in found.sms.items() for shift in (0, size)},
        )
    count = len(graph.operators)
    lines = lines_of(graph, context.prices, taken)
    beams = BEAMS if count <= WIDE_OPERATORS else BEAMS[:-1]
    orders = dict.fromkeys((tuple(range(count)), *(best_order(lines, beam).positions for beam in beams)))
    for order in orders:
        for share in SHARES:
            search.look(order, search.limits(share))
    search.improve(moves)
    return search


def taken_by(graph: OperatorGraph, pieces: Sequence[Piece]) -> frozenset[int]:
    """Collectives that strategies of pairs run together with their GEMMs."""
    positions = (position for piece in pieces for position in piece.operators)
    return frozenset(position for position in positions if isinstance(graph.operators[position], CollectiveOp))


def _half_of(graph: OperatorGraph) -> OperatorGraph | None:
    """One of two layers of a kind that follow each other; None where a graph is anything else."""
    size = len(graph.operators) // 2
    if size == 0 or graph.operators[:size] != graph.operators[size:]:
        return None
    return graph.part(range(size))


@dataclass
class Search:
    """The best order so far, with SMs by old position, and what was tried."""

    context: Context
    seconds_of: Callable[[Context], float]
    taken: Collection[int] = ()
    seconds: float = float("inf")
    order: tuple[int, ...] = ()
    sms: Mapping[int, int] = field(default_factory=dict)
    tried: dict[object, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.context.graph
        self.streams = [stream_of(graph, position, self.taken) for position in range(len(graph.operators))]
        prices = self.context.prices
        self.most = {
            position: prices.held_sms(op)
            for position, op in enumerate(graph.operators)
            if isinstance(op, CollectiveOp) and self.streams[position].startswith(BESIDE)
        }

    def limits(self, share: float) -> dict[int, int]:
        """All collectives at a share of the library's SMs."""
        return {position: self._limit(position, share) for position in self.most if share < 1 and self.most[position]}

    def look(self, order: tuple[int, ...], sms: Mapping[int, int]) -> bool:
        """Run an order in the engine; True where it is the best so far."""
        key = (order, tuple(sorted(sms.items())))
        if key in self.tried:
            return False
        self.tried[key] = seconds = self.seconds_of(
            replace(self.context, graph=arrange_by(self.context.graph, order, sms, self.taken))
        )
        if seconds >= self.seconds * (1 - LEAST_GAIN) and self.order:
            return False
        self.seconds, self.order, self.sms = seconds, order, dict(sms)
        return True

    def improve(self, moves: int) -> None:
        """Change SMs and places while that helps, for so many runs at most."""
        most = len(self.tried) + moves
        better = True
        while better:
            better = False
            for order, sms in self._neighbours():
                if len(self.tried) >= most:
                    return
                if self.look(order, sms):
                    better = True
                    break

    def _neighbours(self) -> Iterator[tuple[tuple[int, ...], Mapping[int, int]]]:
        order, sms = self.order, self.sms
        for position in self.most:
            for share in SHARES if self.most[position] else ():
                limit = self._limit(position, share) if share < 1 else 0
                yield order, {**{p: n for p, n in sms.items() if p != position}, **({position: limit} if limit else {})}
        for new in self._moved(order):
            yield new, sms
        for new in self._swapped(order):
            yield new, sms

    def _limit(self, position: int, share: float) -> int:
        return max(1, round(self.most[position] * share))

    def _moved(self, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Orders in which one operator has passed others of its stream that it needs nothing of, or that need it."""
        depends = set(self.context.graph.dependencies)
        for at, position in enumerate(order):
            for step in (-1, 1):
                to = at + step
                while 0 <= to < len(order):
                    other = order[to]
                    if ((other, position) if step < 0 else (position, other)) in depends:
                        break
                    if self.streams[other] == self.streams[position]:
                        rest = [*order[:at], *order[at + 1 :]]
                        yield (*rest[:to], position, *rest[to:])
                    to += step

    def _swapped(self, order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Orders in which two operators of a stream have changed places, where all that they need stays before them."""
        needs: list[set[int]] = [set() for _ in order]
        for src, dst in self.context.graph.dependencies:
            needs[dst].add(src)
        for first, one in enumerate(order):
            for second in range(first + 1, len(order)):
                other = order[second]
                if self.streams[one] != self.streams[other]:
                    continue
                between = set(order[first:second])
                if needs[other] & between or any(one in needs[p] for p in order[first + 1 : second + 1]):
                    continue
                yield (*order[:first], other, *order[first + 1 : second], one, *order[second + 1 :])

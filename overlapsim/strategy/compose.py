"""Several strategies in one graph: arrange operators, hand pairs to their strategies, join all by dependencies."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from overlapsim.errors import StrategyError
from overlapsim.plan import Finding
from overlapsim.strategy.base import Context, Parameters, Strategy
from overlapsim.strategy.budget import sm_budget
from overlapsim.strategy.chains import is_gemm, is_grouped
from overlapsim.strategy.compatibility import Setting, advise, check_compatible
from overlapsim.strategy.queues import queue_findings
from overlapsim.strategy.tasks import Placement, Site
from overlapsim.units import ps_from_s
from overlapsim.workload.operators import CollectiveOp, GemmOp, Operator, OperatorGraph


class ArrangingStrategy(Strategy):
    """A strategy that moves, merges and splits operators and puts them on streams; their kernels stay the library's.

    Data-parallel buckets, prefetched parameters and delayed weight gradients
    are of this kind.  What it returns can be arranged again by another one.
    """

    scope = "graph"
    per_block: ClassVar[bool] = False
    """Whether a block is arranged alone and stands among others like it; False where those in a row are arranged as
    one, as prefetching does."""

    def adjacent_layers(self, parameters: Parameters) -> int:
        """How many layers of a kind that follow each other it arranges together, where there are as many."""
        return 1

    @abstractmethod
    def arrange(self, context: Context, parameters: Parameters) -> OperatorGraph:
        """Return the graph as it is to be issued: order, streams, merged or added operators, added dependencies.

        Raises
        ------
        StrategyError
            If a parameter cannot be used with this graph.
        """

    def rewrite(self, context: Context, parameters: Parameters, site: Site) -> Placement:
        """Add the tasks of the arranged graph; the placement speaks of its positions."""
        return lower(Context(self.arrange(context, parameters), context.prices), site)


@dataclass(frozen=True)
class Chosen:
    """A strategy with the parameters to use."""

    strategy: Strategy
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True)
class Composition:
    """What is switched on in one graph.

    Attributes
    ----------
    arranging : applied to the whole graph, in this order
    pairs : by operator name and pass, which strategy takes the GEMM and its collective, in every layer
    setting : what is known of the run; the machine and the queues are filled in
    """

    arranging: tuple[Chosen, ...] = ()
    pairs: Mapping[tuple[str, str], Chosen] = field(default_factory=dict)
    setting: Setting = field(default_factory=Setting)

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """All that is switched on."""
        return tuple(chosen.strategy for chosen in (*self.arranging, *self.pairs.values()))


class Composed(NamedTuple):
    """What became of a composition.

    Attributes
    ----------
    graph : as arranged
    placement : where its operators went
    findings : what is allowed and does not help, and which GEMMs lose a wave to communication
    """

    graph: OperatorGraph
    placement: Placement
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Piece:
    """Operators (rising positions) that one strategy rewrites together."""

    operators: tuple[int, ...]
    chosen: Chosen


def compose(context: Context, composition: Composition, site: Site) -> Composed:
    """Arrange the graph, find the pairs of each strategy, and add the tasks of everything to `site`.

    Raises
    ------
    StrategyError
        If strategies do not go together in this setting, a chosen pair is not there, does not apply, or cannot be one
        piece, or collectives on different streams would hold more SMs than there are (cause ``contention``).
    """
    device = context.prices.cluster.device
    setting = replace(composition.setting, architecture=device.architecture, num_queues=site.num_queues)
    if reasons := check_compatible(composition.strategies, setting):
        raise StrategyError(f"these strategies do not go together: {'; '.join(reasons)}")
    graph = context.graph
    for chosen in composition.arranging:
        if not isinstance(chosen.strategy, ArrangingStrategy):
            raise StrategyError(
                f"{chosen.strategy.name} takes single pairs of operators; name the operators it is for instead of "
                "switching it on for the whole graph"
            )
        here = Context(graph, context.prices, composition.pairs, context.seconds_of)
        _refuse(chosen, here)
        graph = chosen.strategy.arrange(here, chosen.parameters)
    arranged = Context(graph, context.prices)
    pieces = tuple(find_pieces(graph, composition.pairs))
    for piece in pieces:
        _refuse(piece.chosen, Context(graph.part(piece.operators), context.prices))
    placement = lower(arranged, site, pieces)
    budget = sm_budget(site.builder, site.gpu().pool, device.num_sms)
    answer = budget.verdict()
    if not answer.applies:
        raise StrategyError(f"these strategies do not go together: {'; '.join(answer.reasons)} ({answer.cause})")
    findings = (
        *advise(composition.strategies, setting),
        *queue_findings(site.builder),
        *budget.findings(graph, context.prices),
    )
    return Composed(graph, placement, findings)


def _refuse(chosen: Chosen, context: Context) -> None:
    chosen.strategy.check(chosen.parameters)
    answer = chosen.strategy.applies_to(replace(context, prices=context.prices.nominal))
    if not answer.applies:
        raise StrategyError(f"{chosen.strategy.name} does not apply: {'; '.join(answer.reasons)}")


def find_pieces(graph: OperatorGraph, pairs: Mapping[tuple[str, str], Chosen]) -> Iterator[Piece]:
    """Yield the GEMMs that `pairs` names, each with what its strategy takes with it (`Strategy.piece`).

    Raises
    ------
    StrategyError
        If no operator has the name, or a GEMM of the name has no such collective.
    """
    taken: set[int] = set()
    for (name, pass_), chosen in pairs.items():
        gemms = [i for i, op in enumerate(graph.operators) if is_gemm(op) and (op.name, op.pass_) == (name, pass_)]
        if not gemms:
            raise StrategyError(f"{chosen.strategy.name} is chosen for {name} {pass_}; the graph has no such GEMM")
        for gemm in gemms:
            piece = chosen.strategy.piece(graph, gemm, taken)
            if piece is None:
                raise StrategyError(
                    f"{chosen.strategy.name} is chosen for {name} {pass_}; {_missing(graph.operators[gemm], chosen)}"
                )
            taken |= set(piece)
            yield Piece(piece, chosen)


def _missing(op: Operator, chosen: Chosen) -> str:
    """Why a strategy found nothing to take."""
    if is_grouped(op) != chosen.strategy.experts:
        wanted = "grouped GEMMs of experts" if chosen.strategy.experts else "plain GEMMs"
        return f"it takes {wanted}, and that is none"
    where = " or ".join(chosen.strategy.relations)
    return f"that GEMM has no collective standing {where} that is still free"


def lower(context: Context, site: Site, pieces: Sequence[Piece] = ()) -> Placement:
    """Add the tasks of a graph: pieces through their strategies, everything else as library kernels on its stream.

    Parameters
    ----------
    context : graph and prices
    site : where the tasks go
    pieces : operators that strategies take

    Raises
    ------
    StrategyError
        If the operators of a piece have an operator between them that needs one and is needed by another.
    """
    graph = context.graph
    entries: dict[int, tuple[int, ...]] = {}
    exits: dict[int, tuple[int, ...]] = {}
    owner = {position: number for number, piece in enumerate(pieces) for position in piece.operators}
    with site.placing():
        for item in _items(graph, pieces, owner):
            number = owner.get(item[0])
            if number is None:
                entries[item[0]] = exits[item[0]] = (_add(context, item[0], site),)
            else:
                chosen = pieces[number].chosen
                inner = chosen.strategy.rewrite(Context(graph.part(item), context.prices), chosen.parameters, site)
                for local, position in enumerate(item):
                    entries[position], exits[position] = inner.entries[local], inner.exits[local]
            _join(graph, item, owner, entries, exits, site)
        for position, (allocated, freed) in enumerate(graph.memory):
            site.builder.add_memory(entries[position][0], allocates_bytes=allocated)
            site.builder.add_memory(exits[position][-1], frees_bytes=freed)
    return Placement(entries, exits)


def _add(context: Context, position: int, site: Site) -> int:
    """Add one operator as the library runs it."""
    op, gpu, prices = context.graph.operators[position], site.gpu(), context.prices
    stream = gpu.stream(context.graph.stream_of(position))
    if isinstance(op, GemmOp):
        return gpu.add_gemm(op, prices.vendor_gemm(op), stream=stream)
    if isinstance(op, CollectiveOp):
        return gpu.add_collective(op, stream=stream)
    return gpu.add_kernel(op, prices.kernel(op), stream=stream)


def _join(
    graph: OperatorGraph,
    item: tuple[int, ...],
    owner: Mapping[int, int],
    entries: Mapping[int, tuple[int, ...]],
    exits: Mapping[int, tuple[int, ...]],
    site: Site,
) -> None:
    """Let the operators of `item` wait for their producers outside it."""
    wait_ps = ps_from_s(site.prices.signal_wait_s) if site.prices.signal_wait_s > 0 else 0
    for position in item:
        for producer in graph.producers(position):
            if producer in item:
                continue
            library = producer not in owner and position not in owner
            if library and graph.stream_of(producer) == graph.stream_of(position):
                continue
            # A stream that goes on when another one's event is done starts a collective after a poll and a launch.
            into_comm = isinstance(graph.operators[position], CollectiveOp)
            crosses = into_comm and not isinstance(graph.operators[producer], CollectiveOp)
            for source in exits[producer]:
                for task in entries[position]:
                    site.builder.add_edge(source, task, lag_ps=wait_ps if crosses else 0)


def _items(graph: OperatorGraph, pieces: Sequence[Piece], owner: Mapping[int, int]) -> Iterator[tuple[int, ...]]:
    """Yield operators, those of a piece together, so that producers come first; else in the order they are issued."""
    key = [(pieces[owner[i]].operators if i in owner else (i,)) for i in range(len(graph.operators))]
    needs: dict[tuple[int, ...], set[tuple[int, ...]]] = {item: set() for item in key}
    for a, b in graph.dependencies:
        if key[a] != key[b]:
            needs[key[b]].add(key[a])
    followers: dict[tuple[int, ...], list[tuple[int, ...]]] = {item: [] for item in needs}
    for item, before in needs.items():
        for other in before:
            followers[other].append(item)
    waiting = {item: len(before) for item, before in needs.items()}
    # A piece is issued where its GEMM stands: what goes along may stand behind operators that need nothing of it.
    place = {item: max((i for i in item if is_gemm(graph.operators[i])), default=item[-1]) for item in needs}
    ready = [(place[item], item) for item, count in waiting.items() if not count]
    heapq.heapify(ready)
    done = 0
    while ready:
        _, item = heapq.heappop(ready)
        done += 1
        yield item
        for other in followers[item]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (place[other], other))
    if done < len(needs):
        stuck = next(item for item, count in waiting.items() if count and len(item) > 1)
        names = " and ".join(f"{graph.operators[i].name} {graph.operators[i].pass_}" for i in stuck)
        raise StrategyError(
            f"{names} cannot be one piece: an operator between them needs one and is needed by the other"
        )

"""Least times of layers for many layouts: each half of a layer is built and priced once for all that share it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import add
from typing import Final, Literal

from overlapsim.cost.prices import PriceBook
from overlapsim.planner.bounds import lower_bound_s
from overlapsim.workload.build import GraphBuilder, Half, modules_of
from overlapsim.workload.model import Layer
from overlapsim.workload.operators import (
    COMPUTE,
    CollectiveOp,
    GemmOp,
    GroupedGemmOp,
    KernelOp,
    Operator,
    OperatorGraph,
)
from overlapsim.workload.recompute import Recompute

Seconds = Callable[[Operator], float]
HALVES: Final[tuple[Half, ...]] = ("attention", "mlp")
PASSES: Final[Mapping[str, frozenset[str]]] = {
    "forward": frozenset({"fwd"}),
    "backward": frozenset({"dgrad", "wgrad"}),
    "dgrad": frozenset({"dgrad"}),
    "wgrad": frozenset({"wgrad"}),
}
AGAIN: Final = ("selective", "sar")
"""Sets of modules whose forward is also priced alone: what recompute runs again."""
FIELDS: Final = (*PASSES, *AGAIN)
STRATEGY_GEMM: Final = 0.94
"""A strategy's kernel over the library's, at least: GEMMs cut in pieces may be a little cheaper together than whole,
since models are not monotone (`cost.gemm_prices.PIECES`)."""
GROUPS: Final = ("tp", "sp", "cp", "ep", "etp", "etp_ep")
"""Groups whose collectives strategies hide; the first are those of pairs that every layout is searched with."""
PAIR_GROUPS: Final = GROUPS[:1]
Hides = Literal["nothing", "pairs", "all"]
"""What strategies hide: nothing, collectives of `PAIR_GROUPS` in their pairs, or any of a layer's."""
NO_WIRES: Final = (0.0,) * len(GROUPS)
EXPERTS: Final = ("ep", "etp", "etp_ep")
FUSED: Final = ("moe.permute", "moe.unpermute")
"""Kernels whose work a strategy may do in its own."""


@dataclass(frozen=True)
class Times:
    """Seconds of one pass of one half, or of a layer.

    Attributes
    ----------
    chain : until the compute stream is done, with the library's kernels: it issues in order and waits for other streams
    computing : kernels alone, whatever collectives take
    free : the compute stream without collectives of `PAIR_GROUPS`, whose GEMMs a strategy may have cut
    least : kernels of the compute stream alone, as any strategy may have them
    wires : collectives of each of `GROUPS` at the links' rate, which no strategy can beat
    """

    chain: float = 0.0
    computing: float = 0.0
    free: float = 0.0
    least: float = 0.0
    wires: tuple[float, ...] = NO_WIRES

    def __add__(self, other: Times) -> Times:
        """Both, one after the other."""
        return Times(
            self.chain + other.chain,
            self.computing + other.computing,
            self.free + other.free,
            self.least + other.least,
            tuple(map(add, self.wires, other.wires)),
        )

    def at_least(self, hides: Hides) -> float:
        """Least time with strategies: computation still runs on one stream, and bytes on their links."""
        if hides == "nothing":
            return self.chain
        if hides == "pairs":
            return min(self.chain, max(self.free, *self.wires[: len(PAIR_GROUPS)]))
        return min(self.chain, max(self.least, *self.wires))


def times_of(
    graph: OperatorGraph, seconds: Seconds, wire: Callable[[CollectiveOp], float], keep: frozenset[str]
) -> Times:
    """Follow the operators of some passes through their streams, every one as soon as it may start.

    Streams issue in order and dependencies hold, so the engine's compute
    stream, where what runs at the same time only stretches, is done no earlier.
    """
    end: dict[int, float] = {}
    streams: dict[str, float] = {}
    computing = free = least = 0.0
    wires = dict.fromkeys(GROUPS, 0.0)
    in_pairs, cut = _cut(graph, PAIR_GROUPS), _cut(graph, GROUPS)
    for position, op in enumerate(graph.operators):
        if op.pass_ not in keep:
            continue
        own, stream = seconds(op), graph.stream_of(position)
        start = max((end.get(producer, 0.0) for producer in graph.producers(position)), default=0.0)
        end[position] = streams[stream] = max(start, streams.get(stream, 0.0)) + own
        if not isinstance(op, CollectiveOp):
            computing += own
            if stream == COMPUTE:
                free += own * STRATEGY_GEMM if position in in_pairs else own
                least += 0.0 if op.name in FUSED else own * STRATEGY_GEMM if position in cut else own
            continue
        if op.group in wires and op.route is None:
            wires[op.group] += wire(op)
        if stream == COMPUTE and op.group not in PAIR_GROUPS:
            free += own
    return Times(streams.get(COMPUTE, 0.0), computing, free, least, tuple(wires.values()))


def _cut(graph: OperatorGraph, groups: Collection[str]) -> set[int]:
    """Positions of GEMMs that a strategy may take with a collective over one of some groups.

    Between experts and their exchange there may stand a permute.
    """
    found = set()
    if any(op.group in EXPERTS and op.group in groups for op in graph.of_type(CollectiveOp)):
        kernels = enumerate(graph.operators)
        found = {i for i, op in kernels if isinstance(op, KernelOp) and isinstance(op.work, GroupedGemmOp)}
    for pair in graph.dependencies:
        gemms = [i for i in pair if isinstance(graph.operators[i], GemmOp)]
        others = [graph.operators[i] for i in pair if i not in gemms]
        if gemms and any(isinstance(op, CollectiveOp) and op.group in groups for op in others):
            found.update(gemms)
    return found


class LayerTimes:
    """Prices halves of layers, and what stands before and behind them; each once for all layouts that share it.

    Parameters
    ----------
    seconds : price of an operator; what a price book says by default
    """

    def __init__(self, seconds: Callable[[Operator, PriceBook], float] | None = None) -> None:
        self._seconds = seconds or (lambda op, prices: prices.operator_s(op))
        self._known: dict[tuple[object, ...], dict[str, Times]] = {}
        self._wires: dict[tuple[object, ...], float] = {}

    def layer(self, layer: Layer, builder: GraphBuilder, prices: PriceBook) -> dict[str, Times]:
        """Times of a layer by name of `FIELDS`."""
        halves = [self._half(layer, half, builder, prices) for half in HALVES]
        return {name: halves[0][name] + halves[1][name] for name in FIELDS}

    def ends(self, builder: GraphBuilder, prices: PriceBook) -> dict[str, Times]:
        """Times of the embedding (``embed forward``, ``embed backward``), and of logits and loss (``head ...``)."""
        key = ("ends", *_shape(builder), prices.groups.get("tp"))
        if key not in self._known:
            whole = frozenset({"fwd", "dgrad", "wgrad"})
            self._known[key] = {
                f"{end} {which}": times_of(make(which), lambda op: self._seconds(op, prices), self._wire(prices), whole)
                for end, make in (("embed", builder.embedding), ("head", builder.head))
                for which in ("forward", "backward")
            }
        return self._known[key]

    def _half(self, layer: Layer, half: Half, builder: GraphBuilder, prices: PriceBook) -> dict[str, Times]:
        places = (prices.groups.get(kind) for kind in ("tp", "sp", "cp", "ep", "etp", "etp_ep"))
        key = (half, id(layer), *_shape(builder), *places)
        if key not in self._known:
            self._known[key] = self._price(layer, half, builder, prices)
        return self._known[key]

    def _price(self, layer: Layer, half: Half, builder: GraphBuilder, prices: PriceBook) -> dict[str, Times]:
        seconds: dict[int, float] = {}

        def priced(op: Operator) -> float:
            if id(op) not in seconds:
                seconds[id(op)] = self._seconds(op, prices)
            return seconds[id(op)]

        forward, backward = builder.half(layer, half, "forward"), builder.half(layer, half, "backward")
        wire = self._wire(prices)
        found = {
            name: times_of(forward if name == "forward" else backward, priced, wire, keep)
            for name, keep in PASSES.items()
        }
        for name in AGAIN:
            modules = Recompute.parse(name).modules
            again = [i for i, op in enumerate(forward.operators) if modules_of(op) & modules]
            found[name] = times_of(forward.part(again), priced, wire, PASSES["forward"]) if again else Times()
        return found

    def _wire(self, prices: PriceBook) -> Callable[[CollectiveOp], float]:
        cluster = prices.cluster

        def wire(op: CollectiveOp) -> float:
            key = (op.kind, op.ranks, op.size_bytes)
            if key not in self._wires:
                self._wires[key] = lower_bound_s(OperatorGraph((op,)), cluster)
            return self._wires[key]

        return wire


def _shape(builder: GraphBuilder) -> tuple[object, ...]:
    """Of a layout and a micro-batch all that shapes of operators depend on."""
    layout = builder.layout
    degrees = (layout.tp, layout.sp, layout.cp, layout.ep, layout.etp, layout.sequence_parallel)
    return (*degrees, builder.micro_batch)

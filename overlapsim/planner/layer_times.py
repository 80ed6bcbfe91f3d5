"""Least times of layers for many layouts: each half of a layer is built and priced once for all that share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Final

from overlapsim.cost.prices import PriceBook
from overlapsim.planner.bounds import lower_bound_s
from overlapsim.workload.build import GraphBuilder, Half, modules_of
from overlapsim.workload.model import Layer
from overlapsim.workload.operators import COMPUTE, CollectiveOp, GemmOp, Operator, OperatorGraph
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


@dataclass(frozen=True)
class Times:
    """Seconds of one pass of one half, or of a layer.

    Attributes
    ----------
    chain : until the compute stream is done, with the library's kernels: it issues in order and waits for other streams
    computing : kernels alone, whatever collectives take
    free : the compute stream without tensor-parallel collectives, whose GEMMs a strategy may have cut
    wire : tensor-parallel collectives at the links' rate, which no strategy can beat
    """

    chain: float = 0.0
    computing: float = 0.0
    free: float = 0.0
    wire: float = 0.0

    def __add__(self, other: Times) -> Times:
        """Both, one after the other."""
        return Times(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Times)))

    def times(self, count: float) -> Times:
        """The same `count` times."""
        return Times(*(getattr(self, field.name) * count for field in fields(Times)))

    @property
    def overlapped(self) -> float:
        """Least time with strategies for the pairs of the tensor-parallel group."""
        return min(self.chain, max(self.free, self.wire))


def times_of(
    graph: OperatorGraph, seconds: Seconds, wire: Callable[[CollectiveOp], float], keep: frozenset[str]
) -> Times:
    """Follow the operators of some passes through their streams, every one as soon as it may start.

    Streams issue in order and dependencies hold, so the engine's compute
    stream, where what runs at the same time only stretches, is done no earlier.
    """
    end: dict[int, float] = {}
    streams: dict[str, float] = {}
    computing = free = on_wire = 0.0
    cut = _cut(graph)
    for position, op in enumerate(graph.operators):
        if op.pass_ not in keep:
            continue
        own, stream = seconds(op), graph.stream_of(position)
        start = max((end.get(producer, 0.0) for producer in graph.producers(position)), default=0.0)
        end[position] = streams[stream] = max(start, streams.get(stream, 0.0)) + own
        if not isinstance(op, CollectiveOp):
            computing += own
            free += (own * STRATEGY_GEMM if position in cut else own) if stream == COMPUTE else 0.0
        elif op.group == "tp":
            on_wire += wire(op)
        elif stream == COMPUTE:
            free += own
    return Times(streams.get(COMPUTE, 0.0), computing, free, on_wire)


def _cut(graph: OperatorGraph) -> set[int]:
    """Positions of GEMMs that stand beside a tensor-parallel collective."""
    found = set()
    for pair in graph.dependencies:
        gemms = [i for i in pair if isinstance(graph.operators[i], GemmOp)]
        others = [graph.operators[i] for i in pair if i not in gemms]
        if gemms and any(isinstance(op, CollectiveOp) and op.group == "tp" for op in others):
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

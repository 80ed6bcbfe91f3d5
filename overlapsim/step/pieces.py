"""Blocks of every stage's passes: layers of a kind are simulated once, and counted as often as the stage holds them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

from overlapsim.cost.prices import PriceBook
from overlapsim.errors import StrategyError
from overlapsim.schedule.pipeline import PipelineSchedule
from overlapsim.schedule.pipeline_kinds import schedule_kind
from overlapsim.step.blocks import Piece, simulate_piece, simulate_turn, speed_beside
from overlapsim.step.buckets import UnitCost
from overlapsim.step.inputs import StepInputs
from overlapsim.step.piece_setting import signature, stack_of, training_setting
from overlapsim.step.sharded import Entry, stage_entries, unit_parameters
from overlapsim.step.sharded_pieces import ShardedPieces
from overlapsim.strategy.base import Context, Trait
from overlapsim.strategy.chains import is_gemm
from overlapsim.strategy.compatibility import check_compatible
from overlapsim.strategy.compose import ArrangingStrategy, Composition
from overlapsim.strategy.overlaps import unknown_gemm
from overlapsim.strategy.pairing import paired, side_by_side
from overlapsim.workload.adjacent import adjacent
from overlapsim.workload.build import GraphBuilder, Which
from overlapsim.workload.model import Layer
from overlapsim.workload.operators import CollectiveOp, OperatorGraph
from overlapsim.workload.stages import chunk_layers

PAIR_ORDERS: Final[frozenset[Trait]] = frozenset({"expert_pair", "operator_order"})
"""What orders the operators of an F&B pair, each in its own way; the fastest is taken."""


def graph_builder(inputs: StepInputs) -> GraphBuilder:
    """Maker of the operator graphs of a step's layers."""
    i = inputs
    skew = (i.perturbation.imbalance, i.perturbation.routing)
    return GraphBuilder(i.model, i.layout, i.recipe, i.job.micro_batch, i.job.seq_len, i.recompute, *skew)


def layer_gemms(inputs: StepInputs) -> set[tuple[str, str]]:
    """(Operator, pass) of every GEMM of the step's layers."""
    which: tuple[Which, ...] = ("forward", "backward", "input_grad", "weight_grad")
    builder = graph_builder(inputs)
    graphs = [builder.layer(layer, w) for layer in inputs.model.kinds for w in which]
    return {(op.name, op.pass_) for graph in graphs for op in graph.operators if is_gemm(op)}


class StagePieces:
    """What each stage of a schedule costs, by pass.

    Parameters
    ----------
    inputs : the step
    prices : of the machine, with the layout's groups placed
    schedule : its stages are the chunks of the model, in order

    Raises
    ------
    StrategyError
        If a strategy is chosen for an operator that no layer has.
    """

    def __init__(self, inputs: StepInputs, prices: PriceBook, schedule: PipelineSchedule) -> None:
        self.inputs, self.prices, self.schedule = inputs, prices, schedule
        counts = chunk_layers(inputs.layout, inputs.model.num_layers, inputs.job.stage_layers)
        assert len(counts) == schedule.num_stages, "the schedule was made for the layout"
        begins = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
        self.layers = [inputs.model.layers[begins[s] : begins[s + 1]] for s in range(len(counts))]
        self._stack = stack_of(inputs, prices)
        # Layouts that differ in what no layer sees (stages, replicas) share their layers' blocks through the book.
        key = signature(inputs, prices)
        self._cache: dict[object, Piece] = prices.models.setdefault(key, {})
        self._speeds: dict[object, float] = prices.models.setdefault(("speeds", key), {})
        # What whole graphs' strategies said of the blocks at hand.
        self._used: set[str] = prices.models.setdefault(("used", key), set())
        self._refusals: dict[str, tuple[str, ...]] = prices.models.setdefault(("refusals", key), {})
        # Blocks are known by the model's and its layers' identity, which stays theirs as long as they live.
        prices.models.setdefault(("pieces of", id(inputs.model)), inputs.model)
        self._setting = inputs.composition.setting
        if inputs.composition.strategies:
            if not self._cache:
                self._check_pairs()
            self._setting = training_setting(inputs, schedule)
            # Of what a setting rules, a block that is at hand already was asked about another one.
            architecture = inputs.cluster.device.architecture
            if reasons := check_compatible(
                inputs.composition.strategies, replace(self._setting, architecture=architecture)
            ):
                raise StrategyError(f"these strategies do not go together: {'; '.join(reasons)}")
            if schedule_kind(inputs.schedule_name).has_pairs:
                self._check_pairing()

    @cached_property
    def _sharded(self) -> ShardedPieces:
        return ShardedPieces(self.inputs, self.builder, self._simulate, self._simulate_turn)

    @cached_property
    def builder(self) -> GraphBuilder:
        """Maker of the layers' operator graphs."""
        return graph_builder(self.inputs)

    def stage(self, stage: int, which: Which) -> Piece:
        """One pass of one micro-batch through a stage."""
        key = (tuple(map(id, self.layers[stage])), which, self._is_first(stage), self._is_last(stage))
        if key not in self._cache:
            self._cache[key] = self._stage(stage, which)
        return self._cache[key]

    def pair(self, forward_stage: int, backward_stage: int) -> Piece:
        """A forward and a backward of two micro-batches run together, layer by layer; what is over runs alone."""
        first, second = self.layers[forward_stage], self.layers[backward_stage]
        together = min(len(first), len(second))
        total = Piece()
        for mine, other in zip(first[:together], second[:together], strict=True):
            total += self._pair(mine, other)
        total += self._layers(first[together:], "forward", 0)
        total += self._layers(second[together:], "backward", 0)
        for stage, which in ((forward_stage, "forward"), (backward_stage, "backward")):
            total += self._ends(stage, which)  # type: ignore[arg-type]
        return total

    def units(self, stage: int, which: Which) -> tuple[UnitCost, ...]:
        """Parameters and time of each unit of a stage's pass, in the order it meets them."""
        layers = [(layer, True) for layer in self.layers[stage]]
        found = []
        for entry in stage_entries(layers, which, first=self._is_first(stage), last=self._is_last(stage)):
            if entry.layer is not None:
                seconds = self.layer(entry.layer, which, rebuilt=True).duration_s
            elif entry.unit == "embed":
                seconds = self.graph(f"embed {which}", self.builder.embedding(which)).duration_s
            else:
                seconds = self.graph(f"head {which}", self.builder.head(which)).duration_s
            found.append(UnitCost(stage, unit_parameters(self.inputs, entry), seconds))
        return tuple(found)

    def speed_beside(self, stage: int, flow: CollectiveOp, *, gathers: bool) -> float:
        """Speed of a stage's blocks beside a collective, over that alone: of backwards, and forwards under `gathers`.

        Read from the commonest layer.
        """
        if not self.layers[stage]:
            return 1.0
        layer = Counter(self.layers[stage]).most_common(1)[0][0]
        passes: tuple[Which, ...] = ("forward", "backward") if gathers else ("backward",)
        alone = beside = 0.0
        for which in passes:
            key = (layer, which, flow, self.prices.groups.get(flow.group))
            if key not in self._speeds:
                graph = self._one_layer(layer, which)
                self._speeds[key] = speed_beside(
                    Context(graph, self.prices),
                    self._composition(graph),
                    flow,
                    launch_s=self._stack.host_s,
                    contention=self.inputs.contention,
                )
            seconds = self.layer(layer, which, rebuilt=True).duration_s
            alone, beside = alone + seconds, beside + seconds / self._speeds[key]
        return alone / beside

    def graph(self, name: str, graph: OperatorGraph, *, follows: bool = True) -> Piece:
        """Simulate any graph once and keep it by `name`."""
        if name not in self._cache:
            self._cache[name] = self._simulate(graph, follows=follows)
        return self._cache[name]

    def _stage(self, stage: int, which: Which) -> Piece:
        i = self.inputs
        spared = len(self.layers[stage])
        if i.recompute.granularity == "full" and i.recompute.method == "block":
            spared = i.recompute.num_layers
        if i.sharded:
            return self._sharded_stage(stage, which, spared)
        return self._layers(self.layers[stage], which, spared) + self._ends(stage, which)

    def _sharded_stage(self, stage: int, which: Which, num_rebuilt: int) -> Piece:
        first, last, extra = self._is_first(stage), self._is_last(stage), self.inputs.model.num_mtp_layers
        layers = [(layer, number < num_rebuilt) for number, layer in enumerate(self.layers[stage])]
        if last:
            layers += [(self.inputs.model.layers[-1], True)] * extra
        total = self._sharded.stage(layers, which, first=first, last=last)
        if last and extra:
            total += self.graph(f"head {which}", self.builder.head(which)).times(extra)
        return total

    def _layers(self, layers: Sequence[Layer], which: Which, num_rebuilt: int) -> Piece:
        """Layers of a chunk, of which the first `num_rebuilt` are recomputed where recompute is on."""
        total, counts = Piece(), dict[tuple[Layer, bool, int], int]()
        marked = [(layer, number < num_rebuilt or which == "forward") for number, layer in enumerate(layers)]
        for (layer, rebuilt), run in itertools.groupby(marked):
            left = len(list(run))
            while left:
                together = min(left, self._together)
                counts[layer, rebuilt, together] = counts.get((layer, rebuilt, together), 0) + left // together
                left %= together
        for (layer, rebuilt, together), count in counts.items():
            total += self.layer(layer, which, rebuilt=rebuilt, together=together).times(count)
        return total

    @property
    def _together(self) -> int:
        """How many layers of a kind that follow each other are arranged as one."""
        arranging = self.inputs.composition.arranging
        return max(
            (c.strategy.adjacent_layers(c.parameters) for c in arranging if isinstance(c.strategy, ArrangingStrategy)),
            default=1,
        )

    def layer(self, layer: Layer, which: Which, *, rebuilt: bool = True, together: int = 1) -> Piece:
        """One pass of one micro-batch through a layer, or several `together`, their parameters at hand."""
        key = (layer, which, rebuilt, together)
        if key not in self._cache:
            graph = self.builder.layer(layer, which, rebuilt=rebuilt)
            self._cache[key] = self._simulate(adjacent([graph] * together) if together > 1 else graph)
        return self._cache[key]

    def _pair(self, first: Layer, second: Layer) -> Piece:
        """One layer forward and one backward at once; one after the other where that is faster."""
        key = ("pair", first, second)
        if key not in self._cache:
            forward, backward = self._one_layer(first, "forward"), self._one_layer(second, "backward")
            found = [
                self._simulate(paired(forward, backward, self.prices.operator_s), without=PAIR_ORDERS),
                self._alone(first, "forward") + self._alone(second, "backward"),
            ]
            both = side_by_side(forward, backward)
            for trait in PAIR_ORDERS:
                if any(trait in chosen.strategy.traits for chosen in self.inputs.composition.arranging):
                    found.append(self._simulate(both, without=PAIR_ORDERS - {trait}))
            self._cache[key] = min(found, key=lambda piece: piece.duration_s)
        return self._cache[key]

    def _alone(self, layer: Layer, which: Which) -> Piece:
        key = ("alone", layer, which)
        if key not in self._cache:
            self._cache[key] = self._simulate(self._one_layer(layer, which))
        return self._cache[key]

    def _one_layer(self, layer: Layer, which: Which) -> OperatorGraph:
        if self.inputs.sharded:
            return self._sharded.graph([Entry("layer", which, layer)])
        return self.builder.layer(layer, which)

    def _ends(self, stage: int, which: Which) -> Piece:
        """Embedding of the first stage, logits and loss of the last, and its layers of multi-token prediction."""
        total = Piece()
        if self._is_first(stage):
            total += self.graph(f"embed {which}", self.builder.embedding(which))
        if self._is_last(stage):
            extra = self.inputs.model.num_mtp_layers
            total += self.graph(f"head {which}", self.builder.head(which)).times(1 + extra)
            if extra:
                total += self.layer(self.inputs.model.layers[-1], which, rebuilt=True).times(extra)
        return total

    def _check_pairing(self) -> None:
        """Refuse strategies that do not go with F&B pairs, which the schedule brings."""
        for strategy in self.inputs.composition.strategies:
            if "expert_pair" in strategy.excludes:
                raise StrategyError(
                    f"{strategy.name} cannot be combined with pairs of forward and backward, which the schedule "
                    f"{self.inputs.schedule_name} runs"
                )

    def _check_pairs(self) -> None:
        """Refuse strategies for operators that no layer has: each graph takes those it has, and none has them."""
        known = layer_gemms(self.inputs)
        for key in self.inputs.composition.pairs:
            if key not in known:
                raise StrategyError(
                    f"a strategy is chosen for {' '.join(key)}, and no layer of {self.inputs.model.name} has such a "
                    f"GEMM: {unknown_gemm(key, known)}"
                )

    def _simulate(
        self, graph: OperatorGraph, *, follows: bool = True, without: Collection[Trait] = frozenset()
    ) -> Piece:
        return simulate_piece(
            Context(graph, self.prices),
            self._composition(graph, without),
            launch_s=self._stack.host_s,
            hosts=self._stack,
            contention=self.inputs.contention,
            follows=follows,
        )

    def _simulate_turn(self, graph: OperatorGraph) -> tuple[Piece, Piece]:
        return simulate_turn(
            Context(graph, self.prices),
            self._composition(graph),
            launch_s=self._stack.host_s,
            contention=self.inputs.contention,
        )

    def _composition(self, graph: OperatorGraph, without: Collection[Trait] = frozenset()) -> Composition:
        """What of the step's composition is for the operators of one graph, but for strategies of some traits."""
        chosen, context = self.inputs.composition, Context(graph, self.prices.nominal)
        gemms = {(op.name, op.pass_) for op in graph.operators if is_gemm(op)}
        pairs = {where: what for where, what in chosen.pairs.items() if where in gemms}
        arranging = []
        for entry in chosen.arranging:
            if not entry.strategy.traits.isdisjoint(without):
                continue
            answer = entry.strategy.applies_to(context)
            if answer.applies:
                arranging.append(entry)
                self._used.add(entry.strategy.name)
            self._refusals.setdefault(entry.strategy.name, answer.reasons)
        return replace(chosen, arranging=tuple(arranging), pairs=pairs, setting=self._setting)

    def check_used(self) -> None:
        """Refuse strategies for whole graphs that no graph of the step could take.

        Raises
        ------
        StrategyError
            With the first reason given.
        """
        for name, reasons in self._refusals.items():
            if name not in self._used:
                raise StrategyError(
                    f"{name} is switched on for the step and no part of it takes it: {'; '.join(reasons)}"
                )

    def _is_first(self, stage: int) -> bool:
        return stage == 0

    def _is_last(self, stage: int) -> bool:
        return stage == self.schedule.num_stages - 1

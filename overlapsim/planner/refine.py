"""What is too dear to weigh on every layout, weighed on the best few: changes run in the engine, kept if they help."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from overlapsim.errors import DeadlockError, LayoutError, StrategyError, WorkloadError
from overlapsim.planner.allowed import narrower
from overlapsim.planner.overlap_choice import NOTHING, OverlapChooser
from overlapsim.planner.pair_choice import GAIN, WHICH
from overlapsim.schedule.pipeline_kinds import SCHEDULES
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import graph_builder
from overlapsim.step.run_graph import with_engine
from overlapsim.step.sharded import Entry, sharded_graph, turned
from overlapsim.step.simulate import step_memory, step_prices, step_schedule, step_seconds
from overlapsim.strategy.base import Context, Strategy
from overlapsim.strategy.compose import Chosen, find_pieces
from overlapsim.strategy.pairing import paired
from overlapsim.workload.dispatchers import Dispatcher
from overlapsim.workload.operators import CollectiveOp
from overlapsim.workload.recipe import Recipe

PAIRED: Final = "interleaved_pairs"
"""Schedule that runs forwards and backwards of an interleaved pipeline in pairs."""


class Refiner:
    """Finds what a layout gains from strategies of whole graphs, other dispatchers, and forwards paired with backwards.

    Parameters
    ----------
    limit_bytes : memory of a GPU that may be used
    models : results of cost models
    chooser : of what hides communication in layers
    dispatchers : of tokens to experts, that may be used
    allow : what changes results and may be sent in fewer bytes
    pairs : whether an interleaved pipeline may pair forwards with backwards
    """

    def __init__(
        self,
        limit_bytes: float,
        models: dict[object, object],
        chooser: OverlapChooser,
        dispatchers: Sequence[Dispatcher],
        allow: Sequence[str] = (),
        *,
        pairs: bool,
    ) -> None:
        self.limit_bytes, self.models, self.chooser = limit_bytes, models, chooser
        self.dispatchers, self.allow, self.pairs = tuple(dispatchers), tuple(allow), pairs

    def refine(self, inputs: StepInputs, seconds: float) -> tuple[float, StepInputs]:
        """The fastest found that starts from a step, and its time; the step itself where nothing helps enough.

        Parameters
        ----------
        inputs, seconds : a step that fits, and its time
        """
        best = (seconds, inputs)
        for recipe in self._recipes(inputs):
            asked = replace(inputs, recipe=recipe, composition=NOTHING)
            found = self.chooser.composition(asked, step_prices(asked, self.models))
            best = self._better(best, replace(asked, composition=found))
        if self.pairs and inputs.schedule_name == "interleaved":
            asked = replace(best[1], schedule=PAIRED, composition=NOTHING)
            best = self._better(best, asked)
            best = self._add(best, asked)
        best = self._add(best, best[1])
        for _ in self.allow:
            for recipe in narrower(best[1].recipe, self.allow):
                best = self._better(best, replace(best[1], recipe=recipe))
        return best

    def dispatched(self, inputs: StepInputs, seconds: float) -> tuple[float, StepInputs]:
        """The same with the dispatcher with which layers alone take least, if the step is faster so, and its time.

        Parameters
        ----------
        inputs, seconds : a step without strategies that fits, and its time
        """
        best = (seconds, inputs)
        for recipe in self._recipes(inputs):
            if recipe != inputs.recipe:
                best = self._better(best, replace(inputs, recipe=recipe))
        return best

    def polish(self, inputs: StepInputs, seconds: float) -> tuple[float, StepInputs]:
        """The same with other parameters of its strategies for whole graphs, one at a time, where that helps.

        Strategies were added one by one: a better search of the last may do better without the others.

        Parameters
        ----------
        inputs, seconds : a step that fits, and its time
        """
        chosen = inputs.composition.arranging
        found = self._varied((seconds, inputs))
        if len(chosen) > 1:
            alone = _arranged(inputs, chosen[-1:])
            # Weighed by its own time, however far that is from the best.
            found = min(found, self._varied((self._seconds(alone), alone)), key=lambda entry: entry[0])
        return found

    # Inside

    def _better(self, best: tuple[float, StepInputs], asked: StepInputs) -> tuple[float, StepInputs]:
        """A step, if it fits and saves enough; else the best so far."""
        seconds = self._seconds(asked, at_most_s=best[0] / GAIN)
        return (seconds, asked) if seconds <= best[0] / GAIN else best

    def _seconds(self, asked: StepInputs, at_most_s: float = math.inf) -> float:
        """Time of a step that fits and takes no longer than that; infinite for others."""
        try:
            prices, schedule = step_prices(asked, self.models), step_schedule(asked)
            seconds = step_seconds(asked, prices, schedule)
            if seconds > at_most_s:
                return math.inf
            memory = max(entry.total_bytes for entry in step_memory(asked, schedule))
            return seconds if memory + extra_bytes(asked, self.models) <= self.limit_bytes else math.inf
        except (DeadlockError, LayoutError, StrategyError, WorkloadError):
            return math.inf

    def _varied(self, best: tuple[float, StepInputs]) -> tuple[float, StepInputs]:
        """Each strategy for whole graphs with each of its parameters at other values, those that help kept."""
        for place in range(len(best[1].composition.arranging)):
            for name, value in self._values(best[1], best[1].composition.arranging[place]):
                arranging = list(best[1].composition.arranging)
                chosen = arranging[place]
                arranging[place] = replace(chosen, parameters={**chosen.parameters, name: value})
                best = self._better(best, _arranged(best[1], arranging))
        return best

    def _recipes(self, inputs: StepInputs) -> Iterator[Recipe]:
        """The recipe, and with the dispatcher with which layers alone take least."""
        yield inputs.recipe
        if inputs.layout.ep == 1:
            return
        times: list[tuple[float, int]] = []
        recipes = [replace(inputs.recipe, dispatcher=name) for name in self.dispatchers]
        for number, recipe in enumerate(recipes):
            asked = replace(inputs, recipe=recipe, composition=NOTHING)
            try:
                seconds = self.chooser.layer_seconds(asked, step_prices(asked, self.models), NOTHING)
            except (LayoutError, WorkloadError):
                continue
            if seconds is not None:
                times.append((seconds, number))
        fastest = recipes[min(times)[1]] if times else inputs.recipe
        if fastest != inputs.recipe:
            yield fastest

    def _add(self, best: tuple[float, StepInputs], asked: StepInputs) -> tuple[float, StepInputs]:
        """Add strategies for whole graphs, one after the other, while that helps."""
        for strategy in self.chooser.strategies:
            present = [chosen.strategy.name for chosen in asked.composition.arranging]
            if strategy.name in present:
                continue
            for chosen in self._parameters(asked, strategy):
                # An order of operators is found for what the others leave.
                arranging = sorted(
                    (*asked.composition.arranging, chosen), key=lambda c: "operator_order" in c.strategy.traits
                )
                better = self._better(best, _arranged(asked, arranging))
                if better is not best:
                    best, asked = better, better[1]
        return best

    def _parameters(self, inputs: StepInputs, strategy: Strategy) -> Iterator[Chosen]:
        for context in self._contexts(inputs):
            if strategy.applies_to(context).applies:
                yield Chosen(strategy, next(strategy.parameters(context).points()))
                return

    def _values(self, inputs: StepInputs, chosen: Chosen) -> Iterator[tuple[str, Any]]:
        """Parameters and values that a strategy may have here, other than those that it has."""
        strategy = chosen.strategy
        for context in self._contexts(inputs):
            if strategy.applies_to(context).applies:
                grid = dict(strategy.parameters(context).grid)
                if "layers" in grid:
                    grid["layers"] = (1, 2)
                yield from (
                    (name, value) for name, values in grid.items() for value in values
                    if value != chosen.parameters.get(name)
                )  # fmt: skip
                return

    def _contexts(self, inputs: StepInputs) -> Iterator[Context]:
        """Graphs that strategies may be asked about: of a layer, sharded where it is, a forward beside a backward."""
        prices, builder = step_prices(inputs, self.models), graph_builder(inputs)
        for layer in inputs.model.kinds:
            graphs = [builder.layer(layer, which) for which in WHICH]
            if inputs.sharded:
                entries = (Entry("layer", "forward", layer),)
                graphs.insert(0, sharded_graph(inputs, builder, (*entries, *turned(entries))))
            if SCHEDULES[inputs.schedule_name].has_pairs:
                graphs.insert(0, paired(graphs[-2], graphs[-1], prices.operator_s))
            yield from (with_engine(Context(graph, prices), contention=inputs.contention) for graph in graphs)


def _arranged(inputs: StepInputs, arranging: Sequence[Chosen]) -> StepInputs:
    return replace(inputs, composition=replace(inputs.composition, arranging=tuple(arranging)))


def extra_bytes(inputs: StepInputs, models: dict[object, object]) -> float:
    """Bytes of a GPU that the strategies of a step hold beyond the library's: the most of any layer's pass."""
    chosen, most = inputs.composition, 0.0
    if not chosen.strategies:
        return most
    prices, builder = step_prices(inputs, models), graph_builder(inputs)
    for graph in (builder.layer(layer, which) for layer in inputs.model.kinds for which in WHICH):
        own = {(op.name, op.pass_) for op in graph.operators}
        pairs = {key: entry for key, entry in chosen.pairs.items() if key in own}
        context, extra = with_engine(Context(graph, prices, pairs), contention=inputs.contention), 0.0
        for entry in chosen.arranging:
            if entry.strategy.applies_to(context).applies:
                extra += entry.strategy.extra_memory_bytes(context, entry.parameters)
        for piece in find_pieces(graph, pairs):
            part = graph.part(piece.operators)
            ranks = next(part.of_type(CollectiveOp)).ranks
            taken = piece.chosen
            extra += taken.strategy.extra_memory_bytes(Context(part, replace(prices, ranks=ranks)), taken.parameters)
        most = max(most, extra)
    return most

"""What hides communication within the layers of a step: strategies of pairs, of whole graphs, or both."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from overlapsim.cost.prices import PriceBook
from overlapsim.errors import DeadlockError, StrategyError
from overlapsim.planner.candidates import propose
from overlapsim.planner.pair_choice import GAIN, WHICH, PairChooser
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import StagePieces, graph_builder
from overlapsim.step.simulate import step_schedule
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.registry import load_strategies

NOTHING: Final = Composition()


class OverlapChooser:
    """Chooses the composition with which the layers of a step take least, in the engine.

    Pairs and graphs are arranged by the same streams, so what is best of
    each is also tried together: what a pair's kernel hides leaves less for
    an order of operators to hide, and the other way round.
    """

    def __init__(self) -> None:
        self.pairs = PairChooser()
        self.strategies = load_strategies(scope="graph")

    def composition(self, inputs: StepInputs, prices: PriceBook) -> Composition:
        """The fastest composition; empty where nothing saves enough.

        Parameters
        ----------
        inputs : the step without strategies; how its parameters are sharded is not looked at
        prices : with its groups placed
        """
        inputs = replace(inputs, layout=replace(inputs.layout, zero=0), composition=NOTHING)
        best, least_s = NOTHING, self.layer_seconds(inputs, prices, NOTHING)
        assert least_s is not None, "library kernels always run"
        for option in self._options(inputs, prices):
            seconds = self.layer_seconds(inputs, prices, option)
            if seconds is not None and least_s >= GAIN * seconds:
                best, least_s = option, seconds
        return best

    def _options(self, inputs: StepInputs, prices: PriceBook) -> Iterator[Composition]:
        pairs = self.pairs.pairs(inputs, prices)
        graphs = list(self._arranging(inputs, prices))
        yield from (Composition(pairs=pairs) for _ in range(bool(pairs)))
        for own, chosen in itertools.product(({}, pairs) if pairs else ({},), graphs):
            yield Composition((chosen,), own)

    def _arranging(self, inputs: StepInputs, prices: PriceBook) -> Iterator[Chosen]:
        """Strategies that take a layer's graph, each with the first of its parameters."""
        builder = graph_builder(inputs)
        graphs = [builder.layer(layer, which) for layer in inputs.model.kinds for which in WHICH]
        for strategy in self.strategies:
            for context in (Context(graph, prices) for graph in graphs):
                if strategy.applies_to(context).applies:
                    yield Chosen(strategy, next(propose(strategy.parameters(context))).parameters)
                    break

    def layer_seconds(self, inputs: StepInputs, prices: PriceBook, composition: Composition) -> float | None:
        """Forward and backward of a micro-batch through all layers; None where strategies do not go together."""
        asked = replace(inputs, composition=composition)
        try:
            pieces = StagePieces(asked, prices, step_schedule(asked))
            return sum(
                count * pieces.layer(kind, which).duration_s
                for kind, count in inputs.model.kinds.items()
                for which in WHICH
            )
        except (StrategyError, DeadlockError):
            return None

"""Which overlap strategy each GEMM of a layer takes with its collective: planned once for each distinct pair."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from overlapsim.cost.prices import PriceBook
from overlapsim.planner.operator import QUICK, plan_operator
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import step_prices
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import ArrangingStrategy, Chosen, Composition
from overlapsim.strategy.registry import load_strategies
from overlapsim.workload.build import GraphBuilder
from overlapsim.workload.operators import CollectiveOp, GemmOp, OperatorGraph

GAIN: Final = 1.005
"""A strategy is taken where it saves at least this much of its pair."""


class OverlapChooser:
    """Chooses strategies for the tensor-parallel pairs of a step.

    Parameters
    ----------
    models : results of cost models, shared
    """

    def __init__(self, models: dict[object, object]) -> None:
        self.models = models
        self.strategies = tuple(s for s in load_strategies() if not isinstance(s, ArrangingStrategy))
        self._chosen: dict[object, Chosen | None] = {}

    def composition(self, inputs: StepInputs) -> Composition:
        """Best strategy of each (operator, pass) whose GEMM has a collective of its own, by name."""
        i = inputs
        prices = step_prices(i, self.models)
        builder = GraphBuilder(i.model, i.layout, i.recipe, i.job.micro_batch, i.job.seq_len, i.recompute)
        pairs: dict[tuple[str, str], Chosen] = {}
        for layer in i.model.kinds:
            for which in ("forward", "backward"):
                graph = builder.layer(layer, which)
                for name, pair in _pairs(graph).items():
                    chosen = self._choose(pair, prices)
                    if chosen is not None and name not in pairs:
                        pairs[name] = chosen
        return Composition(pairs=pairs)

    def _choose(self, pair: OperatorGraph, prices: PriceBook) -> Chosen | None:
        if pair not in self._chosen:
            collective = next(pair.of_type(CollectiveOp))
            book = replace(prices, ranks=collective.ranks)
            result = plan_operator(Context(pair, book), self.strategies, effort=QUICK)
            best = result.best
            worth = best.strategy.overlaps and best.best is not None and best.speedup >= GAIN
            self._chosen[pair] = Chosen(best.strategy, best.best.parameters) if worth and best.best else None
        return self._chosen[pair]


def _pairs(graph: OperatorGraph) -> dict[tuple[str, str], OperatorGraph]:
    """GEMMs with a dependent collective over a tensor-parallel group, by name and pass; the first of each."""
    found: dict[tuple[str, str], OperatorGraph] = {}
    for a, b in graph.dependencies:
        first, second = graph.operators[a], graph.operators[b]
        if isinstance(first, GemmOp) == isinstance(second, GemmOp):
            continue
        gemm, collective = (first, second) if isinstance(first, GemmOp) else (second, first)
        if not isinstance(collective, CollectiveOp) or not isinstance(gemm, GemmOp) or collective.group != "tp":
            continue
        same = (gemm.name, gemm.pass_) == (collective.name, collective.pass_)
        if same and (gemm.name, gemm.pass_) not in found:
            found[gemm.name, gemm.pass_] = OperatorGraph((first, second), ((0, 1),))
    return found

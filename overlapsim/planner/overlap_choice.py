"""Which overlap strategy each GEMM of a layer takes with its collective: planned once for each distinct pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from overlapsim.cost.prices import PriceBook
from overlapsim.planner.operator import QUICK, plan_operator
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import graph_builder
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import ArrangingStrategy, Chosen, Composition
from overlapsim.strategy.registry import load_strategies
from overlapsim.workload.build import Which
from overlapsim.workload.operators import CollectiveOp, GemmOp, OperatorGraph

GAIN: Final = 1.005
"""A strategy is taken where it saves at least this much of its pair."""
GROUPS: Final = ("tp",)
"""Groups whose collectives are given to strategies together with their GEMM."""
_WHICH: Final[tuple[Which, ...]] = ("forward", "backward")


class OverlapChooser:
    """Chooses strategies for the tensor-parallel pairs of a step, of which none changes what is computed.

    Every strategy sees a pair with all SMs; what is chosen leaves each GEMM
    the SMs that its own collective does not hold, and pairs follow one
    another on the compute stream, so that one budget holds for all of them
    (`compose` refuses what would exceed it).
    """

    def __init__(self) -> None:
        self.strategies = tuple(s for s in load_strategies() if not isinstance(s, ArrangingStrategy))
        self._chosen: dict[object, Chosen | None] = {}

    @property
    def num_planned(self) -> int:
        """Distinct pairs that were planned so far."""
        return len(self._chosen)

    def composition(self, inputs: StepInputs, prices: PriceBook) -> Composition:
        """Best strategy of each (operator, pass) whose GEMM has a collective of its own, by name.

        Parameters
        ----------
        inputs : the step; its layers' graphs are looked at
        prices : with its groups placed
        """
        builder = graph_builder(inputs)
        pairs: dict[tuple[str, str], Chosen] = {}
        for layer in inputs.model.kinds:
            for which in _WHICH:
                for name, pair in _pairs(builder.layer(layer, which)):
                    chosen = self._choose(pair, prices)
                    if chosen is not None:
                        pairs.setdefault(name, chosen)
        return Composition(pairs=pairs)

    def _choose(self, pair: OperatorGraph, prices: PriceBook) -> Chosen | None:
        """Plan a pair, or take what was chosen for its like: names and passes do not matter."""
        collective = next(pair.of_type(CollectiveOp))
        alike = tuple(replace(op, name="mlp.fc1", pass_="fwd") for op in pair.operators)
        key = (alike, prices.groups.get(collective.group))
        if key not in self._chosen:
            result = plan_operator(
                Context(pair, replace(prices, ranks=collective.ranks)), self.strategies, effort=QUICK
            )
            best = result.best
            worth = best.strategy.overlaps and best.best is not None and best.speedup >= GAIN
            self._chosen[key] = Chosen(best.strategy, best.best.parameters) if worth and best.best else None
        return self._chosen[key]


def _pairs(graph: OperatorGraph) -> Iterator[tuple[tuple[str, str], OperatorGraph]]:
    """GEMMs with a dependent collective over a tensor-parallel group, by name and pass; the first of each."""
    found: set[tuple[str, str]] = set()
    for a, b in graph.dependencies:
        first, second = graph.operators[a], graph.operators[b]
        if isinstance(first, GemmOp) == isinstance(second, GemmOp):
            continue
        gemm, collective = (first, second) if isinstance(first, GemmOp) else (second, first)
        if not isinstance(collective, CollectiveOp) or not isinstance(gemm, GemmOp):
            continue
        name = (gemm.name, gemm.pass_)
        if collective.group in GROUPS and name == (collective.name, collective.pass_) and name not in found:
            found.add(name)
            yield name, OperatorGraph((first, second), ((0, 1),))

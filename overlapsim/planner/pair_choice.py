"""Which strategy each GEMM of a layer takes with its collective: planned once for each distinct pair."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from overlapsim.cost.prices import PriceBook
from overlapsim.planner.candidates import propose
from overlapsim.planner.layer_times import GROUPS
from overlapsim.planner.operator import time_s
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import graph_builder
from overlapsim.strategy.base import Context, Parameters, Strategy
from overlapsim.strategy.chains import is_gemm
from overlapsim.strategy.compose import Chosen
from overlapsim.strategy.registry import load_strategies
from overlapsim.workload.build import Which
from overlapsim.workload.operators import CollectiveOp, KernelOp, OperatorGraph

GAIN: Final = 1.005
"""A strategy is taken where it saves at least this much of what it is for."""
RUNS: Final = 3
"""Parameters of one strategy that the engine runs, the best by recurrence or closed form first."""
WHICH: Final[tuple[Which, ...]] = ("forward", "backward")


class Offer(NamedTuple):
    """What a strategy makes of a GEMM and what it takes with it: the operators' positions, and what it saves."""

    saved_s: float
    positions: tuple[int, ...]
    chosen: Chosen


class PairChooser:
    """Chooses strategies for the pairs of a step, of which none changes what is computed.

    Every strategy sees a pair with all SMs; what is chosen leaves each GEMM
    the SMs that its own collective does not hold, and pairs follow one
    another on the compute stream, so that one budget holds for all of them
    (`compose` refuses what would exceed it).
    """

    def __init__(self) -> None:
        self.strategies = tuple(s for s in load_strategies(scope="pair") if s.overlaps)
        self._planned: dict[object, tuple[float, Chosen] | None] = {}

    @property
    def num_planned(self) -> int:
        """Distinct pairs that were planned so far, each by every strategy."""
        return len(self._planned)

    def pairs(
        self, inputs: StepInputs, prices: PriceBook, groups: Collection[str] = GROUPS
    ) -> dict[tuple[str, str], Chosen]:
        """Best strategy of each (operator, pass) whose GEMM has a collective of its own, by name.

        Parameters
        ----------
        inputs : the step; its layers' graphs are looked at
        prices : with its groups placed
        groups : whose collectives are given to strategies together with their GEMM
        """
        builder = graph_builder(inputs)
        found: dict[tuple[str, str], Chosen] = {}
        for layer in inputs.model.kinds:
            for which in WHICH:
                graph = builder.layer(layer, which)
                taken: set[int] = set()
                for gemm in _gemms(graph):
                    best = max(self._offers(graph, gemm, taken, prices, groups), key=lambda o: o.saved_s, default=None)
                    if best is not None:
                        op = graph.operators[gemm]
                        taken |= set(best.positions)
                        found.setdefault((op.name, op.pass_), best.chosen)
        return found

    def _offers(
        self, graph: OperatorGraph, gemm: int, taken: set[int], prices: PriceBook, groups: Collection[str]
    ) -> Iterator[Offer]:
        for strategy in self.strategies:
            positions = strategy.piece(graph, gemm, taken)
            if positions is None:
                continue
            part = graph.part(positions)
            collective = next(part.of_type(CollectiveOp))
            if collective.group in groups and part.dependencies and (planned := self._plan(strategy, part, prices)):
                yield Offer(planned[0], positions, planned[1])

    def _plan(self, strategy: Strategy, part: OperatorGraph, prices: PriceBook) -> tuple[float, Chosen] | None:
        """What a strategy saves of a pair; planned once for its like: which layer or micro-batch does not matter."""
        collective = next(part.of_type(CollectiveOp))
        alike = tuple(
            op if isinstance(op, KernelOp) else replace(op, name="mlp.fc1", pass_="fwd") for op in part.operators
        )
        key = (strategy.name, alike, part.dependencies, prices.groups.get(collective.group))
        if key not in self._planned:
            context = Context(part, replace(prices, ranks=collective.ranks))
            self._planned[key] = None
            if strategy.applies_to(context).applies:
                serial_s = prices.serial_s(part)
                seconds, point = min(
                    ((time_s(strategy, context, point), point) for point in _points(strategy, context)),
                    key=lambda entry: entry[0],
                )
                if serial_s >= GAIN * seconds:
                    self._planned[key] = serial_s - seconds, Chosen(strategy, point)
        return self._planned[key]


def _points(strategy: Strategy, context: Context) -> Iterator[Parameters]:
    for proposal in itertools.islice(propose(strategy.parameters(context)), RUNS):
        yield proposal.parameters


def _gemms(graph: OperatorGraph) -> Iterator[int]:
    """Positions of GEMMs, the first of each name and pass."""
    named: set[tuple[str, str]] = set()
    for position, op in enumerate(graph.operators):
        if is_gemm(op) and (op.name, op.pass_) not in named:
            named.add((op.name, op.pass_))
            yield position

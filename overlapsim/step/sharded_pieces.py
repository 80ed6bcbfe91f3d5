"""Blocks of stages whose parameters are sharded: a few layers are simulated together, more of them by what one adds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from overlapsim.step.blocks import Piece
from overlapsim.step.inputs import StepInputs
from overlapsim.step.sharded import Entry, sharded_graph, stage_entries, turned
from overlapsim.workload.build import GraphBuilder, Which
from overlapsim.workload.model import Layer
from overlapsim.workload.operators import OperatorGraph

FEW: Final = 8
MANY: Final = 16
"""Layers in whose difference the steady state of gathers that run ahead is read; at most `MANY` are simulated."""

Layers = Sequence[tuple[Layer, bool]]
Turn = tuple[Piece, Piece]


class ShardedPieces:
    """What a stage costs by pass, with the gathers and scatters of its layers.

    Parameters
    ----------
    inputs, builder : the step, and maker of its layers' graphs
    simulate : runs the graph of one pass
    simulate_turn : runs the graph of a forward and its backward
    """

    def __init__(
        self,
        inputs: StepInputs,
        builder: GraphBuilder,
        simulate: Callable[[OperatorGraph], Piece],
        simulate_turn: Callable[[OperatorGraph], Turn],
    ) -> None:
        self._inputs, self._builder = inputs, builder
        self._simulate, self._simulate_turn = simulate, simulate_turn
        self._turns: dict[object, Turn] = {}
        self._passes: dict[object, Piece] = {}

    def stage(self, layers: Layers, which: Which, *, first: bool, last: bool) -> Piece:
        """One pass of one micro-batch through a stage."""
        if which == "forward" or which == "backward":
            return self._whole(layers, first, last)[which == "backward"]
        total = Piece()
        for entry in stage_entries(layers, which, first=first, last=last):
            if entry not in self._passes:
                self._passes[entry] = self._simulate(self.graph([entry]))
            total += self._passes[entry]
        return total

    def graph(self, entries: Sequence[Entry]) -> OperatorGraph:
        """Operators of entries with what gathers and scatters their parameters."""
        return sharded_graph(self._inputs, self._builder, entries)

    def _whole(self, layers: Layers, first: bool, last: bool) -> Turn:
        """Forward and backward, the stage's commonest layers standing for those that are too many to simulate."""
        counts = Counter(layers)
        if len(layers) <= MANY or not counts:
            return self._turn(layers, first, last)
        common = counts.most_common(1)[0][0]
        few = self._turn([common] * FEW, first, last)
        counts[common] -= FEW
        for kind, count in counts.items():
            more = self._one_more(kind)
            few = (few[0] + more[0].times(count), few[1] + more[1].times(count))
        return few

    def _one_more(self, kind: tuple[Layer, bool]) -> Turn:
        """What one more layer of a kind adds to a stage of them."""
        few, many = (self._turn([kind] * count, False, False) for count in (FEW, MANY))
        share = 1 / (MANY - FEW)
        return _difference(few[0], many[0], share), _difference(few[1], many[1], share)

    def _turn(self, layers: Layers, first: bool, last: bool) -> Turn:
        key = (tuple(layers), first, last)
        if key not in self._turns:
            forward = stage_entries(layers, "forward", first=first, last=last)
            self._turns[key] = self._simulate_turn(self.graph([*forward, *turned(forward)]))
        return self._turns[key]


def _difference(few: Piece, many: Piece, share: float) -> Piece:
    """A share of what the longer piece has more; kinds that shrink count as none."""
    duration_s = max(0.0, many.duration_s - few.duration_s) * share
    kinds = {kind: max(0.0, seconds - few.kinds_s.get(kind, 0.0)) for kind, seconds in many.kinds_s.items()}
    scale = duration_s / (sum(kinds.values()) or 1.0)
    demands = {name: max(0.0, amount - few.demands.get(name, 0.0)) * share for name, amount in many.demands.items()}
    return Piece(duration_s, {kind: part * scale for kind, part in kinds.items()}, demands, many.capacities)

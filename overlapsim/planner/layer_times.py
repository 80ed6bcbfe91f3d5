"""Times of layers for many layouts at once: each half of a layer is built and priced once for all that share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from overlapsim.cost.prices import PriceBook
from overlapsim.planner.space import Space
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import step_prices
from overlapsim.workload.build import GraphBuilder, Half, modules_of
from overlapsim.workload.model import Layer
from overlapsim.workload.operators import COMPUTE, CollectiveOp, OperatorGraph
from overlapsim.workload.recompute import Recompute

FIELDS: Final = ("forward", "dgrad", "wgrad", "rebuilt_selective", "rebuilt_sar")
# Columns on which a half depends; the others change neither shapes nor the place of its groups.
KEYS: Final[Mapping[Half, tuple[str, ...]]] = {
    "attention": ("tp", "sp", "cp", "sequence_parallel", "micro_batch"),
    "mlp": ("tp", "sp", "cp", "ep", "etp", "sequence_parallel", "micro_batch"),
}


@dataclass(frozen=True)
class Times:
    """Seconds of one pass of one half.

    Attributes
    ----------
    serial : operators of the compute stream one after another
    compute : those that are no collectives
    groups : collectives by group, whatever their stream
    """

    serial: float = 0.0
    compute: float = 0.0
    groups: tuple[tuple[str, float], ...] = ()

    @property
    def bound(self) -> float:
        """Least time with the library's kernels: streams beside compute may hide all they hold."""
        return max(self.serial, self.longest)

    @property
    def longest(self) -> float:
        """Longest of the groups' collectives."""
        return max((seconds for _, seconds in self.groups), default=0.0)


def times_of(graph: OperatorGraph, prices: PriceBook, passes: frozenset[str]) -> Times:
    """Add up the operators of some passes."""
    serial = compute = 0.0
    groups: dict[str, float] = {}
    for position, op in enumerate(graph.operators):
        if op.pass_ not in passes:
            continue
        seconds = prices.operator_s(op)
        if isinstance(op, CollectiveOp):
            groups[op.group] = groups.get(op.group, 0.0) + seconds
        else:
            compute += seconds
        serial += seconds if graph.stream_of(position) == COMPUTE else 0.0
    return Times(serial, compute, tuple(sorted(groups.items())))


class LayerTimes:
    """Prices halves of layers for the rows of a space.

    Parameters
    ----------
    inputs : any step of the request: its recipe and cluster are the ones priced
    models : results of cost models, shared with the engine's runs
    """

    def __init__(self, inputs: StepInputs, models: dict[object, object]) -> None:
        self.inputs, self.models = inputs, models
        self._halves: dict[tuple[object, ...], dict[str, Times]] = {}
        self._books: dict[tuple[int, ...], PriceBook] = {}

    def columns(self, space: Space, layer: Layer) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
        """Seconds of a layer by row: ``forward dgrad wgrad`` and what is rebuilt, each with library and bound forms."""
        found = {f"{name} {form}": np.zeros(len(space)) for name in FIELDS for form in ("library", "overlapped")}
        for half, keys in KEYS.items():
            first, inverse = space.distinct(keys)
            for name in FIELDS:
                library, overlapped = np.empty(len(first)), np.empty(len(first))
                for number, row in enumerate(first):
                    times = self._half(space, int(row), layer, half)[name]
                    library[number] = times.bound
                    overlapped[number] = max(times.compute, times.longest)
                found[f"{name} library"] += library[inverse]
                found[f"{name} overlapped"] += overlapped[inverse]
        return found

    def prices(self, space: Space, row: int) -> PriceBook:
        """Prices with the groups of one row placed."""
        layout = space.layout(row)
        key = (layout.tp, layout.sp, layout.cp, layout.ep, layout.etp, layout.pp, layout.dp)
        if key not in self._books:
            inputs = replace(self.inputs, layout=layout, job=space.job(row))
            self._books[key] = step_prices(inputs, self.models)
        return self._books[key]

    def _half(self, space: Space, row: int, layer: Layer, half: Half) -> dict[str, Times]:
        key = (half, layer, *(int(space.columns[name][row]) for name in KEYS[half]))
        if key not in self._halves:
            self._halves[key] = self._price(space, row, layer, half)
        return self._halves[key]

    def _price(self, space: Space, row: int, layer: Layer, half: Half) -> dict[str, Times]:
        prices, layout = self.prices(space, row), space.layout(row)
        job = space.job(row)
        builder = GraphBuilder(space.model, layout, self.inputs.recipe, job.micro_batch, job.seq_len)
        forward, backward = builder.half(layer, half, "forward"), builder.half(layer, half, "backward")
        found = {
            "forward": times_of(forward, prices, frozenset({"fwd"})),
            "dgrad": times_of(backward, prices, frozenset({"dgrad"})),
            "wgrad": times_of(backward, prices, frozenset({"wgrad"})),
        }
        for name in ("selective", "sar"):
            modules = Recompute.parse(name).modules
            again = [i for i, op in enumerate(forward.operators) if modules_of(op) & modules]
            found[f"rebuilt_{name}"] = times_of(forward.part(again), prices, frozenset({"fwd"}))
        return found

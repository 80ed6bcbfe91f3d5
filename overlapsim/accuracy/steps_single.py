"""The composed table of single nodes: constants of eager hosts from some cells, predictions of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np

from overlapsim.accuracy.progress import counted
from overlapsim.accuracy.steps_data import Measured
from overlapsim.accuracy.steps_inputs import PROFILED, Constants, vtrain_inputs
from overlapsim.cost.launch import launch_stack
from overlapsim.step.simulate import simulate_step, step_prices, step_seconds

Cell = tuple[int, int, int, int, int]
HOST_BOUND: Final = 1.05
"""Time with the host over time without it from which a cell counts as host-bound."""
NEAR_US: Final = (0, -2, -1, 1, 2)
"""Microseconds by which a fit departs from the best of its choices."""


@dataclass(frozen=True)
class Predicted:
    """One row's step: time, central 90 % interval."""

    step_s: float
    low_s: float
    high_s: float


@dataclass
class Singles:
    """Predictions of rows of one node, at any constants; steps that differ in nothing inside a layer share its blocks.

    Attributes
    ----------
    host_us : what a fit may choose from
    """

    host_us: Sequence[float]
    _models: dict[Hashable, dict[object, object]] = field(default_factory=dict)
    _errors: dict[tuple[str, Constants], float] = field(default_factory=dict)
    _ranges: dict[tuple[Cell, Constants], tuple[float, float]] = field(default_factory=dict)

    def seconds(self, row: Measured, constants: Constants) -> float:
        """Predicted time of one row."""
        inputs = vtrain_inputs(row, constants)
        return step_seconds(inputs, step_prices(inputs, self._shared(constants)))

    def predict(self, row: Measured, constants: Constants) -> Predicted:
        """Time of one row, with the relative range of its cell: that of one of its steps of two micro-batches."""
        key = (row.cell, constants)
        if key not in self._ranges:
            inputs = vtrain_inputs(row, constants)
            few = row.dp * row.micro_batch * min(row.num_micro_batches, 2)
            short = replace(inputs, job=replace(inputs.job, global_batch=few))
            result = simulate_step(short, models=self._shared(constants))
            self._ranges[key] = result.low_s / result.step_time_s, result.high_s / result.step_time_s
        seconds, (low, high) = self.seconds(row, constants), self._ranges[key]
        return Predicted(seconds, low * seconds, high * seconds)

    def fit(self, rows: Sequence[Measured]) -> Constants:
        """Host time of a launch with the least mean absolute error: of `host_us`, then to the microsecond about it.

        Cells and rows count half each: one row stands for its cell, with the weight of the cell's rows in the latter.
        """
        chosen = list(representatives(rows).values())
        counts = Counter(row.cell for row in rows)
        weights = np.array([0.5 / len(chosen) + 0.5 * counts[row.cell] / len(rows) for row in chosen])

        def loss(host_us: float) -> float:
            return float(weights @ [self._error(row, Constants(host_us * 1e-6)) for row in chosen])

        coarse = min(self.host_us, key=loss)
        return Constants(min((coarse + us for us in NEAR_US), key=loss) * 1e-6)

    def host_bound(self, row: Measured) -> bool:
        """Whether launches decide the time of the row's cell, at the stack's prior."""
        inputs, times = vtrain_inputs(row), []
        for stack in ("graph", inputs.stack):
            asked = replace(inputs, stack=stack)
            times.append(step_seconds(asked, step_prices(asked, self._shared(None))))
        return times[1] > HOST_BOUND * times[0]

    def _error(self, row: Measured, constants: Constants) -> float:
        key = (row.id, constants)
        if key not in self._errors:
            self._errors[key] = abs(self.seconds(row, constants) / row.time_s - 1)
        return self._errors[key]

    def _shared(self, constants: Constants | None) -> dict[object, object]:
        """Results of cost models and blocks of layers, which differ with the constants."""
        return self._models.setdefault(constants, {})


@lru_cache(maxsize=1)
def prior() -> Constants:
    """Constants of the stack as it ships."""
    return Constants(launch_stack(PROFILED).host_s)


def representatives(rows: Iterable[Measured]) -> dict[Cell, Measured]:
    """One row of each cell: without pipeline and data parallelism where there is one, then the shortest."""
    found: dict[Cell, Measured] = {}
    for row in sorted(rows, key=lambda row: (row.dp * row.pp, row.layers, row.num_micro_batches, row.id)):
        found.setdefault(row.cell, row)
    return dict(sorted(found.items()))


def left_out(singles: Singles, known: Sequence[Measured], cells: Iterable[Cell]) -> dict[Cell, Constants]:
    """Constants for each cell, fitted on all other cells."""
    return {
        cell: singles.fit([row for row in known if row.cell != cell]) for cell in counted("cells left out", list(cells))
    }


def transferred(singles: Singles, known: Sequence[Measured]) -> dict[str, tuple[list[Measured], Constants]]:
    """For each hidden size, its rows and constants fitted on the rows of all other hidden sizes."""
    sizes = sorted({row.hidden for row in known})
    found: dict[str, tuple[list[Measured], Constants]] = {}
    for size in sizes if len(sizes) > 1 else ():
        others = [row for row in known if row.hidden != size]
        names = ", ".join(str(other) for other in sizes if other != size)
        found[f"h {names} to {size}"] = [row for row in known if row.hidden == size], singles.fit(others)
    return found


def microseconds(constants: Constants | Mapping[Any, Constants]) -> str:
    """Constants for people."""
    several = constants.values() if isinstance(constants, Mapping) else (constants,)
    found = sorted({round(one.host_s * 1e6) for one in several})
    return ", ".join(f"host {host} us" for host in found)

"""Rows of several nodes with multipliers of cost families fitted on all other models, to set beside nothing fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from overlapsim.accuracy.progress import counted
from overlapsim.accuracy.steps_data import Measured
from overlapsim.accuracy.steps_inputs import vtrain_inputs
from overlapsim.cost.base import Family
from overlapsim.step.simulate import step_prices, step_seconds

STEP: Final = 0.05
"""Change of a multiplier with which its effect is measured."""
FloatArray = NDArray[np.float64]
Models = dict[object, object]


def sensitivities(rows: Sequence[Measured], families: Sequence[Family], models: Models) -> FloatArray:
    """Seconds that a step gains by a multiplier of each family, per unit: array of shape (rows, families)."""
    found = np.zeros((len(rows), len(families)))
    for number, row in enumerate(rows):
        inputs = vtrain_inputs(row)
        prices = step_prices(inputs, models)
        base = step_seconds(inputs, prices)
        for place, family in enumerate(families):
            found[number, place] = (step_seconds(inputs, prices.scaled(family, 1 + STEP)) - base) / STEP
    return found


def fit_multipliers(effect: FloatArray, errors: FloatArray, bounds: Sequence[tuple[float, float]]) -> FloatArray:
    """Multipliers with the least sum of absolute relative errors, within bounds.

    Parameters
    ----------
    effect : (rows, families), change of predicted over measured by a multiplier, per unit
    errors : predicted over measured minus one, at multipliers of 1
    bounds : lowest and highest multiplier of each family

    Examples
    --------
    >>> fit_multipliers(np.full((3, 1), 0.5), np.array([-0.05, -0.04, -0.2]), [(0.9, 1.25)]).round(3).tolist()
    [1.1]
    """
    rows, families = effect.shape
    cost = np.concatenate((np.zeros(families), np.ones(rows)))
    identity = np.eye(rows)
    upper = np.block([[effect, -identity], [-effect, -identity]])
    found = linprog(
        cost, upper, np.concatenate((-errors, errors)),
        bounds=[*((low - 1, high - 1) for low, high in bounds), *([(0, None)] * rows)],
    )  # fmt: skip
    assert found.x is not None, "a multiplier of 1 is within every bound"
    return 1 + np.asarray(found.x[:families], dtype=np.float64)


def leave_models_out(
    known: Sequence[Measured],
    rows: Sequence[Measured],
    predicted_s: Mapping[str, float],
    multipliers: Mapping[Family, tuple[float, float]],
    models: Models,
) -> tuple[FloatArray, list[dict[str, float]]]:
    """Errors of rows at multipliers fitted on the known rows of all other models, and those multipliers.

    Predictions are linear in the multipliers. Suspect rows are neither left out nor known here: absolute errors bear
    them.
    """
    families = tuple(multipliers)
    everything = {row.id: row for row in (*known, *rows)}
    effect = dict(zip(everything, sensitivities(tuple(everything.values()), families, models), strict=True))
    errors = np.zeros(len(rows))
    chosen = []
    for model in counted("models left out", list(dict.fromkeys(row.model for row in rows))):
        others = [row for row in known if row.model != model]
        if not others:
            continue
        relative = np.array([effect[row.id] / row.time_s for row in others])
        base = np.array([predicted_s[row.id] / row.time_s - 1 for row in others])
        found = fit_multipliers(relative, base, tuple(multipliers.values()))
        chosen.append(dict(zip(families, found.round(3).tolist(), strict=True)))
        for number, row in enumerate(rows):
            if row.model == model:
                errors[number] = (predicted_s[row.id] + effect[row.id] @ (found - 1)) / row.time_s - 1
    return errors, chosen

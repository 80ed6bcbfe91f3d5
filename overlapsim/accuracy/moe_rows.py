"""Predictions beside the figures of the suite ``moe``, and which ids a group has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from overlapsim.accuracy.value_file import Figure
from overlapsim.cost.base import Family
from overlapsim.errors import CalibrationError
from overlapsim.step.simulate import ENDS, FAMILIES

Shift = tuple[Family, Literal["low", "high"]] | None
"""A cost family at one end of its range; None: all at their middle."""
SHIFTS: Final[tuple[tuple[Family, Literal["low", "high"]], ...]] = tuple(itertools.product(FAMILIES, ENDS))


@dataclass(frozen=True)
class Predicted:
    """A prediction with its central 90 %, in SI units or as a ratio."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value_at: Callable[[Shift], float], *, ranges: bool = True) -> Predicted:
        """Value with each cost family moved to its ends, the deviations added in quadrature.

        Examples
        --------
        >>> found = Predicted.of(lambda shift: 1.3 if shift == ("gemm", "high") else 1.0)
        >>> found.low, round(found.high, 2)
        (1.0, 1.3)
        """
        middle = value_at(None)
        deviations = [value_at(shift) - middle for shift in SHIFTS] if ranges else []
        low = math.hypot(*(min(0.0, one) for one in deviations), 0.0)
        high = math.hypot(*(max(0.0, one) for one in deviations), 0.0)
        return cls(middle, middle - low, middle + high)


def check_keys(row: Figure, needed: Mapping[str, Sequence[str]], units: Mapping[str, Sequence[str]]) -> None:
    """Refuse a row whose keys, metric or unit its group does not have.

    Parameters
    ----------
    needed : values that each key of the group may have; an empty sequence allows any whole number from 1
    units : units by metric

    Raises
    ------
    CalibrationError
        If a key is missing, unknown or has another value, or the unit is none of the metric's.
    """
    expected = {*needed, "metric"}
    if row.keys.keys() != expected:
        raise CalibrationError(f"row {row.id}: keys are {', '.join(row.keys)}; expected {', '.join(sorted(expected))}")
    for key, values in needed.items():
        given = row.keys[key]
        if not (given in values if values else given.isdecimal() and int(given) > 0):
            raise CalibrationError(
                f"row {row.id}: {key} is {given!r}; expected {' or '.join(values) or 'a whole number from 1'}"
            )
    if row.unit not in units.get(row.metric, ()):
        known = "; ".join(f"{metric} in {' or '.join(some)}" for metric, some in units.items())
        raise CalibrationError(f"row {row.id}: metric {row.metric!r} in {row.unit!r}; expected one of: {known}")

"""Rows of the suite ``moe``: published figures by id, and the predictions that stand beside them."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from overlapsim.errors import CalibrationError

FAMILIES: Final = ("gemm", "attention", "memory", "collective", "launch")
ENDS: Final[tuple[Literal["low", "high"], ...]] = ("low", "high")
Shift = tuple[str, str] | None
"""A cost family at one end of its range; None: all at their middle."""
SHIFTS: Final[tuple[tuple[str, str], ...]] = tuple(itertools.product(FAMILIES, ENDS))
SCALE: Final = {"s": 1.0, "ms": 1e3, "us": 1e6, "%": 100.0, "ratio": 1.0, "tok/s": 1.0}
"""Units of the suite's own groups, over SI."""


@dataclass(frozen=True)
class MoeRow:
    """One published figure, or one to be predicted only.

    Attributes
    ----------
    id : ``group|key=value|...``
    keys : of the id
    value : as published; NaN where it is blank
    """

    id: str
    group: str
    keys: Mapping[str, str]
    value: float
    unit: str

    @property
    def metric(self) -> str:
        """What of the run is compared."""
        return self.keys["metric"]


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


def parse_rows(text: str, name: str) -> tuple[MoeRow, ...]:
    r"""Rows of a CSV with the header ``id,value,unit``; a blank value is predicted only.

    Raises
    ------
    CalibrationError
        Naming the line and what is wrong with it.

    Examples
    --------
    >>> row, = parse_rows("id,value,unit\ntable3|system=megascale-moe|gpus=480|metric=iteration,,s", "demo")
    >>> row.group, row.keys["gpus"], row.value
    ('table3', '480', nan)
    """
    lines = list(csv.reader(io.StringIO(text)))
    header = [cell.strip() for cell in lines[0]] if lines else []
    if header != ["id", "value", "unit"]:
        raise CalibrationError(f"{name}: header is {','.join(header)!r}; expected id,value,unit")
    rows = tuple(_row(cells, f"{name}:{number}") for number, cells in enumerate(lines[1:], start=2) if cells)
    if not rows:
        raise CalibrationError(f"{name} has no rows")
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise CalibrationError(f"{name}: id {row.id!r} is there twice")
        seen.add(row.id)
    return rows


def _row(cells: Sequence[str], where: str) -> MoeRow:
    if len(cells) != 3:
        raise CalibrationError(f"{where}: {len(cells)} cells; expected id, value and unit")
    identity, text, unit = (cell.strip() for cell in cells)
    group, *parts = identity.split("|")
    pairs = [part.partition("=") for part in parts]
    keys = {key: value for key, _, value in pairs}
    if not group or len(keys) < len(pairs) or not all(key and value for key, value in keys.items()):
        raise CalibrationError(f"{where}: id is {identity!r}; expected group|key=value|..., each key once")
    return MoeRow(identity, group, keys, _value(text, where), unit)


def _value(text: str, where: str) -> float:
    if not text:
        return math.nan
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise CalibrationError(f"{where}: value is {text!r}; expected a number above 0, or nothing")
    return number


def check_keys(row: MoeRow, needed: Mapping[str, Sequence[str]], units: Mapping[str, Sequence[str]]) -> None:
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

"""Files of figures by id (``id,value,unit``): what the suites ``moe`` and ``strategies`` score."""

from __future__ import annotations

import csv
import importlib.resources
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overlapsim.errors import CalibrationError

HEADER: Final = ("id", "value", "unit")
SCALE: Final = {"s": 1.0, "ms": 1e3, "us": 1e6, "%": 100.0, "ratio": 1.0, "tok/s": 1.0}
"""Units of figures, over SI."""


@dataclass(frozen=True)
class Figure:
    """One published figure, or one to be predicted only.

    Attributes
    ----------
    id : ``group|key=value|...``
    group, keys : of the id
    value : as published; NaN where it is blank
    where : file and line, for messages
    """

    id: str
    group: str
    keys: Mapping[str, str]
    value: float
    unit: str
    where: str

    @property
    def metric(self) -> str:
        """What of the run is compared."""
        return self.keys["metric"]


def read_text(data: Path | None, bundled: str) -> tuple[str, str]:
    """Name and text of a user's file, or of the bundled one.

    Raises
    ------
    CalibrationError
        If the file cannot be read.
    """
    if data is None:
        folder = importlib.resources.files("overlapsim.accuracy") / "splits"
        return bundled, (folder / bundled).read_text(encoding="utf-8")
    try:
        return str(data), data.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{data} cannot be read: {error}") from None


def parse_figures(text: str, name: str, *, blank: bool = True) -> tuple[Figure, ...]:
    r"""Figures of a CSV with the header ``id,value,unit``.

    Parameters
    ----------
    text, name : of the file
    blank : whether a value may be blank, for a figure that is predicted only

    Raises
    ------
    CalibrationError
        Naming the line and what is wrong with it.

    Examples
    --------
    >>> row, = parse_figures("id,value,unit\ntable3|system=megascale-moe|gpus=480|metric=iteration,,s", "demo")
    >>> row.group, row.keys["gpus"], row.value
    ('table3', '480', nan)
    """
    lines = list(csv.reader(io.StringIO(text)))
    header = tuple(cell.strip() for cell in lines[0]) if lines else ()
    if header != HEADER:
        raise CalibrationError(f"{name}: header is {','.join(header)!r}; expected {','.join(HEADER)}")
    rows = tuple(_figure(cells, f"{name}:{at}", blank) for at, cells in enumerate(lines[1:], start=2) if cells)
    if not rows:
        raise CalibrationError(f"{name} has no rows")
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise CalibrationError(f"{row.where}: id {row.id!r} is there twice")
        seen.add(row.id)
    return rows


def number(text: str, where: str, what: str) -> float:
    """A finite number above 0.

    Raises
    ------
    CalibrationError
        If it is none.
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not (math.isfinite(found) and found > 0):
        raise CalibrationError(f"{where}: {what} is {text!r}; expected a number above 0")
    return found


def _figure(cells: Sequence[str], where: str, blank: bool) -> Figure:
    if len(cells) != len(HEADER):
        raise CalibrationError(f"{where}: {len(cells)} cells; expected id, value and unit")
    identity, text, unit = (cell.strip() for cell in cells)
    group, *parts = identity.split("|")
    pairs = [part.partition("=") for part in parts]
    keys = {key: value for key, _, value in pairs}
    if not group or len(keys) < len(pairs) or not all(key and value for key, value in keys.items()):
        raise CalibrationError(f"{where}: id is {identity!r}; expected group|key=value|..., each key once")
    value = math.nan if blank and not text else number(text, where, "value")
    return Figure(identity, group, keys, value, unit, where)

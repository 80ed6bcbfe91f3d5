"""Suite ``loop``: what `validate loop` predicted before it ran, and what it then measured; held-out sizes only."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from overlapsim.accuracy.suite import Row, Suite, score, sha256_of
from overlapsim.errors import CalibrationError, UsageError
from overlapsim.plan import Finding

SUITE: Final = "loop"
FILE: Final = "loop.csv"
"""Name of the file in a loop's folder."""
VERSION: Final = 1
BAR: Final = 0.15
LEAST_BYTES: Final = 1e6
"""The bar is for sizes from 1 MB on: smaller messages are latency and noise."""
LEAST_ROWS: Final = 12
"""Fewer valid rows say nothing of a median."""
SERIAL: Final = "serial"


@dataclass(frozen=True)
class LoopRow:
    """One case: predicted first, then run.

    Attributes
    ----------
    case : shape and collective; serial and overlapped runs of it share the name
    strategy, parameters : what was run; parameters as compact JSON
    collective, m, n, k, dtype, ranks, nodes, size_bytes : the shape on one rank, and the collective's size
    predicted_s, low_s, high_s : said before the run, with the central 90 %
    measured_s, p10_s, p90_s : median over all rounds, and percentiles
    noise : half the distance of the rounds' medians over the median
    repeats, rounds : timed calls, and turns they were made in
    valid : numbers were right, rounds agree, and nobody else used the machine
    """

    case: str
    strategy: str
    parameters: str
    collective: str
    m: int
    n: int
    k: int
    dtype: str
    ranks: int
    nodes: int
    size_bytes: float
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    p10_s: float
    p90_s: float
    noise: float
    repeats: int
    rounds: int
    valid: bool

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_s / self.measured_s - 1


COLUMNS: Final = tuple(item.name for item in fields(LoopRow))


@dataclass(frozen=True)
class Margin:
    """Whether an overlapped run pays against serial execution of its shape.

    Attributes
    ----------
    measured, predicted : serial over overlapped time, minus one
    noise : of both measurements together; a margin within it has no sign
    """

    measured: float
    predicted: float
    noise: float

    @property
    def decided(self) -> bool:
        """Whether the measured margin exceeds the noise."""
        return abs(self.measured) > self.noise

    @property
    def right(self) -> bool:
        """Whether the prediction has the measured sign."""
        return (self.measured > 0) == (self.predicted > 0)


def dump_loop(rows: Iterable[LoopRow], header: Mapping[str, Any]) -> str:
    """Text of a loop file: one line of JSON behind ``#``, then CSV.

    Examples
    --------
    >>> parse_loop(dump_loop([], {"device": "CPU"}))
    ((), {'device': 'CPU'})
    """
    out = io.StringIO()
    out.write(f"# {json.dumps({'overlapsim_loop': VERSION, **header})}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow(repr(v) if isinstance(v, float) else v for v in (getattr(row, name) for name in COLUMNS))
    return out.getvalue()


def parse_loop(text: str, name: str = FILE) -> tuple[tuple[LoopRow, ...], dict[str, Any]]:
    """Rows and header of a loop file.

    Raises
    ------
    CalibrationError
        If it is not one, of another version, or a cell is not what its column holds; the message names the line.
    """
    lines = text.splitlines()
    try:
        header = json.loads(lines[0].removeprefix("#"))
        version = header.pop("overlapsim_loop")
    except (IndexError, ValueError, KeyError, AttributeError):
        raise CalibrationError(f"{name} is not a file of `validate loop`: its first line is no header") from None
    if version != VERSION:
        raise CalibrationError(f"{name} is of version {version!r}; this version of overlapsim reads {VERSION}")
    rows = list(csv.DictReader(lines[1:]))
    if lines[1:2] != [",".join(COLUMNS)]:
        raise CalibrationError(f"{name}, line 2: expected the columns {','.join(COLUMNS)}")
    return tuple(_row(name, number, row) for number, row in enumerate(rows, start=3)), header


def evaluate(data: Path | None = None) -> Suite:
    """Score a loop's folder or its ``loop.csv``.

    Groups are strategies. Rows that are not valid are left out and counted in a finding. ``sign`` of an overlapped row
    is whether "it pays" came out right, where the measured margin over serial exceeds the noise. Notes give the bar:
    the median error over sizes of 1 MB and more against 15 % or twice the noise floor, whichever is larger.

    Parameters
    ----------
    data : folder or file; nothing is bundled, since times of one CPU say nothing to others

    Raises
    ------
    UsageError
        Without `data`.
    CalibrationError
        If there is no such file, it cannot be read, or holds no valid row.
    """
    if data is None:
        raise UsageError(
            "the suite loop has no bundled data: run `python -m overlapsim.validate loop --ranks 2 -o DIR` and give "
            "--data DIR"
        )
    path = data / FILE if data.is_dir() else data
    try:
        rows, header = parse_loop(path.read_text(encoding="utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path} cannot be read: {error}; expected a folder of `validate loop`") from None
    valid = [row for row in rows if row.valid]
    if not valid:
        raise CalibrationError(f"{path} holds {len(rows)} rows and none is valid: run it again on a quiet machine")
    findings = []
    if len(valid) < len(rows):
        text = f"{len(rows) - len(valid)} of {len(rows)} rows are not valid (noise, others on the machine) and left out"
        findings.append(Finding("not_valid", text))
    findings.append(
        Finding("says_nothing_about_gpus", f"measured on {header.get('device', 'a CPU')}: exercises the loop only")
        if str(header.get("device", "CPU")).startswith("CPU")
        else Finding("one_machine", f"measured on {header['device']}")
    )
    margins = margins_of(valid)
    scored = [_scored(row, margins) for row in valid]
    return score(SUITE, scored, sha256_of(path), findings=findings, notes=notes(valid, margins))


def margins_of(rows: Sequence[LoopRow]) -> dict[LoopRow, Margin]:
    """Margin of every overlapped row whose shape was run serially as well."""
    serial = {row.case: row for row in rows if row.strategy == SERIAL}
    found = {}
    for row in rows:
        base = serial.get(row.case)
        if base is None or row is base:
            continue
        measured, predicted = base.measured_s / row.measured_s - 1, base.predicted_s / row.predicted_s - 1
        found[row] = Margin(measured, predicted, math.hypot(base.noise, row.noise))
    return found


def notes(rows: Sequence[LoopRow], margins: Mapping[LoopRow, Margin]) -> dict[str, Any]:
    """The bar, the noise floor, and the signs."""
    large = [row for row in rows if row.size_bytes >= LEAST_BYTES]
    result: dict[str, Any] = {}
    if large and len(large) < LEAST_ROWS:
        result["bar"] = f"not judged: {len(large)} valid rows from 1 MB on, expected at least {LEAST_ROWS}"
    elif large:
        median = float(np.median([abs(row.error) for row in large]))
        floor = float(np.median([row.noise for row in large]))
        bar = max(BAR, 2 * floor)
        result["bar"] = (
            f"median error {median:.1%} over {len(large)} rows from 1 MB on, noise floor {floor:.1%}, bar {bar:.1%}: "
            f"{'met' if median <= bar else 'MISSED'}"
        )
    decided = [margin for margin in margins.values() if margin.decided]
    right = sum(margin.right for margin in decided)
    result["does it pay"] = f"{right} of {len(decided)} signs right where the margin exceeds the noise"
    result["undecided"] = f"{len(margins) - len(decided)} margins within the noise"
    return result


def _scored(row: LoopRow, margins: Mapping[LoopRow, Margin]) -> Row:
    margin = margins.get(row)
    sign = None if margin is None or not margin.decided else int(margin.right)
    name = f"{row.case} {row.strategy} {row.parameters}".strip()
    return Row(name, row.strategy, row.measured_s, row.predicted_s, row.low_s, row.high_s, "s", False, sign)


def _row(name: str, number: int, cells: Mapping[str, str]) -> LoopRow:
    values: dict[str, Any] = {}
    for item in fields(LoopRow):
        cell = cells.get(item.name)
        try:
            values[item.name] = _PARSERS[str(item.type)](cell or "")
        except ValueError:
            raise CalibrationError(f"{name}, line {number}: {item.name} is {cell!r}; expected {item.type}") from None
    if not values["measured_s"] > 0 or not values["predicted_s"] > 0:
        raise CalibrationError(f"{name}, line {number}: times must be above 0")
    return LoopRow(**values)


def _flag(cell: str) -> bool:
    if cell not in ("True", "False"):
        raise ValueError(cell)
    return cell == "True"


_PARSERS: Final[Mapping[str, Any]] = {"str": str, "int": int, "float": float, "bool": _flag}

"""Suite ``operators``: attention, grouped GEMM and memory-bound operators of published tables, unfitted halves."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from overlapsim.accuracy.operator_data import Split, load_split
from overlapsim.accuracy.progress import counted
from overlapsim.accuracy.roughness import roughness
from overlapsim.accuracy.suite import Row, Suite, score
from overlapsim.calibration.operator_models import group_works
from overlapsim.calibration.operator_rows import Work
from overlapsim.calibration.operator_tables import TableRow, from_seconds, parse_rows, to_seconds
from overlapsim.cost.priced import fit_findings
from overlapsim.errors import CalibrationError
from overlapsim.hardware.loading import load_device
from overlapsim.hardware.profile import DeviceSpec
from overlapsim.plan import Finding
from overlapsim.workload.attention import AttentionOp

SUITE: Final = "operators"
LARGE_TABLE: Final = 40
"""Rows from which a table must meet the bar."""
BAR: Final = 0.10
ROUGH_BAR: Final = 0.15
ROUGH: Final = 0.05
"""Bar of the median error, and the wider one for tables rougher than `ROUGH` themselves."""


def evaluate(data: Path | None = None) -> Suite:
    """Score the bundled tables, or the rows of a ``id,value,unit`` file.

    Groups are tables: their unfitted rows under the table's name, the fitted ones apart as ``<table> fitted``; tables
    that are in no fit at all have ``fitted: null``. Notes: errors by operator, each table's own roughness and bar.

    Parameters
    ----------
    data : file to score instead of the bundled tables; its rows count as unfitted unless they are rows of the
        bundled tables that fits used

    Raises
    ------
    CalibrationError
        If the file cannot be read, a row is malformed, or a table is of no known kind or device.
    """
    split = load_split()
    if data is None:
        return evaluate_rows(split, split.rows, split.sha256())
    try:
        text = data.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{data} cannot be read: {error}") from None
    return evaluate_rows(split, parse_rows(text, str(data)), hashlib.sha256(text.encode()).hexdigest())


def evaluate_rows(split: Split, rows: Sequence[TableRow], split_sha256: str) -> Suite:
    """Score given rows."""
    works = [row.work() for row in rows]
    devices: dict[str, DeviceSpec] = {}
    members: dict[str, list[int]] = defaultdict(list)
    for position, row in enumerate(rows):
        members[split.device_name(row.table)].append(position)
    scored: dict[int, Row] = {}
    findings: dict[Finding, None] = {}
    seen: Counter[str] = Counter()
    for name, positions in counted("devices", list(members.items())):
        device = devices.setdefault(name, load_device(name))
        for group in group_works([works[position] for position in positions]):
            prices = group.prices(device)
            findings.update(dict.fromkeys(fit_findings(device, [prices.fit])))
            for number, inner in enumerate(group.positions.tolist()):
                position = positions[inner]
                ends = (prices.seconds[number], prices.low_s[number], prices.high_s[number])
                scored[position] = _scored(split, rows[position], works[position], *map(float, ends))
    ordered = []
    for position in range(len(rows)):
        result = scored[position]
        seen[result.id] += 1
        # A table may hold a shape twice: both are scored, under ids of their own.
        ordered.append(result if seen[result.id] == 1 else replace(result, id=f"{result.id}#{seen[result.id]}"))
    return score(SUITE, ordered, split_sha256, findings=findings, notes=_notes(split, rows, works, ordered))


def _scored(split: Split, row: TableRow, work: Work, seconds: float, low_s: float, high_s: float) -> Row:
    predicted, one, other = (from_seconds(time * work.times, row.unit, work) for time in (seconds, low_s, high_s))
    in_no_fit = row.table in split.cross_check
    fitted = None if in_no_fit else split.is_fitted(row)
    group = f"{row.table} fitted" if fitted else row.table
    return Row(row.id, group, row.value, predicted, min(one, other), max(one, other), row.unit, fitted)


def _notes(split: Split, rows: Sequence[TableRow], works: Sequence[Work], scored: Sequence[Row]) -> dict[str, Any]:
    tables: dict[str, list[int]] = defaultdict(list)
    for position, row in enumerate(rows):
        tables[row.table].append(position)
    notes: dict[str, Any] = {"split rule": "first byte of the SHA-256 of the id even: fitted"}
    for table, positions in tables.items():
        unfitted = [position for position in positions if scored[position].fitted is not True]
        if not unfitted:
            continue
        times: dict[str, list[tuple[dict[str, Any], float]]] = defaultdict(list)
        for p in positions:
            times[works[p].part].append((_dimensions(works[p]), to_seconds(rows[p].value, rows[p].unit, works[p])))
        rough = roughness(times.values())
        error = float(np.median([abs(scored[p].error) for p in unfitted]))
        text = f"median {_percent(error)}, roughness {_percent(rough)}"
        if len(positions) >= LARGE_TABLE and table not in split.cross_check:
            bar = ROUGH_BAR if rough > ROUGH else BAR
            text += f", bar {_percent(bar)}: {'met' if error <= bar else 'MISSED'}"
        notes[table] = text
        parts: dict[str, list[float]] = defaultdict(list)
        for position in unfitted:
            parts[works[position].part].append(scored[position].error)
        if len(parts) > 1:
            notes[f"{table} by operator (points: bias / median / p90, %)"] = ", ".join(
                f"{part} {len(errors)}: {_figures(errors)}" for part, errors in parts.items()
            )
    return notes


def _dimensions(work: Work) -> dict[str, Any]:
    shape = asdict(work.op)
    if isinstance(work.op, AttentionOp) and work.op.q_len == work.op.kv_len:
        # One length: with two names no row would have neighbours.
        del shape["q_len"]
    return shape


def _figures(errors: Sequence[float]) -> str:
    size = np.abs(errors)
    return f"{100 * np.median(errors):+.1f} / {100 * np.median(size):.1f} / {100 * np.quantile(size, 0.9):.1f}"


def _percent(value: float) -> str:
    return "unknown" if np.isnan(value) else f"{100 * value:.1f} %"

"""What every accuracy suite returns: rows of measured against predicted, and their statistics by group."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from overlapsim.plan import Finding


@dataclass(frozen=True)
class Row:
    """One measurement and its prediction.

    Attributes
    ----------
    id : unique within the suite
    group : statistics are made by group; fitted and unfitted points are never in one group
    measured, predicted, low, high : in `unit`; `low` .. `high` is the central 90 % interval; `measured` is NaN (in JSON
        null) where a row is predicted only: no statistics count it
    unit : s, ms, us, ratio ...
    fitted : True if the point was used to fit, False if held out, None where the layer has no fit of its own
    sign : 1 if a comparison (faster or slower than ...) came out right, 0 if wrong, None where there is none
    """

    id: str
    group: str
    measured: float
    predicted: float
    low: float
    high: float
    unit: str
    fitted: bool | None
    sign: int | None = None

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Group:
    """Statistics of one group; errors are fractions.

    Attributes
    ----------
    num_points, fitted : size, and whether these points were fitted (None: no fit)
    median_signed, median_abs, mean_abs, p90_abs, p95_abs : of ``predicted / measured - 1``
    sign_right, sign_total : comparisons that came out right, and all
    coverage90 : share of measurements inside the 90 % interval
    """

    name: str
    num_points: int
    fitted: bool | None
    median_signed: float
    median_abs: float
    mean_abs: float
    p90_abs: float
    p95_abs: float
    sign_right: int
    sign_total: int
    coverage90: float


@dataclass(frozen=True)
class Suite:
    """Outcome of one suite.

    Attributes
    ----------
    suite : name
    split_sha256 : of the committed split file (or of the data given), so that two runs can be compared
    groups : one per group, in order of first appearance
    overall : statistics over the rows that were not fitted, or over all where none was
    rows : all of them
    notes : figures beside the score: ablations, constants, reference predictors
    """

    suite: str
    split_sha256: str
    groups: tuple[Group, ...]
    overall: Group
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Content of ``accuracy --json``."""
        import msgspec

        rows = [{**msgspec.to_builtins(row), "error": row.error} for row in self.rows]
        for row in rows:
            del row["sign"]
        return {
            "suite": self.suite,
            "split_sha256": self.split_sha256,
            "groups": msgspec.to_builtins(self.groups),
            "overall": msgspec.to_builtins(self.overall),
            "rows": rows,
            "findings": msgspec.to_builtins(self.findings),
            "notes": msgspec.to_builtins(self.notes),
        }


def score(
    suite: str,
    rows: Sequence[Row],
    split_sha256: str,
    *,
    findings: Iterable[Finding] = (),
    notes: dict[str, Any] | None = None,
) -> Suite:
    """Put rows into groups and add up their statistics.

    Examples
    --------
    >>> rows = [Row("a", "g", 1.0, 1.1, 0.9, 1.2, "s", False), Row("b", "g", 2.0, 1.9, 1.95, 2.1, "s", False)]
    >>> group = score("demo", rows, "").groups[0]
    >>> round(group.mean_abs, 3), group.coverage90
    (0.075, 1.0)
    """
    names = dict.fromkeys(row.group for row in rows)
    by_name = {name: [row for row in rows if row.group == name] for name in names}
    for name, members in by_name.items():
        assert len({row.fitted for row in members}) == 1, f"group {name} mixes fitted and unfitted points"
    unfitted = [row for row in rows if row.fitted is False] or list(rows)
    return Suite(
        suite,
        split_sha256,
        tuple(_group(name, members) for name, members in by_name.items()),
        _group("overall", unfitted),
        tuple(rows),
        tuple(findings),
        notes or {},
    )


def _group(name: str, rows: Sequence[Row]) -> Group:
    rows = [row for row in rows if not np.isnan(row.measured)]
    if not rows:
        nan = float("nan")
        return Group(name, 0, None, nan, nan, nan, nan, nan, 0, 0, nan)
    errors = np.array([row.error for row in rows])
    size = np.abs(errors)
    inside = [row.low <= row.measured <= row.high for row in rows]
    signs = [row.sign for row in rows if row.sign is not None]
    return Group(
        name=name,
        num_points=len(rows),
        fitted=rows[0].fitted,
        median_signed=float(np.median(errors)),
        median_abs=float(np.median(size)),
        mean_abs=float(size.mean()),
        p90_abs=float(np.quantile(size, 0.9)),
        p95_abs=float(np.quantile(size, 0.95)),
        sign_right=sum(signs),
        sign_total=len(signs),
        coverage90=float(np.mean(inside)),
    )


def sha256_of(*paths: Path) -> str:
    """SHA-256 over the contents of files, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


SuiteFunction = Callable[[Path | None], Suite]
"""A suite: takes the file given with ``--data`` (None for the bundled data) and returns its score."""

"""Measured against predicted: records priced by a profile, and errors by kind and regime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from overlapsim.calibration.predict import predict
from overlapsim.calibration.records import Record
from overlapsim.calibration.regimes import SIZE_REGIMES, TIME_REGIMES, regime_of
from overlapsim.errors import CalibrationError
from overlapsim.hardware.profile import Cluster, CurveKey
from overlapsim.plan import Finding

FloatArray = NDArray[np.float64]

# Off by more than this, whatever the regime, is a unit or another machine.
UNIT_FACTOR: Final = 100.0


@dataclass(frozen=True)
class Compared:
    """One record and its price.

    Attributes
    ----------
    record : as measured
    predicted_s : price of its work alone; NaN where no model prices it
    group, regime : ``all_reduce over 8 ranks on 1 node``, ``gemm bf16`` ...; band of sizes (collectives) or of times
    calibrated : the profile holds a curve or a fit that was measured for this very case
    """

    record: Record
    predicted_s: float
    group: str
    regime: str
    calibrated: bool

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_s / self.record.median_s - 1


@dataclass(frozen=True)
class Line:
    """Errors of one group in one regime; fractions.

    Attributes
    ----------
    num_points : records
    median_signed, median_abs, p90_abs, worst : of ``predicted / measured - 1``; worst keeps its sign
    calibrated : share of the records for which the profile holds a measurement
    """

    group: str
    regime: str
    num_points: int
    median_signed: float
    median_abs: float
    p90_abs: float
    worst: float
    calibrated: float


@dataclass(frozen=True)
class Comparison:
    """All records with their prices, the table by regime, and what a reader should know."""

    cluster: str
    rows: tuple[Compared, ...]
    lines: tuple[Line, ...]
    slowdowns: tuple[Line, ...]
    findings: tuple[Finding, ...]


def compare(records: Sequence[Record], cluster: Cluster) -> Comparison:
    """Price records and tabulate the errors.

    What ran beside something else is set against its price alone in lines of its own (`slowdowns`): there a negative
    error is contention, not a wrong price.

    Parameters
    ----------
    records : any kinds; those marked not valid are passed over
    cluster : the profile to be judged

    Raises
    ------
    CalibrationError
        If no record can be priced.
    """
    usable = [record for record in records if record.valid]
    findings = []
    if len(usable) < len(records):
        findings.append(Finding("not_valid", f"{len(records) - len(usable)} records are marked not valid; passed over"))
    if not usable:
        raise CalibrationError(f"none of the {len(records)} records is valid")
    wide = cluster.with_nodes(max(cluster.num_nodes, *(record.nodes or 1 for record in usable)))
    predicted = predict(usable, wide)
    rows = [
        Compared(record, float(seconds), _group(record), _regime(record), _is_measured(record, wide))
        for record, seconds in zip(usable, predicted, strict=True)
    ]
    priced = [row for row in rows if np.isfinite(row.predicted_s)]
    if not priced:
        raise CalibrationError(f"{cluster.name} prices none of the {len(rows)} records: {_unpriced(rows)}")
    if len(priced) < len(rows):
        unpriced = [row for row in rows if not np.isfinite(row.predicted_s)]
        findings.append(Finding("not_priced", f"{len(unpriced)} records are not priced: {_unpriced(unpriced)}"))
    alone = [row for row in priced if row.record.alone]
    lines, slowdowns = _lines(alone), _lines([row for row in priced if not row.record.alone])
    findings += _findings(alone, cluster)
    return Comparison(cluster.name, tuple(priced), lines, slowdowns, tuple(findings))


def _lines(rows: Sequence[Compared]) -> tuple[Line, ...]:
    groups: dict[tuple[str, str], list[Compared]] = {}
    for row in rows:
        groups.setdefault((row.group, row.regime), []).append(row)
    order = [name for name, _ in (*SIZE_REGIMES, *TIME_REGIMES)]
    keys = sorted(groups, key=lambda key: (key[0], order.index(key[1])))
    return tuple(_line(*key, groups[key]) for key in keys)


def _line(group: str, regime: str, rows: Sequence[Compared]) -> Line:
    errors = np.array([row.error for row in rows])
    size = np.abs(errors)
    return Line(
        group=group,
        regime=regime,
        num_points=len(rows),
        median_signed=float(np.median(errors)),
        median_abs=float(np.median(size)),
        p90_abs=float(np.quantile(size, 0.9)),
        worst=float(errors[int(np.argmax(size))]),
        calibrated=float(np.mean([row.calibrated for row in rows])),
    )


def _group(record: Record) -> str:
    beside = f" beside {record.concurrent}" if record.concurrent else ""
    if record.kind == "collective":
        assert record.nodes is not None
        in_place = ", in place" if record.in_place else ""
        forced = "".join(f", {name}" for name in (record.algo, record.proto) if name)
        nodes = f"{record.nodes} node{'s' * (record.nodes > 1)}"
        return f"{record.op} {record.dtype} over {record.ranks} ranks on {nodes}{forced}{in_place}{beside}".replace(
            "  ", " "
        )
    return f"{record.op} {record.dtype}{beside}".strip()


def _regime(record: Record) -> str:
    if record.kind == "collective":
        assert record.size_bytes is not None
        return regime_of(np.array([float(record.size_bytes)]), SIZE_REGIMES)[0]
    return regime_of(np.array([record.median_s]), TIME_REGIMES)[0]


def _is_measured(record: Record, cluster: Cluster) -> bool:
    if record.kind == "collective":
        assert record.ranks is not None and record.nodes is not None
        return CurveKey(record.op, record.ranks, record.nodes) in cluster.curves
    key = f"gemm.{record.dtype}" if record.kind == "gemm" else f"memory.{record.op}"
    fit = cluster.device.fits.get(key)
    return fit is not None and fit.num_points > 0


def _unpriced(rows: Sequence[Compared]) -> str:
    return ", ".join(sorted({row.group for row in rows})[:6])


def _findings(rows: Sequence[Compared], cluster: Cluster) -> list[Finding]:
    found = []
    if rows:
        ratio = float(np.median([row.record.median_s / row.predicted_s for row in rows]))
        if not 1 / UNIT_FACTOR < ratio < UNIT_FACTOR:
            found.append(
                Finding(
                    "unit_suspected",
                    f"measured times are {ratio:.3g} times the predicted ones at the median: check the file's unit",
                )
            )
    if not cluster.calibrated:
        found.append(
            Finding("not_calibrated", f"{cluster.name} was not calibrated on a machine of yours; see `calibrate`")
        )
    return found

"""One measured collective: repeats merged, outliers out, checked against the machine, judged on held-out sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from overlapsim.calibration.fit_collective import fit_latency_bandwidth
from overlapsim.calibration.outliers import find_outliers
from overlapsim.calibration.placement import base_seconds, bound_seconds, fills_nodes
from overlapsim.calibration.plausible import check_times
from overlapsim.calibration.records import Record
from overlapsim.calibration.regimes import SIZE_REGIMES, RegimeError, judge, told
from overlapsim.cost.curve import Curve
from overlapsim.hardware.profile import Cluster, CurveKey, CurveTable, Source
from overlapsim.plan import Finding
from overlapsim.units import format_bytes, format_time

FloatArray = NDArray[np.float64]

FOLDS: Final = 3
# Below, nothing can be held out.
LEAST_POINTS: Final = 4
# Repeats of one condition differ by a few percent, on a shared fabric by a third; more is several conditions in one.
MAX_DISAGREEMENT: Final = 0.35
_DTYPES: Final = ("bf16", "fp16", "fp32", "", "fp8", "int8")
"""Which element type stands for a collective where several were timed: time goes by bytes, not by type."""


@dataclass(frozen=True)
class Point:
    """One size of a table.

    Attributes
    ----------
    size_bytes, time_s : median over the repeats
    p10_s, p90_s : percentiles, None where nothing says them
    repeats : calls behind the median
    disagreement : half the distance of the records' 10th and 90th percentile over the median; None with one record
    """

    size_bytes: int
    time_s: float
    p10_s: float | None
    p90_s: float | None
    repeats: int
    disagreement: float | None = None


@dataclass(frozen=True)
class LeftOut:
    """A point that is not used, and why."""

    size_bytes: int
    time_s: float
    expected_s: float | None
    reason: str


@dataclass(frozen=True)
class CurveFit:
    """One collective over some ranks and nodes, as measured.

    Attributes
    ----------
    key, dtype, algo, proto : what was timed
    points : used, by rising size
    left_out : outliers and points faster than the wires
    latency_s, bytes_per_s : ``time = latency + size / rate`` by soft-L1; None with fewer than 3 points
    noise : half the distance of the percentiles over the median, at the median over sizes; None without repeats
    disagreement : the same of the medians of records of one size, at the median over sizes with several; else None
    regimes : errors of a curve that had not seen the point, by size
    over_base : measured over the base profile's price, median of the larger half
    accepted : records of one size agree, and every regime from the first point on is within its limits
    """

    key: CurveKey
    dtype: str
    algo: str
    proto: str
    points: tuple[Point, ...]
    left_out: tuple[LeftOut, ...]
    latency_s: float | None
    bytes_per_s: float | None
    noise: float | None
    disagreement: float | None
    regimes: tuple[RegimeError, ...]
    over_base: float
    accepted: bool
    findings: tuple[Finding, ...] = field(default=())

    @property
    def name(self) -> str:
        """For messages: ``all_reduce over 16 ranks on 2 nodes``."""
        return f"{self.key.collective} over {self.key.ranks} ranks on {self.key.nodes} node{'s' * (self.key.nodes > 1)}"

    def table(self, reference: str = "calibrate") -> CurveTable:
        """The points as a curve of a profile."""
        sizes = tuple(float(point.size_bytes) for point in self.points)
        return CurveTable(sizes, tuple(point.time_s for point in self.points), Source("measured", reference, "high"))


@dataclass(frozen=True)
class Condition:
    """Everything but size that a collective's time depends on."""

    key: CurveKey
    dtype: str
    algo: str
    proto: str
    channels: int | None
    in_place: bool


def group_collectives(records: Iterable[Record]) -> dict[Condition, list[Record]]:
    """Solo, valid records of collectives by condition, in a fixed order."""
    groups: dict[Condition, list[Record]] = defaultdict(list)
    for record in records:
        if record.kind == "collective" and record.alone and record.valid:
            assert record.ranks is not None and record.nodes is not None
            key = CurveKey(record.op, record.ranks, record.nodes)
            condition = Condition(key, record.dtype, record.algo, record.proto, record.channels, record.in_place)
            groups[condition].append(record)
    order = sorted(groups, key=lambda c: (c.key.collective, c.key.nodes, c.key.ranks, *_rank_of(c)))
    return {condition: groups[condition] for condition in order}


def main_conditions(groups: dict[Condition, list[Record]]) -> tuple[list[Condition], list[Finding]]:
    """The condition that stands for each collective, and what was kept aside.

    Out of place before in place, the library's own choice before a forced algorithm, 16-bit floats before others.
    """
    chosen: dict[CurveKey, Condition] = {}
    aside: dict[tuple[str, str], set[str]] = defaultdict(set)
    for condition in groups:
        first = chosen.setdefault(condition.key, condition)
        if condition is not first and not condition.in_place:
            kept, other = _conditions(first), _conditions(condition)
            aside[kept, other].add(f"{condition.key.collective} over {condition.key.ranks}")
    findings = [
        Finding(
            "conditions_aside",
            f"{len(names)} collectives were timed as {kept} and as {other}: curves are of {kept}, the others are kept "
            "as records",
        )
        for (kept, other), names in aside.items()
    ]
    findings += [
        Finding("in_place_used", f"{condition.key.collective}: only in-place times were measured; used for the curve")
        for condition in chosen.values()
        if condition.in_place
    ]
    findings += [
        Finding(
            "forced_algorithm",
            f"{condition.key.collective}: timed with {condition.algo or condition.proto} forced; the library's own "
            "choice may be faster",
        )
        for condition in chosen.values()
        if condition.algo or condition.proto
    ]
    return list(chosen.values()), findings


def fit_curve(condition: Condition, records: Sequence[Record], cluster: Cluster, base_name: str) -> CurveFit:
    """Make one curve out of its records.

    Parameters
    ----------
    condition, records : from `group_collectives`
    cluster : base profile with at least as many nodes as the records
    base_name : of the profile, for messages

    Raises
    ------
    CalibrationError
        If the ranks do not fit the base's nodes, or the times cannot be what they say (`plausible.check_times`).
    """
    key = condition.key
    points = merge_repeats(records)
    size = np.array([point.size_bytes for point in points], dtype=np.float64)
    time = np.array([point.time_s for point in points])
    what = f"{key.collective} over {key.ranks} ranks"
    base, bound = base_seconds(key, size, cluster), bound_seconds(key, size, cluster)
    in_kib = base_seconds(key, size * 1024, cluster)
    checked = check_times(what, base_name, time, base, bound, size, in_kib)
    left_out = [
        LeftOut(points[i].size_bytes, points[i].time_s, float(bound[i]), "faster than the links allow")
        for i in np.flatnonzero(checked.too_fast)
    ]
    kept = np.flatnonzero(~checked.too_fast)
    for outlier in find_outliers(size[kept], time[kept]):
        point = points[kept[outlier.place]]
        told_factor = f"{outlier.factor:.3g} times what its neighbours say"
        left_out.append(LeftOut(point.size_bytes, point.time_s, outlier.expected_s, told_factor))
    dropped = {entry.size_bytes for entry in left_out}
    used = tuple(point for point in points if point.size_bytes not in dropped)
    errors, at = held_out_errors(used)
    regimes = judge(errors, at, SIZE_REGIMES)
    noise = _noise(used)
    disagreement = _median_of(point.disagreement for point in used)
    kept_points = _from_accepted(used, regimes)
    # Jitter of single calls is no reason: the median is what is used, and held-out sizes say how good it is.
    accepted = bool(kept_points) and (disagreement is None or disagreement <= MAX_DISAGREEMENT)
    if accepted:
        used = kept_points
    line = fit_latency_bandwidth([p.size_bytes for p in used], [p.time_s for p in used]) if len(used) >= 3 else None
    fit = CurveFit(
        key=key,
        dtype=condition.dtype,
        algo=condition.algo,
        proto=condition.proto,
        points=used,
        left_out=tuple(sorted(left_out, key=lambda entry: entry.size_bytes)),
        latency_s=None if line is None else line.latency_s,
        bytes_per_s=None if line is None else line.bytes_per_s,
        noise=noise,
        disagreement=disagreement,
        regimes=regimes,
        over_base=checked.over_base,
        accepted=accepted,
    )
    return replace(fit, findings=tuple(_findings(fit, cluster, base_name)))


def _from_accepted(points: tuple[Point, ...], regimes: Sequence[RegimeError]) -> tuple[Point, ...]:
    """All points, or those from 64 KiB on where only the smaller ones are refused; none if that leaves too few.

    Rough small messages do not spoil the large ones; the price below the first point is then an extrapolation, and
    says so. A rough end or middle leaves nothing to extrapolate from.
    """
    refused = {regime.name for regime in regimes if not regime.accepted}
    if not refused:
        return points
    smallest, limit = SIZE_REGIMES[0]
    if refused != {smallest}:
        return ()
    rest = tuple(point for point in points if point.size_bytes >= limit)
    return rest if len(rest) >= LEAST_POINTS else ()


def merge_repeats(records: Sequence[Record]) -> tuple[Point, ...]:
    """One point a size: the median over records, percentiles over them or those that they state, whichever is wider."""
    by_size: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        assert record.size_bytes is not None
        by_size[record.size_bytes].append(record)
    points = []
    for size, same in sorted(by_size.items()):
        times = [record.median_s for record in same]
        stated = [(r.p10_s, r.p90_s) for r in same if r.p10_s is not None and r.p90_s is not None]
        spans = [tuple(np.median(stated, axis=0))] if stated else []
        disagreement = None
        if len(times) >= 2:
            between = tuple(np.quantile(times, (0.1, 0.9)))
            disagreement = float(between[1] - between[0]) / 2 / float(np.median(times))
            spans.append(between)
        low = min((float(span[0]) for span in spans), default=None)
        high = max((float(span[1]) for span in spans), default=None)
        repeats = sum(record.repeats for record in same)
        points.append(Point(size, float(np.median(times)), low, high, repeats, disagreement))
    return tuple(points)


def held_out_errors(points: Sequence[Point]) -> tuple[FloatArray, FloatArray]:
    """Errors at sizes that a curve had not seen, and those sizes.

    The split is by position: of the sizes between the ends every third is held out, three times, so each is
    predicted once from a curve without it. No errors with fewer than 4 points.
    """
    if len(points) < LEAST_POINTS:
        return np.zeros(0), np.zeros(0)
    size = np.array([float(point.size_bytes) for point in points])
    time = np.array([point.time_s for point in points])
    inner = np.arange(1, size.size - 1)
    errors = np.empty(size.size)
    for fold in range(FOLDS):
        test = inner[inner % FOLDS == fold]
        if test.size:
            seen = np.setdiff1d(np.arange(size.size), test)
            table = CurveTable(tuple(size[seen]), tuple(time[seen]), Source("measured", "held out"))
            errors[test] = Curve(table).seconds(size[test]) / time[test] - 1
    return errors[inner], size[inner]


def _conditions(condition: Condition) -> str:
    channels = f"{condition.channels} channels" if condition.channels else ""
    return "/".join(filter(None, (condition.dtype or "unnamed type", condition.algo, condition.proto, channels)))


def _rank_of(condition: Condition) -> tuple[bool, bool, int, str, str, str, int]:
    """Order of preference within one collective."""
    dtype = _DTYPES.index(condition.dtype) if condition.dtype in _DTYPES else len(_DTYPES)
    forced = bool(condition.algo or condition.proto or condition.channels)
    texts = (condition.dtype, condition.algo, condition.proto)
    return condition.in_place, forced, dtype, *texts, condition.channels or 0


def _noise(points: Sequence[Point]) -> float | None:
    return _median_of((p.p90_s - p.p10_s) / 2 / p.time_s for p in points if p.p10_s is not None and p.p90_s is not None)


def _median_of(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _findings(fit: CurveFit, cluster: Cluster, base_name: str) -> Iterable[Finding]:
    for entry in fit.left_out:
        expected = "" if entry.expected_s is None else f", expected about {format_time(entry.expected_s)}"
        yield Finding(
            "outlier",
            f"{fit.name}: {format_bytes(entry.size_bytes)} took {format_time(entry.time_s)}{expected}: {entry.reason}; "
            "left out",
        )
    if len(fit.points) < LEAST_POINTS:
        yield Finding("not_judged", f"{fit.name}: {len(fit.points)} sizes; too few to hold any out, taken as measured")
    if fit.disagreement is not None and fit.disagreement > MAX_DISAGREEMENT:
        yield Finding(
            "not_accepted",
            f"{fit.name}: not accepted, left out of the profile: repeats of one size differ by {fit.disagreement:.0%}; "
            "several conditions (placements, versions, algorithms) in one table, or a disturbed machine",
        )
    elif fit.accepted and not all(regime.accepted for regime in fit.regimes):
        yield Finding(
            "begins_late",
            f"{fit.name}: the curve begins at {format_bytes(fit.points[0].size_bytes)}, smaller sizes are "
            f"extrapolated; not accepted: {told(fit.regimes)}",
        )
    elif not fit.accepted:
        yield Finding("not_accepted", f"{fit.name}: not accepted, left out of the profile: {told(fit.regimes)}")
    if fit.over_base > 2:
        yield Finding(
            "slower_than_base",
            f"{fit.name}: large sizes take {fit.over_base:.3g} times what {base_name} has; a degraded link, another "
            "fabric, or another machine",
        )
    if not fills_nodes(fit.key, cluster):
        yield Finding(
            "spread_over_nodes",
            f"{fit.name}: overlapsim fills nodes of {cluster.node.num_devices}, so this curve is kept but not used",
        )

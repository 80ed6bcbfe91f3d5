"""Fit of collective times: latency and bandwidth of one curve, and the structural constants of a platform."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from overlapsim.cost.structural import (
    FIXED_PARAMETERS,
    PAIR_KINDS,
    PAIR_PARAMETERS,
    RING_KINDS,
    RING_PARAMETERS,
    OneNodeModel,
)
from overlapsim.errors import CalibrationError
from overlapsim.hardware.profile import Fit, Source

FloatArray = NDArray[np.float64]
SOFT_SCALE: Final = 0.05
"""Log deviation from which the soft-L1 loss turns linear: 5 %, the roughness of public tables."""
# A time that a larger size undercuts by this factor is a stall of the host, not a property of the link.
SPIKE: Final = 1.5
# Weak pull of every parameter to its start, so that what the rows do not show stays where other platforms are.
_PULL: Final = 0.02
# Weight of the slope of the last octave, from this size on: it is what goes on above the table.
_SLOPE: Final = 0.5
_LARGE: Final = 2.0**26
# Starts that sisters show: rates over the link's, of the Hopper and Blackwell nodes that were measured.
_SISTERS: Final[Mapping[str, Mapping[str, float]]] = {
    "nvls_rate": {"hopper": 0.68, "blackwell": 0.57},
    # What one rank count alone cannot tell apart from the link's rate: on Blackwell the own shard is copied slowly.
    "pair_copy_rate": {"blackwell": 0.84},
}


class CollectiveRow(NamedTuple):
    """One measured collective: kind, ranks, nodes, size as nccl-tests defines it, seconds."""

    kind: str
    ranks: int
    nodes: int
    size_bytes: float
    time_s: float


class Outlier(NamedTuple):
    """A row left out of a fit, and by which factor it is off."""

    row: CollectiveRow
    factor: float
    reason: str


def split_spikes(rows: Iterable[CollectiveRow]) -> tuple[list[CollectiveRow], list[Outlier]]:
    """Rows that can be fitted, and those that a larger size undercuts by more than `SPIKE`.

    Time of one curve may fall a little where the library changes its algorithm; it does not fall by a third.

    Examples
    --------
    >>> sizes, times = (1e6, 2e6, 4e6), (32e-6, 290e-6, 59e-6)
    >>> kept, outliers = split_spikes(CollectiveRow("all_reduce", 8, 1, s, t) for s, t in zip(sizes, times))
    >>> len(kept), outliers[0].row.size_bytes, round(outliers[0].factor, 1)
    (2, 2000000.0, 4.9)
    """
    kept, outliers = list[CollectiveRow](), list[Outlier]()
    for curve in curves(rows).values():
        least = np.inf
        for row in reversed(curve):
            if row.time_s > SPIKE * least:
                outliers.append(Outlier(row, row.time_s / float(least), "longer than a larger size"))
            else:
                kept.append(row)
                least = min(least, row.time_s)
    kept.sort()
    return kept, sorted(outliers)


@dataclass(frozen=True)
class LatencyBandwidth:
    """``time = latency + size / rate`` of one curve.

    Attributes
    ----------
    latency_s, bytes_per_s : the line; the rate is algorithm bandwidth
    outliers : index of each point left out
    residual : median of |predicted / measured - 1| of the points kept
    """

    latency_s: float
    bytes_per_s: float
    outliers: tuple[int, ...]
    residual: float

    def seconds(self, size_bytes: ArrayLike) -> FloatArray:
        """Times on the line."""
        return self.latency_s + np.asarray(size_bytes, dtype=np.float64) / self.bytes_per_s


def fit_latency_bandwidth(size_bytes: Sequence[float], time_s: Sequence[float]) -> LatencyBandwidth:
    """Fit a line to one curve and leave out what does not belong to it.

    Soft-L1 on the log ratio, so small and large messages count alike and a stall does not pull; points more than
    5 robust deviations (at least 50 %) off are then left out, and the rest is fitted again.

    Raises
    ------
    CalibrationError
        With fewer than three points, or numbers that are not positive.
    """
    size, time = np.asarray(size_bytes, dtype=np.float64), np.asarray(time_s, dtype=np.float64)
    if size.shape != time.shape or size.size < 3:
        raise CalibrationError(f"a line needs 3 points or more; {size.size} sizes and {time.size} times are given")
    if not (np.isfinite(size) & np.isfinite(time) & (size > 0) & (time > 0)).all():
        raise CalibrationError("a size or time is not finite and > 0; remove that row")
    keep = np.ones(size.size, dtype=bool)
    for _ in range(3):
        latency, rate = _line(size[keep], time[keep])
        off = np.abs(np.log((latency + size / rate) / time))
        limit = max(np.log(SPIKE), 5 * 1.4826 * float(np.median(off[keep])))
        now = off <= limit
        if (now == keep).all() or now.sum() < 3:
            break
        keep = now
    residual = float(np.median(np.abs((latency + size[keep] / rate) / time[keep] - 1)))
    return LatencyBandwidth(latency, rate, tuple(int(i) for i in np.flatnonzero(~keep)), residual)


def _line(size: FloatArray, time: FloatArray) -> tuple[float, float]:
    slope = max((time[-1] - time[0]) / max(size[-1] - size[0], 1.0), 1e-15)
    start = np.log([max(float(time.min()), 1e-9), slope])

    def residuals(x: FloatArray) -> FloatArray:
        return np.asarray(np.log((np.exp(x[0]) + size * np.exp(x[1])) / time))

    found = least_squares(residuals, start, loss="soft_l1", f_scale=SOFT_SCALE, bounds=(start - 12, start + 12))
    return float(np.exp(found.x[0])), float(np.exp(-found.x[1]))


def fit_collective(
    rows: Iterable[CollectiveRow],
    *,
    architecture: str,
    link_bytes_per_s: float,
    switch_reduction: bool,
    source: Source,
    key: str = "nccl",
    notes: str = "",
) -> Fit:
    """Fit the structural model of one node (`overlapsim.cost.structural`) to measured rows.

    Ring collectives (all_reduce, all_gather, reduce_scatter) share one set of constants, the pairwise exchange
    (all_to_all) has its own; what has no rows is left out. The branch of each row is the tuner's, not a minimum.
    A kind without rows takes the ratios of its nearest relative: reduce_scatter those of all_reduce.

    Parameters
    ----------
    rows : of one node; spikes are left out (`split_spikes` shows them)
    architecture, link_bytes_per_s, switch_reduction : of the platform: device architecture, sheet rate of NVLink per
        GPU and direction, whether the switch reduces
    source, key, notes : of the fit

    Returns
    -------
    Fit
        ``collective.KEY`` with parameters in SI units; ``spread`` is empty: it must come from rows not fitted.

    Raises
    ------
    CalibrationError
        If rows span nodes, there is no NVLink, or fewer than eight rows of one group are left.
    """
    kept, outliers = split_spikes(rows)
    if link_bytes_per_s <= 0:
        raise CalibrationError("there is no NVLink: PCIe tables do not transfer between rank counts; keep the tables")
    if far := [row for row in kept if row.nodes != 1]:
        raise CalibrationError(f"{len(far)} rows span nodes; fit_collective takes rows of one node")
    parameters: dict[str, float] = {"link_rate": link_bytes_per_s}
    count = 0
    for kinds, names in ((RING_KINDS, RING_PARAMETERS), (PAIR_KINDS, PAIR_PARAMETERS)):
        mine = [row for row in kept if row.kind in kinds and row.ranks > 1]
        if not mine:
            continue
        if len(mine) < 8:
            raise CalibrationError(f"{len(mine)} rows of {', '.join(kinds)} are left; expected 8 or more")
        count += len(mine)
        parameters |= _fit_group(mine, names, architecture, link_bytes_per_s, switch_reduction)
    if not count:
        raise CalibrationError(f"no row of {', '.join((*RING_KINDS, *PAIR_KINDS))} with 2 ranks or more")
    if outliers:
        notes = f"{notes}; {len(outliers)} spikes left out".removeprefix("; ")
    return Fit("collective", key, parameters, source, count, {}, notes)


def residuals(fit: Fit, rows: Sequence[CollectiveRow], architecture: str, *, switch_reduction: bool) -> FloatArray:
    """Predicted over measured, minus one, of rows in order; NaN for a kind that the fit does not hold."""
    model = OneNodeModel(fit.parameters, architecture, fit.parameters["link_rate"], switch_reduction)
    return np.array(
        [
            float(model.seconds(row.kind, row.ranks, np.array([row.size_bytes]))[0]) / row.time_s - 1
            if model.prices(row.kind)
            else np.nan
            for row in rows
        ]
    )


def with_spread(fit: Fit, spread: Mapping[str, tuple[float, float]]) -> Fit:
    """The same fit with ranges from rows that it has not seen."""
    return replace(fit, spread=dict(spread))


def fit_document(fits: Iterable[Fit], of: str, notes: str = "") -> dict[str, Any]:
    """Content of a fit file (``hwprofiles/fits/collective/NAME.yaml``), times in us, rates in GB/s, sizes in KiB."""
    entries = {}
    for fit in fits:
        entries[fit.key] = {
            "source": fit.source.reference,
            "layer": fit.source.layer,
            "trust": fit.source.trust,
            "num_points": fit.num_points,
            "notes": fit.notes,
            "spread": {regime: [round(low, 3), round(high, 3)] for regime, (low, high) in fit.spread.items()},
            "parameters": {name: _leaf(name, value) for name, value in fit.parameters.items()},
        }
    said = {"notes": notes} if notes else {}
    return {"kind": "fit", "family": "collective", "of": of, **said, "fits": entries}


def _leaf(name: str, value: float) -> dict[str, Any]:
    known = {name: values[0] for name, values in {**RING_PARAMETERS, **PAIR_PARAMETERS}.items()} | {**FIXED_PARAMETERS}
    unit = known.get(name)
    unit = unit or ("B/s" if name.endswith("_rate") else "ratio" if name.endswith(("_norm", "_efficiency")) else "s")
    scale, shown = {"s": (1e6, "us"), "B/s": (1e-9, "GB/s"), "B": (1.0, "B"), "ratio": (1.0, "ratio")}[unit]
    return {"value": float(f"{value * scale:.4g}"), "unit": shown}


def _fit_group(
    rows: Sequence[CollectiveRow],
    names: Mapping[str, tuple[str, float, float, float]],
    architecture: str,
    link: float,
    switch_reduction: bool,
) -> dict[str, float]:
    """Constants of one group of collectives: bounded logs, soft-L1 on the log ratio, fixed starts."""
    keys = list(names)
    scale = np.array([link if unit == "B/s" else 1.0 for unit, *_ in names.values()])
    start, low, high = (np.log(np.array([values[i] for values in names.values()]) * scale) for i in (1, 2, 3))
    for name, shares in _SISTERS.items():
        if name in names and (share := shares.get(architecture.split("_")[0])) is not None:
            start[keys.index(name)] = np.log(share * link)
    start = np.clip(start, low + 1e-6, high - 1e-6)
    probe = OneNodeModel(dict.fromkeys(keys, 1.0), architecture, link, switch_reduction)
    data = []
    for (kind, ranks, _), curve in curves(rows).items():
        sizes = np.array([row.size_bytes for row in curve])
        log_time = np.log([row.time_s for row in curve])
        branch = probe.branches(kind, ranks, sizes) if kind in RING_KINDS else np.zeros(sizes.size, dtype=np.intp)
        data.append((kind, ranks, sizes, log_time, branch))
    ties = [
        (keys.index(a), None if b is None else keys.index(b), weight)
        for a, b, weight in (
            ("reduce_scatter_rate_ratio", "all_reduce_rate_ratio", 0.5),
            ("reduce_scatter_copy_ratio", "all_reduce_copy_ratio", 0.2),
            ("all_reduce_rate_ratio", None, 0.5),
            ("all_reduce_copy_ratio", None, 0.2),
        )
        if a in names
    ]

    def off(x: FloatArray) -> FloatArray:
        values = dict(zip(keys, np.exp(x).tolist(), strict=True))
        model = OneNodeModel({**values, "link_rate": link}, architecture, link, switch_reduction)
        parts = [_PULL * (x - start)]
        parts.append(np.array([weight * (x[a] - (0.0 if b is None else x[b])) for a, b, weight in ties]))
        for kind, ranks, sizes, log_time, branch in data:
            if kind in RING_KINDS:
                seconds = model.priced(kind, ranks, sizes, branch)
            else:
                seconds = model.pair_seconds(kind, ranks, sizes)
            parts.append(np.log(seconds) - log_time)
            if sizes.size > 1 and sizes[-2] >= _LARGE:
                slope = max(seconds[-1] - seconds[-2], 1e-9) / (np.exp(log_time[-1]) - np.exp(log_time[-2]))
                parts.append(np.array([_SLOPE * np.log(slope)]))
        return np.concatenate(parts)

    found = least_squares(off, start, bounds=(low, high), loss="soft_l1", f_scale=SOFT_SCALE, max_nfev=200)
    return dict(zip(keys, np.exp(found.x).tolist(), strict=True))


def curves(rows: Iterable[CollectiveRow]) -> dict[tuple[str, int, int], list[CollectiveRow]]:
    """Rows of one kind, ranks and nodes by rising size; repeats of a size become their median."""
    groups: dict[tuple[str, int, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        groups[row.kind, row.ranks, row.nodes][row.size_bytes].append(row.time_s)
    return {
        key: [CollectiveRow(*key, size, float(np.median(times))) for size, times in sorted(sizes.items())]
        for key, sizes in sorted(groups.items())
    }

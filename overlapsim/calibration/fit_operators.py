"""Constants of attention, memory-bound and stack-specific GEMM models from measured times, with honest spreads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares

from overlapsim.calibration.operator_models import WorkGroup, group_works
from overlapsim.calibration.operator_rows import Work
from overlapsim.cost import attention, grouped_fit, memory_bound
from overlapsim.cost.priced import REGIMES, regimes
from overlapsim.errors import CalibrationError
from overlapsim.hardware.profile import DeviceSpec, Fit, Source
from overlapsim.workload.memory_bound import MemoryOp

FloatArray = NDArray[np.float64]
Model = Callable[[Mapping[str, float]], FloatArray]

# Soft-L1 beyond 5 %: a kernel that the library chose badly does not bend the curve.
LOSS_SCALE: Final = 0.05
# Weight of the prior against one measured point, per factor e: holds what the points say nothing about.
PRIOR_WEIGHT: Final = 0.02
# Points under which a regime takes the spread of all of them together.
LEAST_SPREAD_POINTS: Final = 12
# Share of points beyond each end. A little under 5 %: a fold's constants rest on half of the points.
SPREAD_TAIL: Final = 0.045
LEAST_POINTS: Final = 4
_ORIGIN: Final = 10.0

# Physical limits, per family and parameter; the start is the prior of the cost model.
LIMITS: Final[Mapping[str, Mapping[str, tuple[float, float]]]] = {
    "prefill": {
        "floor_s": (0.5e-6, 100e-6),
        "tensor_efficiency": (0.1, 1.0),
        "narrow_efficiency": (0.08, 1.0),
        "broad_efficiency": (0.08, 1.0),
        "diagonal": (1.0, 1000.0),
        "narrow_diagonal": (1.0, 1000.0),
        "hbm_efficiency": (0.2, 1.0),
        "kv_traffic": (1.0, 8.0),
        "token_s": (1e-13, 10e-9),
        "path": (1e-3, 1.5),
    },
    "decode": {
        "floor_s": (1e-6, 100e-6),
        "tensor_efficiency": (0.05, 1.0),
        "hbm_efficiency": (0.3, 1.0),
        "group_rows": (1.0, 64.0),
        "norm": (1.0, 6.0),
    },
    "linear": {
        "floor_s": (0.5e-6, 60e-6),
        "tensor_efficiency": (0.2, 1.0),
        "half_tile": (0.4, 1.0),
        "hbm_efficiency": (0.3, 1.0),
        "fill_s": (1e-9, 20e-6),
        "norm": (1.0, 6.0),
        "narrow": (0.01, 120.0),
    },
    "memory": {
        "floor_s": (0.5e-6, 200e-6),
        "column_s": (1e-13, 5e-9),
        "hbm_efficiency": (0.1, 1.0),
        "l2_efficiency": (0.1, 3.0),
        "row_s": (1e-13, 100e-9),
        "norm": (1.0, 6.0),
    },
}
_PRIORS: Final[Mapping[str, Mapping[str, float]]] = {
    "prefill": attention.PREFILL_PRIOR,
    "decode": attention.DECODE_PRIOR,
    "linear": grouped_fit.PRIOR,
    "memory": memory_bound.PRIOR,
}


def fit_works(device: DeviceSpec, works: Sequence[Work], time_s: ArrayLike, source: Source, notes: str = "") -> Fit:
    """Fit the constants of one key to measured times of its operators.

    Soft-L1 on the logarithm of model over measured, all constants as logarithms inside `LIMITS`, a weak pull to the
    stated prior; two starts; deterministic. The spread of each regime comes from two folds, each predicted with the
    constants fitted to the other: no point judges itself.

    Parameters
    ----------
    device : what the times were measured on
    works : operators, all of one family and key
    time_s : one time each, seconds
    source : where the times are from
    notes : kept in the fit, before the residuals

    Returns
    -------
    Fit
        Family, key, constants with the box of sizes they saw, number of points and spread by regime.

    Raises
    ------
    CalibrationError
        If there are fewer than four points, the operators do not share a key, or a time is not a positive number.
    """
    times = np.asarray(time_s, dtype=np.float64)
    groups = group_works(works)
    if len({(group.key.family, group.key.key) for group in groups}) != 1:
        raise CalibrationError("operators of several fits given; expected one family and key at a time")
    key = groups[0].key
    if len(times) != len(works) or len(times) < LEAST_POINTS:
        raise CalibrationError(
            f"{key.family}.{key.key}: {len(times)} times for {len(works)} operators; expected as many, at least "
            f"{LEAST_POINTS}"
        )
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise CalibrationError(f"{key.family}.{key.key}: a time is not a positive number of seconds; check the unit")
    form = _form(groups[0])
    counts = np.array([work.times for work in works])
    parameters = _fit_groups(device, groups, times / counts, form)
    fold = np.arange(len(times)) % 2
    ratio, share = np.empty(len(times)), np.empty(len(times), dtype=np.intp)
    for number in (0, 1):
        kept = np.flatnonzero(fold != number).tolist()
        others = parameters
        if len(kept) >= LEAST_POINTS:
            others = _fit_groups(device, group_works([works[i] for i in kept]), (times / counts)[kept], form)
        predicted = _seconds(device, groups, others) * counts
        here = fold == number
        ratio[here] = (times / predicted)[here]
        share[here] = regimes(predicted, parameters["floor_s"] * counts)[here]
    residual = np.abs(_seconds(device, groups, parameters) * counts / times - 1)
    text = f"residuals of the fitted points: median {np.median(residual):.3f}, p90 {np.quantile(residual, 0.9):.3f}"
    return Fit(
        key.family,
        key.key,
        {**parameters, **_box(groups)},
        source,
        len(times),
        _spreads(ratio, share),
        f"{notes}; {text}" if notes else text,
    )


def fit_device_memory(
    device: DeviceSpec,
    op: str,
    rows: ArrayLike,
    columns: ArrayLike,
    dtype: str,
    time_s: ArrayLike,
    *,
    pass_: str = "fwd",
    reference: str = "own measurement",
) -> Fit:
    """Fit a memory-bound operator to a user's own times.

    Parameters
    ----------
    device : what they were measured on
    op : one of `overlapsim.workload.memory_bound.MEMORY_KINDS`
    rows, columns : grids, arrays of one length
    dtype, pass_ : of all of them
    time_s : one time each, seconds

    Returns
    -------
    Fit
        Family ``memory``, key `op`.

    Raises
    ------
    CalibrationError
        As `fit_works`.
    WorkloadError
        If the operator is unknown.
    """
    grid = np.broadcast_arrays(np.asarray(rows), np.asarray(columns))
    works = [
        Work(MemoryOp(op, int(row), int(column), dtype, pass_), op, dtype)
        for row, column in zip(grid[0].ravel(), grid[1].ravel(), strict=True)
    ]
    return fit_works(device, works, time_s, Source("measured", reference, "high"))


def adopt(fit: Fit, owner: str, reference: str) -> Fit:
    """The fit of a sister for a device without points: a prior whose spread is that of an unmeasured device.

    Examples
    --------
    >>> fit = Fit("memory", "add", {"floor_s": 2e-6}, Source("derived", "VIDUR"), 40, {"ramp": (0.9, 1.1)})
    >>> adopt(fit, "h100", "SISTER").num_points
    0
    """
    box = ("_low", "_high")
    constants = {name: value for name, value in fit.parameters.items() if not name.endswith(box)}
    notes = f"taken over from {owner}, whose {fit.num_points} points it was fitted to"
    return Fit(fit.family, fit.key, constants, Source("derived", reference, "low"), 0, {}, notes)


def _form(group: WorkGroup) -> str:
    if group.key.family != attention.FAMILY:
        return group.key.family
    return "decode" if group.key.kind == "decode" else "prefill"


def _fit_groups(device: DeviceSpec, groups: list[WorkGroup], time_s: FloatArray, form: str) -> dict[str, float]:
    return robust_fit(lambda constants: _seconds(device, groups, constants), _PRIORS[form], LIMITS[form], time_s)


def robust_fit(
    model: Model, start: Mapping[str, float], limits: Mapping[str, tuple[float, float]], time_s: FloatArray
) -> dict[str, float]:
    """Constants inside `limits` with which `model` is nearest to the times, on a logarithmic scale.

    Parameters
    ----------
    model : times for constants by name
    start : the prior, also the first start
    limits : lowest and highest value of each, above 0

    Returns
    -------
    dict of str to float
        One value for each name in `limits`.
    """
    names = tuple(limits)
    low = np.array([limits[name][0] for name in names])
    high = np.array([limits[name][1] for name in names])
    prior = np.clip([start[name] for name in names], low * 1.001, high * 0.999)
    target = np.log(time_s)

    # Shifted logarithms: relative steps of the numeric derivative are steps of 0.1 % in every constant.
    def constants(x: FloatArray) -> dict[str, float]:
        return dict(zip(names, (prior * np.exp(x - _ORIGIN)).tolist(), strict=True))

    def residuals(x: FloatArray) -> FloatArray:
        # `least_squares` applies the loss to all residuals; the pull is small enough to stay quadratic.
        pull = PRIOR_WEIGHT * LOSS_SCALE * (x - _ORIGIN)
        return np.concatenate([np.log(model(constants(x))) - target, pull])

    bounds = (np.log(low / prior) + _ORIGIN, np.log(high / prior) + _ORIGIN)
    best = None
    middle = np.clip(_ORIGIN + 0.4 * np.cos(np.arange(len(names)) * np.pi), bounds[0], bounds[1])
    for first in (np.full(len(names), _ORIGIN), middle):
        found = least_squares(
            residuals,
            first,
            bounds=bounds,
            loss="soft_l1",
            f_scale=LOSS_SCALE,
            diff_step=[1e-4] * len(names),
            max_nfev=60,
        )
        if best is None or found.cost < best.cost * (1 - 1e-9):
            best = found
    assert best is not None
    return constants(best.x)


def _seconds(device: DeviceSpec, groups: list[WorkGroup], constants: Mapping[str, float]) -> FloatArray:
    total = sum(len(group.positions) for group in groups)
    seconds = np.empty(total)
    for group in groups:
        seconds[group.positions] = group.seconds(constants, device)
    return seconds


def _spreads(ratio: FloatArray, regime: NDArray[np.intp]) -> dict[str, tuple[float, float]]:
    spreads: dict[str, tuple[float, float]] = {}
    for number, name in enumerate(REGIMES):
        members = ratio[regime == number]
        if len(members) < LEAST_SPREAD_POINTS:
            members = ratio
        low, high = _ends(members)
        spreads[name] = (min(1.0, low), max(1.0, high))
    return spreads


def _ends(ratio: FloatArray) -> tuple[float, float]:
    """Order statistics beyond which a new point falls with probability `SPREAD_TAIL`; of few points the outermost."""
    ordered, count = np.sort(ratio), len(ratio)
    below = max(0, int(np.floor((count + 1) * SPREAD_TAIL)) - 1)
    return float(ordered[below]), float(ordered[count - 1 - below])


def _box(groups: list[WorkGroup]) -> dict[str, float]:
    ends: dict[str, float] = {}
    for group in groups:
        for name, values in group.ranges().items():
            ends[f"{name}_low"] = min(ends.get(f"{name}_low", np.inf), float(values.min()))
            ends[f"{name}_high"] = max(ends.get(f"{name}_high", -np.inf), float(values.max()))
    return ends

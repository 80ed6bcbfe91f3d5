"""GEMM constants of a device from measured shapes: 60 to 120 of them are enough, thousands are welcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from overlapsim.cost.gemm_fitted import (
    FittedGemm,
    GemmRows,
    machine_of,
    regime,
    residual_layer,
)
from overlapsim.cost.gemm_model import GemmMachine, GemmParameters, constants, model_seconds, warm_scale
from overlapsim.errors import CalibrationError
from overlapsim.hardware.profile import DeviceSpec, Fit, Source

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

LEAST_ROWS: Final = 30
# Log ratios beyond this count linearly, not squared: tables hold cells that are several times off.
SOFT_SCALE: Final = 0.05
# A pull to the middle of the range seen on seven devices, in natural logarithms: what shapes do not tell stays there.
PULL: Final = 0.01
# Starting points of which the best end counts: the form has kinks.
STARTS: Final = (0.0, 0.25)
MAX_EVALUATIONS: Final = 80
# Residual and layer need neighbours; below this a layer of a few points would only repeat their noise.
LEAST_LAYER_ROWS: Final = 500

# Start, lowest, highest.  Rates of one SM and of L2 are bytes per SM and clock.
RANGES: Final[Mapping[str, tuple[float, float, float]]] = {
    "launch_s": (1.5e-6, 0.2e-6, 6e-6),
    "compute_efficiency": (0.93, 0.35, 1.0),
    "hbm_efficiency": (0.82, 0.5, 1.0),
    "sm_load_bytes_per_s": (160.0, 16.0, 1024.0),
    "fill_s": (1.0e-6, 0.05e-6, 4e-6),
    "split_s": (2.3e-6, 0.2e-6, 6e-6),
    "epilogue_s": (1.0e-6, 0.01e-6, 6e-6),
    "tile_64x64": (0.70, 0.2, 1.3),
    "tile_64x128": (0.90, 0.3, 1.3),
    "tile_128x128": (1.0, 0.4, 1.3),
    "tile_128x192": (1.0, 0.4, 1.3),
    "l2_bytes_per_s": (64.0, 8.0, 256.0),
    "reread": (0.4, 0.01, 3.0),
}
# Of a peak that is a guess: a CPU whose clock and vector units nobody wrote down may reach a tenth of it.
GUESSED_PEAK: Final[Mapping[str, tuple[float, float, float]]] = {"compute_efficiency": (0.93, 0.02, 1.0)}
QUANTISE_RANGES: Final[Mapping[str, tuple[float, float, float]]] = {
    "quantise_launch_s": (4e-6, 0.1e-6, 20e-6),
    "quantise_floor_s": (4e-6, 0.1e-6, 20e-6),
    "quantise_efficiency": (0.35, 0.02, 1.0),
}
WARM_RANGE: Final[Mapping[str, tuple[float, float, float]]] = {"warm_rate": (2.0, 1.0, 5.0)}
PER_SM_AND_CLOCK: Final = ("sm_load_bytes_per_s", "l2_bytes_per_s")


def fit_gemm(
    rows: GemmRows,
    device: DeviceSpec,
    dtype: str = "bf16",
    *,
    reference: str = "own measurements",
    quantised: bool = False,
    warm: bool = False,
    launch_s: float | None = None,
) -> Fit:
    """Fit the parametric form to measured shapes.

    Soft-L1 on log(model / measured) within physical bounds, with a weak pull
    to what other devices have; deterministic, a second for thousands of rows.

    Parameters
    ----------
    rows : shapes and times; 60 to 120 well spread ones tell a new device
    device : datasheet figures (peak, SMs, clock, HBM, L2)
    dtype : of A and B
    reference : where the rows come from; ``gemm/NAME.csv`` for a bundled table, whose residuals then count too
    quantised : the rows are linear layers that quantise A first
    warm : the benchmark left weights in L2 when its copies just filled it (see `warm_scale`)
    launch_s : kernel floor to keep, where other kernels hide it (quantised rows)

    Returns
    -------
    Fit
        Family ``gemm``, without ranges: see `with_spread`.

    Raises
    ------
    CalibrationError
        If there are fewer than 30 rows, or times that are not positive and finite.
    ProfileError
        If the device has no rate for the dtype.
    """
    _check(rows)
    machine = machine_of(device, dtype)
    ranges = {**RANGES, **(QUANTISE_RANGES if quantised else {}), **(WARM_RANGE if warm else {})}
    peak = device.sources.get(f"peak_flop_per_s.{dtype}")
    if peak is not None and peak.layer == "prior":
        ranges.update(GUESSED_PEAK)
    if launch_s is not None:
        del ranges["launch_s"]
    known = {} if launch_s is None else {"launch_s": launch_s}
    units = np.array([_unit(name, device) for name in ranges])
    start, low, high = np.log(np.array(list(ranges.values())).T * units)
    target = np.log(rows.time_s)
    names = list(ranges)

    def parameters(x: FloatArray) -> GemmParameters:
        return GemmParameters.from_mapping({**known, **dict(zip(names, np.exp(x).tolist(), strict=True))})

    def off(x: FloatArray) -> FloatArray:
        return np.concatenate((np.log(modelled(rows, machine, parameters(x))) - target, PULL * (x - start)))

    found = [_search(off, start + shift * np.cos(2.0 * np.arange(start.size)), low, high) for shift in STARTS]
    best = parameters(min(found, key=lambda end: end[1])[0])
    return Fit("gemm", dtype, best.to_mapping(), Source("measured", reference, "high"), len(rows))


def modelled(rows: GemmRows, machine: GemmMachine, parameters: GemmParameters) -> FloatArray:
    """Times of the form for rows as they were measured: quantising and warm operands included."""
    scale = 1.0 if parameters.warm_rate == 1.0 else warm_scale(machine, parameters, rows.m, rows.n, rows.k)
    return model_seconds(constants(machine, parameters), rows.m, rows.n, rows.k, scale)


def predicted(fit: Fit, device: DeviceSpec, rows: GemmRows, fitted: GemmRows | None = None) -> FloatArray:
    """Times for rows as they were measured, with the residuals of the rows that were fitted.

    Parameters
    ----------
    fit : from `fit_gemm`
    device : that was fitted
    rows : to predict; their times are not looked at
    fitted : rows of the residual layer; none, or fewer than 500, leaves the parametric form alone
    """
    machine, parameters = machine_of(device, fit.key), GemmParameters.from_mapping(fit.parameters)
    seconds = modelled(rows, machine, parameters)
    if fitted is None or len(fitted) < LEAST_LAYER_ROWS:
        return seconds
    model = FittedGemm(fit, machine, parameters, residual_layer(fitted, machine, parameters))
    quantise = model.quantises
    correction = model.seconds(rows.m, rows.n, rows.k, quantise=quantise) / model.seconds(
        rows.m, rows.n, rows.k, quantise=quantise, residual=False
    )
    return seconds * correction


def spread_by_regime(
    ratio: FloatArray, m: FloatArray, k: FloatArray, *, least: int = 20
) -> dict[str, tuple[float, float]]:
    """Central 90 % of measured over predicted, by regime; regimes of fewer points take all points' range."""
    names = np.array([regime(*shape) for shape in zip(m.tolist(), k.tolist(), strict=True)])
    whole = _central(ratio)
    found = {name: ratio[names == name] for name in sorted(set(names.tolist()))}
    return {name: _central(part) if part.size >= least else whole for name, part in found.items()}


def anchors(rows: GemmRows, count: int) -> BoolArray:
    """Mask of `count` rows spread over the table: each the farthest, in octaves, from those taken before.

    What a user with an hour of a new GPU should measure; deterministic.
    """
    octaves = np.log2(np.stack((rows.m, rows.n, rows.k), axis=1))
    chosen = np.zeros(len(rows), dtype=bool)
    distance = np.linalg.norm(octaves - np.median(octaves, axis=0), axis=1)
    nearest = np.full(len(rows), np.inf)
    place = int(np.argmin(distance))
    for _ in range(min(count, len(rows))):
        chosen[place] = True
        nearest = np.minimum(nearest, np.linalg.norm(octaves - octaves[place], axis=1))
        place = int(np.argmax(nearest))
    return chosen


def _search(off: object, start: FloatArray, low: FloatArray, high: FloatArray) -> tuple[FloatArray, float]:
    assert callable(off)
    inside = np.clip(start, low + 1e-3, high - 1e-3)
    end = least_squares(
        off,
        inside,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=SOFT_SCALE,
        diff_step=[3e-4] * start.size,
        # Small dense factorisations wait for threads longer than they compute on a busy machine.
        tr_solver="lsmr",
        max_nfev=MAX_EVALUATIONS,
    )
    return np.asarray(end.x), float(end.cost)


def _unit(name: str, device: DeviceSpec) -> float:
    if name not in PER_SM_AND_CLOCK:
        return 1.0
    return device.boost_clock_hz * (device.num_sms if name == "l2_bytes_per_s" else 1)


def _central(ratio: FloatArray) -> tuple[float, float]:
    low, high = np.quantile(ratio, (0.05, 0.95)).tolist()
    return low, high


def _check(rows: GemmRows) -> None:
    if len(rows) < LEAST_ROWS:
        raise CalibrationError(f"{len(rows)} GEMM shapes were given; expected at least {LEAST_ROWS}, better 120")
    columns: Sequence[FloatArray] = [getattr(rows, item.name) for item in fields(rows)]
    if not all(np.all(np.isfinite(column) & (column > 0)) for column in columns):
        raise CalibrationError("GEMM shapes hold sizes or times that are not positive and finite; remove those rows")

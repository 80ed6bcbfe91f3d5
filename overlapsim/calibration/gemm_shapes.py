"""GEMM shapes of one type on one device: price of the profile, lower bound, and the forms that can be fitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from overlapsim.calibration.fit_gemm import anchors, fit_gemm, spread_by_regime
from overlapsim.cost.gemm import gemm_cost
from overlapsim.cost.gemm_fitted import FittedGemm, GemmRows, fitted_gemm
from overlapsim.cost.gemm_model import GemmParameters
from overlapsim.hardware.profile import DeviceSpec, Fit, Source
from overlapsim.units import dtype_bytes
from overlapsim.workload.operators import GemmOp

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Form = Literal["own", "own_layers", "scaled"]
"""Constants of the device alone; of layers that quantise their input; the base's constants and residuals, scaled."""

CALIBRATED: Final = "calibrated"
"""Beginning of the notes of fits that were made here."""
MAX_FITTED: Final = 400
LEAST_ROWS: Final[Mapping[Form, int]] = {"own": 30, "own_layers": 30, "scaled": 12}
SOFT_SCALE: Final = 0.05
# One factor for each group of constants: a sister differs in clocks and rates, not in the shape of its kernels.
_GROUPS: Final = (
    ("launch_s", "fill_s", "split_s", "epilogue_s"),
    ("compute_efficiency",),
    ("hbm_efficiency",),
    ("l2_bytes_per_s", "sm_load_bytes_per_s"),
    ("quantise_launch_s", "quantise_floor_s"),
)
_PULL: Final = 0.3
_LIMIT: Final = 1.6


def rows_of(shapes: IntArray, time_s: FloatArray) -> GemmRows:
    """Shapes (N, 3) and their times as the fit takes them."""
    m, n, k = shapes.astype(np.float64).T
    return GemmRows(m, n, k, time_s)


def profile_seconds(device: DeviceSpec, dtype: str, shapes: IntArray) -> FloatArray:
    """What the device's profile prices shapes (N, 3) at, on all SMs.

    A fit that was made here of layers that quantise their input prices such layers; all else are plain kernels.
    """
    model = fitted_gemm(device, dtype)
    if model is None:
        ops = (GemmOp(m, n, k, dtype) for m, n, k in shapes.tolist())
        return np.array([gemm_cost(op, device).duration_s for op in ops])
    return _seconds(model, shapes, quantise=model.quantises and model.fit.notes.startswith(CALIBRATED))


def bound_seconds(device: DeviceSpec, dtype: str, shapes: IntArray) -> FloatArray:
    """FLOP at the dense peak.

    A, B and C over HBM are no bound here: benchmarks that repeat one shape find operands in L2.
    """
    m, n, k = shapes.astype(np.float64).T
    return np.asarray(2.0 * m * n * k / device.peak(dtype))


def forms_of(device: DeviceSpec, dtype: str, num_rows: int) -> tuple[Form, ...]:
    """Forms that as many rows can determine."""
    base = fitted_gemm(device, dtype)
    forms: list[Form] = ["own"]
    if dtype_bytes(dtype) == 1:
        forms.append("own_layers")
    if base is not None and base.layer is not None:
        forms.append("scaled")
    return tuple(form for form in forms if num_rows >= LEAST_ROWS[form])


def fit_form(device: DeviceSpec, dtype: str, form: Form, rows: GemmRows, reference: str) -> Fit:
    """Fit one form.

    Of more than 400 rows, 400 that lie far apart are taken: the constants are the same within their error.

    Parameters
    ----------
    device : base profile's
    form : one of `forms_of`
    rows : measured shapes
    reference : where they are
    """
    chosen = rows[anchors(rows, MAX_FITTED)] if len(rows) > MAX_FITTED else rows
    if form == "scaled":
        fit = _scaled(device, dtype, chosen, reference)
    else:
        fit = fit_gemm(chosen, device, dtype, reference=reference, quantised=form == "own_layers")
        fit = replace(fit, notes=f"{CALIBRATED} on {reference}")
    return replace(fit, key=dtype, num_points=len(rows))


def fit_seconds(fit: Fit, device: DeviceSpec, shapes: IntArray) -> FloatArray:
    """Times of shapes (N, 3) by a fit of this device, as they were measured."""
    with_fit = replace(device, fits={**device.fits, f"gemm.{fit.key}": fit})
    model = fitted_gemm(with_fit, fit.key)
    assert model is not None
    return _seconds(model, shapes, quantise=model.quantises)


def spread(rows: GemmRows, seconds: FloatArray, which: BoolArray) -> dict[str, tuple[float, float]]:
    """Central 90 % of measured over predicted of the rows `which`, by the regimes of the GEMM model."""
    ranges = spread_by_regime(rows.time_s[which] / seconds[which], rows.m[which], rows.k[which])
    return {str(name): (min(1.0, low), max(1.0, high)) for name, (low, high) in ranges.items()}


def is_of_layers(fit: Fit) -> bool:
    """Whether a GEMM fit is of layers that quantise their input."""
    return fit.family == "gemm" and fit.parameters.get("quantise_launch_s", 0.0) > 0


def _seconds(model: FittedGemm, shapes: IntArray, *, quantise: bool) -> FloatArray:
    m, n, k = shapes.astype(np.float64).T
    return np.asarray(model.seconds(m, n, k, quantise=quantise))


def _scaled(device: DeviceSpec, dtype: str, rows: GemmRows, reference: str) -> Fit:
    """The base's constants by groups, each times a factor that the rows tell; its residuals stay."""
    base = fitted_gemm(device, dtype)
    assert base is not None
    values = base.parameters.to_mapping()
    groups = _GROUPS if base.quantises else _GROUPS[:-1]

    def parameters(x: FloatArray) -> GemmParameters:
        factors = {name: factor for names, factor in zip(groups, np.exp(x).tolist(), strict=True) for name in names}
        return GemmParameters.from_mapping({name: value * factors.get(name, 1.0) for name, value in values.items()})

    def off(x: FloatArray) -> FloatArray:
        model = replace(base, parameters=parameters(x))
        seconds = model.seconds(rows.m, rows.n, rows.k, quantise=base.quantises)
        return np.concatenate((np.log(seconds / rows.time_s), _PULL * x))

    found = least_squares(
        off,
        np.zeros(len(groups)),
        bounds=(-_LIMIT, _LIMIT),
        loss="soft_l1",
        f_scale=SOFT_SCALE,
        diff_step=[3e-3] * len(groups),
    )
    # The source names the base's table: its residuals are part of this fit.
    source = Source("measured", base.fit.source.reference, "high")
    notes = f"{CALIBRATED} on {reference}: constants of {device.name} scaled, with the residuals of its table"
    return Fit("gemm", dtype, parameters(found.x).to_mapping(), source, len(rows), {}, notes)

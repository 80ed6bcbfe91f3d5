"""A device's fitted GEMM model: parameters, the table's residual layer and ranges, from its fit."""

from __future__ import annotations

import csv
import math
import weakref
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from overlapsim.cost.base import Spread
from overlapsim.cost.gemm_model import (
    ALIGNMENT_BYTES,
    LEAST_M,
    TILES,
    GemmMachine,
    GemmParameters,
    constants,
    kernel_seconds,
    locate_one,
    model_seconds,
    neighbourhood,
    price_one,
    warm_scale,
)
from overlapsim.cost.residuals import ResidualLayer
from overlapsim.errors import ProfileError
from overlapsim.hardware.catalogue import Library, bundled
from overlapsim.hardware.loading import load_device
from overlapsim.hardware.profile import DeviceSpec, Fit, Source
from overlapsim.units import dtype_bytes

FloatArray = NDArray[np.float64]

FAMILY: Final = "gemm"
# One kernel serves both 16-bit types.
TWINS: Final = {"fp16": "bf16", "bf16": "fp16"}
# Rows of A up to these make a regime, each divided at k = 1024: launch and wave fill, weights, tiles, large.
REGIME_ROWS: Final = (16, 256, 4096)
REGIME_NAMES: Final = ("m16", "small_m", "middle_m", "large_m")
REGIME_K: Final = 1024
# Tables with whole n and k unseen, and sisters' tables, stay inside these (a prior where a fit has no range).
UNKNOWN: Final = Spread(0.80, 1.25, "prior")
MEASURED_M: Final = (16, 32768)
MEASURED_N_K: Final = (32, 32768)
# Beside a scale of nvfp4: one byte for 16 elements.
ELEMENT_BYTES: Final = {"fp4": 0.5625}


@dataclass(frozen=True, eq=False)
class GemmRows:
    """Measured shapes of one dtype on one device; arrays of equal length, float64.

    Attributes
    ----------
    m, n, k : elements
    time_s : one call
    """

    m: FloatArray
    n: FloatArray
    k: FloatArray
    time_s: FloatArray

    def __len__(self) -> int:
        return len(self.m)

    def __getitem__(self, where: NDArray[np.bool_] | NDArray[np.intp]) -> GemmRows:
        return GemmRows(self.m[where], self.n[where], self.k[where], self.time_s[where])


@dataclass(frozen=True, eq=False)
class FittedGemm:
    """GEMM times of one device and dtype from its fit.

    Attributes
    ----------
    fit : parameters, ranges and their source
    machine, parameters : of the parametric form
    layer : residuals of the fit's table; None if there is none at hand
    """

    fit: Fit
    machine: GemmMachine
    parameters: GemmParameters
    layer: ResidualLayer | None

    @cached_property
    def linear_constants(self) -> FloatArray:
        """For all SMs, with the kernels that quantise A."""
        return constants(self.machine, self.parameters)

    @cached_property
    def kernel_constants(self) -> FloatArray:
        """For all SMs, the kernel alone."""
        return constants(self.machine, self.parameters.kernel_alone())

    @property
    def quantises(self) -> bool:
        """The table timed a linear layer that also quantises its input."""
        return self.parameters.quantise_launch_s + self.parameters.quantise_floor_s > 0

    def seconds(
        self, m: ArrayLike, n: ArrayLike, k: ArrayLike, *, quantise: bool = False, residual: bool = True
    ) -> FloatArray:
        """Times of many shapes on all SMs, broadcast against each other.

        Parameters
        ----------
        quantise : price a linear layer that quantises its input first (fp8, fp4)
        residual : add the residual layer, where the fit has one for this operator
        """
        m = np.maximum(np.asarray(m, dtype=np.float64), LEAST_M)
        m, n, k = (np.asarray(values, dtype=np.float64) for values in np.broadcast_arrays(m, n, k))
        found = model_seconds(self.linear_constants if quantise else self.kernel_constants, m, n, k)
        if residual and self.layer is not None and quantise == self.quantises:
            points, octaves = neighbourhood(self.kernel_constants, m.ravel(), n.ravel(), k.ravel())
            found = found * np.exp(self.layer.at(points, octaves)).reshape(found.shape)
        element, flop = self.machine.element_bytes, 2.0 * m * n * k
        bytes_moved = element * (m + n) * k + 2.0 * m * n
        bound = np.maximum(flop / self.machine.peak_flop_per_s, bytes_moved / self.machine.hbm_bandwidth_bytes_per_s)
        return np.maximum(found, bound)

    def best(self, m: float, n: float, k: float, sms: int, *, quantise: bool) -> tuple[float, tuple[int, int], int]:
        """(time, tile, split) of the library's kernel on `sms` SMs, with the residual layer."""
        m = max(m, LEAST_M)
        whole = self.linear_constants if quantise else self.kernel_constants
        c = whole if sms == self.machine.num_sms else constants(self.machine, self._operator(quantise), sms)
        time_s, tile, split = price_one(m, n, k, 1.0, c)
        if self.layer is not None and quantise == self.quantises:
            place, whole_split = (tile, split) if c is whole else price_one(m, n, k, 1.0, whole)[1:]
            point, octaves = np.empty(7), np.empty(3)
            locate_one(m, n, k, place, whole_split, whole, point, octaves)
            time_s *= math.exp(self.layer.at_one(point, octaves))
        return time_s, TILES[tile], split

    def kernel(self, m: float, n: float, k: float, tile_m: int, tile_n: int, sms: int) -> float:
        """Time of a kernel with that tile and no split k, without the library's peculiarities."""
        whole = self.kernel_constants
        c = whole if sms == self.machine.num_sms else constants(self.machine, self.parameters.kernel_alone(), sms)
        efficiency = self.parameters.efficiency_of(tile_m, tile_n)
        return kernel_seconds(m, n, k, 1.0, float(tile_m), float(tile_n), efficiency, 1, c)

    def belief(self, m: float, n: float, k: float, *, quantise: bool = False) -> tuple[Spread, Source, bool]:
        """Range, source and whether the shape was measured around, for a price."""
        return (
            self.spread(m, n, k, quantise=quantise),
            self.fit.source,
            self.in_range(m, n, k, quantise=quantise),
        )

    def spread(self, m: float, n: float, k: float, *, quantise: bool = False) -> Spread:
        """Central 90 % of measured over predicted in the regime; outside the measured box at least the prior."""
        known = self.fit.spread.get(regime(m, k)) if quantise == self.quantises else None
        if known is None:
            return UNKNOWN
        if not self.inside(m, n, k):
            return Spread(min(known[0], UNKNOWN.low), max(known[1], UNKNOWN.high), "prior")
        return Spread(min(known[0], 1.0), max(known[1], 1.0), "residual" if self.fit.num_points else "prior")

    def in_range(self, m: float, n: float, k: float, *, quantise: bool = False) -> bool:
        """Whether this operator was measured here in a box around the shape, and the shape's rows start at 16 bytes."""
        element = self.machine.element_bytes
        aligned = n * element % ALIGNMENT_BYTES == 0 and k * element % ALIGNMENT_BYTES == 0
        return aligned and self.fit.num_points > 0 and quantise == self.quantises and self.inside(m, n, k)

    def inside(self, m: float, n: float, k: float) -> bool:
        """The shape lies in the box of the table's sizes."""
        low, high = self._box
        return low[0] <= m <= high[0] and low[1] <= n <= high[1] and low[2] <= k <= high[2]

    @cached_property
    def _box(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if self.layer is None:
            (least_m, most_m), (least, most) = MEASURED_M, MEASURED_N_K
            return (least_m, least, least), (most_m, most, most)
        low, high = (tuple(np.round(2.0**side).tolist()) for side in (self.layer.low, self.layer.high))
        return low, high

    def _operator(self, quantise: bool) -> GemmParameters:
        return self.parameters if quantise else self.parameters.kernel_alone()


def regime(m: float, k: float) -> str:
    """Name of the regime that ranges and biases are kept by.

    Examples
    --------
    >>> regime(4096, 512), regime(17, 8192)
    ('middle_m.short_k', 'small_m.long_k')
    """
    rows = next((name for name, most in zip(REGIME_NAMES, REGIME_ROWS, strict=False) if m <= most), REGIME_NAMES[-1])
    return f"{rows}.{'short_k' if k < REGIME_K else 'long_k'}"


_Known = tuple["weakref.ref[DeviceSpec]", "FittedGemm | None"]
# Planners price 100,000 kernels of a few devices: what is found for a device is kept as long as the device lives.
_FOUND: Final[dict[tuple[int, str, str], _Known]] = {}


def fitted_gemm(device: DeviceSpec, dtype: str, accumulate: str = "fp32") -> FittedGemm | None:
    """The device's fitted model for a dtype; None if it has no fit for it.

    Raises
    ------
    ProfileError
        If the fit lacks parameters, or the device has no rate for the dtype.
    """
    key = (id(device), dtype, accumulate)
    known = _FOUND.get(key)
    if known is not None and known[0]() is device:
        return known[1]
    found = _find(device, dtype, accumulate)
    _FOUND[key] = (weakref.ref(device, lambda _: _FOUND.pop(key, None)), found)
    return found


def machine_of(device: DeviceSpec, dtype: str, accumulate: str = "fp32") -> GemmMachine:
    """What the form needs of a device.

    Raises
    ------
    ProfileError
        If the device has no rate for the dtype.
    """
    return GemmMachine(
        device.num_sms,
        device.peak(dtype, accumulate),
        device.hbm_bandwidth_bytes_per_s,
        device.l2_bytes,
        ELEMENT_BYTES[dtype] if dtype in ELEMENT_BYTES else float(dtype_bytes(dtype)),
    )


def residual_layer(rows: GemmRows, machine: GemmMachine, parameters: GemmParameters) -> ResidualLayer:
    """What the form leaves over at measured shapes, of the operator that was measured."""
    scale = warm_scale(machine, parameters, rows.m, rows.n, rows.k)
    modelled = model_seconds(constants(machine, parameters), rows.m, rows.n, rows.k, scale)
    alone = constants(machine, parameters.kernel_alone())
    points, octaves = neighbourhood(alone, rows.m, rows.n, rows.k)
    return ResidualLayer.of(points, np.log(rows.time_s / modelled), octaves)


@lru_cache
def bundled_rows(file: str, dtype: str) -> GemmRows | None:
    """Rows of a dtype of ``tables/FILE`` among the bundled; None if there is no such table or no such row."""
    entry = Library((bundled(),)).table(file)
    if entry is None or not file.startswith("gemm/"):
        return None
    lines = (line for line in entry.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    rows = [
        [float(row[name]) for name in ("m", "n", "k", "time_us")]
        for row in csv.DictReader(lines)
        if row["dtype"] == dtype
    ]
    if not rows:
        return None
    columns = np.array(rows).T
    return GemmRows(columns[0], columns[1], columns[2], columns[3] * 1e-6)


@lru_cache
def _bundled_layer(file: str, dtype: str) -> ResidualLayer | None:
    """Residuals of a bundled table against the fit of the device it was measured on."""
    rows = bundled_rows(file, dtype)
    if rows is None:
        return None
    owner = load_device(file.removeprefix("gemm/").removesuffix(".csv"))
    fit = owner.fits.get(f"{FAMILY}.{dtype}")
    if fit is None:
        raise ProfileError(f"table {file} is named by a fit, but {owner.name} has no {FAMILY}.{dtype} fit of its own")
    return residual_layer(rows, machine_of(owner, dtype), GemmParameters.from_mapping(fit.parameters))


def _find(device: DeviceSpec, dtype: str, accumulate: str) -> FittedGemm | None:
    names = (dtype, TWINS.get(dtype, dtype))
    fit = next((device.fits[f"{FAMILY}.{name}"] for name in names if f"{FAMILY}.{name}" in device.fits), None)
    if fit is None:
        return None
    parameters = GemmParameters.from_mapping(fit.parameters)
    return FittedGemm(
        fit, machine_of(device, dtype, accumulate), parameters, _bundled_layer(fit.source.reference, fit.key)
    )

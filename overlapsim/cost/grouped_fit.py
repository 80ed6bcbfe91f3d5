"""GEMMs of one software stack as it was measured, grouped by expert or not: tiles, waves and rates of that stack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from overlapsim.cost.base import Cost
from overlapsim.cost.priced import Priced, checked_sms, cost_of, find_fit, inside, priced, prior_fit
from overlapsim.errors import UsageError
from overlapsim.hardware.profile import DeviceSpec, Fit
from overlapsim.units import dtype_bytes

FloatArray = NDArray[np.float64]

FAMILY: Final = "linear"
PARAMETERS: Final = ("floor_s", "tensor_efficiency", "half_tile", "hbm_efficiency", "fill_s", "norm", "narrow")
# Output tiles that grouped kernels choose from; the fastest is taken.
TILE_ROWS: Final = (64, 128)
TILE_COLUMNS: Final = (64, 96, 128, 160, 192, 256)
# Parts of k that a plain GEMM may run at once where its tiles leave SMs idle, and the pass that adds them (1.8 to
# 2.6 us on seven devices). Grouped kernels do not split.
SPLITS: Final = (1, 2, 4, 8, 16)
SPLIT_REDUCE_S: Final = 2e-6
# Points at which an uneven distribution of tokens over experts is evaluated.
NUM_QUANTILES: Final = 40

PRIOR: Final[Mapping[str, float]] = {
    "floor_s": 6e-6,
    "tensor_efficiency": 0.8,
    "half_tile": 0.9,
    "hbm_efficiency": 0.85,
    "fill_s": 0.3e-6,
    "norm": 2.0,
    "narrow": 10.0,
}


@dataclass(frozen=True, eq=False)
class GroupedShapes:
    """Arrays of one length: ``groups`` independent products ``C[m, n] = A[m, k] B[k, n]`` in one launch.

    Attributes
    ----------
    groups : products (experts of this rank); 1 is a plain GEMM
    m : mean rows of a product (tokens of an expert), any real number >= 0
    n, k : columns and depth of each product
    output_bytes : bytes moved per element of C: 2 for bf16, 8 for adding to an fp32 gradient
    uneven : half width of the uniform distribution of rows over products, as a share of `m`; rows are truncated to
        whole numbers, and a product without rows reads no weights
    """

    groups: FloatArray
    m: FloatArray
    n: FloatArray
    k: FloatArray
    output_bytes: FloatArray
    uneven: FloatArray

    @classmethod
    def of(
        cls,
        groups: ArrayLike,
        m: ArrayLike,
        n: ArrayLike,
        k: ArrayLike,
        output_bytes: ArrayLike = 2.0,
        uneven: ArrayLike = 0.0,
    ) -> Self:
        """Arrays of equal length from anything that broadcasts.

        Raises
        ------
        UsageError
            If a size is not positive or a share not in 0 .. 1.
        """
        arrays = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(value, dtype=np.float64)) for value in (groups, m, n, k, output_bytes, uneven))
        )
        if any(np.any(~(array > 0)) for array in arrays[:4]) or np.any((arrays[5] < 0) | (arrays[5] >= 1)):
            raise UsageError("grouped GEMM sizes must be positive and the uneven share in [0, 1)")
        return cls(*arrays)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, where: NDArray[np.bool_] | NDArray[np.intp]) -> Self:
        return type(self)(*(getattr(self, item.name)[where] for item in fields(self)))

    @property
    def row_counts(self) -> FloatArray:
        """Rows of a product at equally likely quantiles, shape (shapes, quantiles); one quantile if all are even."""
        if not self.uneven.any():
            return self.m[:, None]
        position = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES * 2 - 1
        spread = self.m[:, None] * (1 + self.uneven[:, None] * position)
        return np.where(self.uneven[:, None] > 0, np.floor(spread), spread)

    @property
    def flop(self) -> FloatArray:
        """Operations on real rows, a multiply-add counted as two."""
        flop: FloatArray = 2 * self.groups * self.row_counts.mean(axis=1) * self.n * self.k
        return flop

    def hbm_bytes(self, element_bytes: float) -> FloatArray:
        """Operands and results once; weights of products without rows are not read."""
        counts = self.row_counts
        active = (counts > 0).mean(axis=1)
        rows = counts.mean(axis=1)
        operands = element_bytes * (active * self.n * self.k + rows * self.k)
        total: FloatArray = self.groups * (operands + self.output_bytes * rows * self.n)
        return total


def grouped_cost(
    shapes: GroupedShapes, device: DeviceSpec, key: str, *, dtype: str = "bf16", sms: int | None = None
) -> Cost:
    """Cost of the only product (or group of products) in `shapes`; parameters and errors as `grouped_prices`.

    Examples
    --------
    Sixteen experts of about 64 tokens each, as a masked fp8 kernel:

    >>> from overlapsim.hardware.loading import load_device
    >>> experts = GroupedShapes.of(16, 64, 4096, 7168, uneven=0.3)
    >>> cost = grouped_cost(experts, load_device("h800-sxm5-80gb"), "deepgemm_masked_fp8", dtype="fp8")
    >>> cost.family, 150e-6 < cost.duration_s < 250e-6
    ('gemm', True)
    """
    assert len(shapes) == 1, "one operator a cost; use grouped_prices for many"
    sms = checked_sms(sms, device)
    result = grouped_prices(shapes, device, key, dtype=dtype, sms=sms)
    size = float(shapes.hbm_bytes(dtype_bytes(dtype))[0])
    return cost_of(result, device, sms=sms, family="gemm", hbm_bytes=size)


def grouped_prices(
    shapes: GroupedShapes, device: DeviceSpec, key: str, *, dtype: str = "bf16", sms: int | None = None
) -> Priced:
    """Times, spreads and bounds of GEMMs of the stack that `key` names.

    Each product is cut into tiles of 64 or 128 rows; all tiles of all products run in whole waves, each
    ``fill_s`` plus the tile's FLOP at ``tensor_efficiency`` of an SM's peak (less ``half_tile`` for 64 rows, less
    ``narrow`` columns of overhead beside the tile's own). HBM traffic combines with it as a norm. The fastest tile
    counts.

    Parameters
    ----------
    key : a fit of family ``linear`` such as ``deepgemm_masked_fp8``
    dtype : of A and B: peak and bytes

    Raises
    ------
    StrategyError
        If the device has no such number of SMs.
    ProfileError
        If it has no rate for the dtype.
    """
    sms = checked_sms(sms, device)
    fit = fit_for(device, key)
    seconds = model_seconds(shapes, fit.parameters, device, dtype, sms)
    box = inside(shapes.m, fit, "rows") & inside(shapes.n * shapes.k, fit, "weights") & (fit.key == key)
    return priced(fit, seconds, fit.parameters["floor_s"], lower_bound_s(shapes, device, dtype), box)


def model_seconds(
    shapes: GroupedShapes, parameters: Mapping[str, float], device: DeviceSpec, dtype: str, sms: int
) -> FloatArray:
    """The form of `grouped_prices` for given constants; never falls when groups, m, n or k grow."""
    p = parameters
    sm_rate = device.peak(dtype) * p["tensor_efficiency"] / device.num_sms
    traffic = shapes.hbm_bytes(dtype_bytes(dtype))
    hbm = device.hbm_bandwidth_bytes_per_s * p["hbm_efficiency"]
    memory_s = traffic / hbm
    counts = shapes.row_counts
    norm = p["norm"]
    splits = SPLITS if (shapes.groups == 1).any() else SPLITS[:1]
    best = np.full(len(shapes), np.inf)
    for rows in TILE_ROWS:
        row_tiles = _total_tiles(counts, rows, shapes.groups)
        for columns in TILE_COLUMNS:
            tiles = row_tiles * np.ceil(shapes.n / columns)[:, None]
            waves = np.maximum(1.0, np.ceil(tiles / sms)).mean(axis=1)
            rate = sm_rate * (p["half_tile"] if rows == TILE_ROWS[0] else 1.0)
            for split in splits:
                tile_s = 2 * rows * (columns + p["narrow"]) * shapes.k / split / rate + p["fill_s"]
                reduce_s = SPLIT_REDUCE_S + 4 * split * shapes.m * shapes.n / hbm if split > 1 else 0.0
                time_s = ((waves * tile_s) ** norm + memory_s**norm) ** (1 / norm) + reduce_s
                if split > 1:
                    fits = (shapes.groups == 1) & (tiles.max(axis=1) * split <= sms)
                    time_s = np.where(fits, time_s, np.inf)
                best = np.minimum(best, time_s)
    total: FloatArray = p["floor_s"] + best
    return total


def _total_tiles(counts: FloatArray, rows: int, groups: FloatArray) -> FloatArray:
    """Row tiles of all products together at equally likely quantiles: many products spread less than one."""
    tiles = np.ceil(counts / rows)
    mean = tiles.mean(axis=1, keepdims=True)
    total: FloatArray = groups[:, None] * mean + np.sqrt(groups)[:, None] * (tiles - mean)
    return total


def lower_bound_s(shapes: GroupedShapes, device: DeviceSpec, dtype: str) -> FloatArray:
    """No kernel is faster: FLOP of real rows at the dense peak, and bytes at the sheet's HBM rate."""
    traffic = shapes.hbm_bytes(dtype_bytes(dtype))
    return np.maximum(shapes.flop / device.peak(dtype), traffic / device.hbm_bandwidth_bytes_per_s)


def fit_for(device: DeviceSpec, key: str) -> Fit:
    """Constants of a stack on a device, or the stated prior."""
    return find_fit(device, FAMILY, [key], prior_fit(FAMILY, f"{key}_prior", PRIOR, "PRIOR-LINEAR"))

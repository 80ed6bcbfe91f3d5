"""Batched and grouped GEMM: many products in one launch, each padded to whole tiles, all tiles in common waves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from overlapsim.cost.base import Demand, Spread, hbm_name, hbm_rate
from overlapsim.cost.gemm import L2_BYTES_PER_CLOCK, SPLIT_REDUCE_S, WAVE_FILL_S, GemmCost, Tile
from overlapsim.cost.gemm_fitted import fitted_gemm, machine_of
from overlapsim.cost.gemm_model import (
    ALIGNMENT_BYTES,
    BK,
    EPILOGUE_ELEMENTS,
    OUTPUT_BYTES,
    TILES,
    UNALIGNED_SLOWDOWN,
    GemmMachine,
    GemmParameters,
)
from overlapsim.cost.priced import checked_sms
from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import WorkloadError
from overlapsim.hardware.profile import DeviceSpec, Source
from overlapsim.workload.operators import ADDED_BYTES

# Grouped kernels of six stacks against the plain kernel's constants: a judgement, narrower where a stack was fitted
# (`overlapsim.cost.grouped_fit`).
GROUPED: Final = Spread(0.75, 1.5, "prior")


@dataclass(frozen=True, kw_only=True)
class GroupedCost(GemmCost):
    """Cost of a grouped GEMM; `grid` holds all tiles, as if the padded products stood below each other.

    Attributes
    ----------
    rows : real rows of all products
    padded_rows : with every product padded to whole tiles
    active : products that have rows; the weights of others are not read
    """

    rows: int
    padded_rows: int
    active: int

    @property
    def padding(self) -> float:
        """Share of the computed rows that is padding: 0 where every product ends with a whole tile."""
        return 1 - self.rows / self.padded_rows


def grouped_gemm_cost(
    rows: Sequence[int],
    n: int,
    k: int,
    device: DeviceSpec,
    *,
    dtype: str = "bf16",
    accumulate: str = "fp32",
    sms: int | None = None,
    tile: tuple[int, int] | None = None,
    adds: bool = False,
) -> GroupedCost:
    """Time of ``C_i[rows_i, n] = A_i[rows_i, k] B_i[k, n]`` for all i in one persistent launch.

    Every product is cut into its own tiles, so each is padded to whole tiles
    of rows; the tiles of all products share waves, so one launch, one fill a
    wave and one ragged last wave are paid together.  Weights of products with
    rows are read once.  The fastest tile counts; k is not split.

    Parameters
    ----------
    rows : of each product (tokens of each expert of this rank), imbalance as it is; 0 for an idle expert
    n, k : columns and depth of each product
    sms : SMs the kernel gets; all by default
    tile : (BM, BN) to use instead of the fastest
    adds : products are added to fp32 matrices in memory, which are read and written

    Returns
    -------
    GroupedCost
        Range a stated prior, ``in_range`` False: the constants come from plain GEMMs.

    Raises
    ------
    WorkloadError
        If there is no product with rows, or a size is out of range.
    StrategyError
        If the device has no such number of SMs.
    ProfileError
        If it has no rate for the dtype.
    """
    sms = checked_sms(sms, device)
    if not rows or min(rows) < 0 or max(rows) == 0 or n < 1 or k < 1:
        raise WorkloadError(
            f"grouped GEMM of {len(rows)} products, the largest {max(rows, default=0)}x{n}x{k}; expected rows >= 0 "
            "with at least one above 0, and n, k of at least 1"
        )
    machine, parameters, source = _model(device, dtype, accumulate)
    tiles = TILES if tile is None else (tile,)
    moved = _bytes(rows, n, k, machine.element_bytes, ADDED_BYTES if adds else OUTPUT_BYTES)
    time_s, best = min(
        (_seconds(rows, n, k, machine, parameters, candidate, sms, moved), candidate) for candidate in tiles
    )
    return _cost(rows, n, device, moved, source, best, sms, time_s)


def batched_gemm_cost(
    batch: int, m: int, n: int, k: int, device: DeviceSpec, *, dtype: str = "bf16", sms: int | None = None
) -> GroupedCost:
    """Time of `batch` equal products in one launch; errors as `grouped_gemm_cost`."""
    return grouped_gemm_cost([m] * batch, n, k, device, dtype=dtype, sms=sms)


def _seconds(
    rows: Sequence[int],
    n: int,
    k: int,
    machine: GemmMachine,
    parameters: GemmParameters,
    tile: tuple[int, int],
    sms: int,
    moved: float,
) -> float:
    """The plain form of `overlapsim.cost.gemm_model.kernel_seconds` with the tiles of all products."""
    p, (bm, bn), element = parameters, tile, machine.element_bytes
    tiles = sum(-(-count // bm) for count in rows) * -(-n // bn)
    rate = machine.peak_flop_per_s * p.compute_efficiency * p.efficiency_of(bm, bn) / machine.num_sms
    step_s = max(2.0 * bm * bn * BK / rate, (bm + bn) * BK * element / p.sm_load_bytes_per_s)
    narrow = UNALIGNED_SLOWDOWN if n * element % ALIGNMENT_BYTES or k * element % ALIGNMENT_BYTES else 1.0
    compute_s = (
        -(-tiles // sms) * (-(-k // BK) * narrow * step_s + p.fill_s) + p.epilogue_s * bm * bn / EPILOGUE_ELEMENTS
    )
    l2_s = narrow * element * k * tiles * (bm + bn) / (p.l2_bytes_per_s * sms / machine.num_sms)
    memory_s = max(moved / (machine.hbm_bandwidth_bytes_per_s * p.hbm_efficiency), l2_s)
    flop_s = 2.0 * sum(rows) * n * k / (machine.peak_flop_per_s * sms / machine.num_sms)
    bound_s = max(flop_s, moved / machine.hbm_bandwidth_bytes_per_s)
    return p.launch_s + max(math.hypot(compute_s, memory_s), bound_s)


def _bytes(rows: Sequence[int], n: int, k: int, element: float, output: float) -> float:
    total, active = sum(rows), sum(count > 0 for count in rows)
    return element * k * (total + active * n) + output * total * n


def _model(device: DeviceSpec, dtype: str, accumulate: str) -> tuple[GemmMachine, GemmParameters, Source]:
    """Constants of the device's fit, or of its profile where it has none."""
    fitted = fitted_gemm(device, dtype, accumulate)
    if fitted is not None:
        return fitted.machine, fitted.parameters.kernel_alone(), fitted.fit.source
    kernels = device.kernels
    l2_rate = device.boost_clock_hz * L2_BYTES_PER_CLOCK
    parameters = GemmParameters(
        launch_s=kernels.gemm_launch_s,
        compute_efficiency=kernels.gemm_efficiency,
        hbm_efficiency=kernels.hbm_efficiency,
        sm_load_bytes_per_s=l2_rate,
        fill_s=WAVE_FILL_S,
        split_s=SPLIT_REDUCE_S,
        epilogue_s=0.0,
        tile_64x64=1.0,
        tile_64x128=1.0,
        tile_128x128=1.0,
        tile_128x192=1.0,
        l2_bytes_per_s=l2_rate * device.num_sms,
    )
    source = Source("derived", f"wave model with kernels.gemm_efficiency of {device.name}", "low")
    return machine_of(device, dtype, accumulate), parameters, source


def _cost(
    rows: Sequence[int],
    n: int,
    device: DeviceSpec,
    moved: float,
    source: Source,
    tile: tuple[int, int],
    sms: int,
    time_s: float,
) -> GroupedCost:
    padded = sum(-(-count // tile[0]) for count in rows) * tile[0]
    grid = TileGrid(padded, n, tile[0], tile[1])
    rate = hbm_rate(device)
    whole: Tile = (tile[0], tile[1], BK)
    return GroupedCost(
        duration_s=time_s,
        sm=sms,
        family="gemm",
        spread=GROUPED,
        source=replace(source, trust="low"),
        demands=(Demand(hbm_name(0), min(moved, time_s * rate), rate),),
        in_range=False,
        tile=whole,
        grid=grid,
        tile_time_s=time_s / grid.waves(sms),
        rows=sum(rows),
        padded_rows=padded,
        active=sum(count > 0 for count in rows),
    )

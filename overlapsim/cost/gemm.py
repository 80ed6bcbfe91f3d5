"""GEMM time from tiles and waves: the vendor library's kernel, and templated kernels with a given tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from overlapsim.cost.base import MEASURED, Cost, Demand, Spread, hbm_name, hbm_rate
from overlapsim.cost.gemm_fitted import FAMILY, MEASURED_M, MEASURED_N_K, FittedGemm, fitted_gemm
from overlapsim.cost.gemm_model import ALIGNMENT_BYTES, BK, UNALIGNED_SLOWDOWN
from overlapsim.cost.priced import checked_sms
from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import StrategyError, UsageError
from overlapsim.hardware.profile import DeviceSpec, Source
from overlapsim.units import dtype_bytes, format_time
from overlapsim.workload.operators import GemmOp

Tile = tuple[int, int, int]

# The next five are priors of the form for devices without a fit; what differs between devices is in the profile.
# They were chosen on 2387 shapes of A100 and 2869 of H100 (hwprofiles/SOURCES.md, AIC-GEMM and FIT-GEMM).
# Pipeline fill and drain of one wave: the tables give 0.1 us (H100) to 2.1 us (A100).
WAVE_FILL_S: Final = 0.5e-6
# What one SM draws from L2: tables give 64 to 128 bytes a clock; without it tiny tiles would look free.
L2_BYTES_PER_CLOCK: Final = 96.0
DEFAULT_BK: Final = 64
SPLITS: Final = (1, 2, 4, 8, 16)
SPLIT_LEAST_K: Final = 256
# A second pass that adds the parts: 1.8 to 2.6 us on seven devices.
SPLIT_REDUCE_S: Final = 2e-6

# Central 90 % of measured over predicted time on those shapes with the bundled profiles, the wider end of the two
# devices.  A prior, not a residual: the profiles' constants were fitted to a quarter of these points.
LONG_KERNEL_S: Final = 100e-6
LONG_KERNEL: Final = Spread(0.88, 1.22, "prior")
SHORT_KERNEL: Final = Spread(0.80, 1.33, "prior")


@dataclass(frozen=True, kw_only=True)
class GemmCost(Cost):
    """Cost of a GEMM with the waves it runs in: ``duration_s == waves * tile_time_s``.

    Attributes
    ----------
    tile : (BM, BN, BK) of the kernel
    grid : its output tiles
    tile_time_s : one CTA, hence one wave; launch, fill and epilogue are spread over the waves
    split_k : CTAs that share one output tile, each a part of k; above 1 only for the vendor's kernel on a grid
        that leaves SMs idle, and then everything runs in one wave
    """

    tile: Tile
    grid: TileGrid
    tile_time_s: float
    split_k: int = 1

    @property
    def waves(self) -> int:
        """Waves on the `sm` SMs it was priced for."""
        return self.grid.waves(self.sm)

    def scaled(self, factor: float) -> Self:
        """The same kernel with every wave taking `factor` times as long."""
        if factor == 1.0:
            return self
        return replace(self, duration_s=self.duration_s * factor, tile_time_s=self.tile_time_s * factor)


def gemm_cost(
    op: GemmOp,
    device: DeviceSpec,
    *,
    sms: int | None = None,
    tile: Sequence[int] | None = None,
    measured_s: float | None = None,
) -> GemmCost:
    """Time of the vendor library's kernel.

    A device with a fit for the dtype (``DeviceSpec.fits``, ``gemm.bf16``; fp16
    and bf16 share one) is priced by `overlapsim.cost.gemm_fitted`: the
    parametric form of `overlapsim.cost.gemm_model` and the residual layer of
    the fit's table.  Without a fit the form below takes ``KernelSpec``.

    Model: CTAs run in whole waves on the SMs they get; a wave is fill plus
    main-loop steps at ``gemm_efficiency`` of the peak, and the last wave's
    tiles are stored at one SM's share of HBM.  Memory time is the longer of
    HBM traffic at ``hbm_efficiency`` of the sheet and tile traffic from L2.
    The two combine as the root of the sum of squares, above a launch floor.
    The library picks the fastest tile, and splits k on grids that leave SMs idle.

    Parameters
    ----------
    op : shape, dtype, accumulate type
    device : peaks, SMs and ``kernels`` constants
    sms : SMs the kernel gets, 1 .. num_sms; all of them by default
    tile : (BM, BN) or (BM, BN, BK) to use instead of the library's choice; k is then not split
    measured_s : time of this kernel alone on all SMs; a wave takes ``measured_s / ceil(tiles / num_sms)``,
        also when the kernel gets fewer SMs (hwprofiles/SOURCES.md, FLASH)

    Returns
    -------
    GemmCost
        Valid for m of 16 to 32768 and n, k of 32 to 32768; ``in_range`` is False outside, where nothing was
        measured on this device, and where n or k are not multiples of 16 bytes (then the main loop takes twice as
        long, a stated prior).  Below 16 rows a fitted time is that of 16.

    Raises
    ------
    StrategyError
        If `tile` is larger than C and not of the device's list, or `sms` is not what the device has.
    UsageError
        If `measured_s` is not positive or below what the device's peak and memory allow.
    ProfileError
        If the device has no rate for the dtype.

    Examples
    --------
    A kernel measured at 2.36 ms on 108 SMs (19 waves) needs 20 waves on 106:

    >>> from overlapsim.hardware.profile import DeviceSpec, KernelSpec
    >>> kernels = KernelSpec(((128, 256, 64),), 0.87, 2.6e-6, 1.15, 0.79, 1e-6)
    >>> a100 = DeviceSpec("A100", "ampere", 108, 1.41e9, {"fp16": 312e12}, 80e9, 2.039e12, 40e6, 164e3, 3, kernels)
    >>> cost = gemm_cost(GemmOp(8192, 8192, 4096, "fp16"), a100, sms=106, tile=(256, 128), measured_s=2.361e-3)
    >>> cost.waves, round(cost.duration_s * 1e3, 3)
    (20, 2.485)
    """
    sms = checked_sms(sms, device)
    if tile is not None or measured_s is not None:
        return _fixed_kernel(op, device, sms, tile, measured_s, 1.0)
    if (fitted := fitted_gemm(device, op.dtype, op.accumulate)) is not None:
        return _from_fit(op, device, sms, fitted)
    time_s, chosen, split = _best(op, device, sms, device.kernels.gemm_tiles, SPLITS)
    return _from_model(op, device, sms, chosen, split, time_s)


def template_gemm_cost(
    op: GemmOp,
    device: DeviceSpec,
    *,
    sms: int | None = None,
    tile: Sequence[int] | None = None,
    measured_s: float | None = None,
) -> GemmCost:
    """Time of a templated kernel (signalled or fused): the vendor model without split k, ``template_slowdown`` times.

    Parameters, returns and errors as `gemm_cost`; without `tile` the fastest of the device's tiles.
    A measured time is taken as it is.

    Notes
    -----
    The slowdown is a prior of the profile (1.14 to 1.16 on an A800, hwprofiles/SOURCES.md, FLASH-GAP); on
    architectures a template was not written for it can exceed 2, so measure it.
    """
    return _fixed_kernel(op, device, checked_sms(sms, device), tile, measured_s, device.kernels.template_slowdown)


def linear_gemm_cost(op: GemmOp, device: DeviceSpec) -> GemmCost:
    """Time of a linear layer on all SMs that quantises its 16-bit input to the narrow dtype of `op` first.

    ``linear fp8`` against the ``fp8 kernel`` of `gemm_cost`: two operators,
    since quantising adds 10 us to small and up to 80 % to large shapes.
    For 16-bit dtypes the two are the same.

    Raises
    ------
    ProfileError
        If the device has no rate for the dtype.
    """
    fitted = fitted_gemm(device, op.dtype, op.accumulate)
    if fitted is None or not fitted.quantises:
        return gemm_cost(op, device)
    return _from_fit(op, device, device.num_sms, fitted, quantise=True)


def hbm_bytes(op: GemmOp, device: DeviceSpec, tile: Sequence[int], sms: int) -> float:
    """HBM traffic of the GEMM: A, B and C once, and operands again where they outgrow L2.

    The tiles in flight cover about a square of C and share its rows of A and
    columns of B; with operands of twice L2 or more each such square reads its own.
    """
    grid = TileGrid(op.m, op.n, tile[0], tile[1])
    in_flight = min(sms, grid.num_tiles)
    per_square = 2 * math.sqrt(in_flight * tile[0] * tile[1]) * op.k * dtype_bytes(op.dtype)
    unshared = max(0.0, grid.num_tiles / in_flight * per_square - op.operand_bytes)
    spilled = min(1.0, max(0.0, op.operand_bytes / device.l2_bytes - 1))
    return op.operand_bytes + op.output_bytes + spilled * unshared


def checked_tile(op: GemmOp, tile: Sequence[int], device: DeviceSpec) -> Tile:
    """(BM, BN, BK) of a tile; the deepest BK of the device's list when left out.

    A tile of the device's list may overhang C: kernels mask the edge, and a
    small C has no smaller tile to take.

    Raises
    ------
    StrategyError
        If the tile is malformed, or not in the device's list and larger than C in either direction.
    """
    if len(tile) not in (2, 3) or min(tile) < 1:
        raise StrategyError(f"tile is {'x'.join(map(str, tile))}; expected BMxBN or BMxBNxBK, each at least 1")
    depths = [bk for bm, bn, bk in device.kernels.gemm_tiles if (bm, bn) == tuple(tile[:2])]
    if not depths:
        refuse_oversized(op, tile)
    return tile[0], tile[1], tile[2] if len(tile) == 3 else max(depths, default=DEFAULT_BK)


def refuse_oversized(op: GemmOp, tile: Sequence[int]) -> None:
    """Refuse a tile that somebody asked for and that is larger than C.

    Raises
    ------
    StrategyError
        If it is larger in either direction.
    """
    if tile[0] > op.m or tile[1] > op.n:
        raise StrategyError(
            f"tile {tile[0]}x{tile[1]} is larger than the output {op.m}x{op.n}; "
            f"expected at most {op.m}x{op.n}: choose a smaller tile or leave it to the model"
        )


def _fixed_kernel(
    op: GemmOp, device: DeviceSpec, sms: int, tile: Sequence[int] | None, measured_s: float | None, slowdown: float
) -> GemmCost:
    """One kernel without split k, its tile given or the fastest on all SMs: a kernel does not change with its SMs."""
    if tile is None:
        chosen = _best(op, device, device.num_sms, _distinct(device), (1,))[1]
    else:
        chosen = checked_tile(op, tile, device)
    if measured_s is None:
        time_s = _kernel_time_s(op, device, sms, chosen, 1) * slowdown
        if (fitted := fitted_gemm(device, op.dtype, op.accumulate)) is not None:
            return _cost(op, device, sms, chosen, 1, time_s, *fitted.belief(op.m, op.n, op.k))
        return _from_model(op, device, sms, chosen, 1, time_s)
    check_measured(op, device, measured_s)
    grid = TileGrid(op.m, op.n, chosen[0], chosen[1])
    wave_s = measured_s / grid.waves(device.num_sms)
    source = Source("override", "measured GEMM time given by the user")
    return _cost(op, device, sms, chosen, 1, wave_s * grid.waves(sms), MEASURED, source, True)


def _best(
    op: GemmOp, device: DeviceSpec, sms: int, tiles: Sequence[Tile], splits: Sequence[int]
) -> tuple[float, Tile, int]:
    """Return the fastest (time, tile, split); of equals the deeper tile, then the profile's first."""
    candidates = [
        (_kernel_time_s(op, device, sms, tile, split), tile, split)
        for tile in tiles
        for split in splits
        if split == 1 or _may_split(op, tile, split, sms)
    ]
    return min(candidates, key=lambda candidate: (candidate[0], -candidate[1][2]))


def _distinct(device: DeviceSpec) -> Sequence[Tile]:
    """Tiles that may differ in time: fitted models know no BK, so the deepest of each (BM, BN) stands for all."""
    tiles = device.kernels.gemm_tiles
    if not any(name.startswith(FAMILY) for name in device.fits):
        return tiles
    return tuple({tile[:2]: tile for tile in sorted(tiles, key=lambda tile: tile[2])}.values())


def _may_split(op: GemmOp, tile: Tile, split: int, sms: int) -> bool:
    """One wave holds all parts: a split into several waves gains nothing that a smaller tile does not."""
    return TileGrid(op.m, op.n, tile[0], tile[1]).num_tiles * split <= sms and op.k >= split * SPLIT_LEAST_K


def _kernel_time_s(op: GemmOp, device: DeviceSpec, sms: int, tile: Tile, split: int) -> float:
    bm, bn, bk = tile
    if (fitted := fitted_gemm(device, op.dtype, op.accumulate)) is not None:
        assert split == 1, "a fitted model splits k itself"
        return fitted.kernel(op.m, op.n, op.k, bm, bn, sms)
    kernels = device.kernels
    tiles = TileGrid(op.m, op.n, bm, bn).num_tiles
    waves = -(-tiles * split // sms)
    element_bytes = dtype_bytes(op.dtype)
    flop_per_s_sm = device.peak(op.dtype, op.accumulate) * kernels.gemm_efficiency / device.num_sms
    hbm_per_s = hbm_rate(device)

    narrow = _alignment(op)
    steps = -(-op.k // (bk * split))
    main_loop_s = steps * 2.0 * bm * bn * bk / flop_per_s_sm * narrow
    epilogue_s = bm * bn * element_bytes / (hbm_per_s / device.num_sms)
    compute_s = waves * (main_loop_s + WAVE_FILL_S) + epilogue_s

    l2_bytes = float(element_bytes) * op.k * tiles * (bm + bn)
    l2_s = narrow * l2_bytes / (sms * device.boost_clock_hz * L2_BYTES_PER_CLOCK)
    memory_s = max(hbm_bytes(op, device, tile, sms) / hbm_per_s, l2_s)

    # Parts are written and read in fp32 before they are added.
    reduce_s = SPLIT_REDUCE_S + 8.0 * split * op.m * op.n / (2 * hbm_per_s) if split > 1 else 0.0
    return kernels.gemm_launch_s + math.hypot(compute_s, memory_s) + reduce_s


def _alignment(op: GemmOp) -> float:
    """Factor of loads and main loops: rows of n or k elements that do not start at 16 bytes take narrow loads."""
    element_bytes = dtype_bytes(op.dtype)
    aligned = op.n * element_bytes % ALIGNMENT_BYTES == 0 and op.k * element_bytes % ALIGNMENT_BYTES == 0
    return 1.0 if aligned else UNALIGNED_SLOWDOWN


def _from_fit(op: GemmOp, device: DeviceSpec, sms: int, fitted: FittedGemm, *, quantise: bool = False) -> GemmCost:
    time_s, (bm, bn), split = fitted.best(op.m, op.n, op.k, sms, quantise=quantise)
    on_sms = op.flop / device.peak(op.dtype, op.accumulate) * device.num_sms / sms
    time_s = max(time_s, lower_bound_s(op, device), on_sms)
    belief = fitted.belief(op.m, op.n, op.k, quantise=quantise)
    return _cost(op, device, sms, (bm, bn, BK), split, time_s, *belief)


def _from_model(op: GemmOp, device: DeviceSpec, sms: int, tile: Tile, split: int, time_s: float) -> GemmCost:
    known = device.sources.get("kernels.gemm_efficiency")
    trust = known.trust if known is not None else "low"
    measured_box = MEASURED_M[0] <= op.m <= MEASURED_M[1] and all(
        MEASURED_N_K[0] <= size <= MEASURED_N_K[1] for size in (op.n, op.k)
    )
    in_range = measured_box and known is not None and known.layer != "prior" and _alignment(op) == 1.0
    source = Source("derived", f"wave model with kernels.gemm_efficiency of {device.name}", trust)
    spread = LONG_KERNEL if time_s > LONG_KERNEL_S else SHORT_KERNEL
    return _cost(op, device, sms, tile, split, time_s, spread, source, in_range)


def _cost(
    op: GemmOp,
    device: DeviceSpec,
    sms: int,
    tile: Tile,
    split: int,
    time_s: float,
    spread: Spread,
    source: Source,
    in_range: bool,
) -> GemmCost:
    grid = TileGrid(op.m, op.n, tile[0], tile[1])
    # A fit may stream faster than the profile's round share of HBM; a kernel alone is never slowed by its own demand.
    rate = hbm_rate(device)
    traffic = Demand(hbm_name(0), min(hbm_bytes(op, device, tile, sms), time_s * rate), rate)
    return GemmCost(
        duration_s=time_s,
        sm=sms,
        family="gemm",
        spread=spread,
        source=source,
        demands=(traffic,),
        in_range=in_range,
        tile=tile,
        grid=grid,
        tile_time_s=time_s / grid.waves(sms),
        split_k=split,
    )


def lower_bound_s(op: GemmOp, device: DeviceSpec) -> float:
    """No kernel is faster: FLOP at the dense peak, and A, B and C once at the sheet's HBM rate."""
    compute_s = op.flop / device.peak(op.dtype, op.accumulate)
    return max(compute_s, (op.operand_bytes + op.output_bytes) / device.hbm_bandwidth_bytes_per_s)


# No GEMM library is this many times slower than its model; a wrong prefix is a thousand times.
UNLIKELY_SLOW: Final = 30.0


def check_measured(op: GemmOp, device: DeviceSpec, measured_s: float, what: str = "measured GEMM time") -> None:
    """Refuse a measured GEMM time that the device cannot reach, or that only a wrong unit explains.

    Parameters
    ----------
    op, device : shape and machine
    measured_s : the time
    what : how the message names it, the option for example

    Raises
    ------
    UsageError
        If the time is not positive and finite, below `lower_bound_s`, or over 30 times the model's.
    """
    if not (math.isfinite(measured_s) and measured_s > 0):
        raise UsageError(f"{what} is {measured_s} s; expected a finite time > 0")
    bound_s = lower_bound_s(op, device)
    shape = f"{op.m}x{op.n}x{op.k} on {device.name} ({op.dtype}, {op.accumulate} accumulate)"
    if measured_s < bound_s:
        raise UsageError(
            f"{what} {format_time(measured_s)} is below {format_time(bound_s)}, the least that {shape} can take: check "
            "the unit (a bare number is seconds), the shape, the device and the accumulate type, and measure with "
            "operands that are not left in L2"
        )
    model_s = gemm_cost(op, device).duration_s
    if measured_s > UNLIKELY_SLOW * model_s:
        raise UsageError(
            f"{what} {format_time(measured_s)} is {measured_s / model_s:.0f} times the {format_time(model_s)} that "
            f"{shape} takes by the model: check the unit (a bare number is seconds) and the shape"
        )

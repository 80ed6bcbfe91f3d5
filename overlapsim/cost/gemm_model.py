"""Parametric GEMM time: tiles, waves, split k, L2 and HBM; one shape or arrays of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from overlapsim.errors import ProfileError
from overlapsim.jit import compiled

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# Four tiles explain most of the published tables; 128x192 (one wave where 128x128 needs two) takes another point off
# H100's p90.  The largest has efficiency 1 by definition.
TILES: Final = ((64, 64), (64, 128), (128, 128), (128, 192), (128, 256))
BK: Final = 64
SPLITS: Final = (1, 2, 4, 8, 16)
SPLIT_LEAST_K: Final = 256.0
# Vector loads and TMA move 16 bytes.  Rows that do not start there (n or k not a multiple of 8 two-byte elements) fall
# back to narrow loads: three GEMMs of logits over an odd vocabulary take three times as long as padded ones (2.9 and
# 3.1 at hidden sizes of 2048 and 1024, from published steps with and without padding; hwprofiles/SOURCES.md, VTRAIN).
ALIGNMENT_BYTES: Final = 16.0
UNALIGNED_SLOWDOWN: Final = 3.0
# No table holds fewer rows; below, times are those of 16.
LEAST_M: Final = 16.0
# C is stored in two bytes whatever the operands are.
OUTPUT_BYTES: Final = 2.0
EPILOGUE_ELEMENTS: Final = 32768.0
# Quantising reads two bytes and writes one for every element of A.
QUANTISE_BYTES: Final = 3.0
# A benchmark that rotates ceil(L2 / weights) copies leaves operands in L2 when all of them just fill it.
WARM_FOOTPRINT: Final = 1.12
WARM_SHARPNESS: Final = 20.0
# Places in the array of `constants`.
_TILE_AT: Final = 17


@dataclass(frozen=True)
class GemmParameters:
    """Constants of the form, fitted per device and dtype; shares are of the datasheet's figures.

    Only ``hbm_efficiency``, the sum of launch and fill, and the product of
    ``compute_efficiency`` and a tile's efficiency are well identified; single
    values are not facts about the hardware.

    Attributes
    ----------
    launch_s : floor of a kernel
    compute_efficiency : share of the dense peak that main loops of 128x256 tiles reach
    hbm_efficiency : share of the sheet's HBM rate
    sm_load_bytes_per_s : what one SM draws at most
    fill_s : fill and drain of a wave
    split_s : the pass that adds the parts of a split k
    epilogue_s : storing the last 32768 elements of a CTA
    tile_64x64, tile_64x128, tile_128x128, tile_128x192 : efficiency of these tiles over 128x256
    l2_bytes_per_s : all SMs from L2; absolute, so that a sister with other HBM keeps it
    reread : weight of operands read again once they outgrow L2
    quantise_launch_s : further kernels of a linear layer that quantises its input; 0 where none does
    quantise_floor_s, quantise_efficiency : quantising A takes ``max(floor, 3 m k / (efficiency * HBM))``
    warm_rate : of the benchmark, not the device: rate of operands it left in L2 over the rate of HBM; 1 if it left none
    """

    launch_s: float
    compute_efficiency: float
    hbm_efficiency: float
    sm_load_bytes_per_s: float
    fill_s: float
    split_s: float
    epilogue_s: float
    tile_64x64: float
    tile_64x128: float
    tile_128x128: float
    tile_128x192: float
    l2_bytes_per_s: float
    reread: float = 0.0
    quantise_launch_s: float = 0.0
    quantise_floor_s: float = 0.0
    quantise_efficiency: float = 1.0
    warm_rate: float = 1.0

    @classmethod
    def from_mapping(cls, values: Mapping[str, float]) -> Self:
        """Parameters by name, as a fit file holds them.

        Raises
        ------
        ProfileError
            If one without a default is missing, one is unknown, or one is negative or not finite.
        """
        known = {field.name: field for field in fields(cls)}
        missing = [name for name, field in known.items() if name not in values and field.default is MISSING]
        unknown = [name for name in values if name not in known]
        bad = [name for name in known if name in values and not 0 <= values[name] < np.inf]
        if missing or unknown or bad:
            raise ProfileError(
                f"GEMM fit lacks {missing}, has unknown {unknown} and values that are negative or not finite {bad}; "
                f"expected {', '.join(known)}"
            )
        return cls(**{name: float(value) for name, value in values.items()})

    def to_mapping(self) -> dict[str, float]:
        """Inverse of `from_mapping`."""
        return asdict(self)

    @property
    def tile_efficiency(self) -> tuple[float, ...]:
        """In the order of ``TILES``."""
        return self.tile_64x64, self.tile_64x128, self.tile_128x128, self.tile_128x192, 1.0

    def efficiency_of(self, tile_m: int, tile_n: int) -> float:
        """Efficiency of any tile, from those of ``TILES`` by its area."""
        areas = [math.log(bm * bn) for bm, bn in TILES]
        return float(np.interp(math.log(tile_m * tile_n), areas, self.tile_efficiency))

    def kernel_alone(self) -> Self:
        """The same without the kernels that quantise A."""
        return replace(self, quantise_launch_s=0.0, quantise_floor_s=0.0)


@dataclass(frozen=True)
class GemmMachine:
    """What the form needs to know of a device, for one dtype.

    Attributes
    ----------
    num_sms : SMs
    peak_flop_per_s : dense, of the dtype and accumulate type
    hbm_bandwidth_bytes_per_s : of the sheet
    l2_bytes : capacity
    element_bytes : of A and B
    """

    num_sms: int
    peak_flop_per_s: float
    hbm_bandwidth_bytes_per_s: float
    l2_bytes: float
    element_bytes: float


def constants(machine: GemmMachine, parameters: GemmParameters, sms: int | None = None) -> FloatArray:
    """The numbers of the compiled form in its order, for a kernel that gets `sms` SMs."""
    p, hbm = parameters, machine.hbm_bandwidth_bytes_per_s
    used = machine.num_sms if sms is None else sms
    return np.array(
        (
            used,
            p.launch_s,
            machine.peak_flop_per_s * p.compute_efficiency / machine.num_sms,
            hbm * p.hbm_efficiency,
            p.sm_load_bytes_per_s,
            p.fill_s,
            p.split_s,
            p.epilogue_s,
            p.l2_bytes_per_s * used / machine.num_sms,
            p.reread,
            machine.l2_bytes,
            machine.element_bytes,
            hbm,
            p.quantise_launch_s,
            p.quantise_floor_s,
            hbm * p.quantise_efficiency,
            machine.peak_flop_per_s / machine.num_sms * used,
            *p.tile_efficiency,
        )
    )


def model_seconds(
    coefficients: FloatArray, m: ArrayLike, n: ArrayLike, k: ArrayLike, hbm_scale: ArrayLike = 1.0
) -> FloatArray:
    """Times of many shapes, broadcast against each other.

    Parameters
    ----------
    coefficients : from `constants`
    m, n, k : sizes >= 1
    hbm_scale : multiplies the HBM time (below 1 where a benchmark left operands in L2)

    Examples
    --------
    100,000 shapes take about 0.1 s.
    """
    arrays = np.broadcast_arrays(*(np.asarray(values, dtype=np.float64) for values in (m, n, k, hbm_scale)))
    flat = [np.ascontiguousarray(values).ravel() for values in arrays]
    seconds = np.empty(flat[0].size)
    _price_many(flat[0], flat[1], flat[2], flat[3], coefficients, seconds)
    return seconds.reshape(arrays[0].shape)


def warm_scale(
    machine: GemmMachine, parameters: GemmParameters, m: FloatArray, n: FloatArray, k: FloatArray
) -> FloatArray:
    """HBM time of benchmark rows over that of cold operands, for tables that left weights in L2.

    Real layers find their weights cold: predictions of those take 1.
    """
    weights = machine.element_bytes * n * k
    footprint = np.ceil(machine.l2_bytes / weights) * weights + machine.element_bytes * m * k / 2
    warm = 1 / (1 + (footprint / machine.l2_bytes / WARM_FOOTPRINT) ** WARM_SHARPNESS)
    scale: FloatArray = 1 - warm + warm / parameters.warm_rate
    return scale


def neighbourhood(coefficients: FloatArray, m: ArrayLike, n: ArrayLike, k: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Where shapes lie for the residual layer: coordinates (N, 7) and log2 of m, n, k (N, 3).

    Library kernels err alike at equal output area, depth, last-wave fill, tile
    and split: area counts fully, the aspect ratio a third, depth 0.7.
    """
    flat = [np.ascontiguousarray(values, dtype=np.float64) for values in np.broadcast_arrays(m, n, k)]
    points, octaves = np.empty((flat[0].size, 7)), np.empty((flat[0].size, 3))
    _locate_many(flat[0].ravel(), flat[1].ravel(), flat[2].ravel(), coefficients, points, octaves)
    return points, octaves


@compiled
def price_one(m: float, n: float, k: float, scale: float, c: FloatArray) -> tuple[float, int, int]:
    """(time, index in ``TILES``, split) of the fastest kernel for one shape."""
    best, best_tile, best_split = np.inf, 0, 1
    for index in range(len(TILES)):
        tile_m, tile_n = float(TILES[index][0]), float(TILES[index][1])
        tiles = np.ceil(max(m, LEAST_M) / tile_m) * np.ceil(n / tile_n)
        for split in SPLITS:
            if split > 1 and (tiles >= c[0] or k < split * SPLIT_LEAST_K):
                break
            time = kernel_seconds(m, n, k, scale, tile_m, tile_n, c[_TILE_AT + index], split, c)
            if time < best:
                best, best_tile, best_split = time, index, split
    return best, best_tile, best_split


@compiled
def kernel_seconds(
    m: float,
    n: float,
    k: float,
    scale: float,
    tile_m: float,
    tile_n: float,
    efficiency: float,
    split: int,
    c: FloatArray,
) -> float:
    """Time of one kernel: tiles of that size and efficiency, k in `split` parts; never below what hardware allows."""
    m = max(m, LEAST_M)
    element = c[11]
    tiles = np.ceil(m / tile_m) * np.ceil(n / tile_n)
    waves = np.ceil(tiles * split / c[0])
    steps = np.ceil(k / (BK * split))
    aligned = (n * element) % ALIGNMENT_BYTES == 0.0 and (k * element) % ALIGNMENT_BYTES == 0.0
    narrow = 1.0 if aligned else UNALIGNED_SLOWDOWN
    step_s = max(2.0 * tile_m * tile_n * BK / (c[2] * efficiency), (tile_m + tile_n) * BK * element / c[4])
    compute_s = waves * (steps * narrow * step_s + c[5]) + c[7] * tile_m * tile_n / EPILOGUE_ELEMENTS
    operands = element * k * (m + n)
    moved = operands + OUTPUT_BYTES * m * n
    reread = 0.0
    if c[9] > 0.0 and operands > c[10]:
        # A wave of tiles covers about a square of C and shares its rows of A and columns of B.
        square = 2.0 * np.sqrt(min(c[0], tiles) * tile_m * tile_n) * k * element
        reread = c[9] * min(1.0, operands / c[10] - 1.0) * max(0.0, np.ceil(tiles / c[0]) * square - operands)
    memory_s = max((moved + reread) * scale / c[3], narrow * element * k * tiles * (tile_m + tile_n) / c[8])
    time = np.sqrt(compute_s * compute_s + memory_s * memory_s)
    time = c[1] + max(time, 2.0 * m * n * k / c[16], moved * scale / c[12])
    if split > 1:
        # Parts are written and read in fp32 before they are added.
        time += c[6] + 8.0 * split * m * n / (2.0 * c[12])
    if c[13] + c[14] > 0.0:
        time += c[13] + max(c[14], QUANTISE_BYTES * m * k / c[15])
    return float(time)


@compiled
def _price_many(
    m: FloatArray, n: FloatArray, k: FloatArray, scale: FloatArray, c: FloatArray, seconds: FloatArray
) -> None:
    for i in range(m.size):
        seconds[i] = price_one(m[i], n[i], k[i], scale[i], c)[0]


@compiled
def locate_one(
    m: float, n: float, k: float, tile: int, split: int, c: FloatArray, point: FloatArray, octaves: FloatArray
) -> None:
    """Fill the coordinates of one shape (see `neighbourhood`) whose kernel is known."""
    octaves[0], octaves[1], octaves[2] = np.log2(m), np.log2(n), np.log2(k)
    root = np.sqrt(2.0)
    point[0] = (octaves[0] + octaves[1]) / root
    point[1] = 0.35 * (octaves[0] - octaves[1]) / root
    point[2] = 0.7 * octaves[2]
    for axis, tile_n in ((3, 128.0), (4, 256.0)):
        waves = np.ceil(m / 128.0) * np.ceil(n / tile_n) / c[0]
        point[axis] = np.log2(np.ceil(waves) / waves)
    point[5] = 0.3 * tile
    point[6] = 0.3 * np.log2(float(split))


@compiled
def _locate_many(
    m: FloatArray, n: FloatArray, k: FloatArray, c: FloatArray, points: FloatArray, octaves: FloatArray
) -> None:
    for i in range(m.size):
        _, tile, split = price_one(m[i], n[i], k[i], 1.0, c)
        locate_one(m[i], n[i], k[i], tile, split, c, points[i], octaves[i])

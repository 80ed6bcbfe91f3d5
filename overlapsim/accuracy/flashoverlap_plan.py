"""The published search of wave groups, as the FlashOverlap artifact runs it: what its measured plans were."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from overlapsim.cost.curve import FloatArray

COMM_SMS = 2
"""SMs that the published search charges for any collective (FLASH-SMS)."""
MOST_UNITS = 10


def published_groups(
    tiles: int, num_sms: int, kernel_s: float, tile_bytes: float, tau_s: Callable[[FloatArray], FloatArray]
) -> tuple[int, ...]:
    """Groups of tiles that the published predictive search picks.

    Waves of ``num_sms - 2`` tiles, in units of ``ceil(waves / 10)``; of all
    partitions of the units, less those with more than five groups and a first
    group of more than two units, the fastest by the published recurrence.  Of
    equals the artifact keeps the finest.

    Parameters
    ----------
    tiles : output tiles of the GEMM
    num_sms : SMs of the device
    kernel_s : time of the kernel alone
    tile_bytes : bytes of a tile
    tau_s : collective time of an array of sizes in bytes
    """
    ends, done = _units(tiles, num_sms)
    count = len(ends) - 1
    wave_s = kernel_s / math.ceil(tiles / num_sms)
    first, last = np.triu_indices(count)
    tau = np.zeros((count, count))
    tau[first, last] = tau_s((done[last + 1] - done[first]) * tile_bytes)
    best = kernel_s + float(tau[0, count - 1])
    best_cuts: tuple[int, ...] = (count,)
    for cuts in _partitions(count):
        if len(cuts) == 1 or (len(cuts) > 5 and cuts[0] > 2):
            continue
        value = 0.0
        for v, w in itertools.pairwise((0, *cuts)):
            value = max(wave_s * ends[w], value) + tau[v, w - 1]
        if value < best or (value == best and len(cuts) > len(best_cuts)):
            best, best_cuts = value, cuts
    return _groups(done, best_cuts)


def growing_groups(tiles: int, num_sms: int) -> Iterator[tuple[int, ...]]:
    """Yield the groups that the artifact tries on the device for all_to_all: sizes in units that never fall."""
    _, done = _units(tiles, num_sms)
    for cuts in _partitions(len(done) - 1):
        sizes = np.diff((0, *cuts))
        if np.all(sizes[1:] >= sizes[:-1]):
            yield _groups(done, cuts)


def _units(tiles: int, num_sms: int) -> tuple[np.ndarray, np.ndarray]:
    sms = num_sms - COMM_SMS
    waves = math.ceil(tiles / sms)
    unit = math.ceil(waves / MOST_UNITS)
    ends = np.minimum(np.arange(0, waves + unit, unit), waves)
    return ends, np.minimum(ends * sms, tiles)


def _partitions(count: int) -> Iterator[tuple[int, ...]]:
    for cut in itertools.product((False, True), repeat=count - 1):
        yield (*(w for w in range(1, count) if cut[w - 1]), count)


def _groups(done: np.ndarray, cuts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(x) for x in np.diff(done[list(cuts)], prepend=0))

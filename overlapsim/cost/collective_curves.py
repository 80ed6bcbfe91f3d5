"""A fitted price as corners of a line, and a rank count between measured ones: what makes many sizes cheap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from overlapsim.cost.curve import Curve
from overlapsim.cost.structural import bus_factor
from overlapsim.cost.tuner import FloatArray
from overlapsim.hardware.profile import Cluster, CurveKey

Knots = tuple[FloatArray, FloatArray]
_PER_OCTAVE: Final = 16
_FIRST, _LAST = 6, 44  # 64 B to 16 TiB
_JUMP: Final = 0.05
_TOLERANCE: Final = 0.002


def knots_of(seconds: Callable[[FloatArray], FloatArray], least_s_per_byte: float = 0.0) -> Knots:
    """Corners between which straight lines are within 0.2 % of a price, steps kept as steps.

    Parameters
    ----------
    seconds : price of sizes
    least_s_per_byte : no time falls below this for a byte

    Examples
    --------
    >>> sizes, times = knots_of(lambda size: 1e-6 + size * 1e-9)
    >>> abs(float(np.interp(3e6, sizes, times)) / 3.001e-3 - 1) < 0.002
    True
    """
    grid = 2.0 ** (np.arange(_FIRST * _PER_OCTAVE, _LAST * _PER_OCTAVE + 1) / _PER_OCTAVE)
    values = seconds(grid)
    sizes, times = list(grid), list(values)
    # A step is where neighbours differ by more than their slopes allow: halve until its two sides are a byte apart.
    growth = np.diff(np.log(values))
    typical = np.maximum(np.abs(np.concatenate([growth[:1], growth[:-1]])), np.abs(np.append(growth[1:], growth[-1:])))
    for i in reversed(np.flatnonzero(np.abs(growth) > _JUMP / 2 + 1.5 * typical)):
        low, high = float(grid[i]), float(grid[i + 1])
        left, right = float(values[i]), float(values[i + 1])
        while high - low > 1.0:
            middle = (low + high) / 2
            value = float(seconds(np.array([middle]))[0])
            if abs(value - left) < abs(value - right):
                low, left = middle, value
            else:
                high, right = middle, value
        sizes[i + 1 : i + 1] = [low, high]
        times[i + 1 : i + 1] = [left, right]
    far = 2.0**60
    slope = max(0.0, (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]))
    start = float(seconds(np.array([1.0]))[0])
    all_sizes = np.array([0.0, *sizes, far])
    all_times = np.array([start, *times, times[-1] + (far - sizes[-1]) * slope])
    rising = np.concatenate([[True], np.diff(all_sizes) > 0])
    all_sizes = all_sizes[rising]
    all_times = np.maximum(all_times[rising], all_sizes * least_s_per_byte)
    kept = _corners(all_sizes, all_times)
    return all_sizes[kept], all_times[kept]


def _corners(sizes: FloatArray, times: FloatArray) -> NDArray[np.intp]:
    """Fewest points (nearly) through which straight lines stay close to all: few corners are found fast."""
    kept, open_ = {0, sizes.size - 1}, [(0, sizes.size - 1)]
    while open_:
        first, last = open_.pop()
        if last - first < 2:
            continue
        inner = slice(first + 1, last)
        line = np.interp(sizes[inner], sizes[[first, last]], times[[first, last]])
        off = np.abs(line / times[inner] - 1)
        worst = int(np.argmax(off))
        if off[worst] > _TOLERANCE:
            middle = first + 1 + worst
            kept.add(middle)
            open_ += [(first, middle), (middle, last)]
    return np.array(sorted(kept), dtype=np.intp)


def between_ranks(cluster: Cluster, kind: str, ranks: int, nodes: int) -> Knots | None:
    """A rank count between two measured ones on the same nodes, for platforms whose tables break every formula (PCIe).

    Latency goes straight with the ranks (each adds a hop), the rest as bus bandwidth does, straight in log ranks.
    None without a table on each side.
    """
    known = sorted(key.ranks for key in cluster.curves if key.collective == kind and key.nodes == nodes)
    below = [count for count in known if count < ranks]
    above = [count for count in known if count > ranks]
    if not below or not above:
        return None
    low, high = below[-1], above[0]
    share = float(np.log(ranks / low) / np.log(high / low))
    first, second = (Curve(cluster.curves[CurveKey(kind, count, nodes)]) for count in (low, high))
    latency = first.latency_s + (second.latency_s - first.latency_s) * (ranks - low) / (high - low)

    def work(curve: Curve, count: int, sizes: FloatArray) -> FloatArray:
        return np.maximum(curve.seconds(sizes) - curve.latency_s, 0.0) / bus_factor(kind, count)

    def seconds(sizes: FloatArray) -> FloatArray:
        mean = work(first, low, sizes) ** (1 - share) * work(second, high, sizes) ** share
        return np.asarray(latency + bus_factor(kind, ranks) * mean)

    return knots_of(seconds)

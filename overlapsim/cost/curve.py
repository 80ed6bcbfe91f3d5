"""Time of a collective against its size, from a measured table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from overlapsim.cost.base import Spread
from overlapsim.errors import ProfileError, UsageError
from overlapsim.hardware.profile import CurveTable

FloatArray = NDArray[np.float64]

# Central 90 % of measured over interpolated time from 64 KiB with every second point left out, so between points a
# factor of 4 apart: 0.91 to 1.16 on 443 published curves (hwprofiles/SOURCES.md, AIC-A100, AIC-H100 and their kind).
# Tables are usually a factor of 2 apart; half of that deviation is taken there.
WIDE_GAP: Final = Spread(0.91, 1.16, "residual")
NARROW_GAP: Final = Spread(0.95, 1.08, "residual")
# Latency of small messages belongs to host and software more than to the link; and a slope holds better than a rate:
# 5 % at the 95th percentile up to 16 times the largest size.  Both are stated, not fitted here.
BELOW: Final = Spread(0.70, 1.40, "prior")
ABOVE: Final = Spread(0.93, 1.08, "prior")


# A step of more than this per doubling of size between two steep-less neighbours is the library changing its algorithm.
SWITCH_RATIO: Final = 1.6
_SWITCH_MARGIN: Final = 1.1
_SWITCH_JUMP: Final = 1.25
_FAR_BYTES: Final = 2.0**60


@dataclass(frozen=True, eq=False)
class Curve:
    """A measured size -> time table made continuous: straight lines of time over size, but not across a switch.

    Interpolation is on time, never on bandwidth.  A straight line is what
    latency plus size over rate gives.  Between two sizes where the library
    changes its algorithm (time more than 1.6 times per doubling, neighbours
    less) the left branch is held to the switch, then the right one begins.
    With every second point of 206 published curves left out, from 64 KiB
    (median, mean and 95th percentile of the error, %):

    ========================================  ======================
    straight lines, left branch held          2.3, 4.4, 15.9 (this)
    straight lines                            2.4, 4.6, 17.6
    monotone cubic in log size and log time   2.8, 4.9, 19.8
    the same, left branch held                2.7, 4.6, 16.9
    straight lines in log size and log time   3.9, 5.8, 20.3
    ========================================  ======================

    Below the smallest size time falls straight to a latency: the one given,
    else fitted to the three smallest points; kept between 0 and the smallest
    time.  Above the largest the slope of the last octave goes on.

    Parameters
    ----------
    table : rising sizes in bytes and times in seconds, one point or more.
        One point gives a constant time below it and a constant rate above.
    known_latency_s : time of the smallest message (base + hop x steps of a fit), if known

    Attributes
    ----------
    latency_s : time that the line below the smallest size reaches at size 0
    tail_s_per_byte : slope above the largest size, >= 0
    falls : (size, next size) where the table's time falls; the table is used as it is, and time then falls too
    switches : (size, next size) between which the library changes its algorithm

    Raises
    ------
    ProfileError
        If sizes do not rise, or a number is not finite and positive.

    Examples
    --------
    >>> from overlapsim.hardware.profile import Source
    >>> table = CurveTable((1e6, 2e6, 4e6), (20e-6, 30e-6, 50e-6), Source("measured", "example"))
    >>> (Curve(table).seconds([0, 0.5e6, 3e6, 8e6]) * 1e6).round(3).tolist()
    [10.0, 15.0, 40.0, 90.0]
    """

    table: CurveTable
    known_latency_s: float | None = None
    latency_s: float = field(init=False)
    tail_s_per_byte: float = field(init=False)
    falls: tuple[tuple[float, float], ...] = field(init=False)
    switches: tuple[tuple[float, float], ...] = field(init=False)
    _size: FloatArray = field(init=False, repr=False)
    _time: FloatArray = field(init=False, repr=False)
    _knots: tuple[FloatArray, FloatArray] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        size = np.asarray(self.table.size_bytes, dtype=np.float64)
        time = np.asarray(self.table.time_s, dtype=np.float64)
        _check_points(size, time, self.table.source.reference)
        down = np.flatnonzero(np.diff(time) < 0)
        switches = _switches(size, time)
        latency = _latency_s(size, time) if self.known_latency_s is None else min(self.known_latency_s, float(time[0]))
        tail = _tail_s_per_byte(size, time)
        fields = {
            "_size": size,
            "_time": time,
            "_knots": _knots(size, time, switches, latency, tail),
            "latency_s": latency,
            "tail_s_per_byte": tail,
            "falls": tuple((float(size[i]), float(size[i + 1])) for i in down),
            "switches": tuple((float(size[i]), float(size[i + 1])) for i in switches),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def seconds(self, size_bytes: ArrayLike) -> FloatArray:
        """Times of sizes, any shape; size 0 gives the latency.

        Raises
        ------
        UsageError
            If a size is negative or not finite.
        """
        return np.asarray(np.interp(checked_sizes(size_bytes), *self._knots), dtype=np.float64)

    def in_range(self, size_bytes: float) -> bool:
        """True if the size lies between the smallest and the largest measured one."""
        return bool(self._size[0] <= size_bytes <= self._size[-1])

    def spread(self, size_bytes: float) -> Spread:
        """Central 90 % of measured over predicted time at one size."""
        return _SPREADS[int(self._regime(np.asarray(size_bytes)))]

    def spread_ends(self, size_bytes: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """The low and the high multipliers of `spread`, for sizes of any shape."""
        regime = self._regime(np.asarray(size_bytes, dtype=np.float64))
        low = np.array([spread.low for spread in _SPREADS])
        high = np.array([spread.high for spread in _SPREADS])
        return low[regime], high[regime]

    def best_s_per_byte(self) -> float:
        """Least time per byte that the table shows: what is left of a collective without latency."""
        return float(min((self._time / self._size).min(), self.tail_s_per_byte or np.inf))

    def _regime(self, asked: FloatArray) -> NDArray[np.intp]:
        """Index into `_SPREADS`: below, narrow gap, wide gap, above."""
        after = np.clip(np.searchsorted(self._size, asked, side="left"), 1, max(1, self._size.size - 1))
        last = self._size.size - 1
        gap = self._size[np.minimum(after, last)] / self._size[np.minimum(after, last) - (last > 0)]
        inside = np.where(gap > _NARROW, 2, 1)
        return np.where(asked < self._size[0], 0, np.where(asked > self._size[-1], 3, inside))


_SPREADS: Final = (BELOW, NARROW_GAP, WIDE_GAP, ABOVE)
_NARROW: Final = 2.01


def checked_sizes(size_bytes: ArrayLike) -> FloatArray:
    """Sizes as a float array.

    Raises
    ------
    UsageError
        If a size is negative or not finite.
    """
    asked = np.asarray(size_bytes, dtype=np.float64)
    if asked.ndim == 0:
        # One size at a time is asked thousands of times; plain floats are quicker than reductions.
        if 0 <= asked.item() < np.inf:
            return asked
    elif (np.isfinite(asked) & (asked >= 0)).all():
        return asked
    if asked.size:
        raise UsageError(f"a collective size is {asked.min()} bytes; expected finite sizes >= 0")
    return asked


def _check_points(size: FloatArray, time: FloatArray, name: str) -> None:
    if size.ndim != 1 or size.size == 0 or size.shape != time.shape:
        raise ProfileError(f"curve {name} has {size.size} sizes and {time.size} times; expected as many of both, >= 1")
    if not (np.isfinite(size) & np.isfinite(time) & (size > 0) & (time > 0)).all():
        raise ProfileError(f"curve {name} holds a size or time that is not finite and > 0; remove that row")
    if not (np.diff(size) > 0).all():
        raise ProfileError(f"curve {name} has sizes that do not rise; sort the rows and keep one per size")


def _switches(size: FloatArray, time: FloatArray) -> list[int]:
    """Index of the point before each switch."""
    if size.size < 4:
        return []
    ratio = (time[1:] / time[:-1]) ** (1 / np.log2(size[1:] / size[:-1]))
    around = np.maximum(ratio[:-2], ratio[2:])
    found = (ratio[1:-1] > SWITCH_RATIO) & (ratio[1:-1] > _SWITCH_MARGIN * around)
    # Where points lie close, noise alone makes a steep ratio per doubling: a switch is a jump as well.
    found &= time[2:-1] > _SWITCH_JUMP * time[1:-2]
    return [int(i) + 1 for i in np.flatnonzero(found)]


def _knots(
    size: FloatArray, time: FloatArray, switches: list[int], latency_s: float, tail_s_per_byte: float
) -> tuple[FloatArray, FloatArray]:
    """Corners of the line from size 0 to far above the table; a switch is two of them, one byte apart or less."""
    far = max(_FAR_BYTES, 2 * float(size[-1]))
    sizes, times = [0.0, *size.tolist(), far], [latency_s, *time.tolist(), 0.0]
    times[-1] = float(time[-1]) + (far - float(size[-1])) * tail_s_per_byte
    for i in reversed(switches):
        edge = float(size[i + 1]) * (1 - 1e-9)
        if edge <= size[i]:
            continue
        slope = max(0.0, float((time[i] - time[i - 1]) / (size[i] - size[i - 1])))
        sizes.insert(i + 2, edge)
        times.insert(i + 2, min(float(time[i]) + slope * (edge - float(size[i])), float(time[i + 1])))
    return np.array(sizes), np.array(times)


def _latency_s(size: FloatArray, time: FloatArray) -> float:
    if size.size == 1:
        return float(time[0])
    slope, _ = np.polyfit(size[:3] / size[0], time[:3], 1)
    # Through the smallest point with the slope of the three: continuous there, whatever the noise.
    return float(np.clip(time[0] - slope, 0.0, time[0]))


def _tail_s_per_byte(size: FloatArray, time: FloatArray) -> float:
    if size.size == 1:
        return float(time[0] / size[0])
    # A table with many points an octave has noise between neighbours; the chord over an octave has not.
    first = min(int(np.searchsorted(size, size[-1] / 2, side="right")) - 1, size.size - 2)
    first = max(first, 0)
    return max(0.0, float((time[-1] - time[first]) / (size[-1] - size[first])))

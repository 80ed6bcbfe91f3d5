"""Points of a size -> time table that do not belong to it: a stall, a first call, a stray row."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

FloatArray = NDArray[np.float64]

# Protocol switches move a time by up to a third against its neighbours; a stall moves it by more.
LEAST_FACTOR: Final = 1.5
# At the ends only one side can speak.
END_FACTOR: Final = 2.0
DEVIATIONS: Final = 6.0
# Two slow points side by side are still an accident; three are a regime.
LONGEST_RUN: Final = 2
MAX_SHARE: Final = 0.25
SOFT_SCALE: Final = 0.05


class Outlier(NamedTuple):
    """A point left out: its place in the table, and what its neighbours say it should be."""

    place: int
    expected_s: float
    factor: float


def find_outliers(size_bytes: FloatArray, time_s: FloatArray) -> list[Outlier]:
    """Points that everything else contradicts.

    A point is an outlier if the smooth curve through all points (latency, square root and bandwidth terms, soft-L1
    on the log), the two points on its left and the two on its right, and the line between its neighbours all put it
    off to the same side, by a factor of 1.5 and 6 robust deviations at least (2 at the ends, where one side is
    missing). A step where the library changes its protocol agrees with one side and is kept. The worst goes first,
    then the rest is judged again.

    Parameters
    ----------
    size_bytes, time_s : rising sizes and their times, equal lengths

    Returns
    -------
    list of Outlier
        By place; at most a quarter of the points.

    Examples
    --------
    >>> sizes = np.array([128, 65536, 1e6, 2e6, 4e6, 8e6, 16e6])
    >>> times = np.array([19.2, 23, 32.4, 290.7, 59.4, 90.5, 135.7]) * 1e-6
    >>> [(outlier.place, round(outlier.factor)) for outlier in find_outliers(sizes, times)]
    [(3, 7)]
    """
    kept = np.arange(size_bytes.size)
    found: list[Outlier] = []
    limit = int(MAX_SHARE * size_bytes.size)
    while len(found) < limit and kept.size >= 4:
        run = _worst_run(size_bytes[kept], time_s[kept])
        if run is None or len(found) + len(run) > limit:
            break
        for place, expected in run:
            found.append(Outlier(int(kept[place]), expected, float(time_s[kept[place]] / expected)))
        kept = np.delete(kept, [place for place, _ in run])
    return sorted(found)


def smooth_seconds(size_bytes: FloatArray, time_s: FloatArray) -> FloatArray:
    """Robust fit of ``a + b sqrt(size) + c size`` with a, b, c >= 0, at the same sizes.

    The log of the ratio is fitted with soft-L1, so that small and large sizes weigh alike and a stall pulls little.
    """
    basis = np.stack((np.ones_like(size_bytes), np.sqrt(size_bytes), size_bytes), axis=1)
    scale = np.array([time_s.min(), *(np.median(time_s / basis[:, term]) for term in (1, 2))]) / 2

    def off(x: FloatArray) -> FloatArray:
        return np.asarray(np.log(basis @ (scale * x) / time_s))

    found = least_squares(off, np.ones(3), loss="soft_l1", f_scale=SOFT_SCALE, bounds=(1e-9, 1e6))
    return np.asarray(basis @ (scale * found.x))


def _worst_run(size: FloatArray, time: FloatArray) -> list[tuple[int, float]] | None:
    """Neighbouring points that stand out most, with their expected times; None if none do."""
    smooth = np.log(time / smooth_seconds(size, time))
    # Either may be spoilt: the first by a curve that is not smooth, the second by the outliers of a short table.
    deviation = min(1.4826 * float(np.median(np.abs(smooth - np.median(smooth)))), _roughness(size, time))
    best: tuple[float, list[tuple[int, float]]] | None = None
    for length in range(1, LONGEST_RUN + 1):
        for first in range(size.size - length + 1):
            after = first + length
            if first < 2 and size.size - after < 2:
                continue
            run = [_vote(size, time, place, first, after, float(smooth[place])) for place in range(first, after)]
            ends = first == 0 or after == size.size
            least = np.log(END_FACTOR if ends else LEAST_FACTOR)
            weakest = min(abs(score) for score, _ in run)
            signs = {np.sign(score) for score, _ in run}
            if weakest > max(least, DEVIATIONS * deviation) and len(signs) == 1 and (best is None or weakest > best[0]):
                best = (weakest, [(first + i, expected) for i, (_, expected) in enumerate(run)])
    return None if best is None else best[1]


def _roughness(size: FloatArray, time: FloatArray) -> float:
    """Robust deviation of points from the lines between their neighbours, as a log ratio."""
    share = (size[1:-1] - size[:-2]) / (size[2:] - size[:-2])
    between = np.log(time[1:-1] / (time[:-2] + share * (time[2:] - time[:-2])))
    return 1.4826 * float(np.median(np.abs(between)))


def _vote(size: FloatArray, time: FloatArray, place: int, first: int, after: int, smooth: float) -> tuple[float, float]:
    """Weakest of all votes on one point (0 where they disagree), and the expected time of the nearest ones."""
    expected = []
    if first >= 2:
        expected.append(_line(size, time, first - 2, first - 1, place))
    if size.size - after >= 2:
        expected.append(_line(size, time, after, after + 1, place))
    if first >= 1 and after < size.size:
        expected.append(_line(size, time, first - 1, after, place))
    votes = [smooth, *(float(np.log(time[place] / value)) for value in expected)]
    if min(votes) < 0 < max(votes):
        return 0.0, expected[-1]
    return min(votes, key=abs), expected[-1]


def _line(size: FloatArray, time: FloatArray, left: int, right: int, place: int) -> float:
    """Straight line of time over size through two points; outside them never below half the nearer one."""
    slope = (time[right] - time[left]) / (size[right] - size[left])
    value = time[left] + slope * (size[place] - size[left])
    nearest = time[left] if place < left else time[right] if place > right else min(time[left], time[right])
    return float(max(value, nearest / 2))

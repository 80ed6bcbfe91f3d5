"""Lays intervals on as few tracks as keep them apart."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]


def assign_lanes(start: Int, end: Int) -> Int:
    """Lane of each interval ``[start, end)`` so that intervals of one lane never overlap.

    First fit in order of (start, end, position): an interval takes the
    lowest lane that is free, so the number of lanes is the largest number
    of intervals that hold one instant.  Intervals that only touch share a
    lane.

    Parameters
    ----------
    start, end : int64 arrays of one shape
        ``start <= end``; any unit of time.

    Returns
    -------
    int64 array
        Lane numbers from 0.

    Examples
    --------
    >>> assign_lanes(np.array([0, 5, 10]), np.array([10, 12, 20])).tolist()
    [0, 1, 0]
    """
    assert len(start) == len(end)
    lane = np.zeros(len(start), np.int64)
    if len(start) == 0 or bool(np.all(start[1:] >= end[:-1])):
        return lane
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    used = 0
    for i in np.lexsort((end, start)).tolist():
        while busy and busy[0][0] <= start[i]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            mine = heapq.heappop(free)
        else:
            mine, used = used, used + 1
        lane[i] = mine
        heapq.heappush(busy, (int(end[i]), mine))
    return lane

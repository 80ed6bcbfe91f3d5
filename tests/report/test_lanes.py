"""Intervals on tracks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.report.lanes import assign_lanes

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=40)


@given(INTERVALS)
def test_lanes_never_overlap_and_are_as_few_as_possible(intervals: list[tuple[int, int]]) -> None:
    start = np.array([s for s, _ in intervals], np.int64)
    end = np.array([s + length for s, length in intervals], np.int64)
    lane = assign_lanes(start, end)
    for one in range(len(intervals)):
        for two in range(one):
            if lane[one] == lane[two]:
                assert min(end[one], end[two]) <= max(start[one], start[two])
    if len(intervals):
        # Empty intervals need no room of their own, so only the others give a bound.
        busiest = max(int(np.sum((start <= t) & (t < end))) for t in range(40))
        assert busiest <= lane.max() + 1 <= max(busiest, 1) + int(np.sum(start == end))


def test_touching_intervals_share_the_lowest_lane() -> None:
    start, end = np.array([0, 0, 10, 15]), np.array([10, 20, 15, 30])
    assert assign_lanes(start, end).tolist() == [0, 1, 0, 0]


def test_lanes_follow_time_not_position() -> None:
    assert assign_lanes(np.array([5, 0]), np.array([9, 6])).tolist() == [1, 0]


def test_nothing_needs_no_lane() -> None:
    assert assign_lanes(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []

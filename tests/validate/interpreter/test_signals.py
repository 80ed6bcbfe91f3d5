"""Counters, waits and flags: exact counts, re-arming, and waits that end where they must."""

from __future__ import annotations

import pytest
from overlapsim.validate.kernels.launch import (
    GemmConfig,
    TileOrder,
    check_status,
    hold_sms,
    new_counters,
    new_status,
    raise_flag,
    signalled_gemm,
    wait_group,
)
from ranks import poisoned, random

from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import DeadlockError, StrategyError
from overlapsim.schedule.reorder import collective_map

GROUPS = (3, 1, 5)


def produced(counters: object, groups: tuple[int, ...] = GROUPS) -> None:
    grid = TileGrid(48, 48, 16, 16)
    order = TileOrder.from_map(collective_map("all_reduce", grid, groups, ranks=2), GemmConfig(16, 16, 16))
    out = poisoned(order.packed_elements)
    signalled_gemm(random(0, 48, 16), random(1, 16, 48), out, order, counters)  # type: ignore[arg-type]


def test_waits_re_arm_the_counters_for_the_next_call() -> None:
    counters, status = new_counters(3), new_status(3)
    for _ in range(2):
        produced(counters)
        assert counters.tolist() == list(GROUPS)
        for group, tiles in enumerate(GROUPS):
            wait_group(counters, group, tiles, status)
        check_status(status, GROUPS)
        assert counters.tolist() == [0, 0, 0] and status.tolist() == [[1, 3], [1, 1], [1, 5]]


def test_a_count_that_never_comes_ends_with_the_group_named() -> None:
    counters, status = new_counters(3), new_status(3)
    produced(counters)
    expected = (3, 2, 5)
    for group, tiles in enumerate(expected):
        wait_group(counters, group, tiles, status, timeout_s=0.5)
    with pytest.raises(DeadlockError, match=r"^group 1 was not complete in time: 1 of 2\. Expected every tile"):
        check_status(status, expected)
    assert counters.tolist() == [0, 1, 0]


def test_a_count_that_is_passed_ends_at_once_with_the_group_named() -> None:
    counters, status = new_counters(3), new_status(3)
    produced(counters)
    produced(counters)
    wait_group(counters, 2, 5, status)
    with pytest.raises(DeadlockError, match=r"group 2 passed its count: 10\."):
        check_status(status)


def test_an_empty_group_goes_on_at_once() -> None:
    counters, status = new_counters(1), new_status(1)
    wait_group(counters, 0, 0, status)
    check_status(status, [0])
    assert status.tolist() == [[1, 0]]


def test_flags_stay_where_they_are() -> None:
    flags, status = new_counters(2), new_status(2)
    raise_flag(flags, 1, 4)
    wait_group(flags, 1, 4, status, rearm=False)
    check_status(status)
    assert flags.tolist() == [0, 4]


def test_holders_count_themselves_and_leave() -> None:
    started, stop, status = new_counters(1), new_counters(1), new_status(1)
    raise_flag(stop, 0)
    hold_sms(3, started, stop)
    wait_group(started, 0, 3, status)
    check_status(status)
    # Without a stop they leave when their time is up.
    hold_sms(2, started, new_counters(1))
    assert started.tolist() == [2]
    with pytest.raises(StrategyError, match="4 SMs to hold of 4"):
        hold_sms(4, started, stop)


def test_what_does_not_fit_is_refused() -> None:
    counters, status = new_counters(2), new_status(2)
    for arguments, message in (
        ((counters, 2, 1, status), "group 2 of 2"),
        ((counters, -1, 1, status), "group -1"),
        ((counters, 0, -1, status), "a wait for -1 tiles"),
        ((counters, 0, 1, status[:1]), "status"),
        ((counters.long(), 0, 1, status), "counters"),
    ):
        with pytest.raises(StrategyError, match=message):
            wait_group(*arguments)
    for timeout_s in (0.0, -1.0, 3600.0, float("nan")):
        with pytest.raises(StrategyError, match="timeout"):
            wait_group(counters, 0, 1, status, timeout_s=timeout_s)
    with pytest.raises(StrategyError, match="flag 2 of 2"):
        raise_flag(counters, 2)

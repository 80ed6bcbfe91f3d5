"""Signals between streams: counters and flags, the kernel that waits for them, and one that holds SMs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def new_counters(num_groups: int, device: Any = "cpu") -> Tensor:
    """Zeroed counters, int32, one a group; every wait leaves its counter at zero for the next call."""
    raise NotImplementedError


def new_status(num_groups: int, device: Any = "cpu") -> Tensor:
    """Zeroed status, int32, shape (groups, 2): outcome of the last wait and the count it saw."""
    raise NotImplementedError


def wait_group(
    counters: Tensor,
    group: int,
    expected: int,
    status: Tensor,
    *,
    timeout_s: float = 10.0,
    rearm: bool = True,
) -> None:
    """Hold the current stream until a counter is exactly `expected`, then set it back to zero.

    One program of one warp polls with acquire at device scope.  A count that is passed, or not reached within
    `timeout_s`, ends the wait and stands in `status`; what follows on the stream then runs on unfinished data, so
    `check_status` must be asked before results are used.

    Parameters
    ----------
    counters : int32, shape (groups,)
    group : which counter
    expected : tiles of the group; 0 goes on at once
    status : from `new_status`, shape (groups, 2)
    timeout_s : by the device's own clock; in the interpreter, where nothing can arrive any more, a few polls
    rearm : False leaves the counter as it is (flags)

    Raises
    ------
    StrategyError
        If group, count, types or devices do not fit.
    """
    raise NotImplementedError


def check_status(status: Tensor, expected: Sequence[int] = (), *, what: str = "group") -> None:
    """Read the status back and refuse results behind a wait that failed; waits for the device.

    Parameters
    ----------
    expected : counts that were waited for, for the message
    what : word for one entry: ``group`` or ``shard``

    Raises
    ------
    DeadlockError
        If a wait timed out or saw too high a count: names each entry, what it saw and what was expected. Counters must
        be made anew afterwards.
    """
    raise NotImplementedError


def raise_flag(flags: Tensor, index: int, value: int = 1) -> None:
    """Set ``flags[index]`` to `value` in stream order, with release at device scope.

    Raises
    ------
    StrategyError
        If the index is outside, or types do not fit.
    """
    raise NotImplementedError


def hold_sms(num_sms: int, started: Tensor, stop: Tensor, *, timeout_s: float = 1.0) -> None:
    """Take whole SMs away from other kernels until `stop` is set: what contention for SMs costs is measured so.

    Each of `num_sms` programs fills the registers of one SM, adds one to ``started[0]`` and polls ``stop[0]``.  On
    the stream of the kernel to be measured, ``wait_group(started, 0, num_sms, status)`` waits until all are there;
    ``raise_flag(stop, 0)`` behind it lets them go.

    Parameters
    ----------
    num_sms : SMs to hold, fewer than the device has
    started : int32, shape (1,), zero
    stop : int32, shape (1,), zero
    timeout_s : after which the programs leave by themselves

    Raises
    ------
    StrategyError
        If the device has no more SMs than that, or types do not fit.
    """
    raise NotImplementedError

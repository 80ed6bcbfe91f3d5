"""Signals between streams: counters and flags, the kernel that waits for them, and one that holds SMs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from overlapsim.validate.kernels.checks import (
    INTERPRETED,
    INTERPRETER_POLLS,
    check_int32,
    check_place,
    device_sms,
    launch,
    timeout_us,
)
from overlapsim.validate.kernels.clock import DONE, PASSED
from overlapsim.validate.kernels.hold import FILL, WARPS, hold_kernel
from overlapsim.validate.kernels.wait import flag_kernel, wait_kernel
from torch import Tensor

from overlapsim.errors import DeadlockError, StrategyError


def new_counters(num_groups: int, device: Any = "cpu") -> Tensor:
    """Zeroed counters, int32, one a group; every wait leaves its counter at zero for the next call."""
    return torch.zeros(num_groups, dtype=torch.int32, device=device)


def new_status(num_groups: int, device: Any = "cpu") -> Tensor:
    """Zeroed status, int32, shape (groups, 2): outcome of the last wait and the count it saw."""
    return torch.zeros((num_groups, 2), dtype=torch.int32, device=device)


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
    check_place(counters, status)
    _check_index("group", group, counters)
    check_int32("counters", counters, 1)
    check_int32("status", status, 2 * counters.numel())
    if not 0 <= expected < 2**31:
        raise StrategyError(f"a wait for {expected} tiles; expected 0 to {2**31 - 1}")
    launch(
        wait_kernel,
        (1,),
        (counters, status, group, expected, timeout_us(timeout_s), INTERPRETER_POLLS),
        {"REARM": rearm, "CLOCK": not INTERPRETED, "num_warps": 1, "num_stages": 1},
        counters.device,
    )


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
    failed = []
    for number, (outcome, seen) in enumerate(status.cpu().tolist()):
        if outcome <= DONE.value:
            continue
        aim = f" of {expected[number]}" if number < len(expected) else ""
        how = "passed its count" if outcome == PASSED.value else "was not complete in time"
        failed.append(f"{what} {number} {how}: {seen}{aim}")
    if failed:
        raise DeadlockError(
            f"{'; '.join(failed)}. Expected every tile or shard to be counted exactly once: check that the wait has "
            "the producer's group table, that the producer was launched and has SMs, and take new counters"
        )


def raise_flag(flags: Tensor, index: int, value: int = 1) -> None:
    """Set ``flags[index]`` to `value` in stream order, with release at device scope.

    Raises
    ------
    StrategyError
        If the index is outside, or types do not fit.
    """
    check_place(flags)
    check_int32("flags", flags, 1)
    _check_index("flag", index, flags)
    launch(flag_kernel, (1,), (flags, index, value), {"num_warps": 1, "num_stages": 1}, flags.device)


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
    check_place(started, stop)
    check_int32("started", started, 1)
    check_int32("stop", stop, 1)
    available = device_sms(started)
    if not 1 <= num_sms < available:
        raise StrategyError(f"{num_sms} SMs to hold of {available}; expected 1 to {available - 1}")
    filler = torch.zeros(FILL + FILL // 2, dtype=torch.int32, device=started.device)
    launch(
        hold_kernel,
        (num_sms,),
        (started, stop, filler, timeout_us(timeout_s), INTERPRETER_POLLS),
        {"FILL": FILL, "CLOCK": not INTERPRETED, "num_warps": WARPS, "num_stages": 1},
        started.device,
    )


def _check_index(what: str, index: int, tensor: Tensor) -> None:
    if not 0 <= index < tensor.numel():
        raise StrategyError(f"{what} {index} of {tensor.numel()}; expected 0 .. {tensor.numel() - 1}")

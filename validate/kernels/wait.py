"""One program that holds a stream until a counter is exactly what was expected, or time is up."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from overlapsim.validate.kernels.clock import DONE, PASSED, TIMED_OUT, in_time, now_ns, pause


@triton.jit
def _look(counter, expected, REARM: tl.constexpr):
    """Read the counter with acquire; a full one goes back to zero in the same step, so that no count can be lost."""
    if REARM:
        seen = tl.atomic_cas(counter, expected, 0, sem="acquire", scope="gpu")
    else:
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    return seen


@triton.jit(do_not_specialize=["group", "expected", "timeout_us", "max_polls"])
def wait_kernel(
    counter_ptr, status_ptr, group, expected, timeout_us, max_polls, REARM: tl.constexpr, CLOCK: tl.constexpr
):
    """Poll one counter; write outcome and the count that was seen last."""
    counter = counter_ptr + group
    start = now_ns(CLOCK)
    polls = 0
    seen = _look(counter, expected, REARM)
    while (seen < expected) & in_time(start, timeout_us, polls, max_polls, CLOCK):
        pause(CLOCK)
        seen = _look(counter, expected, REARM)
        polls += 1
    outcome = tl.where(seen == expected, DONE, tl.where(seen < expected, TIMED_OUT, PASSED))
    tl.store(status_ptr + 2 * group, outcome)
    tl.store(status_ptr + 2 * group + 1, seen)


@triton.jit(do_not_specialize=["index", "value"])
def flag_kernel(flag_ptr, index, value):
    """Set a flag behind everything that the stream did before."""
    tl.atomic_xchg(flag_ptr + index, value, sem="release", scope="gpu")

"""Programs that fill whole SMs and do nothing, to take them away from the kernel that is measured."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from overlapsim.validate.kernels.clock import in_time, now_ns, pause

WARPS = 32
"""Warps of a holder: with 64 registers a thread it fills the register file of an SM (65536; CUDA C++ Programming
Guide, technical specifications by compute capability), so that no other block fits beside it."""
FILL = 32768
"""Values that a holder keeps in registers: this many and half as many again, 48 a thread."""


@triton.jit(do_not_specialize=["timeout_us", "max_polls"])
def hold_kernel(started_ptr, stop_ptr, filler_ptr, timeout_us, max_polls, FILL: tl.constexpr, CLOCK: tl.constexpr):
    """Say that this program is there, then wait for the stop flag with the registers full."""
    at = tl.arange(0, FILL)
    half = tl.arange(0, FILL // 2)
    kept = tl.load(filler_ptr + at)
    more = tl.load(filler_ptr + FILL + half)
    tl.atomic_add(started_ptr, 1, sem="release", scope="gpu")
    start = now_ns(CLOCK)
    polls = 0
    stop = tl.atomic_add(stop_ptr, 0, sem="acquire", scope="gpu")
    while (stop == 0) & in_time(start, timeout_us, polls, max_polls, CLOCK):
        pause(CLOCK)
        stop = tl.atomic_add(stop_ptr, 0, sem="acquire", scope="gpu")
        polls += 1
    # Nothing is ever stored, but the compiler cannot know: what was loaded has to live until here.
    again = tl.where(stop == -1, FILL, 0)
    tl.store(filler_ptr + at, kept, mask=at < again)
    tl.store(filler_ptr + FILL + half, more, mask=half < again)

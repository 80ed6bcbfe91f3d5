"""Time and patience on the device: what kernels that poll share."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

DONE = tl.constexpr(1)
TIMED_OUT = tl.constexpr(2)
PASSED = tl.constexpr(3)


@triton.jit
def now_ns(CLOCK: tl.constexpr):
    """Nanoseconds of the device's clock; 0 without one, as in the interpreter."""
    time = globaltimer() if CLOCK else tl.full((), 0, tl.int64)
    return time


@triton.jit
def in_time(start_ns, timeout_us, polls, max_polls, CLOCK: tl.constexpr):
    """Whether a wait may go on: by the clock, or by the number of polls where there is none."""
    answer = globaltimer() - start_ns < tl.cast(timeout_us, tl.int64) * 1000 if CLOCK else polls < max_polls
    return answer


@triton.jit
def pause(CLOCK: tl.constexpr):
    """Leave the memory system alone for about 0.1 us."""
    if CLOCK:
        tl.inline_asm_elementwise(
            "{ nanosleep.u32 100; mov.u32 $0, 0; }", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )

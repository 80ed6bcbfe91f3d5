"""Which cases a check of one GPU times, in which order, and what fits its time budget; needs no GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from overlapsim.calibration.records import Record

Section = Literal["launch", "gemm", "consumer", "sms", "waves", "contention", "wave_group"]
SECTIONS: Final[dict[Section, str]] = {
    "launch": "launches, events, waits and signals",
    "gemm": "vendor GEMM against the template: plain, reordered, reordered and signalled",
    "consumer": "RMSNorm and add that undo the order, against the same kernels in row order",
    "sms": "GEMMs on fewer SMs: the persistent template, and the vendor's beside a kernel that holds SMs",
    "waves": "full waves and one tile more",
    "contention": "GEMM beside a copy in memory, and the copy beside GEMMs",
    "wave_group": "wave groups on one GPU, a copy in memory standing in for the collective",
}
"""In order of what is worth most if time runs out."""

VENDOR: Final = "gemm"
PLAIN, PACKED, SIGNALLED = "template_gemm", "reordered_gemm", "signalled_gemm"
TILE: Final = (128, 128, 64)
LARGE_TILE: Final = (128, 256, 64)
WAVE_K: Final = 8192
"""Long enough that a wave computes longer than it loads."""
HELD_SMS: Final = (2, 8, 16, 24)
SHAPES: Final = (
    # m, n, k: transformer layers' GEMMs at tensor-parallel degrees, a square, a short one, one with ragged rows.
    (4096, 8192, 8192),
    (8192, 8192, 1024),
    (8192, 4096, 4096),
    (2048, 8192, 3584),
    (1024, 4096, 4096),
    (5000, 8192, 2048),
)
NORM_SHAPES: Final = ((8192, 4096), (4096, 8192), (2048, 16384))
COPY_SHAPE: Final = (16384, 8192)
"""Of copies: twice the L2 of any GPU in the catalogue and more, so that they go through memory."""
RANKS: Final = 4
"""Of the pretended reduce_scatter whose consumer, of one rank's rows, is timed."""
GROUP_COUNTS: Final = (1, 2, 4, 8)
# A compile by Triton, a capture and what a case has besides its calls; GEMMs at half of a slow tensor rate.
CASE_S: Final = 0.4
COMPILE_S: Final = 2.5
SLOW_FLOP_PER_S: Final = 60e12
SLOW_BYTES_PER_S: Final = 0.6e12
CALLS: Final = 60


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes
    ----------
    section : that it belongs to
    like : conditions of its record; the time in it means nothing
    variant : which form: of a consumer the map, of a wave-group run ``serial``, ``overlapped`` or ``copy``
    tile : of the template kernel, else empty
    groups : of a wave-group run
    own_kernel : whether the time is of a kernel of ours: kept apart from those that profiles are fitted to
    compiles : whether a kernel may have to be compiled
    """

    section: Section
    like: Record
    variant: str = ""
    tile: tuple[int, ...] = ()
    groups: int = 0
    own_kernel: bool = False
    compiles: bool = False

    @property
    def name(self) -> str:
        """For people and messages."""
        record = self.like
        sizes = "x".join(str(size) for size in (record.m, record.n, record.k) if size is not None)
        parts = [
            record.op,
            sizes,
            "x".join(map(str, self.tile)),
            self.variant,
            f"{self.groups} groups" if self.groups else "",
        ]
        parts.append(f"on {record.sms_left} SMs" if record.sms_left else "")
        parts.append(f"beside {record.concurrent}" if record.concurrent else "")
        return " ".join(part for part in parts if part)

    @property
    def recorded(self) -> Record:
        """Conditions under which it is written down: what is ours says in its name which form it is."""
        words = [self.like.op, self.variant, "x".join(map(str, self.tile)), f"{self.groups} groups" * bool(self.groups)]
        op = "_".join("_".join(words).split()).replace("__", "_").strip("_")
        return replace(self.like, op=op) if self.own_kernel else self.like

    @property
    def estimate_s(self) -> float:
        """Seconds that the case takes on a slow GPU: what is held against the time that is left."""
        record = self.like
        call_s = 20e-6
        if record.kind == "gemm":
            assert record.m and record.n and record.k
            call_s += 2.0 * record.m * record.n * record.k / SLOW_FLOP_PER_S
        elif record.kind == "memory":
            assert record.m and record.n
            call_s += 8.0 * record.m * record.n / SLOW_BYTES_PER_S
        return CASE_S + CALLS * call_s + COMPILE_S * self.compiles


def plan_cases(num_sms: int, dtype: str = "bf16", scale: int = 1) -> tuple[Case, ...]:
    """Everything that is timed on a GPU of that many SMs, most useful first.

    Parameters
    ----------
    num_sms : of the GPU
    dtype : of GEMMs and consumers
    scale : divides all sizes, for a rehearsal without a GPU
    """

    def gemm(op: str, m: int, n: int, k: int, sms_left: int | None = None, concurrent: str = "") -> Record:
        sizes = [max(1, size // scale) for size in (m, n, k)]
        m, n, k = sizes
        return Record("gemm", op, 1.0, m=m, n=n, k=k, dtype=dtype, sms_left=sms_left, concurrent=concurrent)

    def rows(op: str, m: int, n: int, concurrent: str = "") -> Record:
        return Record("memory", op, 1.0, m=max(1, m // scale), n=max(1, n // scale), dtype=dtype, concurrent=concurrent)

    cases = [Case("launch", Record("launch", op, 1.0)) for op in ("kernel", "event", "wait_group", "signal")]
    for shape in SHAPES:
        cases.append(Case("gemm", gemm(VENDOR, *shape)))
        cases += [
            Case("gemm", gemm(op, *shape), tile=tile, own_kernel=True, compiles=True)
            for tile in (TILE, LARGE_TILE)
            for op in (PLAIN, PACKED, SIGNALLED)
            if tile == TILE or op == SIGNALLED
        ]
    for m, n in NORM_SHAPES:
        cases.append(Case("consumer", rows("rmsnorm", m, n)))
        cases += [
            Case("consumer", rows(op, m, n), variant=variant, own_kernel=True, compiles=True)
            for op in ("restored_rmsnorm", "restored_add")
            for variant in ("row_major", "tile", "subtile")
        ]
    shape = SHAPES[0]
    for held in (0, *(held for held in HELD_SMS if held < num_sms)):
        left = num_sms - held
        cases.append(
            Case("sms", gemm(SIGNALLED, *shape, sms_left=left), variant="persistent", tile=TILE, own_kernel=True)
        )
        if held:
            cases.append(Case("sms", gemm(VENDOR, *shape, sms_left=left), variant="held", compiles=held == HELD_SMS[0]))
    bm, bn, _ = TILE
    high, wide = near_square(num_sms)
    for waves in (1, 2, 3):
        for more in (0, 1):
            like = gemm(PLAIN, waves * high * bm, (wide + more) * bn, WAVE_K)
            variant = f"{waves} waves{' and more' if more else ''}"
            cases.append(Case("waves", like, variant, TILE, own_kernel=True))
    cases.append(Case("contention", rows("copy", *COPY_SHAPE), own_kernel=True))
    cases.append(Case("contention", gemm(VENDOR, *SHAPES[0], concurrent="copy")))
    cases.append(Case("contention", gemm(VENDOR, *SHAPES[2], concurrent="copy")))
    cases.append(Case("contention", rows("copy", *COPY_SHAPE, concurrent="gemm"), own_kernel=True))
    for shape in (SHAPES[1], SHAPES[2]):
        cases.append(Case("wave_group", gemm(SIGNALLED, *shape), "copy", TILE, own_kernel=True))
        cases.append(Case("wave_group", gemm(SIGNALLED, *shape), "serial", TILE, own_kernel=True))
        cases += [
            Case("wave_group", gemm(SIGNALLED, *shape), "overlapped", TILE, groups, own_kernel=True, compiles=True)
            for groups in GROUP_COUNTS[1:]
        ]
    return tuple(cases)


def near_square(count: int) -> tuple[int, int]:
    """Rows and columns of `count` tiles that are as square as they can be: then a wave reads least from memory.

    Examples
    --------
    >>> near_square(132), near_square(58)
    ((11, 12), (2, 29))
    """
    rows = next(side for side in range(math.isqrt(count), 0, -1) if count % side == 0)
    return rows, count // rows


def fit_budget(cases: Sequence[Case], seconds: float) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """Split cases into those that fit the time, in order, and those that do not.

    Examples
    --------
    >>> cases = plan_cases(132)
    >>> kept, dropped = fit_budget(cases, 30.0)
    >>> kept + dropped == cases and 0 < len(kept) < len(cases)
    True
    """
    spent, count = 0.0, 0
    for case in cases:
        spent += case.estimate_s
        if spent > seconds:
            break
        count += 1
    return tuple(cases[:count]), tuple(cases[count:])

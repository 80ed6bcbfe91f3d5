"""Time of one piece of work on all ranks: warm-up, samples from a common start, the slowest rank, percentiles."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from overlapsim.validate.idle import BUSY_SHARE, CpuTime, others_share
from overlapsim.validate.ranks import Ranks

if TYPE_CHECKING:
    import torch

WARMUP_S: Final = 0.1
WARMUP_CALLS: Final = 2
REPEATS: Final = 20
MEDIAN_BOUND: Final = 0.10
"""Standard error of the median, as a share of it, above which a time is marked invalid."""
BATCH_S: Final = 0.25
"""Samples on CPUs come in batches of about this long: shorter, and the kernel's ticks do not tell who took the time."""
LEAST_SAMPLE_S: Final = 0.5e-3
"""Shorter calls on CPUs are timed several at once: a common start is good to some ten microseconds."""
PATIENCE: Final = 4.0
PATIENCE_S: Final = 3.0
"""A disturbed CPU measurement may take `PATIENCE` times as long as an undisturbed one, and at least `PATIENCE_S`."""
PAUSE_S: Final = 0.2
START_MARGIN_S: Final = 0.6e-3
FLUSH_FACTOR: Final = 2
"""The L2 is overwritten with this many times its size between samples."""


@dataclass(frozen=True)
class Timing:
    """Time of one call: of the slowest rank, over repeats.

    Attributes
    ----------
    median_s, p10_s, p90_s : over the repeats
    repeats : timed calls
    others : share of the CPU time that other programs took meanwhile
    clock_hz : SM clock of the GPU meanwhile, 0 if not known
    throttled : whether the GPU held its clock down
    whole : False where something else was to run beside it and ended before
    """

    median_s: float
    p10_s: float
    p90_s: float
    repeats: int
    others: float = 0.0
    clock_hz: float = 0.0
    throttled: bool = False
    whole: bool = True

    @property
    def noise(self) -> float:
        """Half the distance of the percentiles over the median."""
        return (self.p90_s - self.p10_s) / 2 / self.median_s

    @property
    def uncertainty(self) -> float:
        """Standard error of the median over the median, were the samples normal (percentiles 2.56 deviations apart)."""
        return 1.253 * (2 * self.noise / 2.563) / math.sqrt(self.repeats)

    @property
    def valid(self) -> bool:
        """Whether the median is known well enough, nobody else used the machine, and the clock was not held down."""
        undisturbed = self.others <= BUSY_SHARE and not self.throttled and self.whole
        return self.uncertainty <= MEDIAN_BOUND and undisturbed


def pooled(timings: Sequence[Timing]) -> Timing:
    """One timing of several of the same work: medians of their figures, all their repeats.

    Rounds that were spoilt (clock held down, the other one ended before) count only where all were.
    """
    timings = [timing for timing in timings if timing.whole and not timing.throttled] or timings

    def middle(name: str) -> float:
        return float(np.median([getattr(timing, name) for timing in timings]))

    return Timing(
        middle("median_s"),
        middle("p10_s"),
        middle("p90_s"),
        repeats=sum(timing.repeats for timing in timings),
        others=middle("others"),
        clock_hz=middle("clock_hz"),
        throttled=any(timing.throttled for timing in timings),
        whole=all(timing.whole for timing in timings),
    )


@dataclass(frozen=True)
class Sampling:
    """How a time is taken.

    Attributes
    ----------
    repeats : samples
    warmup_s : least time of calls before the first sample
    flush : overwrite the GPU's L2 before each sample; models price operands that come from memory
    graph : capture the work into a CUDA graph and time its replay, so that no launch is in the time
    patience, patience_s : how many times as long, and at least how long, a CPU measurement may take, waiting for others
        to leave the CPUs alone
    """

    repeats: int = REPEATS
    warmup_s: float = WARMUP_S
    flush: bool = True
    graph: bool = True
    patience: float = PATIENCE
    patience_s: float = PATIENCE_S


class Sampler:
    """Takes times on one set of ranks.

    Parameters
    ----------
    ranks, sampling : who, and how
    """

    def __init__(self, ranks: Ranks, sampling: Sampling | None = None) -> None:
        self.ranks = ranks
        self.sampling = sampling or Sampling()
        self._scratch: Any = None

    def time(self, run: Callable[[], None], what: str, *, repeats: int | None = None) -> Timing:
        """Time `run`, which every rank calls.

        Parameters
        ----------
        run : one call; on a GPU it only enqueues work on the current stream
        what : for messages
        repeats : instead of the sampling's

        Raises
        ------
        RankError
            Naming a rank that is late or gone.
        """
        count = repeats or self.sampling.repeats
        self.ranks.meet(what)
        with self.ranks.guarded(what):
            if self.ranks.device.type == "cuda":
                return self._on_gpu(run, what, count)
            return self._on_cpu(run, count)

    # CPU

    def _on_cpu(self, run: Callable[[], None], count: int) -> Timing:
        each_s = self._warm_up(run)
        inner = max(1, round(LEAST_SAMPLE_S / each_s))
        size = max(1, round(BATCH_S / (inner * each_s + 2 * START_MARGIN_S)))
        deadline = time.monotonic() + max(self.sampling.patience_s, self.sampling.patience * count * inner * each_s)
        quiet, disturbed = list[float](), list[tuple[float, list[float]]]()
        while len(quiet) < count:
            share, seconds = self._batch(run, inner, size)
            if share <= BUSY_SHARE:
                quiet += seconds
                continue
            disturbed.append((share, seconds))
            # One clock decides for all ranks.
            if self.ranks.largest([float(time.monotonic() > deadline)])[0]:
                break
            time.sleep(PAUSE_S)
        # What others disturbed counts only where there is nothing better, and then the time is not valid.
        shares, kept = [0.0] * len(quiet), quiet
        for share, seconds in sorted(disturbed):
            if len(kept) < count:
                kept, shares = kept + seconds, shares + [share] * len(seconds)
        return summary(kept, others=float(np.mean(shares)))

    def _batch(self, run: Callable[[], None], inner: int, size: int) -> tuple[float, list[float]]:
        """Share of the CPU time that others took, and samples of the slowest rank."""
        before, own = CpuTime.now(), time.process_time()
        samples = [self._sample_on_cpu(run, inner) for _ in range(size)]
        own_s = self.ranks.total([time.process_time() - own])[0]
        # Processes of other nodes are not in this node's counters.
        share = others_share(before, CpuTime.now(), own_s / self.ranks.num_nodes, _ticks_per_s())
        share, *samples = self.ranks.largest([share, *samples])
        return share, samples

    def _sample_on_cpu(self, run: Callable[[], None], inner: int) -> float:
        begin = self.ranks.agreed_start(START_MARGIN_S)
        while time.perf_counter() < begin:
            pass
        for _ in range(inner):
            run()
        # From the common start: a rank that comes late is part of the time, as in any collective program.
        return (time.perf_counter() - begin) / inner

    def _warm_up(self, run: Callable[[], None]) -> float:
        """Call until the slowest rank has warmed up; every rank makes as many calls. Returns about a call's time."""
        each = 0.0
        for calls in (WARMUP_CALLS, None):
            begin = time.perf_counter()
            number = calls or max(1, min(1000, round(self.sampling.warmup_s / each)))
            for _ in range(number):
                run()
            self._synchronize("warm-up")
            each = max(self.ranks.largest([(time.perf_counter() - begin) / number])[0], 1e-7)
        return each

    # GPU

    def _on_gpu(self, run: Callable[[], None], what: str, count: int) -> Timing:

        self._warm_up(run)
        call = self._captured(run) if self.sampling.graph else run
        scratch = self._flush_buffer()
        events = [(_event(), _event()) for _ in range(count)]
        clocks = []
        for begin, end in events:
            if scratch is not None:
                scratch.zero_()
            self.ranks.total((0.0,))
            begin.record()
            call()
            end.record()
            clocks.append(gpu_clock(self.ranks.local_rank))
        self._synchronize(what)
        seconds = [begin.elapsed_time(end) * 1e-3 for begin, end in events]
        clock, throttled = clocks[-1]
        return summary(self.ranks.largest(seconds), clock_hz=clock, throttled=throttled)

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        import torch

        graph = torch.cuda.CUDAGraph()
        # Streams fork from and join the capturing one by events inside `run`, or the capture fails here.
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def _flush_buffer(self) -> torch.Tensor | None:
        import torch

        if not self.sampling.flush:
            return None
        if self._scratch is None:
            l2_bytes = torch.cuda.get_device_properties(self.ranks.device).L2_cache_size
            self._scratch = torch.empty(FLUSH_FACTOR * l2_bytes, dtype=torch.uint8, device=self.ranks.device)
        buffer: torch.Tensor = self._scratch
        return buffer

    def _synchronize(self, what: str) -> None:
        """Wait for the GPU, but no longer than for a rank: a collective whose peer is gone never ends."""
        if self.ranks.device.type != "cuda":
            return
        done = _event()
        done.record()
        deadline = time.monotonic() + self.ranks.timeout_s
        while not done.query():
            if time.monotonic() > deadline:
                raise self.ranks.overdue(what)
            time.sleep(1e-4)


def summary(seconds: list[float], *, others: float = 0.0, clock_hz: float = 0.0, throttled: bool = False) -> Timing:
    """Median and percentiles of samples.

    Examples
    --------
    >>> summary([3.0, 1.0, 2.0]).median_s
    2.0
    """
    low, median, high = (float(value) for value in np.quantile(seconds, (0.1, 0.5, 0.9)))
    return Timing(median, low, high, len(seconds), others, clock_hz, throttled)


def gpu_clock(index: int) -> tuple[float, bool]:
    """SM clock (Hz) of a GPU and whether it is held down by heat or power; (0, False) where nothing tells."""
    import torch

    try:
        clock = 1e6 * torch.cuda.clock_rate(index)
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(pynvml.nvmlDeviceGetHandleByIndex(index))
    except Exception:
        # The management library is optional, and containers may hide it: then the clock is simply not known.
        return 0.0, False
    held = pynvml.nvmlClocksThrottleReasonHwSlowdown | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
    return clock, bool(reasons & held)


def _event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _ticks_per_s() -> float:
    return float(os.sysconf("SC_CLK_TCK"))

"""Parts alone and beside one another: GEMMs, collectives, and what each costs the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from overlapsim.validate.measure import Sampler, Timing, summary
from overlapsim.validate.numerics import NumericsError
from overlapsim.validate.plans import TORCH_TYPES
from overlapsim.validate.runners.base import all_gather, all_reduce, all_to_all, matmul, reduce_scatter
from overlapsim.validate.runners.lanes import HostLanes, lanes_of

from overlapsim.calibration.records import Record
from overlapsim.units import dtype_bytes

if TYPE_CHECKING:
    import torch
    from overlapsim.validate.ranks import Ranks

BESIDE_REPEATS: Final = 10
BESIDE_FACTOR: Final = 2.5
"""The background lasts this many times what is measured, as both take alone: contention must not end it early."""


class GemmPart:
    """A GEMM alone: one call is one product of fresh random operands."""

    def __init__(self, ranks: Ranks, m: int, n: int, k: int, dtype: str) -> None:
        import torch

        kind, device = getattr(torch, TORCH_TYPES[dtype]), ranks.device
        self._a = torch.randn(m, k, device=device).to(kind)
        self._b = torch.randn(k, n, device=device).to(kind)
        self._c = torch.empty(m, n, device=device, dtype=kind)
        self.like = Record("gemm", "gemm", 1.0, m=m, n=n, k=k, dtype=dtype)

    def run(self) -> None:
        """Multiply."""
        matmul(self._a, self._b, self._c)


class CollectivePart:
    """A collective alone; buffers are those of nccl-tests' "size".

    Parameters
    ----------
    kind : all_reduce, reduce_scatter, all_gather or all_to_all
    size_bytes : cut down to whole elements on every rank
    dtype : of the elements
    rank, ranks, device : of this process; all ranks take part
    num_nodes : for the record
    """

    def __init__(
        self, kind: str, size_bytes: int, dtype: str, rank: int, ranks: int, device: torch.device, num_nodes: int = 1
    ) -> None:
        import torch

        of, each = getattr(torch, TORCH_TYPES[dtype]), max(1, size_bytes // dtype_bytes(dtype) // ranks)
        self._rank, self._size, self._kind, self._each = rank, ranks, kind, each
        self._large = torch.zeros(each * ranks, device=device, dtype=of)
        self._small = torch.zeros(each, device=device, dtype=of)
        self._received = torch.zeros_like(self._large)
        self.lanes = lanes_of(device)
        self.like = Record(
            "collective",
            kind,
            1.0,
            size_bytes=each * ranks * dtype_bytes(dtype),
            dtype=dtype,
            ranks=ranks,
            nodes=num_nodes,
            in_place=kind == "all_reduce",
        )

    @classmethod
    def on(cls, ranks: Ranks, kind: str, size_bytes: int, dtype: str) -> CollectivePart:
        """The collective over all ranks of a run."""
        return cls(kind, size_bytes, dtype, ranks.rank, ranks.size, ranks.device, ranks.num_nodes)

    def start(self) -> Sequence[Any]:
        """Start one collective."""
        if self._kind == "all_reduce":
            return all_reduce(self._large)
        if self._kind == "reduce_scatter":
            return reduce_scatter(self._small, self._large)
        if self._kind == "all_gather":
            return all_gather(self._large, self._small)
        rows = [self._each] * self._size
        return all_to_all(self._received, self._large, rows, rows)

    def run(self) -> None:
        """One collective, waited for."""
        self.lanes.inline(self.start)

    def check(self) -> None:
        """Whether it gives what it must, on data that tell ranks and places apart.

        Raises
        ------
        NumericsError
            If it does not.
        """
        import torch

        size, each, rank = self._size, self._each, self._rank
        # Small whole numbers: sums are exact in every type, and wrong places and ranks show.
        place = torch.arange(each * size, device=self._large.device) % 7
        mine = place[rank * each : (rank + 1) * each]
        shift = sum(range(size))
        self._large.copy_(place + rank)
        if self._kind == "all_gather":
            self._large.fill_(float("nan"))
            self._small.copy_(mine + rank)
        self.run()
        block = torch.arange(size, device=place.device).repeat_interleave(each)
        expected = {
            "all_reduce": (self._large, place * size + shift),
            "reduce_scatter": (self._small, mine * size + shift),
            "all_gather": (self._large, place + block),
            "all_to_all": (self._received, mine.repeat(size) + block),
        }
        got, wanted = expected[self._kind]
        if not bool((got.double() == wanted.double()).all()):
            raise NumericsError(f"{self._kind} of {self.like.size_bytes} bytes gives wrong numbers on rank {rank}")
        # Repeated sums in place must stay finite: zero is as fast as any number.
        self._large.zero_()


def gemm_beside(sampler: Sampler, gemm: GemmPart, part: CollectivePart, solo: tuple[float, float]) -> Timing:
    """Time of one GEMM while collectives move all the time.

    Parameters
    ----------
    solo : seconds of one GEMM and of one collective alone, to make the background long enough
    """
    calls, background = _counts(*solo)
    return _beside(sampler, "gemm beside a collective", gemm.run, calls, part, background, measure_gemm=True)


def collective_beside(sampler: Sampler, gemm: GemmPart, part: CollectivePart, solo: tuple[float, float]) -> Timing:
    """Time of one collective while GEMMs run all the time; `solo` as in `gemm_beside`."""
    calls, background = _counts(*reversed(solo))
    return _beside(sampler, "collective beside a gemm", gemm.run, background, part, calls, measure_gemm=False)


def _counts(measured_s: float, background_s: float) -> tuple[int, int]:
    """Calls of what is measured (some milliseconds of them), and of the background."""
    calls = max(2, min(50, round(5e-3 / measured_s)))
    return calls, max(2, round(BESIDE_FACTOR * calls * measured_s / background_s) + 1)


def _beside(
    sampler: Sampler,
    what: str,
    run: Callable[[], None],
    gemms: int,
    part: CollectivePart,
    collectives: int,
    *,
    measure_gemm: bool,
) -> Timing:
    ranks = sampler.ranks
    ranks.meet(what)
    samples, covered = [], True
    with ranks.guarded(what):
        sampler.time(run, "gemm warm-up", repeats=1)
        sampler.time(part.run, "collective warm-up", repeats=1)
        for _ in range(BESIDE_REPEATS):
            ranks.agreed_start(1e-3)
            if not isinstance(part.lanes, HostLanes):
                seconds, whole = _beside_on_gpu(run, gemms, part, collectives, measure_gemm)
            elif measure_gemm:
                seconds, whole = _gemm_on_cpu(run, gemms, part, collectives)
            else:
                seconds, whole = _collective_on_cpu(run, part, collectives)
            samples.append(seconds)
            covered &= whole
        timing = summary(ranks.largest(samples))
        covered = bool(ranks.total([float(covered)])[0] == ranks.size)
    # What the background did not cover is not contention.
    return replace(timing, whole=covered)


def _gemm_on_cpu(run: Callable[[], None], gemms: int, part: CollectivePart, collectives: int) -> tuple[float, bool]:
    works = [work for _ in range(collectives) for work in part.start()]
    begin = time.perf_counter()
    for _ in range(gemms):
        run()
    seconds = (time.perf_counter() - begin) / gemms
    still = not all(work.is_completed() for work in works)
    for work in works:
        work.wait()
    return seconds, still


def _collective_on_cpu(run: Callable[[], None], part: CollectivePart, collectives: int) -> tuple[float, bool]:
    stop = threading.Event()

    def compute() -> None:
        # The library's GEMM lets go of the interpreter while it multiplies.
        while not stop.is_set():
            run()

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    begin = time.perf_counter()
    for _ in range(collectives):
        part.run()
    seconds = (time.perf_counter() - begin) / collectives
    stop.set()
    thread.join()
    return seconds, True


def _beside_on_gpu(
    run: Callable[[], None], gemms: int, part: CollectivePart, collectives: int, measure_gemm: bool
) -> tuple[float, bool]:
    import torch

    def event() -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        made.record()
        return made

    part.lanes.fork()
    with part.lanes.communication():
        flow_begin = event()
    for _ in range(collectives):
        part.lanes.start(part.start)
    with part.lanes.communication():
        flow_end = event()
    begin = event()
    for _ in range(gemms):
        run()
    end = event()
    part.lanes.join()
    torch.cuda.synchronize()
    if measure_gemm:
        return begin.elapsed_time(end) * 1e-3 / gemms, flow_begin.elapsed_time(flow_end) > flow_begin.elapsed_time(end)
    flow_s = flow_begin.elapsed_time(flow_end) * 1e-3 / collectives
    return flow_s, flow_begin.elapsed_time(end) > flow_begin.elapsed_time(flow_end)

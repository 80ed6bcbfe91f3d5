"""Many parts one after another: what is kept already is passed over, and the time budget ends the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from overlapsim.validate.budget import Budget
from overlapsim.validate.measure import Sampler, Timing, pooled
from overlapsim.validate.output import RecordFile, timed
from overlapsim.validate.parts import CollectivePart, GemmPart, collective_beside, gemm_beside

from overlapsim.calibration.fit_gemm import anchors
from overlapsim.calibration.gemm_shapes import rows_of
from overlapsim.calibration.records import Record
from overlapsim.units import dtype_bytes, format_bytes, format_time

Shape = tuple[int, int, int]


def far_apart(shapes: Sequence[Shape]) -> list[Shape]:
    """The same shapes, each the farthest from those before it: a sweep that ends early has seen the whole range."""
    rows = rows_of(np.array(shapes, dtype=np.int64), np.ones(len(shapes)))
    ordered: list[Shape] = []
    taken = np.zeros(len(shapes), dtype=bool)
    for count in range(1, len(shapes) + 1):
        chosen = anchors(rows, count)
        ordered += [shapes[int(place)] for place in np.flatnonzero(chosen & ~taken)]
        taken = chosen
    return ordered


def sweep_gemms(
    sampler: Sampler, shapes: Iterable[Shape], dtype: str, file: RecordFile, budget: Budget, rounds: int = 1
) -> None:
    """Time GEMMs alone; in several rounds, so that a moment's state of the machine is in no shape's time alone."""
    wanted = {}
    for m, n, k in shapes:
        like = Record("gemm", "gemm", 1.0, m=m, n=n, k=k, dtype=dtype)
        wanted[f"gemm {m}x{n}x{k} {dtype}"] = like, _maker(sampler, (m, n, k), dtype)
    _sweep(sampler, wanted, file, budget, rounds)


def sweep_collectives(
    sampler: Sampler,
    kinds: Iterable[str],
    sizes: Iterable[int],
    dtype: str,
    file: RecordFile,
    budget: Budget,
    rounds: int = 1,
) -> None:
    """Time collectives alone, each checked first; in rounds as GEMMs are."""
    sizes = tuple(sizes)
    wanted = {}
    for kind in kinds:
        for size in sizes:
            part = CollectivePart.on(sampler.ranks, kind, size, dtype)
            wanted[f"{kind} {format_bytes(size)} {dtype}"] = part.like, _checked(sampler, kind, size, dtype)
    _sweep(sampler, wanted, file, budget, rounds)


Run = Callable[[], None]


def _maker(sampler: Sampler, shape: Shape, dtype: str) -> Callable[[str], Run]:
    return lambda _: GemmPart(sampler.ranks, *shape, dtype).run


def _checked(sampler: Sampler, kind: str, size: int, dtype: str) -> Callable[[str], Run]:
    def make(label: str) -> Run:
        part = CollectivePart.on(sampler.ranks, kind, size, dtype)
        with sampler.ranks.guarded(label):
            part.check()
        return part.run

    return make


def _sweep(
    sampler: Sampler,
    wanted: Mapping[str, tuple[Record, Callable[[str], Run]]],
    file: RecordFile,
    budget: Budget,
    rounds: int,
) -> None:
    """Time everything in each round; after each, a record holds what all rounds so far say."""
    timings: dict[str, list[Timing]] = defaultdict(list)
    for number in range(rounds):
        for label, (like, make) in wanted.items():
            if number and (label not in timings or _over(sampler, budget)):
                continue
            if not number and not _wanted(sampler, like, file, budget, label):
                continue
            timings[label].append(sampler.time(make(label), label))
            _keep(sampler, timed(like, pooled(timings[label])), file, budget, label)


def sweep_contention(
    sampler: Sampler,
    shapes: Iterable[Shape],
    kinds: Iterable[str],
    dtype: str,
    file: RecordFile,
    budget: Budget,
    rounds: int = 1,
) -> None:
    """Time GEMMs beside collectives of their output's size, and the other way round; in rounds as GEMMs are."""
    shapes, kinds = tuple(shapes), tuple(kinds)
    timings: dict[str, list[Timing]] = defaultdict(list)

    def keep(like: Record, timing: Timing, label: str) -> float:
        timings[label].append(timing)
        return _keep(sampler, timed(like, pooled(timings[label])), file, budget, label).median_s

    wanted: set[str] = set()
    for number in range(rounds):
        for shape in shapes:
            for kind in kinds:
                m, n, k = shape
                part = CollectivePart.on(sampler.ranks, kind, m * n * dtype_bytes(dtype), dtype)
                gemm = GemmPart(sampler.ranks, *shape, dtype)
                beside = Record("gemm", "gemm", 1.0, m=m, n=n, k=k, dtype=dtype, concurrent=kind)
                names = ("size_bytes", "dtype", "ranks", "nodes", "in_place")
                values = {name: getattr(part.like, name) for name in names}
                flow = Record("collective", kind, 1.0, concurrent="gemm", **values)
                label = f"gemm {m}x{n}x{k} beside {kind}"
                if number and (label not in wanted or _over(sampler, budget)):
                    continue
                if not number and not _wanted(sampler, beside, file, budget, label):
                    continue
                wanted.add(label)
                with sampler.ranks.guarded(label):
                    part.check()
                alone = f"{label}: gemm alone", f"{label}: {kind} alone"
                solo = (
                    keep(gemm.like, sampler.time(gemm.run, alone[0]), alone[0]),
                    keep(part.like, sampler.time(part.run, alone[1]), alone[1]),
                )
                keep(beside, gemm_beside(sampler, gemm, part, solo), label)
                keep(flow, collective_beside(sampler, gemm, part, solo), f"{kind} beside gemm {m}x{n}x{k}")


def _over(sampler: Sampler, budget: Budget) -> bool:
    """Whether the time budget is used up; rank 0's clock decides for all."""
    return bool(sampler.ranks.largest([float(budget.left_s <= 0 and sampler.ranks.is_first)])[0])


def _wanted(sampler: Sampler, like: Record, file: RecordFile, budget: Budget, label: str) -> bool:
    """Whether to measure it; rank 0's file and clock decide for all."""
    ranks = sampler.ranks
    kept, over = file.find(like) is not None, budget.left_s <= 0
    kept_first, over_first = ranks.largest([float(kept and ranks.is_first), float(over and ranks.is_first)])
    if over_first and not kept_first:
        budget.tell(f"left out, the time budget is used up: {label}", ranks.is_first)
    return not (kept_first or over_first)


def _keep(sampler: Sampler, record: Record, file: RecordFile, budget: Budget, label: str) -> Record:
    mark = "" if record.valid else ", not valid: too noisy or disturbed"
    budget.tell(f"{label}: {format_time(record.median_s)}{mark}", sampler.ranks.is_first)
    return file.add(record)

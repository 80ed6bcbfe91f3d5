"""Many parts one after another: what is kept already is passed over, and the time budget ends the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from overlapsim.validate.budget import Budget
from overlapsim.validate.measure import Sampler
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


def sweep_gemms(sampler: Sampler, shapes: Iterable[Shape], dtype: str, file: RecordFile, budget: Budget) -> None:
    """Time GEMMs alone."""
    for shape in shapes:
        like = Record("gemm", "gemm", 1.0, m=shape[0], n=shape[1], k=shape[2], dtype=dtype)
        label = f"gemm {'x'.join(map(str, shape))} {dtype}"
        if not _wanted(sampler, like, file, budget, label):
            continue
        _take(sampler, GemmPart(sampler.ranks, *shape, dtype).run, like, file, budget, label)


def sweep_collectives(
    sampler: Sampler, kinds: Iterable[str], sizes: Iterable[int], dtype: str, file: RecordFile, budget: Budget
) -> None:
    """Time collectives alone, each checked first."""
    sizes = tuple(sizes)
    for kind in kinds:
        for size in sizes:
            label = f"{kind} {format_bytes(size)} {dtype}"
            part = CollectivePart.on(sampler.ranks, kind, size, dtype)
            if not _wanted(sampler, part.like, file, budget, label):
                continue
            with sampler.ranks.guarded(label):
                part.check()
            _take(sampler, part.run, part.like, file, budget, label)


def sweep_contention(
    sampler: Sampler, shapes: Iterable[Shape], kinds: Iterable[str], dtype: str, file: RecordFile, budget: Budget
) -> None:
    """Time GEMMs beside collectives of their output's size, and the other way round."""
    kinds = tuple(kinds)
    for shape in shapes:
        for kind in kinds:
            m, n, k = shape
            part = CollectivePart.on(sampler.ranks, kind, m * n * dtype_bytes(dtype), dtype)
            gemm = GemmPart(sampler.ranks, *shape, dtype)
            beside = Record("gemm", "gemm", 1.0, m=m, n=n, k=k, dtype=dtype, concurrent=kind)
            values = {name: getattr(part.like, name) for name in ("size_bytes", "dtype", "ranks", "nodes", "in_place")}
            flow = Record("collective", kind, 1.0, concurrent="gemm", **values)
            label = f"gemm {m}x{n}x{k} beside {kind}"
            if not _wanted(sampler, beside, file, budget, label):
                continue
            with sampler.ranks.guarded(label):
                part.check()
            alone = _take(sampler, gemm.run, gemm.like, file, budget, f"{label}: gemm alone")
            alone_flow = _take(sampler, part.run, part.like, file, budget, f"{label}: {kind} alone")
            solo = (alone.median_s, alone_flow.median_s)
            _keep(sampler, timed(beside, gemm_beside(sampler, gemm, part, solo)), file, budget, label)
            told = f"{kind} beside gemm {m}x{n}x{k}"
            _keep(sampler, timed(flow, collective_beside(sampler, gemm, part, solo)), file, budget, told)


def _wanted(sampler: Sampler, like: Record, file: RecordFile, budget: Budget, label: str) -> bool:
    """Whether to measure it; rank 0's file and clock decide for all."""
    ranks = sampler.ranks
    kept, over = file.find(like) is not None, budget.left_s <= 0
    kept_first, over_first = ranks.largest([float(kept and ranks.is_first), float(over and ranks.is_first)])
    if over_first and not kept_first:
        budget.tell(f"left out, the time budget is used up: {label}", ranks.is_first)
    return not (kept_first or over_first)


def _take(
    sampler: Sampler, run: Callable[[], None], like: Record, file: RecordFile, budget: Budget, label: str
) -> Record:
    return _keep(sampler, timed(like, sampler.time(run, label)), file, budget, label)


def _keep(sampler: Sampler, record: Record, file: RecordFile, budget: Budget, label: str) -> Record:
    mark = "" if record.valid else ", not valid: too noisy or disturbed"
    budget.tell(f"{label}: {format_time(record.median_s)}{mark}", sampler.ranks.is_first)
    return file.add(record)

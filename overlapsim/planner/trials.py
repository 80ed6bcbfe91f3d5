"""Which plans to try on hardware first, and what to measure to decide between them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from overlapsim.cost.base import Family
from overlapsim.plan import Measurement, Trial
from overlapsim.planner.step import Ranked
from overlapsim.planner.step_bound import step_operators
from overlapsim.step.simulate import StepResult, step_prices
from overlapsim.units import format_bytes, format_time
from overlapsim.workload.operators import CollectiveOp, GemmOp, Operator

MOST_TRIALS: Final = 3
NAMED: Final = 3
"""Shapes that a measurement names."""


@dataclass(frozen=True)
class Difference:
    """How much longer one plan takes than another, seconds, and the central 90 % interval.

    Both plans stand on the same costs: a family at an end moves both, so the interval is narrower than their ranges.
    """

    value_s: float
    low_s: float
    high_s: float
    by_family: Mapping[Family, tuple[float, float]]


def difference(first: StepResult, second: StepResult) -> Difference:
    """Time of the second less that of the first, on as many GPUs: where it uses others, its time is scaled to them.

    Families are moved one at a time to their ends, in both plans together;
    deviations add in quadrature, as those of a single plan do.
    """
    scale = second.inputs.layout.world_size / first.inputs.layout.world_size
    value = second.step_time_s * scale - first.step_time_s
    by_family: dict[Family, tuple[float, float]] = {}
    low = high = 0.0
    for family, ends in second.shifts_s.items():
        moved = [mine * scale - other for mine, other in zip(ends, first.shifts_s[family], strict=True)]
        by_family[family] = (moved[0], moved[1])
        low += sum(min(0.0, shift) ** 2 for shift in moved)
        high += sum(max(0.0, shift) ** 2 for shift in moved)
    return Difference(value, value - math.sqrt(low), value + math.sqrt(high), by_family)


def slower(gap: Difference, best: StepResult) -> str:
    """A difference in words."""
    share = gap.value_s / best.step_time_s
    return "as fast" if abs(share) < 5e-4 else f"{percent(abs(share))} {'slower' if share > 0 else 'faster'}"


def percent(value: float) -> str:
    """Share in percent."""
    return f"{value:.1%}".replace("%", " %")


def range_text(gap: Difference) -> str:
    """The difference and its interval."""
    return f"{_signed(gap.value_s)}, {_signed(gap.low_s)} .. {_signed(gap.high_s)}"


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_time(abs(seconds))}"


def find_trials(ranked: Sequence[Ranked]) -> Iterator[Trial]:
    """The best plan, and those that may be faster; the second where none may, to see whether the order holds."""
    best = ranked[0].result
    yield Trial(1, "predicted best")
    chosen = 1
    for entry in ranked[1:]:
        gap = difference(best, entry.result)
        if chosen < MOST_TRIALS and gap.low_s <= 0:
            chosen += 1
            yield Trial(
                entry.rank,
                f"{slower(gap, best)} as predicted, and the range of the difference ({range_text(gap)}) leaves open "
                "which is better",
            )
    if chosen == 1 and len(ranked) > 1:
        yield Trial(2, "surely behind as predicted; shows whether the order holds on your machine")


def measurements(ranked: Sequence[Ranked], trials: Sequence[Trial]) -> Iterator[Measurement]:
    """For each plan that is tried beside the best: the family of costs that moves their difference most."""
    best = ranked[0].result
    for trial in trials[1:]:
        other = next(entry.result for entry in ranked if entry.rank == trial.rank)
        gap = difference(best, other)
        family = max(gap.by_family, key=lambda name: abs(gap.by_family[name][1] - gap.by_family[name][0]), default=None)
        if family is None or gap.by_family[family][0] == gap.by_family[family][1]:
            continue
        ends = sorted(gap.value_s + shift for shift in gap.by_family[family])
        yield Measurement(family, (1, trial.rank), ends[0], ends[1], _what(family, best, other, trial.rank))


def _what(family: Family, best: StepResult, other: StepResult, rank: int) -> str:
    if family == "launch":
        return f"host time between kernels, in a trace of one step of plan 1 and of plan {rank}"
    mine, theirs = _shapes(family, best), _shapes(family, other)
    apart = {name: theirs.get(name, 0.0) - mine.get(name, 0.0) for name in {**mine, **theirs}}
    largest = sorted(apart, key=lambda name: (-abs(apart[name]), name))[:NAMED]
    kinds = {"gemm": "GEMMs", "attention": "attention kernels", "memory": "memory-bound kernels"}
    what = kinds.get(family, "collectives")
    return f"{what} that plans 1 and {rank} do not share: {'; '.join(largest)}"


def _shapes(family: Family, result: StepResult) -> dict[str, float]:
    """Seconds of a step in the operators of a family, by shape."""
    prices = step_prices(result.inputs)
    found: dict[str, float] = defaultdict(float)
    for op, times in step_operators(result.inputs):
        if isinstance(op, CollectiveOp):
            mine = family == "collective"
        elif isinstance(op, GemmOp):
            mine = family == "gemm"
        else:
            mine = prices.kernel(op).family == family
        if mine:
            found[_shape(op)] += times * prices.operator_s(op)
    return found


def _shape(op: Operator) -> str:
    if isinstance(op, GemmOp):
        return f"{op.m} x {op.n} x {op.k} {op.dtype} ({op.name} {op.pass_})"
    if isinstance(op, CollectiveOp):
        return f"{op.kind} of {format_bytes(op.size_bytes)} over {op.ranks} ranks ({op.group or op.name})"
    return f"{op.name} {op.pass_}"

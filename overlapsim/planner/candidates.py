"""Which parameters of a strategy are worth running in the engine, and what to try next to the best of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from overlapsim.planner.partition import Split, best_by_groups, solve
from overlapsim.strategy.base import Parameters, ParameterSpace, Partition

MAX_GROUPS: Final = 8
WORTH_RUNNING: Final = 1.05
"""A split is run when its recurrence is within this of its problem's optimum: contention moves values by as much."""


@dataclass(frozen=True)
class Proposal:
    """Parameters to run.

    Attributes
    ----------
    screened_s : the recurrence's value, None where the strategy has no closed form
    partition, cuts : where the parameters come from, if from a split of waves
    """

    parameters: Parameters
    screened_s: float | None = None
    partition: Partition | None = None
    cuts: tuple[int, ...] = ()


def propose(space: ParameterSpace) -> Iterator[Proposal]:
    """Yield proposals, each parameters once: what is most worth running first."""
    if space.partitions is None:
        points = list(space.points())
        if space.screen is not None:
            points.sort(key=space.screen)
        yield from (Proposal(point) for point in points)
        return
    problems = [partition for point in space.points() for partition in space.partitions(point)]
    solved = sorted(((solve(p)[0], p) for p in problems), key=lambda entry: entry[0].value_s)
    seen = set()
    # One split of every problem, then the next of every problem: few runs still see every belief.
    for column in itertools.zip_longest(*(_splits(best, partition) for best, partition in solved)):
        for proposal in column:
            if proposal is not None and repr(proposal.parameters) not in seen:
                seen.add(repr(proposal.parameters))
                yield proposal


def refine(best: Proposal, value_s: float, run_s: Callable[[Parameters], float], budget: int) -> tuple[Proposal, float]:
    """Walk from a split to better ones in the engine: groups merged, cut in two, cuts moved by a wave or two.

    The recurrence cannot hold how stolen SMs arrive; the engine can, so the
    last step is taken there.

    Parameters
    ----------
    best, value_s : where to start, and its time in the engine
    run_s : time of parameters in the engine
    budget : runs allowed

    Returns
    -------
    Proposal, float
        The best found and its time; the start itself where nothing is better.
    """
    if best.partition is None:
        return best, value_s
    tried = {best.cuts}
    while budget > 0:
        better = None
        for cuts in _neighbours(best.cuts):
            if cuts in tried or budget <= 0:
                continue
            tried.add(cuts)
            budget -= 1
            candidate = Proposal(best.partition.to_parameters(cuts), None, best.partition, cuts)
            seconds = run_s(candidate.parameters)
            if seconds < value_s:
                better, value_s = candidate, seconds
        if better is None:
            break
        best = better
    return best, value_s


def _splits(best: Split, partition: Partition) -> Iterator[Proposal]:
    """Yield the optimum, then the best split for every number of groups that comes near it, nearest first."""
    yield Proposal(partition.to_parameters(best.cuts), best.value_s, partition, best.cuts)
    # Solved only when asked for: a quick search takes the optimum of every problem and no more.
    others = [s for s in best_by_groups(partition, MAX_GROUPS) if s.value_s <= WORTH_RUNNING * best.value_s]
    for split in sorted(others, key=lambda split: split.value_s):
        yield Proposal(partition.to_parameters(split.cuts), split.value_s, partition, split.cuts)


def _neighbours(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield cuts that differ in one place; the last cut, the end of the waves, stays."""
    *inner, last = cuts
    for i in range(len(inner)):
        yield (*inner[:i], *inner[i + 1 :], last)
    bounds = [0, *cuts]
    for i, cut in enumerate(inner):
        for step in (1, -1, 2, -2):
            if bounds[i] < cut + step < bounds[i + 2]:
                yield (*inner[:i], cut + step, *inner[i + 1 :], last)
    for low, high in itertools.pairwise(bounds):
        middle = (low + high) // 2
        if low < middle < high:
            yield tuple(sorted({*cuts, middle}))

"""From the runs of a search to its plans: the best layouts, refined, and what comes next to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from overlapsim.planner.funnel import PLAN, Ran
from overlapsim.planner.refine import Refiner
from overlapsim.planner.space import Space
from overlapsim.planner.step_bound import step_lower_bound_s
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import StepResult, simulate_step

TWINS: Final = 4
"""Settings of one layout that are returned at most, the fastest among those that were run."""
REFINED: Final = 3
"""Layouts that are refined beyond those asked for."""
KIND: Final = ("tp", "sp", "cp", "ep", "etp")
"""Degrees within a layer: which of them are above 1 tells kinds of parallelism apart."""
Step = Callable[[Ran], StepInputs]


@dataclass(frozen=True, eq=False)
class Found:
    """One candidate that the engine ran.

    Attributes
    ----------
    row : in the space
    bound_s : what was known before: the engine's time is at least that
    result : of `simulate_step`, without ranges
    """

    row: int
    bound_s: float
    result: StepResult


def best_of(
    ran: Sequence[Ran], step: Step, space: Space, top: int, models: dict[object, object], refiner: Refiner | None
) -> list[Found]:
    """The best settings of each of the best layouts, and those that come next, in order.

    Parameters
    ----------
    ran : in the engine
    step : makes the step of a run
    space, top : candidates, and layouts to return
    models : results of cost models
    refiner : of the best layouts; None leaves them as they were run
    """
    layouts = _by_layout(ran, space)
    found: list[tuple[float, int, float, StepInputs]] = []
    for entry in _few(layouts, space, top) if refiner else ():
        assert refiner is not None
        seconds, inputs = refiner.refine(step(entry), entry.seconds)
        if seconds < entry.seconds:
            found.append((seconds, entry.row, step_lower_bound_s(inputs), inputs))
    if found and refiner is not None:
        seconds, row, bound_s, inputs = min(found, key=lambda entry: entry[:2])
        found.remove((seconds, row, bound_s, inputs))
        seconds, inputs = refiner.polish(inputs, seconds)
        found.append((seconds, row, bound_s, inputs))
    found += [
        (entry.seconds, entry.row, entry.bound_s, step(entry))
        for entries in layouts.values()
        for entry in entries[:TWINS]
    ]
    kept: list[Found] = []
    counts: dict[tuple[int, ...], int] = {}
    for _, row, bound_s, inputs in sorted(found, key=lambda e: (e[0], e[1], bool(e[3].composition.strategies))):
        plan = _values(space, row, PLAN)
        if plan in counts or len(counts) < top:
            counts[plan] = counts.get(plan, 0) + 1
            if counts[plan] <= TWINS:
                kept.append(Found(row, bound_s, simulate_step(inputs, ranges=False, models=models)))
    return kept


def _by_layout(ran: Sequence[Ran], space: Space) -> Mapping[tuple[int, ...], list[Ran]]:
    """Runs of each layout, the fastest first, and layouts by their fastest."""
    found: dict[tuple[int, ...], list[Ran]] = {}
    for entry in sorted(ran, key=lambda entry: (entry.seconds, entry.row, bool(entry.composition.strategies))):
        found.setdefault(_values(space, entry.row, PLAN), []).append(entry)
    return found


def _few(layouts: Mapping[tuple[int, ...], list[Ran]], space: Space, top: int) -> list[Ran]:
    """The fastest of the best layouts, and of each kind of parallelism: what they hide differs."""
    heads = [entries[0] for entries in layouts.values()]
    kinds: dict[tuple[bool, ...], Ran] = {}
    for entry in heads:
        kinds.setdefault(tuple(value > 1 for value in _values(space, entry.row, KIND)), entry)
    few = [*heads[:top], *list(kinds.values())[:REFINED]]
    return list({entry.row: entry for entry in few}.values())


def _values(space: Space, row: int, names: Sequence[str]) -> tuple[int, ...]:
    return tuple(int(space.columns[name][row]) for name in names)

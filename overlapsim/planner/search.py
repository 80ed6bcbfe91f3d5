"""The search of `plan`: enumerate, drop what cannot fit, bound the rest, look closer at the least bound first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from overlapsim.errors import PlanError
from overlapsim.hardware.profile import Cluster
from overlapsim.planner.found import Found, best_of
from overlapsim.planner.funnel import HIDES, PLAN, Funnel, Ran
from overlapsim.planner.layout_bounds import LayoutBounds
from overlapsim.planner.memory_screen import least_bytes
from overlapsim.planner.nearest import nearest_changes
from overlapsim.planner.overlap_choice import OverlapChooser
from overlapsim.planner.refine import Refiner
from overlapsim.planner.space import (
    DISPATCHERS,
    OVERLAPS,
    RECOMPUTES,
    SCHEDULE_NAMES,
    Axes,
    Constraint,
    Space,
    enumerate_space,
)
from overlapsim.planner.step_bound import step_lower_bound_s
from overlapsim.step.inputs import DP_OVERLAPS, StepInputs
from overlapsim.step.simulate import simulate_step
from overlapsim.strategy.compose import Composition
from overlapsim.units import format_bytes
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recompute import Recompute

TOP: Final = 5
SERIALS: Final = 3
"""Layouts without strategies that are tried with other dispatchers, beside that of the best plan."""


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is asked for.

    Attributes
    ----------
    model, cluster : cluster with its nodes counted; the plan uses all of its GPUs
    global_batch, sequence : sequences of a step, tokens of each
    axes, constraints : what may be chosen
    memory_bytes : of one GPU, that the plan may use; None: all of its HBM
    recipe, stack, sustained_clock : software and clock of the runs; the recipe's dispatcher becomes the first of `axes`
        where these leave it out
    top : layouts to return
    exhaustive : run the engine on everything that fits, bounds or not
    narrow : what changes results and may be sent in fewer bytes (`allowed.narrower`)
    """

    model: ModelSpec
    cluster: Cluster
    global_batch: int
    sequence: int
    axes: Axes = field(default_factory=Axes)
    constraints: tuple[Constraint, ...] = ()
    memory_bytes: float | None = None
    recipe: Recipe = field(default_factory=Recipe)
    stack: str = "graph"
    sustained_clock: float = 1.0
    top: int = TOP
    exhaustive: bool = False
    narrow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        given = self.axes.dispatcher
        if given != DISPATCHERS and self.recipe.dispatcher not in given:
            object.__setattr__(self, "recipe", replace(self.recipe, dispatcher=given[0]))

    @property
    def limit_bytes(self) -> float:
        """Memory of a GPU that a plan may use."""
        return self.cluster.device.hbm_bytes if self.memory_bytes is None else self.memory_bytes


@dataclass(frozen=True, eq=False)
class SearchResult:
    """What the funnel found.

    Attributes
    ----------
    space : candidates that were bounded
    best : the fastest of each of the best layouts, and settings of these that come next, in order
    best_serial : the fastest without strategies, with any of the dispatchers
    pruned : candidates left out, by reason
    num_candidates, num_run : enumerated, with and without strategies, a layout that is refused whole counted once; and
        run in the engine. What was not run is in `pruned`
    elapsed_s : of the search
    refused : why the machine cannot run a dispatcher; empty where it can
    """

    space: Space
    best: tuple[Found, ...]
    best_serial: Found | None
    pruned: Mapping[str, int]
    num_candidates: int
    num_run: int
    elapsed_s: float
    refused: str = ""


def search(request: PlanRequest, progress: Callable[[str], None] | None = None) -> SearchResult:
    """Find the fastest plans of a request.

    Nothing is pruned that could be among them: a candidate is left out
    because it cannot fit, or because its bound is above the time of as many
    other layouts as are asked for, or of its own layout with other settings.

    Raises
    ------
    PlanError
        If no layout exists for the request, or none fits into memory (exit code 1); the message says what would.
    """
    began = time.perf_counter()
    say = progress or (lambda text: None)
    request = replace(request, model=_shared_layers(request.model))
    space = enumerate_space(
        request.model, request.cluster.num_devices, request.global_batch, request.sequence, request.axes,
        request.constraints,
    )  # fmt: skip
    if not len(space):
        raise PlanError(
            f"no layout of {request.model.name} exists on {request.cluster.num_devices} GPUs with a batch of "
            f"{request.global_batch} and these constraints: {_reasons(space.pruned)}; "
            f"{nearest_changes(request, step_inputs)}",
            exit_code=1,
        )
    overlap = (OVERLAPS[0] in request.axes.overlap, OVERLAPS[1] in request.axes.overlap)
    total = _count(space, overlap)
    say(f"{total:,} candidates")
    least = least_bytes(space, step_inputs(request, space, 0))
    fits = least <= request.limit_bytes
    if not fits.any():
        raise _unfit(request, float(least.min()))
    space = space.take(fits)
    pruned, refused = dict(space.pruned), sum(space.pruned.values())
    left_out = total - _count(space, overlap)
    say(f"{total - left_out:,} may fit")
    models: dict[object, object] = {}
    chooser = OverlapChooser()
    funnel = Funnel(
        LayoutBounds(space, step_inputs(request, space, 0), models),
        lambda row, composition: step_inputs(request, space, row, composition),
        request.limit_bytes,
        request.top,
        overlap,
        models,
        chooser.pairs,
        say,
    )
    if request.exhaustive:
        funnel.run_all()
    else:
        bounds = funnel.bounds.hardware(hides=HIDES[overlap[1]])
        say(f"bounded by hardware; the least is {bounds.min():.3g} s")
        funnel.run(bounds)
    if not funnel.ran and funnel.refused:
        raise PlanError(f"no layout of {request.model.name} can be run: {funnel.refused}", exit_code=1)
    if not funnel.ran:
        raise _unfit(request, None)
    counts = dict(funnel.counts)
    counts["does not fit into memory"] = counts.get("does not fit into memory", 0) + left_out
    counts["bound above the best found"] = total - len(funnel.ran) - sum(counts.values())
    pruned |= {reason: count for reason, count in counts.items() if count}
    refiner = None
    if overlap[1]:
        pairs = request.axes.schedule == Axes().schedule
        refiner = Refiner(request.limit_bytes, models, chooser, request.axes.dispatcher, request.narrow, pairs=pairs)
        say("refining the best")
    best = best_of(
        funnel.ran,
        lambda ran: step_inputs(request, space, ran.row, ran.composition),
        space,
        request.top,
        models,
        refiner,
    )
    serial = _serial(request, space, funnel.ran, best, models, refiner)
    elapsed_s = time.perf_counter() - began
    counted = total + refused
    return SearchResult(space, tuple(best), serial, pruned, counted, len(funnel.ran), elapsed_s, funnel.refused)


def step_inputs(request: PlanRequest, space: Space, row: int, composition: Composition | None = None) -> StepInputs:
    """The step of one candidate."""
    c = space.columns
    return StepInputs(
        request.model,
        request.cluster,
        space.layout(row),
        space.job(row),
        schedule=SCHEDULE_NAMES[int(c["schedule"][row])] if int(c["pp"][row]) > 1 else "",
        recompute=Recompute.parse(RECOMPUTES[int(c["recompute"][row])]),
        recipe=request.recipe,
        stack=request.stack,
        dp_overlap=DP_OVERLAPS[int(c["dp_overlap"][row])],
        sustained_clock=request.sustained_clock,
        composition=composition or Composition(),
    )


def _shared_layers(model: ModelSpec) -> ModelSpec:
    """The model with one object for all layers that are equal: they are told apart by identity where that is faster."""
    known = {layer: layer for layer in reversed(model.layers)}
    return replace(model, layers=tuple(known[layer] for layer in model.layers))


def _count(space: Space, overlap: tuple[bool, bool]) -> int:
    """Candidates of a space, those with strategies counted beside those without."""
    return overlap[0] * len(space) + overlap[1] * int((space.columns["tp"] > 1).sum())


def _serial(
    request: PlanRequest,
    space: Space,
    ran: Sequence[Ran],
    best: Sequence[Found],
    models: dict[object, object],
    refiner: Refiner | None,
) -> Found | None:
    """The fastest without strategies, layouts with their fastest dispatcher; it may be among the best."""
    heads: dict[tuple[int, ...], Ran] = {}
    for entry in sorted((entry for entry in ran if not entry.composition.strategies), key=lambda e: e.seconds):
        heads.setdefault(_plan(space, entry.row), entry)
    own = (_plan(space, found.row) for found in best[:1])
    tried = dict.fromkeys((*list(heads)[:SERIALS], *(plan for plan in own if plan in heads)))
    options: list[tuple[float, int, float, StepInputs]] = []
    for entry in (heads[plan] for plan in tried):
        given = step_inputs(request, space, entry.row)
        seconds, inputs = refiner.dispatched(given, entry.seconds) if refiner else (entry.seconds, given)
        options.append((seconds, entry.row, entry.bound_s if inputs is given else step_lower_bound_s(inputs), inputs))
    if not options:
        return None
    seconds, row, bound_s, inputs = min(options, key=lambda option: option[:2])
    for found in best:
        if not found.result.inputs.composition.strategies and found.result.step_time_s <= seconds * (1 + 1e-9):
            return found
    return Found(row, bound_s, simulate_step(inputs, ranges=False, models=models))


def _plan(space: Space, row: int) -> tuple[int, ...]:
    return tuple(int(space.columns[name][row]) for name in PLAN)


def _reasons(pruned: Mapping[str, int]) -> str:
    """The most frequent reasons with their counts."""
    ordered = sorted(pruned.items(), key=lambda entry: -entry[1])
    return ", ".join(f"{name} ({count})" for name, count in ordered[:3]) or "nothing divides"


def _unfit(request: PlanRequest, least_bytes: float | None) -> PlanError:
    """What to say where nothing fits."""
    leanest = "" if least_bytes is None else f": the leanest needs at least {format_bytes(least_bytes)}"
    return PlanError(
        f"no layout of {request.model.name} fits into {format_bytes(request.limit_bytes)} of each of "
        f"{request.cluster.num_devices} GPUs{leanest}; {nearest_changes(request, step_inputs)}",
        exit_code=1,
    )

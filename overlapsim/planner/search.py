"""The search of `plan`: enumerate, drop what cannot fit, bound the rest, look closer at the least bound first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from overlapsim.errors import PlanError
from overlapsim.hardware.profile import Cluster
from overlapsim.planner.found import Found, best_of
from overlapsim.planner.funnel import HIDES, Funnel, Ran
from overlapsim.planner.layout_bounds import LayoutBounds
from overlapsim.planner.memory_screen import least_bytes
from overlapsim.planner.nearest import nearest_changes
from overlapsim.planner.overlap_choice import OverlapChooser
from overlapsim.planner.refine import Refiner
from overlapsim.planner.space import OVERLAPS, RECOMPUTES, SCHEDULE_NAMES, Axes, Constraint, Space, enumerate_space
from overlapsim.step.inputs import DP_OVERLAPS, StepInputs
from overlapsim.step.simulate import simulate_step
from overlapsim.strategy.compose import Composition
from overlapsim.units import format_bytes
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recompute import Recompute

TOP: Final = 5


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is asked for.

    Attributes
    ----------
    model, cluster : cluster with its nodes counted; the plan uses all of its GPUs
    global_batch, sequence : sequences of a step, tokens of each
    axes, constraints : what may be chosen
    memory_bytes : of one GPU, that the plan may use; None: all of its HBM
    recipe, stack, sustained_clock : software and clock of the runs
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
    best_serial : the fastest with the library's kernels one after another
    pruned : candidates left out, by reason
    num_candidates, num_run : enumerated, with and without strategies; and run in the engine
    elapsed_s : of the search
    """

    space: Space
    best: tuple[Found, ...]
    best_serial: Found | None
    pruned: Mapping[str, int]
    num_candidates: int
    num_run: int
    elapsed_s: float


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
    pruned = dict(space.pruned)
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
    serial = _serial(request, space, funnel.ran, best, models)
    return SearchResult(space, tuple(best), serial, pruned, total, len(funnel.ran), time.perf_counter() - began)


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
    request: PlanRequest, space: Space, ran: Sequence[Ran], best: Sequence[Found], models: dict[object, object]
) -> Found | None:
    """The fastest run without strategies; it may be among the best."""
    plain = min((entry for entry in ran if not entry.composition.strategies), key=lambda e: e.seconds, default=None)
    if plain is None:
        return None
    inputs = step_inputs(request, space, plain.row)
    for found in best:
        if found.row == plain.row and found.result.inputs == inputs:
            return found
    return Found(plain.row, plain.bound_s, simulate_step(inputs, ranges=False, models=models))


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

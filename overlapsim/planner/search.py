"""The search of `plan`: enumerate, drop what cannot fit, bound the rest, look closer at the least bound first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from overlapsim.errors import PlanError
from overlapsim.hardware.profile import Cluster
from overlapsim.planner.funnel import PLAN, Funnel, Ran
from overlapsim.planner.layout_bounds import LayoutBounds
from overlapsim.planner.memory_screen import least_bytes
from overlapsim.planner.nearest import nearest_changes
from overlapsim.planner.space import OVERLAPS, RECOMPUTES, SCHEDULE_NAMES, Axes, Constraint, Space, enumerate_space
from overlapsim.step.inputs import DP_OVERLAPS, StepInputs
from overlapsim.step.simulate import StepResult, simulate_step
from overlapsim.strategy.compose import Composition
from overlapsim.units import format_bytes
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recompute import Recompute

TOP: Final = 5
TWINS: Final = 4
"""Settings of one layout that are returned at most, the fastest among those that were run."""


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

    @property
    def limit_bytes(self) -> float:
        """Memory of a GPU that a plan may use."""
        return self.cluster.device.hbm_bytes if self.memory_bytes is None else self.memory_bytes


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
    funnel = Funnel(
        LayoutBounds(space, step_inputs(request, space, 0), models),
        lambda row, composition: step_inputs(request, space, row, composition),
        request.limit_bytes,
        request.top,
        overlap,
        models,
        say,
    )
    if request.exhaustive:
        funnel.run_all()
    else:
        bounds = funnel.bounds.hardware(strategies=overlap[1])
        say(f"bounded by hardware; the least is {bounds.min():.3g} s")
        funnel.run(bounds)
    if not funnel.ran:
        raise _unfit(request, None)
    counts = dict(funnel.counts)
    counts["does not fit into memory"] = counts.get("does not fit into memory", 0) + left_out
    counts["bound above the best found"] = total - len(funnel.ran) - sum(counts.values())
    pruned |= {reason: count for reason, count in counts.items() if count}
    best = [_found(request, space, ran, models) for ran in _chosen(funnel.ran, space, request.top)]
    plain = min((ran for ran in funnel.ran if not ran.composition.pairs), key=lambda ran: ran.seconds, default=None)
    same = next((found for found in best if plain is not None and _same(found, plain)), None)
    serial = same or (None if plain is None else _found(request, space, plain, models))
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


def _chosen(ran: Sequence[Ran], space: Space, top: int) -> list[Ran]:
    """Runs of the best layouts, in order: the best of each, and its next."""
    layouts: dict[tuple[int, ...], int] = {}
    kept = []
    for entry in sorted(ran, key=lambda entry: (entry.seconds, entry.row, bool(entry.composition.pairs))):
        plan = tuple(int(space.columns[name][entry.row]) for name in PLAN)
        if plan in layouts or len(layouts) < top:
            layouts[plan] = layouts.get(plan, 0) + 1
            if layouts[plan] <= TWINS:
                kept.append(entry)
    return kept


def _found(request: PlanRequest, space: Space, ran: Ran, models: dict[object, object]) -> Found:
    inputs = step_inputs(request, space, ran.row, ran.composition)
    return Found(ran.row, ran.bound_s, simulate_step(inputs, ranges=False, models=models))


def _same(found: Found, ran: Ran) -> bool:
    return found.row == ran.row and bool(found.result.inputs.composition.pairs) == bool(ran.composition.pairs)


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

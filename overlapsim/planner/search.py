"""The funnel: enumerate, drop what cannot fit, bound the rest in arrays, run the engine best bound first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from overlapsim.errors import LayoutError, PlanError, StrategyError
from overlapsim.hardware.profile import Cluster
from overlapsim.planner.layer_times import LayerTimes
from overlapsim.planner.memory_screen import least_bytes
from overlapsim.planner.overlap_choice import OverlapChooser
from overlapsim.planner.screen import step_bounds
from overlapsim.planner.space import OVERLAPS, RECOMPUTES, SCHEDULE_NAMES, Axes, Constraint, Space, enumerate_space
from overlapsim.step.inputs import DP_OVERLAPS, StepInputs
from overlapsim.step.simulate import StepResult, simulate_step, step_memory, step_schedule
from overlapsim.strategy.compose import Composition
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
    top : plans to return
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
    bound_s : what the screen said: the engine's time is at least that
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
    space : candidates that were screened
    best : the fastest, in order
    best_serial : the fastest with the library's kernels one after another
    pruned : candidates left out, by reason
    num_candidates, num_run : screened, and run in the engine
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
    better ones as are asked for.

    Raises
    ------
    PlanError
        If no layout exists for the request, or none fits into memory (exit code 1).
    """
    began = time.perf_counter()
    say = progress or (lambda text: None)
    space = enumerate_space(
        request.model, request.cluster.num_devices, request.global_batch, request.sequence, request.axes,
        request.constraints,
    )  # fmt: skip
    if not len(space):
        reasons = ", ".join(
            f"{name} ({count})" for name, count in sorted(space.pruned.items(), key=lambda e: -e[1])[:3]
        )
        raise PlanError(
            f"no layout of {request.model.name} exists on {request.cluster.num_devices} GPUs with a batch of "
            f"{request.global_batch} and these constraints: {reasons or 'nothing divides'}",
            exit_code=1,
        )
    total = len(space)
    say(f"{total:,} candidates")
    inputs = step_inputs(request, space, 0)
    least = least_bytes(space, inputs)
    fits = least <= request.limit_bytes
    if not fits.any():
        raise PlanError(
            f"no layout of {request.model.name} fits: the leanest needs {least.min() / 1e9:.1f} GB of "
            f"{request.limit_bytes / 1e9:.1f} GB on {request.cluster.num_devices} GPUs; use more GPUs, allow more "
            "recompute or ZeRO, or raise --memory",
            exit_code=1,
        )
    space = space.take(fits, "does not fit into memory")
    say(f"{len(space):,} may fit")
    models: dict[object, object] = {}
    times = LayerTimes(inputs, models)
    bounds = step_bounds(space, times, inputs)
    say(f"bounded; the least is {bounds.min():.3g} s")
    return _run(request, space, bounds, models, total, began, say)


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


def _run(
    request: PlanRequest,
    space: Space,
    bounds: np.ndarray[tuple[int], np.dtype[np.float64]],
    models: dict[object, object],
    total: int,
    began: float,
    say: Callable[[str], None],
) -> SearchResult:
    """Engine runs, least bound first, until no bound is below the worst of the best."""
    order = np.argsort(bounds, kind="stable")
    chooser = OverlapChooser(models)
    best: list[Found] = []
    serial: Found | None = None
    unfit = refused = ran = 0
    pruned = dict(space.pruned)
    strategies = OVERLAPS.index("strategies")
    for place, row in enumerate(order.tolist()):
        bound = float(bounds[row])
        worst = best[request.top - 1].result.step_time_s if len(best) >= request.top else float("inf")
        wants_serial = serial is None or bound < serial.result.step_time_s
        if bound > worst and not (wants_serial and serial is None) and not request.exhaustive:
            pruned["bound above the best found"] = len(order) - place
            break
        inputs = step_inputs(request, space, row)
        try:
            memory = step_memory(inputs, step_schedule(inputs))
            if max(m.total_bytes for m in memory) > request.limit_bytes:
                unfit += 1
                continue
            if int(space.columns["overlap"][row]) == strategies:
                composition = chooser.composition(inputs)
                if not composition.pairs:
                    refused += 1
                    continue
                inputs = replace(inputs, composition=composition)
            result = simulate_step(inputs, ranges=False, models=models)
        except (LayoutError, StrategyError):
            refused += 1
            continue
        ran += 1
        found = Found(row, bound, result)
        best.append(found)
        best.sort(key=lambda f: f.result.step_time_s)
        del best[request.top if not request.exhaustive else max(request.top, 50) :]
        if int(space.columns["overlap"][row]) != strategies and (
            serial is None or result.step_time_s < serial.result.step_time_s
        ):
            serial = found
        if ran % 50 == 0:
            say(f"{ran} run, best {best[0].result.step_time_s:.4g} s")
    if unfit:
        pruned["does not fit into memory"] = pruned.get("does not fit into memory", 0) + unfit
    if refused:
        pruned["no strategy applies"] = refused
    if not best:
        raise PlanError(
            f"no layout of {request.model.name} fits into {request.limit_bytes / 1e9:.1f} GB a GPU; use more GPUs, "
            "allow more recompute or ZeRO, or raise --memory",
            exit_code=1,
        )
    return SearchResult(space, tuple(best), serial, pruned, total, ran, time.perf_counter() - began)


def reasons_of(pruned: Mapping[str, int]) -> Sequence[tuple[str, int]]:
    """Reasons with their counts, the most frequent first."""
    return sorted(pruned.items(), key=lambda entry: -entry[1])

"""Plans a training step: searches layouts and strategies, ranks them by the objective, adds ranges and bounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from overlapsim.errors import PlanError, ProfileError, UsageError
from overlapsim.plan import Finding, Gain, Objective
from overlapsim.planner.allowed import ALLOWED, changes, multiplying, not_applied
from overlapsim.planner.found import Found
from overlapsim.planner.gains import gains_of
from overlapsim.planner.robust import ROBUST, by_high_end, degrees_of, perturbed_step
from overlapsim.planner.search import PlanRequest, SearchResult, search
from overlapsim.planner.space import DISPATCHERS, divisors
from overlapsim.planner.step_bound import step_lower_bound_s
from overlapsim.step.perturb import NONE, Perturbation
from overlapsim.step.simulate import StepResult, simulate_step
from overlapsim.units import format_time
from overlapsim.workload.model import MoE

ROBUST_LAYOUTS: Final = 4
"""Layouts that are perturbed for each one shown: the fastest undisturbed."""
TWINS: Final = 3
FEW: Final = 2
"""Sizes of pipelines that are so few that a finding says why."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Goal:
    """What plans are ranked by.

    Attributes
    ----------
    objective : ``step_time``; ``tokens_per_s_per_gpu`` (plans may use the whole cluster or a half, a quarter ... of its
        nodes); ``robust`` (the high end of the range under the perturbation)
    perturbation : what plans are perturbed with; `ROBUST` where ``robust`` names none
    allow : of `ALLOWED`

    Raises
    ------
    UsageError
        If `allow` names something else.
    """

    objective: Objective = "step_time"
    perturbation: Perturbation = NONE
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.allow:
            if name not in ALLOWED:
                raise UsageError(f"allowed is {name!r}; expected of {', '.join(ALLOWED)}")
        if self.objective == "robust" and self.perturbation == NONE:
            object.__setattr__(self, "perturbation", ROBUST)


@dataclass(frozen=True, eq=False)
class Ranked:
    """One plan.

    Attributes
    ----------
    rank : place, from 1; 0 for a plan that is there to compare with
    result : of `simulate_step`, with ranges
    lower_bound_s : what the hardware forbids this layout to go below
    perturbed : the same step perturbed, with ranges; None where nothing is, or its strategies refuse (`not_perturbed`)
    twins : the same layout with other settings, slower
    findings : of the step, and what was allowed and is used
    """

    rank: int
    result: StepResult
    lower_bound_s: float
    perturbed: StepResult | None
    twins: tuple[StepResult, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Nodes that the plan uses."""
        return self.result.inputs.cluster.num_nodes


@dataclass(frozen=True, eq=False)
class StepAnswer:
    """The answer to `overlapsim plan`.

    Attributes
    ----------
    request, goal : what was asked
    ranked : the best plan of each of the best layouts, best first
    serial : the fastest plan without overlap strategies
    pruned : candidates left out, by reason
    searched, run : candidates looked at, and run in the engine; the others are in `pruned`
    elapsed_s : of the whole answer
    findings : what was asked for and not applied
    gains : what each part of the best plan gains, where it overlaps
    """

    request: PlanRequest
    goal: Goal
    ranked: tuple[Ranked, ...]
    serial: Ranked | None
    pruned: Mapping[str, int]
    searched: int
    run: int
    elapsed_s: float
    findings: tuple[Finding, ...] = ()
    gains: tuple[Gain, ...] = ()


def plan_step(request: PlanRequest, goal: Goal | None = None, progress: Say | None = None) -> StepAnswer:
    """Find, rank and range the best plans of a request.

    Plans that differ in degrees are told apart; of each layout the best
    settings are shown, and what comes close to them as twins.

    Raises
    ------
    PlanError
        If nothing is feasible (exit code 1).
    ProfileError
        If a plan is predicted below what its hardware can do: a measured curve does not belong to the machine.
    """
    began, goal, say = time.perf_counter(), goal or Goal(), progress or (lambda text: None)
    models: dict[object, object] = {}
    _check_routing(request, goal.perturbation)
    runs = _search_all(request, goal, say)
    found = sorted((f for run in runs for f in run.best), key=lambda f: _value(f.result, goal))
    findings = [*_assumed(goal), *_even_only(request)]
    perturbed: dict[int, StepResult] = {}
    if goal.objective == "robust":
        found, perturbed, more = by_high_end(found, request, goal.perturbation, models, say)
        findings += more
    groups = _by_layout(found, request.top)
    ranked = []
    for number, group in enumerate(groups, start=1):
        say(f"ranges of plan {number} of {len(groups)}")
        twins = tuple(twin.result for twin in group[1 : 1 + TWINS])
        ranked.append(_ranked(number, group[0].result, twins, perturbed.get(id(group[0])), request, goal, models))
    serials = [run.best_serial for run in runs if run.best_serial is not None]
    serial = None
    if serials:
        plain = min(serials, key=lambda f: _value(f.result, goal))
        same = (entry for group, entry in zip(groups, ranked, strict=True) if group[0] is plain)
        serial = next(same, None) or _ranked(0, plain.result, (), None, request, goal, models)
    findings += _dispatchers_unused(request, ranked, runs)
    used = [entry.result.inputs.recipe for entry in ranked]
    findings += not_applied(goal.allow, request.cluster.device, used)
    gains: tuple[Gain, ...] = ()
    if ranked[0].result.inputs.composition.strategies:
        say("what each part of plan 1 gains")
        gains = gains_of(request, ranked[0].result.inputs, models)
    return StepAnswer(
        request,
        goal,
        tuple(ranked),
        serial,
        _sum(run.pruned for run in runs),
        sum(run.num_candidates for run in runs),
        sum(run.num_run for run in runs),
        time.perf_counter() - began,
        tuple(findings),
        gains,
    )


def _check_routing(request: PlanRequest, perturbation: Perturbation) -> None:
    """Refuse recorded counts of another number of experts before anything is searched."""
    for layer in request.model.kinds:
        if isinstance(layer.mlp, MoE):
            perturbation.routing.shares(layer.mlp.num_experts, layer.mlp.top_k)


def _value(result: StepResult, goal: Goal) -> float:
    """What is to be small: the step, or what it takes of each GPU's time."""
    devices = result.inputs.layout.world_size if goal.objective == "tokens_per_s_per_gpu" else 1
    return result.step_time_s * devices


def _search_all(request: PlanRequest, goal: Goal, say: Say) -> list[SearchResult]:
    """One search for each machine and precision that may be used; those without a feasible plan are left out."""
    runs: list[SearchResult] = []
    failures: list[PlanError] = []
    for variant in _variants(request, goal):
        if (variant.cluster.num_nodes, variant.recipe) != (request.cluster.num_nodes, request.recipe):
            say(f"on {variant.cluster.num_nodes} node(s){', with fp8' if variant.recipe.fp8 else ''}")
        try:
            runs.append(search(variant, say))
        except PlanError as error:
            if error.exit_code != 1:
                raise
            failures.append(error)
    if not runs:
        raise failures[0]
    return runs


def _variants(request: PlanRequest, goal: Goal) -> Iterator[PlanRequest]:
    nodes, counts = request.cluster.num_nodes, [request.cluster.num_nodes]
    while goal.objective == "tokens_per_s_per_gpu" and nodes % 2 == 0:
        nodes //= 2
        counts.append(nodes)
    # A perturbation changes the order: more layouts are looked at than are shown.
    top = request.top * (ROBUST_LAYOUTS if goal.objective == "robust" else 1)
    for count in counts:
        cluster = request.cluster if count == request.cluster.num_nodes else request.cluster.with_nodes(count)
        for recipe in multiplying(request.recipe, goal.allow, cluster.device):
            yield replace(request, cluster=cluster, recipe=recipe, top=top, narrow=goal.allow)


def _assumed(goal: Goal) -> Iterator[Finding]:
    if goal.objective == "robust" and goal.perturbation == ROBUST:
        yield Finding(
            "perturbation_assumed",
            f"plans are ranked under {ROBUST}: a convention; give what your machine shows with --perturb",
        )


def _even_only(request: PlanRequest) -> Iterator[Finding]:
    """Say that hardly any pipeline was searched, where layers divide into few and uneven stages were not asked for."""
    layers, given = request.model.num_layers, request.axes.degrees.get("pp")
    pipelines = [
        pp
        for pp in divisors(request.cluster.num_devices)
        if pp <= layers
        and (given is None or pp in given)
        and all(rule.holds(np.array(pp)) for rule in request.constraints if rule.column == "pp")
    ]
    even, uneven = ([pp for pp in pipelines if (layers % pp == 0) is divides] for divides in (True, False))
    if uneven and len(even) <= FEW and not request.axes.uneven:
        yield Finding(
            "even_stages_only",
            f"{request.model.name} has {layers} layers: only pp {_list(even)} was searched, which divides them; "
            f"--uneven searches pp {_list(uneven)} as well, with stages that differ by a layer",
        )


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _dispatchers_unused(request: PlanRequest, ranked: Sequence[Ranked], runs: Sequence[SearchResult]) -> list[Finding]:
    """Say why dispatchers that were asked for are in no plan."""
    asked = request.axes.dispatcher
    if asked == DISPATCHERS or any(entry.result.inputs.layout.ep > 1 for entry in ranked):
        return []
    why = next((run.refused for run in runs if run.refused), "")
    if not any(isinstance(layer.mlp, MoE) for layer in request.model.kinds):
        why = f"{request.model.name} has no experts"
    why = why or "no plan has ep over 1, so none sends tokens to other GPUs; ask for one with --constraint 'ep>=2'"
    return [Finding("dispatchers_not_used", f"{', '.join(asked)} asked for and in no plan: {why}")]


def _by_layout(found: Sequence[Found], top: int) -> list[list[Found]]:
    """Plans of the best layouts, best first, each with its twins; single settings where layouts are few."""
    groups: dict[object, list[Found]] = {}
    for entry in found:
        groups.setdefault(degrees_of(entry), []).append(entry)
    heads = list(groups.values())[:top]
    place = {id(entry): number for number, entry in enumerate(found)}
    twins = sorted((twin for group in heads for twin in group[1:]), key=lambda entry: place[id(entry)])
    heads += [[twin] for twin in twins[: top - len(heads)]]
    return sorted(heads, key=lambda group: place[id(group[0])])


def _ranked(
    rank: int,
    result: StepResult,
    twins: tuple[StepResult, ...],
    perturbed: StepResult | None,
    request: PlanRequest,
    goal: Goal,
    models: dict[object, object],
) -> Ranked:
    inputs = result.inputs
    ranged = simulate_step(inputs, models=models)
    bound = step_lower_bound_s(inputs)
    if ranged.step_time_s < bound * (1 - 1e-9):
        raise ProfileError(
            f"{inputs.layout} is predicted at {format_time(ranged.step_time_s)}, below {format_time(bound)} that "
            f"{inputs.cluster.name} can do: a measured curve or time does not belong to this machine; check it with "
            "`profiles check`"
        )
    findings = [*changes(inputs.recipe, request.recipe), *ranged.findings]
    if perturbed is None and goal.perturbation != NONE:
        perturbed, said = perturbed_step(inputs, goal.perturbation, models)
        findings += said
    return Ranked(rank, ranged, bound, perturbed, twins, tuple(findings))


def _sum(counts: Iterator[Mapping[str, int]] | Sequence[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for entry in counts:
        for reason, count in entry.items():
            total[reason] = total.get(reason, 0) + count
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))

"""Between a step's plan file and the planner: answer -> plan, and a plan's candidate -> the same step again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from overlapsim.errors import PlanError
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import (
    Finding,
    OperatorSettings,
    Prediction,
    SearchCount,
    StepCandidate,
    StepPlan,
    StepPlanInputs,
    StepSettings,
)
from overlapsim.planner.explain import advise
from overlapsim.planner.operator_plan import check_settings, cluster_differs, time_differs
from overlapsim.planner.step import Ranked, StepAnswer
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import graph_builder
from overlapsim.step.simulate import StepResult, step_prices
from overlapsim.strategy.base import Context
from overlapsim.strategy.chains import is_gemm
from overlapsim.strategy.compose import Chosen, Composition, find_pieces
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.build import Which
from overlapsim.workload.layout import KEYS, Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.operators import CollectiveOp
from overlapsim.workload.recipe import RECIPES, Recipe
from overlapsim.workload.recompute import Recompute

_WHICH: Final[tuple[Which, ...]] = ("forward", "backward")


def model_digest(model: ModelSpec) -> str:
    """SHA-256 of all that describes a model, whatever file it came from."""
    return hashlib.sha256(msgspec.json.encode(model, order="deterministic")).hexdigest()


def to_step_plan(answer: StepAnswer, inputs: StepPlanInputs, provenance: Mapping[str, str]) -> StepPlan:
    """Write down an answer: the plans with settings, predictions and bounds, and what is to be said about them."""
    every = answer.ranked if answer.serial is None else (*answer.ranked, answer.serial)
    shared = [f for f in answer.ranked[0].findings if all(f in entry.findings for entry in every)]
    best, *others = (candidate(entry, shared) for entry in answer.ranked)
    return StepPlan(
        kind="step",
        inputs=inputs,
        choice=best,
        alternatives=tuple(others),
        serial=None if answer.serial is None else candidate(answer.serial, shared),
        advice=advise(answer),
        search=SearchCount(answer.searched, answer.run, answer.pruned),
        findings=(*answer.findings, *shared),
        provenance=provenance,
    )


def candidate(entry: Ranked, shared: list[Finding]) -> StepCandidate:
    """One plan as its file holds it; findings that all plans share are left to the file."""
    result, perturbed = entry.result, entry.perturbed
    return StepCandidate(
        rank=entry.rank,
        settings=settings_of(result.inputs),
        operators=tuple(operators_of(result.inputs)),
        step=_prediction(result),
        perturbed=None if perturbed is None else _prediction(perturbed),
        lower_bound_s=entry.lower_bound_s,
        tokens_per_s=result.tokens_per_s,
        mfu=result.mfu,
        memory_bytes={kind: float(size) for kind, size in result.fullest.by_kind().items()},
        breakdown_s=result.breakdown_s,
        findings=tuple(f for f in entry.findings if f not in shared),
    )


def _prediction(result: StepResult) -> Prediction:
    return Prediction(result.step_time_s, result.low_s, result.high_s)


def settings_of(inputs: StepInputs) -> StepSettings:
    """Settings of a step; what was left to a default is filled in."""
    i = inputs
    assert i.precision is None, "plans keep the recipe's precision"
    return StepSettings(
        nodes=i.cluster.num_nodes,
        layout={key: getattr(i.layout, key) for key in KEYS},
        micro_batch=i.job.micro_batch,
        num_micro_batches=i.num_micro_batches,
        stage_layers=tuple(i.job.stage_layers or ()),
        schedule=i.schedule_name,
        p2p=i.p2p_mode,
        scatter_gather=i.scatter_gather,
        recompute=i.recompute.granularity,
        recompute_modules=tuple(sorted(i.recompute.modules)),
        recompute_method=i.recompute.method,
        recompute_layers=i.recompute.num_layers,
        fp8=i.recipe.fp8,
        dp_overlap=i.dp_overlap,
        bucket_bytes=i.bucket_bytes,
        reshard=i.reshard,
        rings=i.rings,
        rank_order=i.rank_order,
        dispatcher=i.recipe.dispatcher,
        dispatch_dtype=i.recipe.dispatch.dtype,
        compress=i.recipe.compress,
        dp_sync=i.dp_sync,
        arranging=tuple((chosen.strategy.name, dict(chosen.parameters)) for chosen in i.composition.arranging),
    )


def operators_of(inputs: StepInputs) -> Iterator[OperatorSettings]:
    """How each operator is overlapped that a strategy takes, by fixed name and pass; the same in every layer."""
    builder, prices = graph_builder(inputs), step_prices(inputs)
    said: set[tuple[str, str]] = set()
    for layer in inputs.model.kinds:
        for which in _WHICH:
            graph = builder.layer(layer, which)
            here = {(op.name, op.pass_) for op in graph.operators if is_gemm(op)} - said
            pairs = {key: chosen for key, chosen in inputs.composition.pairs.items() if key in here}
            for piece in find_pieces(graph, pairs):
                part = graph.part(piece.operators)
                gemm, collective = next(filter(is_gemm, part.operators)), next(part.of_type(CollectiveOp))
                if (gemm.name, gemm.pass_) in said:
                    continue
                said.add((gemm.name, gemm.pass_))
                context = Context(part, replace(prices, ranks=collective.ranks))
                strategy, parameters = piece.chosen.strategy, piece.chosen.parameters
                settings = strategy.settings(context, parameters)
                yield OperatorSettings(gemm.name, gemm.pass_, strategy.name, parameters, settings)


@dataclass(frozen=True, eq=False)
class StepReplay:
    """What a plan says to run.

    Attributes
    ----------
    inputs : the step
    planned_s : the plan's prediction
    findings : what does not fit the plan
    """

    inputs: StepInputs
    planned_s: float
    findings: tuple[Finding, ...]

    def differences(self, simulated_s: float) -> tuple[Finding, ...]:
        """Finding ``plan_differs`` where the simulation does not give the time that the plan predicts."""
        return time_differs(str(self.inputs.layout), simulated_s, self.planned_s)


def replay_step(plan: StepPlan, model: ModelSpec, cluster: Cluster, chosen: StepCandidate | None = None) -> StepReplay:
    """Prepare the simulation of one of a plan's candidates, the best by default.

    A model or profile that changed since is a finding, not an error: the
    numbers may then differ. Settings of operators must be those that follow
    from the plan's inputs and parameters.

    Raises
    ------
    PlanError
        If a setting cannot be used, or does not follow from inputs and parameters.
    LayoutError, UsageError, StrategyError, WorkloadError
        If a degree, choice or parameter is outside what is accepted.
    """
    entry = chosen or plan.choice
    findings = cluster_differs(plan.inputs.cluster_sha256, cluster)
    if plan.inputs.model_sha256 != model_digest(model):
        findings += (Finding("model_changed", f"{model.name} is not the model this plan was made for; plan again"),)
    inputs = step_inputs_of(plan.inputs, entry, model, cluster)
    if inputs.num_micro_batches != entry.settings.num_micro_batches:
        raise PlanError(
            f"settings.num_micro_batches is {entry.settings.num_micro_batches}; the plan's batch and layout make "
            f"{inputs.num_micro_batches}; plan again instead of editing the file"
        )
    expected = {(op.operator, op.pass_): op for op in operators_of(inputs)}
    for given in entry.operators:
        key = (given.operator, given.pass_)
        if key not in expected:
            raise PlanError(f"{given.operator}:{given.pass_} has no collective that {given.strategy} could take")
        check_settings(f"{given.strategy} on {given.operator}:{given.pass_}", given.settings, expected[key].settings)
    return StepReplay(inputs, entry.step.value_s, findings)


def step_inputs_of(asked: StepPlanInputs, entry: StepCandidate, model: ModelSpec, cluster: Cluster) -> StepInputs:
    """The step of a candidate.

    Raises
    ------
    PlanError
        If the recipe is unknown or the layout has other keys.
    """
    s = entry.settings
    if asked.recipe not in RECIPES:
        raise PlanError(f"the plan's recipe is {asked.recipe!r}; expected one of {', '.join(RECIPES)}")
    if set(s.layout) != set(KEYS):
        raise PlanError(f"the plan's layout has {', '.join(s.layout)}; expected {', '.join(KEYS)}")
    degrees: dict[str, Any] = dict(s.layout)
    layout = Layout(**degrees)
    pairs = {(op.operator, op.pass_): Chosen(load_strategy(op.strategy), op.parameters) for op in entry.operators}
    arranging = tuple(Chosen(load_strategy(name), parameters) for name, parameters in s.arranging)
    return StepInputs(
        model,
        cluster.with_nodes(s.nodes),
        layout,
        Job(asked.seq_len, s.micro_batch, asked.global_batch, layout.world_size, s.stage_layers or None),
        schedule=s.schedule,
        p2p=s.p2p,  # type: ignore[arg-type]
        scatter_gather=s.scatter_gather,
        recompute=Recompute(
            s.recompute,  # type: ignore[arg-type]
            frozenset(s.recompute_modules),
            s.recompute_method,  # type: ignore[arg-type]
            s.recompute_layers,
        ),
        recipe=_recipe(RECIPES[asked.recipe], s),
        stack=asked.stack,
        dp_overlap=s.dp_overlap,  # type: ignore[arg-type]
        bucket_bytes=s.bucket_bytes,
        reshard=s.reshard,
        rings=s.rings,  # type: ignore[arg-type]
        rank_order=s.rank_order,
        dp_sync=s.dp_sync,  # type: ignore[arg-type]
        sustained_clock=asked.sustained_clock,
        composition=Composition(arranging, pairs),
    )


def _recipe(recipe: Recipe, settings: StepSettings) -> Recipe:
    """The recipe that was asked for, with what a plan's settings change of it.

    Raises
    ------
    WorkloadError
        If a setting is unknown.
    """
    return replace(
        recipe,
        fp8=settings.fp8,
        compress=settings.compress,  # type: ignore[arg-type]
        dispatcher=settings.dispatcher,  # type: ignore[arg-type]
        dispatch=replace(recipe.dispatch, dtype=settings.dispatch_dtype),
    )

"""Step plans: every setting of a step is written and read back, and the plan simulates to its own numbers."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings

from overlapsim.errors import PlanError
from overlapsim.plan import StepCandidate, StepPlan, StepPlanInputs, dump_plan, load_plan
from overlapsim.planner.found import Found
from overlapsim.planner.robust import by_high_end
from overlapsim.planner.search import PlanRequest
from overlapsim.planner.space import Axes
from overlapsim.planner.step import Goal, Ranked, StepAnswer
from overlapsim.planner.step_bound import step_lower_bound_s
from overlapsim.planner.step_plan import (
    candidate,
    model_digest,
    operators_of,
    replay_step,
    settings_of,
    step_inputs_of,
    to_step_plan,
)
from overlapsim.step.inputs import StepInputs
from overlapsim.step.perturb import Perturbation
from overlapsim.step.pieces import graph_builder
from overlapsim.step.simulate import simulate_step, step_prices
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.operators import CollectiveOp
from tests.step.steps import A100, GPT, MODELS, MOE, ask, steps

ASKED = {"model", "cluster", "job", "recipe", "stack", "sustained_clock"}
"""Of `StepInputs`, what the plan's inputs hold or settings complete."""
NOT_PLANNED = {"precision", "perturbation", "contention"}
"""What plans keep at its default: the recipe's precision, a healthy machine, with contention."""
CHUNKED = Composition(pairs={("mlp.fc2", "fwd"): Chosen(load_strategy("chunked"), {"chunks": 2})})


def asked(step: StepInputs) -> StepPlanInputs:
    return StepPlanInputs(
        "gpt", model_digest(step.model), "a100-sxm8", A100.digest, step.cluster.num_nodes, step.job.global_batch or 0,
        step.job.seq_len, stack=step.stack, sustained_clock=step.sustained_clock,
    )  # fmt: skip


def ranked(step: StepInputs, rank: int) -> Ranked:
    result = simulate_step(step, models=MODELS)
    return Ranked(rank, result, step_lower_bound_s(step), None, findings=result.findings)


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    steps = [
        ask(GPT, "tp=4,dp=2", 16, micro=8, composition=CHUNKED, dp_overlap="gradients"),
        ask(GPT, "tp=2,pp=2,dp=2,zero=1", 16, schedule="zb_h1"),
        ask(GPT, "tp=4,dp=2", 16, micro=8, dp_overlap="gradients"),
    ]
    entries = [ranked(step, number) for number, step in enumerate(steps, start=1)]
    request = PlanRequest(GPT, A100, 16, 1024, Axes())
    answer = StepAnswer(request, Goal(), tuple(entries), entries[2], {"reason": 3}, 10, 4, 1.5)
    return load_plan(dump_plan(to_step_plan(answer, asked(steps[0]), {"overlapsim": "0"})))


def test_every_setting_of_a_step_has_a_place() -> None:
    """A new field of `StepInputs` must be written into plans, or be named here."""
    written = {field.name for field in fields(type(settings_of(ask(GPT, "tp=2"))))}
    known = ASKED | NOT_PLANNED | written | {"composition"}
    assert {field.name for field in fields(StepInputs)} <= known


@given(step=steps())
@settings(max_examples=30, deadline=None)
def test_settings_are_read_back_whole(step: StepInputs) -> None:
    step = replace(step, contention=True)
    entry = StepCandidate(1, settings_of(step), tuple(operators_of(step)), None, None, 1.0, 1.0, 1.0, {}, {})
    again = step_inputs_of(asked(step), entry, step.model, A100)
    for field in fields(StepInputs):
        if field.name in ("schedule", "p2p", "cluster", "job"):
            continue
        assert getattr(again, field.name) == getattr(step, field.name), field.name
    assert (again.schedule, again.p2p) == (step.schedule_name, step.p2p_mode)
    assert again.cluster.num_nodes == step.cluster.num_nodes
    assert (again.num_micro_batches, again.job.micro_batch) == (step.num_micro_batches, step.job.micro_batch)
    assert tuple(again.job.stage_layers or ()) == tuple(step.job.stage_layers or ())


def test_all_plans_simulate_to_their_numbers(plan: StepPlan) -> None:
    assert plan.serial is not None and plan.serial.rank == 3
    for entry in (plan.choice, *plan.alternatives, plan.serial):
        again = replay_step(plan, GPT, A100, entry)
        assert again.findings == ()
        time = simulate_step(again.inputs, ranges=False).step_time_s
        assert time == entry.step.value_s == again.planned_s
        assert again.differences(time) == ()


def test_the_breakdown_and_memory_add_up(plan: StepPlan) -> None:
    for entry in (plan.choice, *plan.alternatives):
        assert sum(entry.breakdown_s.values()) == pytest.approx(entry.step.value_s, rel=1e-9)
        assert entry.lower_bound_s <= entry.step.low_s <= entry.step.high_s
        assert set(entry.memory_bytes) >= {"parameters", "gradients", "optimizer", "activations"}


def test_operators_bear_their_settings(plan: StepPlan) -> None:
    (only,) = plan.choice.operators
    assert (only.operator, only.pass_, only.strategy, only.parameters) == ("mlp.fc2", "fwd", "chunked", {"chunks": 2})
    assert sum(only.settings["chunk_rows"]) == 8192
    assert plan.alternatives[0].operators == ()


def test_equal_answers_give_equal_bytes_but_for_provenance(plan: StepPlan) -> None:
    text = dump_plan(plan)
    assert dump_plan(load_plan(text)) == text
    other = dump_plan(replace(plan, provenance={"overlapsim": "1"}))
    assert other != text
    assert other.split("provenance:")[0] == text.split("provenance:")[0]


def test_findings_of_all_plans_stand_once(plan: StepPlan) -> None:
    shared = {finding.code for finding in plan.findings}
    assert "clock_assumed" in shared
    for entry in (plan.choice, *plan.alternatives):
        assert not set(plan.findings) & set(entry.findings)


def test_edited_plans_are_refused(plan: StepPlan) -> None:
    entry = plan.choice
    wrong_count = replace(entry, settings=replace(entry.settings, num_micro_batches=3))
    with pytest.raises(PlanError, match="num_micro_batches is 3"):
        replay_step(plan, GPT, A100, wrong_count)
    layout = {key: value for key, value in entry.settings.layout.items() if key != "tp"}
    with pytest.raises(PlanError, match="the plan's layout has"):
        replay_step(plan, GPT, A100, replace(entry, settings=replace(entry.settings, layout=layout)))
    (operator,) = entry.operators
    rows = replace(operator, settings={**operator.settings, "chunk_rows": [8192]})
    with pytest.raises(PlanError, match="chunk_rows"):
        replay_step(plan, GPT, A100, replace(entry, operators=(rows,)))
    with pytest.raises(PlanError, match="recipe"):
        replay_step(replace(plan, inputs=replace(plan.inputs, recipe="none")), GPT, A100)
    with pytest.raises(PlanError, match="rank 9"):
        plan.candidate(9)


def test_what_changed_since_is_told(plan: StepPlan) -> None:
    other = replace(GPT, vocabulary=GPT.vocabulary + 1024)
    assert [f.code for f in replay_step(plan, other, A100).findings] == ["model_changed"]
    changed = replace(plan, inputs=replace(plan.inputs, cluster_sha256="0"))
    assert [f.code for f in replay_step(changed, GPT, A100).findings] == ["cluster_changed"]
    again = replay_step(plan, GPT, A100)
    assert [f.code for f in again.differences(2 * again.planned_s)] == ["plan_differs"]


def test_a_model_has_one_digest() -> None:
    assert model_digest(GPT) == model_digest(replace(GPT))
    assert model_digest(GPT) != model_digest(replace(GPT, hidden=2048))


def test_candidate_leaves_shared_findings_out() -> None:
    entry = ranked(ask(GPT, "tp=2,dp=4"), 1)
    assert candidate(entry, list(entry.findings)).findings == ()
    assert candidate(entry, []).findings == entry.findings


def test_dispatchers_compression_and_orders_are_read_back_and_give_the_same_time() -> None:
    """What refining adds: strategies of experts, an order searched in the engine, DeepEP, narrow gradients."""
    inputs = ask(MOE, "ep=16,dp=16,zero=1", batch=64, micro=1, seq=2048, dp_overlap="both")
    recipe = replace(inputs.recipe, dispatcher="deepep", compress=("grads-bf16",))
    order = Chosen(load_strategy("operator_order"), {"beam": 16, "sms": 0, "search": "engine", "layers": 1})
    inside = ask(MOE, "ep=8,dp=8", batch=64, micro=1, seq=2048)
    fused = Chosen(load_strategy("fused_experts"), _first_parameters(inside, "fused_experts"))
    for changed in (
        replace(inputs, recipe=recipe, composition=Composition((order,))),
        replace(inside, composition=Composition(pairs={("moe.fc2", "fwd"): fused})),
    ):
        entries = [ranked(changed, 1)]
        request = PlanRequest(MOE, changed.cluster, 64, 2048, Axes())
        answer = StepAnswer(request, Goal(), tuple(entries), None, {}, 1, 1, 1.0)
        written = load_plan(dump_plan(to_step_plan(answer, asked(changed), {})))
        assert isinstance(written, StepPlan)
        replay = replay_step(written, MOE, changed.cluster)
        assert replay.inputs.composition.arranging == changed.composition.arranging
        assert replay.inputs.composition.pairs.keys() == changed.composition.pairs.keys()
        assert replay.inputs.recipe == changed.recipe
        assert simulate_step(replay.inputs, ranges=False).step_time_s == pytest.approx(replay.planned_s, rel=1e-12)


def test_a_plan_whose_kernel_takes_even_rows_only_is_left_out_where_routing_is_perturbed() -> None:
    even = ask(MOE, "ep=8,dp=8", batch=64, micro=1, seq=2048)
    fused = Chosen(load_strategy("fused_experts"), _first_parameters(even, "fused_experts"))
    both = [even, replace(even, composition=Composition(pairs={("moe.fc2", "fwd"): fused}))]
    found = [Found(row, 0.0, simulate_step(inputs, ranges=False)) for row, inputs in enumerate(both)]
    request = PlanRequest(MOE, even.cluster, 64, 2048, Axes())
    kept, _, findings = by_high_end(found, request, Perturbation.parse("routing=zipf:1"), {}, lambda text: None)
    assert [entry.row for entry in kept] == [0]
    (left,) = [finding.message for finding in findings if finding.code == "not_perturbed"]
    assert left.startswith("1 of the fastest plans") and "fused_experts does not apply" in left


def _first_parameters(inputs: StepInputs, name: str) -> dict[str, object]:
    """The first parameters that a strategy has for the second GEMM of experts."""
    strategy, prices = load_strategy(name), step_prices(inputs, MODELS)
    graph = graph_builder(inputs).layer(inputs.model.layers[0], "forward")
    gemm = next(i for i, op in enumerate(graph.operators) if op.name == "moe.fc2")
    positions = strategy.piece(graph, gemm)
    assert positions is not None
    part = graph.part(positions)
    context = Context(part, replace(prices, ranks=next(part.of_type(CollectiveOp)).ranks))
    return next(strategy.parameters(context).points())

"""Plans of steps by objective: what is ranked, what is allowed, what must fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from overlapsim.errors import PlanError, StrategyError, UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import StepPlan, StepPlanInputs, dump_plan, load_plan
from overlapsim.planner.robust import perturbed_step
from overlapsim.planner.search import PlanRequest
from overlapsim.planner.space import Axes, Constraint
from overlapsim.planner.step import ROBUST, Goal, StepAnswer, plan_step
from overlapsim.planner.step_plan import model_digest, operators_of, replay_step, to_step_plan
from overlapsim.step.perturb import Perturbation
from overlapsim.step.simulate import simulate_step
from overlapsim.workload.families import gpt
from overlapsim.workload.model import ModelSpec
from tests.step.steps import A100, GPT, MOE

SMALL = Axes(
    zero=(1,), recompute=("none", "full"), dp_overlap=("gradients",), schedule=("1f1b",), micro_batch=(1,),
    overlap=("library",), sequence_parallel=(True,),
)  # fmt: skip
H100 = load_cluster("h100-sxm8")


def ask(*rules: str, goal: Goal | None = None, **changes: Any) -> StepAnswer:
    request = PlanRequest(GPT, A100, 8, 1024, axes=SMALL, constraints=tuple(map(Constraint.parse, rules)))
    return plan_step(replace(request, **changes), goal)


@pytest.fixture(scope="module")
def plain() -> StepAnswer:
    return ask("cp=1", "sp=1", "vpp=1")


def test_plans_are_ranked_by_time_and_differ_in_degrees(plain: StepAnswer) -> None:
    times = [entry.result.step_time_s for entry in plain.ranked]
    assert times == sorted(times)
    assert [entry.rank for entry in plain.ranked] == [1, 2, 3, 4, 5]
    degrees = {(e.result.inputs.layout.tp, e.result.inputs.layout.pp, e.result.inputs.layout.dp) for e in plain.ranked}
    assert len(degrees) == 5


def test_every_plan_has_range_bound_and_shifts(plain: StepAnswer) -> None:
    for entry in plain.ranked:
        result = entry.result
        assert entry.lower_bound_s <= result.low_s < result.step_time_s < result.high_s
        assert set(result.shifts_s) == {"gemm", "attention", "memory", "collective", "launch"}
        assert entry.perturbed is None
        for twin in entry.twins:
            assert twin.step_time_s >= result.step_time_s
            assert twin.inputs.layout.tp == result.inputs.layout.tp


def test_the_serial_plan_is_the_fastest_without_strategies(plain: StepAnswer) -> None:
    assert plain.serial is not None
    assert not plain.serial.result.inputs.composition.strategies
    assert plain.serial.result.step_time_s >= plain.ranked[0].result.step_time_s


def test_rules_and_memory_hold(plain: StepAnswer) -> None:
    least = plain.ranked[0].result.fullest.total_bytes
    answer = ask("tp<=2", "pp>=2", "cp=1", "sp=1", "vpp=1")
    assert all(e.result.inputs.layout.tp <= 2 and e.result.inputs.layout.pp >= 2 for e in answer.ranked)
    limit = 0.8 * least
    lean = ask("cp=1", "sp=1", "vpp=1", memory_bytes=limit)
    assert all(entry.result.fullest.total_bytes <= limit for entry in lean.ranked)
    assert lean.ranked[0].result.step_time_s >= plain.ranked[0].result.step_time_s


def test_nothing_fits() -> None:
    with pytest.raises(PlanError) as caught:
        ask("cp=1", "sp=1", memory_bytes=1e6)
    assert caught.value.exit_code == 1


def test_throughput_of_a_gpu_takes_fewer_nodes() -> None:
    """A small batch keeps 16 GPUs waiting for gradients between nodes: eight do more each."""
    two = A100.with_nodes(2)
    fast = ask("pp=1", "cp=1", "sp=1", cluster=two)
    lean = ask("pp=1", "cp=1", "sp=1", cluster=two, goal=Goal("tokens_per_s_per_gpu"))
    assert {entry.num_nodes for entry in fast.ranked} == {2}
    assert lean.ranked[0].num_nodes == 1
    rates = [e.result.tokens_per_s / e.result.inputs.layout.world_size for e in lean.ranked]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > fast.ranked[0].result.tokens_per_s / 16
    assert lean.searched > fast.searched


def test_robust_ranks_by_the_high_end_when_perturbed() -> None:
    goal = Goal("robust", Perturbation.parse("slow=0.7@0"))
    answer = ask("cp=1", "sp=1", "vpp=1", goal=goal)
    highs = [entry.perturbed.high_s for entry in answer.ranked if entry.perturbed is not None]
    assert len(highs) == len(answer.ranked)
    assert highs == sorted(highs)
    for entry in answer.ranked:
        again = simulate_step(replace(entry.result.inputs, perturbation=goal.perturbation))
        assert entry.perturbed is not None
        assert again.high_s == entry.perturbed.high_s
        assert entry.perturbed.step_time_s > entry.result.step_time_s


def test_counts_of_another_number_of_experts_are_refused_before_the_search() -> None:
    with pytest.raises(UsageError, match="2 recorded counts"):
        ask("ep=8", model=MOE, goal=Goal("robust", Perturbation.parse("routing=counts:1:2")))


def test_robust_without_a_perturbation_assumes_one_and_says_so() -> None:
    goal = Goal("robust")
    assert goal.perturbation == ROBUST
    answer = ask("tp=4", "pp=1", "cp=1", "sp=1", goal=goal)
    assert "perturbation_assumed" in {finding.code for finding in answer.findings}


def test_what_a_kernel_refuses_runs_one_after_another_in_the_perturbed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = replace(SMALL, recompute=("none",), overlap=("library", "strategies"))
    goal = Goal(perturbation=Perturbation.parse("routing=zipf:1"))
    answer = ask("ep=8", "cp=1", model=MOE, axes=axes, sequence=2048, goal=goal, top=1)
    best, serial = answer.ranked[0], answer.serial
    assert "fused_experts" in {chosen.strategy.name for chosen in best.result.inputs.composition.pairs.values()}
    (why,) = [finding.message for finding in best.findings if finding.code == "perturbed_serially"]
    assert "routing=zipf:1" in why and "fused_experts does not apply" in why
    assert best.perturbed is not None and not best.perturbed.inputs.composition.pairs
    kept = replace(best.result.inputs.composition, pairs={})
    plain = replace(best.result.inputs, composition=kept, perturbation=goal.perturbation)
    assert best.perturbed.step_time_s == simulate_step(plain).step_time_s > best.result.step_time_s
    assert serial is not None and serial.perturbed is not None
    assert "perturbed_serially" not in {finding.code for finding in serial.findings}

    def refuse(*_: object, **__: object) -> None:
        raise StrategyError("not under this")

    monkeypatch.setattr("overlapsim.planner.robust.simulate_step", refuse)
    perturbed, (said,) = perturbed_step(best.result.inputs, goal.perturbation, {})
    assert perturbed is None
    assert (said.code, "not under this" in said.message) == ("not_perturbed", True)


@pytest.mark.parametrize(
    ("model", "cluster", "why"),
    [
        (GPT, A100, f"{GPT.name} has no experts"),
        (MOE, load_cluster("l40s-pcie8"), "expected a machine with both"),
        (MOE, A100, "no plan has ep over 1"),
    ],
    ids=["no experts", "no kernels", "no layout"],
)
def test_dispatchers_that_no_plan_uses_are_said(model: ModelSpec, cluster: Cluster, why: str) -> None:
    axes = replace(SMALL, dispatcher=("deepep",), recompute=("full",))
    rules = ["pp=4", "cp=1", "sp=1", "tp=1"] + (["ep=1"] if cluster is A100 else [])
    answer = ask(*rules, model=model, cluster=cluster, axes=axes, top=1)
    (said,) = [finding.message for finding in answer.findings if finding.code == "dispatchers_not_used"]
    assert said.startswith("deepep asked for") and why in said


def test_layers_that_hardly_divide_name_uneven_stages() -> None:
    """Seven layers on eight GPUs: no pipeline but with stages that differ."""
    odd = gpt(num_layers=7, hidden=1024, num_heads=8, vocabulary=51200, max_positions=2048)
    rules = ("tp=1", "cp=1", "sp=1", "vpp=1")

    def said(*more: str, uneven: bool = False) -> list[str]:
        answer = ask(*rules, *more, model=odd, axes=replace(SMALL, uneven=uneven), top=1)
        return [finding.message for finding in answer.findings if finding.code == "even_stages_only"]

    (hint,) = said()
    assert "has 7 layers: only pp 1 was searched" in hint and "--uneven searches pp 2, 4 as well" in hint
    assert said("pp=1") == said(uneven=True) == []


def test_layers_that_divide_say_nothing(plain: StepAnswer) -> None:
    assert "even_stages_only" not in {finding.code for finding in plain.findings}


def test_a_dispatcher_alone_is_that_of_every_plan() -> None:
    axes = replace(SMALL, dispatcher=("deepep",), recompute=("none",))
    answer = ask("ep=8", "cp=1", model=MOE, axes=axes, sequence=2048, top=1)
    assert answer.serial is not None
    assert {entry.result.inputs.recipe.dispatcher for entry in (*answer.ranked, answer.serial)} == {"deepep"}
    assert "dispatchers_not_used" not in {finding.code for finding in answer.findings}
    assert answer.run + sum(answer.pruned.values()) == answer.searched


def test_fp8_is_used_where_it_is_allowed_and_said() -> None:
    changes: dict[str, Any] = {"cluster": H100, "global_batch": 64, "sequence": 4096}
    rules = ("pp=1", "tp=1", "cp=1", "sp=1")
    without = ask(*rules, **changes)
    allowed = ask(*rules, goal=Goal(allow=("fp8",)), **changes)
    assert not any(entry.result.inputs.recipe.fp8 for entry in without.ranked)
    for entry in allowed.ranked:
        assert entry.result.inputs.recipe.fp8 == ("accuracy_changes" in {f.code for f in entry.findings})
    assert {entry.result.inputs.recipe.fp8 for entry in allowed.ranked} == {True, False}


@pytest.mark.parametrize("name", ["fp8", "compression"])
def test_what_is_allowed_and_not_there_is_a_finding(name: str) -> None:
    answer = ask("tp=4", "pp=1", "cp=1", "sp=1", goal=Goal(allow=(name,)))
    assert any(name in finding.message for finding in answer.findings if finding.code == "not_applied")


def test_only_known_changes_can_be_allowed() -> None:
    with pytest.raises(UsageError, match="int4"):
        Goal(allow=("int4",))


def test_strategies_that_save_time_are_taken_and_written() -> None:
    """Wide layers over a whole node: what tensor parallelism moves is worth hiding, and the plan says how."""
    wide = gpt(num_layers=2, hidden=8192, num_heads=64, vocabulary=51200, max_positions=8192)
    axes = Axes(zero=(0,), recompute=("none",), dp_overlap=("none",), schedule=("1f1b",))
    answer = ask("tp=8", model=wide, sequence=8192, global_batch=1, axes=axes)
    best = answer.ranked[0].result
    assert answer.serial is not None
    assert best.inputs.composition.pairs
    assert best.step_time_s < answer.serial.result.step_time_s
    written = {(op.operator, op.pass_): op for op in operators_of(best.inputs)}
    assert set(written) == set(best.inputs.composition.pairs)
    assert all(op.settings["ranks"] == 8 for op in written.values() if "ranks" in op.settings)
    asked = StepPlanInputs("wide", model_digest(wide), "a100-sxm8", A100.digest, 1, 1, 8192)
    plan = load_plan(dump_plan(to_step_plan(answer, asked, {})))
    assert isinstance(plan, StepPlan)
    again = replay_step(plan, wide, A100)
    assert simulate_step(again.inputs, ranges=False).step_time_s == plan.choice.step.value_s
    assert any("as fast as the best plan without overlap strategies" in sentence for sentence in plan.advice.why)


def test_experts_are_planned_too() -> None:
    answer = ask("tp=1", "cp=1", "sp=1", "pp<=2", "vpp=1", model=MOE, axes=replace(SMALL, recompute=("full",)))
    assert max(entry.result.inputs.layout.ep for entry in answer.ranked) > 1

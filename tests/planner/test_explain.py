"""What is said about plans: differences by closed form, trials and measurements by what separates, causes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapsim.planner.explain import KIND_NAMES, advise, exposed_s, label
from overlapsim.planner.search import PlanRequest
from overlapsim.planner.step import Goal, Ranked, StepAnswer
from overlapsim.planner.trials import difference, find_trials, measurements
from overlapsim.step.categories import COMPUTE_KINDS, KINDS
from overlapsim.step.simulate import StepResult, simulate_step
from tests.step.steps import A100, GPT, MODELS, ask


@pytest.fixture(scope="module")
def results() -> list[StepResult]:
    layouts = ("tp=2,pp=2,dp=2", "tp=4,dp=2", "tp=8")
    return [simulate_step(ask(GPT, layout), models=MODELS) for layout in layouts]


def plans(*results: StepResult) -> list[Ranked]:
    return [Ranked(number, result, 1e-4, None) for number, result in enumerate(results, start=1)]


def moved(result: StepResult, seconds: float, **shifts: tuple[float, float]) -> StepResult:
    return replace(result, step_time_s=seconds, shifts_s={"gemm": (0.0, 0.0), "collective": (0.0, 0.0), **shifts})


def answer(results: list[StepResult], serial: StepResult | None = None) -> StepAnswer:
    request = PlanRequest(GPT, A100, 8, 1024)
    other = None if serial is None else Ranked(0, serial, 1e-4, None)
    return StepAnswer(request, Goal(), tuple(plans(*results)), other, {}, 1, 1, 0.0)


def test_a_family_moves_both_plans(results: list[StepResult]) -> None:
    first = moved(results[0], 1.0, gemm=(-0.1, 0.2), collective=(-0.03, 0.04))
    second = moved(results[1], 1.1, gemm=(-0.1, 0.2), collective=(-0.06, 0.08))
    gap = difference(first, second)
    # GEMMs move both alike and leave the difference alone; collectives move the second more.
    assert gap.value_s == pytest.approx(0.1)
    assert (gap.low_s, gap.high_s) == pytest.approx((0.07, 0.14))
    assert gap.by_family["gemm"] == (0.0, 0.0)


def test_deviations_add_in_quadrature(results: list[StepResult]) -> None:
    first = moved(results[0], 1.0)
    second = moved(results[1], 1.0, gemm=(-0.3, 0.3), collective=(-0.4, 0.4))
    gap = difference(first, second)
    assert (gap.low_s, gap.high_s) == pytest.approx((-0.5, 0.5))


def test_a_plan_does_not_differ_from_itself(results: list[StepResult]) -> None:
    gap = difference(results[0], results[0])
    assert (gap.value_s, gap.low_s, gap.high_s) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("over_compute", [0.5, 1.1])
def test_no_more_is_promised_than_computation_and_hardware_allow(
    results: list[StepResult], over_compute: float
) -> None:
    asked = answer(results)
    best = results[0]
    compute = sum(best.breakdown_s[kind] for kind in COMPUTE_KINDS)
    bound = over_compute * compute
    ranked = (replace(asked.ranked[0], lower_bound_s=bound), *asked.ranked[1:])
    (sentence,) = [text for text in advise(replace(asked, ranked=ranked)).why if "at most" in text]
    assert sentence.endswith(f"would make it {best.step_time_s / max(compute, bound):.2f}x as fast at most")


def test_fewer_gpus_count_by_what_they_take() -> None:
    """Half the GPUs at twice the time is the same throughput of each."""
    two = simulate_step(ask(GPT, "tp=2,dp=4"), ranges=False, models=MODELS)
    one = simulate_step(ask(GPT, "tp=2,dp=2"), ranges=False, models=MODELS)
    assert difference(replace(two, step_time_s=1.0), replace(one, step_time_s=2.0)).value_s == 0.0


def test_plans_that_may_be_faster_are_tried(results: list[StepResult]) -> None:
    first = moved(results[0], 1.0)
    close = moved(results[1], 1.01, collective=(-0.02, 0.02))
    far = moved(results[2], 1.5, collective=(-0.02, 0.02))
    assert [trial.rank for trial in find_trials(plans(first, close, far))] == [1, 2]
    assert [trial.rank for trial in find_trials(plans(first, far, close))] == [1, 3]
    # Where nothing can be faster the second shows whether the order holds; one plan alone is tried alone.
    assert [trial.rank for trial in find_trials(plans(first, far))] == [1, 2]
    assert [trial.rank for trial in find_trials(plans(first))] == [1]
    assert [trial.rank for trial in find_trials(plans(first, close, close, close))] == [1, 2, 3]


def test_the_family_that_separates_most_is_measured(results: list[StepResult]) -> None:
    first = moved(results[0], 1.0, gemm=(-0.3, 0.3), collective=(-0.01, 0.01))
    second = moved(results[1], 1.02, gemm=(-0.3, 0.31), collective=(-0.05, 0.09))
    ranked = plans(first, second)
    (only,) = measurements(ranked, list(find_trials(ranked)))
    assert (only.family, only.ranks) == ("collective", (1, 2))
    assert (only.low_s, only.high_s) == pytest.approx((0.02 - 0.04, 0.02 + 0.08))
    assert "over 4 ranks (tp)" in only.message
    gemms = plans(first, moved(results[1], 1.02, gemm=(-0.2, 0.6), collective=(-0.01, 0.01)))
    (only,) = measurements(gemms, list(find_trials(gemms)))
    assert only.family == "gemm"
    assert "x" in only.message and "bf16" in only.message


def test_nothing_is_measured_where_nothing_separates(results: list[StepResult]) -> None:
    ranked = plans(moved(results[0], 1.0), moved(results[1], 1.0))
    assert list(measurements(ranked, list(find_trials(ranked)))) == []


def test_every_kind_of_time_has_a_name() -> None:
    assert tuple(KIND_NAMES) == KINDS


def test_advice_names_the_second_and_what_is_exposed(results: list[StepResult]) -> None:
    order = sorted(results, key=lambda result: result.step_time_s)
    advice = advise(answer(order))
    assert f"plan 2 ({label(order[1])})" in advice.why[0]
    assert any("no overlap strategy" in sentence for sentence in advice.why)
    shown = [sentence.split(":")[0] for sentence in advice.exposed]
    sizes = [order[0].breakdown_s[next(kind for kind in KINDS if KIND_NAMES[kind] == name)] for name in shown]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size >= 0.005 * order[0].step_time_s for size in sizes)


def test_exposed_time_is_what_communicates_alone(results: list[StepResult]) -> None:
    for result in results:
        parts = result.breakdown_s
        rest = sum(seconds for kind, seconds in parts.items() if not kind.startswith("exposed_"))
        assert exposed_s(parts) == pytest.approx(result.step_time_s - rest)

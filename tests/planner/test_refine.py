"""Refining single plans: never slower, never above the limit, only what was allowed; gains told one by one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from overlapsim.planner.allowed import changes, multiplying, narrower, not_applied
from overlapsim.planner.gains import gains_of
from overlapsim.planner.overlap_choice import OverlapChooser
from overlapsim.planner.refine import Refiner, extra_bytes
from overlapsim.planner.space import DISPATCHERS
from overlapsim.planner.step_bound import step_lower_bound_s
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import step_memory, step_prices, step_schedule, step_seconds
from overlapsim.workload.recipe import Recipe
from tests.planner.requests import ask as request
from tests.step.steps import GPT, MODELS, MOE, ask

LIMIT = 80e9
CHOOSER = OverlapChooser()
LAYOUTS = {
    "experts": "ep=8,dp=8",
    "two nodes": "ep=16,dp=16",
    "tensors": "tp=4,dp=2,ep=8,etp=1",
    "pipeline": "ep=4,dp=4,pp=2",
}


def refiner(limit: float = LIMIT, *allow: str, dispatchers: tuple[str, ...] = DISPATCHERS) -> Refiner:
    """With everything at hand."""
    return Refiner(limit, MODELS, CHOOSER, dispatchers, allow, pairs=True)  # type: ignore[arg-type]


def seconds_of(inputs: StepInputs) -> float:
    """In the engine."""
    return step_seconds(inputs, step_prices(inputs, MODELS))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_refined_step_is_faster_fits_and_is_above_its_bound(layout: str) -> None:
    inputs = ask(MOE, layout, batch=64, micro=1, seq=2048)
    before = seconds_of(inputs)
    seconds, found = refiner().refine(inputs, before)
    assert seconds < before
    assert seconds == seconds_of(found)
    assert seconds >= step_lower_bound_s(found) * (1 - 1e-9)
    held = max(entry.total_bytes for entry in step_memory(found, step_schedule(found)))
    assert held + extra_bytes(found, MODELS) <= LIMIT
    polished, last = refiner().polish(found, seconds)
    assert polished <= seconds
    assert polished == seconds_of(last)
    # Nothing changes results unless it was allowed.
    assert found.recipe == replace(inputs.recipe, dispatcher=found.recipe.dispatcher)
    assert not list(changes(last.recipe, inputs.recipe))


def test_what_does_not_fit_is_not_taken() -> None:
    """Below what the step itself holds nothing is better."""
    inputs = ask(MOE, "ep=8,dp=8", batch=64, micro=1, seq=2048)
    before = seconds_of(inputs)
    assert refiner(1e6).refine(inputs, before) == (before, inputs)


def test_only_the_dispatchers_that_may_be_used_are() -> None:
    inputs = ask(MOE, "ep=16,dp=16", batch=64, micro=1, seq=2048)
    _, found = refiner(dispatchers=("all_to_all",)).refine(inputs, seconds_of(inputs))
    assert found.recipe == inputs.recipe


def test_allowed_compression_is_used_where_it_helps_and_said() -> None:
    """Gradients of a sharded optimizer go in bf16; with nothing allowed they do not (above)."""
    inputs = ask(GPT, "dp=8,zero=1", batch=8, micro=1)
    seconds, found = refiner(LIMIT, "grads-bf16").refine(inputs, seconds_of(inputs))
    assert found.recipe.compress == ("grads-bf16",)
    assert seconds < seconds_of(inputs)


def test_what_is_allowed_is_added_one_by_one() -> None:
    """Parameters go in fp8 only where GEMMs read it; tokens by an entry of their own."""
    recipe = Recipe()
    assert [r.compress for r in narrower(recipe, ["compression"])] == [("grads-bf16",), ("tp-fp8",)]
    assert not list(narrower(recipe, ["params-fp8", "fp8"]))
    (fp8,) = narrower(replace(recipe, fp8=True), ["params-fp8"])
    assert fp8.compress == ("params-fp8",)
    (sent,) = narrower(recipe, ["dispatch-fp8"])
    assert sent.dispatch.dtype == "fp8"
    assert [f.code for f in changes(sent, recipe)] == ["accuracy_changes"]
    device = request(GPT).cluster.device
    assert multiplying(recipe, (), device) == (recipe,)
    assert [r.fp8 for r in multiplying(recipe, ["fp8"], device)] == [False, True]
    assert [f.code for f in not_applied(["tp-fp8", "dispatch-fp8"], device, [recipe])] == ["not_applied"] * 2
    assert not list(not_applied(["dispatch-fp8"], device, [sent]))


def test_gains_lead_from_tensor_parallelism_to_the_plan() -> None:
    """Every part's time is the engine's; the last is the plan's; each is over the one before."""
    asked = request(MOE, batch=64, sequence=2048)
    inputs = replace(ask(MOE, "ep=8,dp=8", batch=64, micro=1, seq=2048), model=MOE)
    _, best = refiner().refine(inputs, seconds_of(inputs))
    gains = gains_of(asked, best, MODELS)
    assert gains[0].name == "tensor parallelism of attention and experts"
    assert "tp=" in gains[0].layout
    assert gains[-1].step_time_s == seconds_of(best)
    assert gains[0].faster == gains[0].in_all == 1
    for before, after in itertools.pairwise(gains):
        assert after.faster == pytest.approx(before.step_time_s / after.step_time_s)
        assert after.in_all == pytest.approx(gains[0].step_time_s / after.step_time_s)

"""Questions that users asked in public about layouts, answered by the planner."""

from __future__ import annotations

import pytest

from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.search import PlanRequest
from overlapsim.planner.space import Constraint
from overlapsim.planner.step import StepAnswer, plan_step
from overlapsim.planner.trials import find_trials
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import simulate_step
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.presets import load_model

MODEL = load_model("qwen3-30b-a3b")[0]
H100 = load_cluster("h100-sxm8").with_nodes(4)


@pytest.fixture(scope="module")
def f01() -> StepAnswer:
    """Qwen3-30B-A3B on 32 H100, 512 sequences of 4096, in Megatron: its optimizer shards what ZeRO-1 does."""
    return plan_step(PlanRequest(MODEL, H100, 512, 4096, constraints=(Constraint.parse("zero<=1"),)))


def test_f01_five_layouts_that_fit_and_use_all_gpus(f01: StepAnswer) -> None:
    """F01: the recipe for 16 GPUs has to be searched again for 32."""
    assert [entry.rank for entry in f01.ranked] == [1, 2, 3, 4, 5]
    for entry in f01.ranked:
        layout = entry.result.inputs.layout
        assert layout.world_size == 32
        assert entry.result.fullest.total_bytes <= H100.device.hbm_bytes
        assert entry.lower_bound_s < entry.result.low_s <= entry.result.step_time_s <= entry.result.high_s
    assert len({(str(e.result.inputs.layout), e.result.inputs.job.micro_batch) for e in f01.ranked}) == 5


def test_f01_layouts_are_of_the_published_kind(f01: StepAnswer) -> None:
    """What is published for half the GPUs (tp 1, pp 2, vpp 12, ep 8) keeps tensor and pipeline groups small and deals
    experts over a node: so do the best here, and none crosses nodes with tensor or expert groups."""
    for entry in f01.ranked:
        layout = entry.result.inputs.layout
        assert layout.tp <= 2
        assert layout.pp <= 4
        assert 4 <= layout.ep * layout.etp <= 8


def test_f01_the_published_recipe_is_near_and_not_ahead(f01: StepAnswer) -> None:
    """Of what the library alone does: the recipe has no strategy, and the best plan gains from some."""
    layout = Layout.parse("tp=1,pp=2,vpp=12,ep=8,zero=1", 32)
    recipe = simulate_step(StepInputs(MODEL, H100, layout, Job(4096, 1, 512, 32), dp_overlap="both"), ranges=False)
    assert f01.serial is not None
    best = f01.serial.result.step_time_s
    assert f01.ranked[0].result.step_time_s < best <= recipe.step_time_s <= 1.15 * best


def test_f01_two_or_three_are_to_be_tried_first(f01: StepAnswer) -> None:
    ranks = [trial.rank for trial in find_trials(f01.ranked)]
    assert ranks[0] == 1
    assert 2 <= len(ranks) <= 3

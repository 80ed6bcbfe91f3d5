"""Plans that were edited: refused where kernels would get other settings, told where the time differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from overlapsim.errors import OverlapSimError, PlanError
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import OperatorInputs, OperatorPlan, dump_plan, load_plan
from overlapsim.planner.operator import plan_operator, simulate
from overlapsim.planner.operator_plan import context_from, replay, to_plan
from overlapsim.strategy.registry import load_strategies

INPUTS = OperatorInputs(
    "a800-sxm8", "", 1, 2, 8192, 8192, 4096, "fp16", "fp16", "all_reduce",
    kernel_time_s={"wave_group": 2.36135e-3}, tile=(256, 128),
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load_cluster("a800-sxm8")


@pytest.fixture(scope="module")
def plan(cluster: Cluster) -> OperatorPlan:
    inputs = replace(INPUTS, cluster_sha256=cluster.digest)
    result = plan_operator(context_from(inputs, cluster), load_strategies(("serial", "wave_group")))
    made = load_plan(dump_plan(to_plan(result, inputs, {})))
    assert made.choice.strategy == "wave_group"
    return made


def with_operator(plan: OperatorPlan, **changes: Any) -> OperatorPlan:
    return replace(plan, operators=(replace(plan.operators[0], **changes),))


def edited(settings: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Settings with the value at a dotted key replaced."""
    first, _, rest = key.partition(".")
    return {**settings, first: edited(settings[first], rest, value) if rest else value}


def test_an_untouched_plan_replays_to_its_numbers(plan: OperatorPlan, cluster: Cluster) -> None:
    again = replay(plan, cluster)
    time = simulate(again.strategy, again.context, again.parameters).duration_s
    assert time == again.planned_s
    assert (again.findings, again.differences(time)) == ((), ())
    serial, parameters = again.serial
    assert serial.name == "serial"
    assert simulate(serial, again.context, parameters).duration_s == plan.choice.serial_s


@pytest.mark.parametrize(
    ("key", "value"), [("bm", 64), ("swizzle", 3), ("persistent", 0), ("group_tiles", [1, 2047]), ("map.kind", "none")]
)
def test_edited_settings_are_named(plan: OperatorPlan, cluster: Cluster, key: str, value: Any) -> None:
    wrong = with_operator(plan, settings=edited(plan.operators[0].settings, key, value))
    with pytest.raises(PlanError, match=rf"settings\.{key} is .*wave_group .*plan again") as error:
        replay(wrong, cluster)
    assert str(value) in str(error.value)


def test_missing_and_additional_settings_are_named(plan: OperatorPlan, cluster: Cluster) -> None:
    settings = dict(plan.operators[0].settings)
    with pytest.raises(PlanError, match=r"settings\.colour is red; .*needs absent"):
        replay(with_operator(plan, settings={**settings, "colour": "red"}), cluster)
    del settings["bn"]
    with pytest.raises(PlanError, match=r"settings\.bn is absent; .*needs 128"):
        replay(with_operator(plan, settings=settings), cluster)


@pytest.mark.parametrize("change", [{"group_tiles": None}, {"tile": "wide"}, {"group_tiles": (2048, 1)}, {"tile": ()}])
def test_parameters_that_cannot_be_used(plan: OperatorPlan, cluster: Cluster, change: dict[str, Any]) -> None:
    with pytest.raises(OverlapSimError):
        replay(with_operator(plan, parameters={**plan.operators[0].parameters, **change}), cluster)
    with pytest.raises(PlanError, match="parameters of wave_group cannot be used"):
        replay(with_operator(plan, parameters={}), cluster)


def test_parameters_and_settings_belong_together(plan: OperatorPlan, cluster: Cluster) -> None:
    with pytest.raises(PlanError, match=r"settings\.group_tiles is"):
        replay(with_operator(plan, parameters={**plan.operators[0].parameters, "group_tiles": (2048,)}), cluster)


def test_another_time_is_told(plan: OperatorPlan, cluster: Cluster) -> None:
    changed = replace(plan, inputs=replace(plan.inputs, kernel_time_s={"wave_group": 2.0e-3}))
    again = replay(changed, cluster)
    time = simulate(again.strategy, again.context, again.parameters).duration_s
    (finding,) = again.differences(time)
    assert finding.code == "plan_differs"
    assert "plan again" in finding.message
    planned = again.planned_s
    assert again.differences(planned * (1 + 0.9e-9)) == ()
    assert [f.code for f in again.differences(planned * (1 - 1.1e-9))] == ["plan_differs"]


def test_plans_that_lack_parts(plan: OperatorPlan, cluster: Cluster) -> None:
    with pytest.raises(PlanError, match="no operators"):
        replay(replace(plan, operators=()), cluster)
    with pytest.raises(PlanError, match="no prediction for wave_group"):
        replay(replace(plan, predictions={"serial": plan.predictions["serial"]}), cluster)
    with pytest.raises(PlanError, match="without overlap"):
        replay(replace(plan, alternatives=()), cluster)

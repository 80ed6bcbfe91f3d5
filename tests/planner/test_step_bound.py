"""Lower bounds of whole steps: closed forms, and no step is ever predicted below its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from overlapsim.planner.step_bound import step_lower_bound_s, step_operators
from overlapsim.step.inputs import StepInputs
from overlapsim.workload.model_count import step_flop_per_token
from overlapsim.workload.operators import CollectiveOp, GemmOp
from tests.step.steps import A100, GPT, ask, run, steps


def test_one_gpu_needs_its_flop() -> None:
    """GEMMs and attention at the peak: what FLOP counts say, up to the padded vocabulary and masked blocks."""
    step = ask(GPT, "tp=1,dp=1", micro=1)
    flop = step_flop_per_token(GPT, 1024) * 8 * 1024
    assert step_lower_bound_s(step) == pytest.approx(flop / A100.device.peak("bf16"), rel=0.05)


@pytest.mark.parametrize("layout", ["tp=1,dp=1", "tp=2,dp=1", "tp=1,dp=4", "tp=2,pp=2,dp=2"])
def test_gpus_share_the_products(layout: str) -> None:
    step = ask(GPT, layout)
    whole = sum(times * op.flop for op, times in step_operators(ask(GPT, "tp=1,dp=1")) if isinstance(op, GemmOp))
    mine = sum(times * op.flop for op, times in step_operators(step) if isinstance(op, GemmOp))
    assert mine * step.layout.world_size == pytest.approx(whole, rel=1e-9)


def test_a_slow_wire_bounds_from_below() -> None:
    step = ask(GPT, "tp=8,dp=2")
    node = replace(step.cluster.node, nic_bandwidth_bytes_per_s=1e6)
    slow = replace(step, cluster=replace(step.cluster, node=node))
    grads = [op for op, _ in step_operators(slow) if isinstance(op, CollectiveOp) and op.name.startswith("grad.")]
    least = sum(op.size_bytes for op in grads) / (node.num_nics * 1e6)
    assert step_lower_bound_s(slow) >= 0.99 * least > step_lower_bound_s(step)


@given(step=steps())
@settings(max_examples=40, deadline=None)
def test_no_step_is_below_its_bound(step: StepInputs) -> None:
    assert 0 < step_lower_bound_s(step) <= run(step).step_time_s * (1 + 1e-9)

"""Blocks against one program of all operator tasks: ten small steps, the error of each printed, at most one percent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapsim.engine import compiled
from overlapsim.engine.deadlock import raise_if_deadlocked
from overlapsim.hardware.loading import load_cluster
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import simulate_step, step_prices, step_schedule
from overlapsim.workload.families import gpt
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.presets import load_model
from overlapsim.workload.recipe import RECIPES
from overlapsim.workload.recompute import Recompute
from tests.step.full_program import full_program

GPT = gpt(num_layers=8, hidden=4096, num_heads=32, vocabulary=51200, max_positions=2048)
LLAMA = replace(load_model("llama3-8b")[0], layers=load_model("llama3-8b")[0].layers[:8])
QWEN = replace(load_model("qwen3-30b-a3b")[0], layers=load_model("qwen3-30b-a3b")[0].layers[:8])
MOST = 0.01

STEPS = {
    "one GPU": (LLAMA, "dp=1", 4, {}),
    "tensor parallel": (GPT, "tp=8,dp=1", 4, {}),
    "all-reduce at the end": (LLAMA, "tp=2,dp=4", 16, {}),
    "buckets under the backward": (LLAMA, "dp=8", 16, {"dp_overlap": "gradients"}),
    "ZeRO 1 on two nodes": (LLAMA, "tp=2,dp=8,zero=1", 16, {"dp_overlap": "both"}),
    "1F1B of 2021": (GPT, "tp=2,pp=4,dp=1", 8, {"recipe": RECIPES["megatron-2021"], "recompute": Recompute("full")}),
    "interleaved": (GPT, "tp=2,pp=2,vpp=2,dp=2", 8, {"dp_overlap": "gradients"}),
    "zero bubble": (LLAMA, "tp=2,pp=4,dp=2", 16, {"schedule": "zb_h1"}),
    "experts": (QWEN, "ep=4,dp=8,pp=2", 32, {}),
    "bidirectional pairs": (QWEN, "ep=4,dp=4,pp=2", 32, {"schedule": "dualpipe"}),
}


def step(name: str) -> StepInputs:
    model, layout, batch, more = STEPS[name]
    degrees = Layout.parse(layout)
    cluster = load_cluster("h100-sxm8").with_nodes(-(-degrees.world_size // 8))
    return StepInputs(model, cluster, degrees, Job(2048, global_batch=batch), **more)


@pytest.mark.parametrize("name", STEPS)
def test_blocks_against_all_operators(name: str) -> None:
    inputs = step(name)
    prices, schedule = step_prices(inputs), step_schedule(inputs)
    _, program = full_program(inputs, prices, schedule)
    timeline = compiled.run(program, contention=inputs.contention)
    raise_if_deadlocked(timeline)
    blocks = simulate_step(inputs, ranges=False).step_time_s
    error = blocks / timeline.duration_s - 1
    print(f"{name}: {program.num_tasks} tasks {timeline.duration_s * 1e3:.3f} ms, blocks {error:+.3%}")
    assert abs(error) <= MOST

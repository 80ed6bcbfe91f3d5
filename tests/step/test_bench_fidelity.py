"""Timing: a 64-GPU MoE step as one program of all operators, waves and signals of its tensor-parallel GEMMs included.

Run with ``pytest -m benchmark tests/step/test_bench_fidelity.py -s``. Blocks of the same step are timed beside it.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import pytest

from overlapsim.engine import compiled
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.operator import QUICK, plan_operator
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import graph_builder
from overlapsim.step.simulate import simulate_step, step_prices, step_schedule
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.operators import CollectiveOp, GemmOp
from overlapsim.workload.presets import load_preset
from tests.step.full_program import full_program

pytestmark = pytest.mark.benchmark
STRATEGY = "wave_group"
OPERATOR = ("attn.out", "fwd")


def mixtral(composition: Composition) -> StepInputs:
    """Mixtral 8x7B on 64 GPUs: TP 4, PP 2, experts over 8 ranks, 8 micro-batches; 32 layers."""
    layout = Layout(tp=4, pp=2, dp=8, ep=8, etp=1)
    job = Job(4096, 1, 64)
    cluster = load_cluster("h100-sxm8").with_nodes(8)
    return StepInputs(load_preset("mixtral-8x7b"), cluster, layout, job, composition=composition)


def waves() -> Composition:
    """Wave groups of the attention's output GEMM, planned alone."""
    inputs = mixtral(Composition())
    graph, prices = graph_builder(inputs).layer(inputs.model.layers[0], "forward"), step_prices(inputs)
    at = next(i for i, op in enumerate(graph.operators) if isinstance(op, GemmOp) and (op.name, op.pass_) == OPERATOR)
    after = next(
        i for i, op in enumerate(graph.operators) if isinstance(op, CollectiveOp) and (at, i) in graph.dependencies
    )
    strategy = load_strategy(STRATEGY)
    context = Context(graph.part((at, after)), prices)
    plan = plan_operator(context, [load_strategy("serial"), strategy], effort=QUICK)
    chosen = next(result for result in plan.results if result.strategy is strategy)
    assert chosen.best is not None
    return Composition(pairs={OPERATOR: Chosen(strategy, chosen.best.parameters)})


def test_a_64_gpu_step_at_full_fidelity(benchmark: Any) -> None:
    inputs = mixtral(waves())
    prices, schedule = step_prices(inputs), step_schedule(inputs)
    start = perf_counter()
    blocks = simulate_step(inputs, ranges=False)
    blocks_s = perf_counter() - start
    start = perf_counter()
    _, program = full_program(inputs, prices, schedule)
    built_s = perf_counter() - start
    timeline = benchmark.pedantic(compiled.run, (program,), rounds=3, warmup_rounds=1)
    units = int(program.units.sum())
    error = blocks.step_time_s / timeline.duration_s - 1
    benchmark.extra_info |= {"tasks": program.num_tasks, "units": units, "built_s": built_s, "blocks_s": blocks_s}
    print(
        f"{program.num_tasks} tasks of {units} units built in {built_s:.2f} s, step of {timeline.duration_s:.4f} s; "
        f"with blocks {blocks_s:.2f} s, {error:+.2%}"
    )
    assert timeline.complete

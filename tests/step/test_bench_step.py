"""Timings: whole steps of 12,288 and 1,440 GPUs, and 100 against 10,000 GPUs beside each other, in one run.

Run with ``pytest -m benchmark tests/step/test_bench_step.py -s``. Each row is asked warm: the engine is compiled, cost
models are not shared between calls, as the command line asks.
"""

from __future__ import annotations

import resource
from time import perf_counter
from typing import Any

import pytest

from overlapsim.hardware.loading import load_cluster
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import simulate_step
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recompute import Recompute

pytestmark = pytest.mark.benchmark


def gpt3(num_gpus: int, *, batch_a_replica: int = 32) -> StepInputs:
    """GPT 175B, TP 8, PP 8 with six chunks a stage: the pipeline is the same whatever the number of replicas."""
    layout = Layout(tp=8, pp=8, vpp=6, dp=num_gpus // 64, zero=1)
    cluster = load_cluster("a100-sxm8").with_nodes(num_gpus // 8)
    job = Job(2048, 1, batch_a_replica * layout.dp)
    return StepInputs(
        load_preset("gpt3-175b"), cluster, layout, job, recompute=Recompute.parse("sar"), dp_overlap="both"
    )


def moe(num_gpus: int) -> StepInputs:
    """The 352B mixture of experts of MegaScale-MoE: Ulysses 8, EP 8, PP 15."""
    layout = Layout(sp=8, ep=8, pp=15, dp=num_gpus // 120, zero=1)
    cluster = load_cluster("h800-sxm8").with_nodes(num_gpus // 8)
    return StepInputs(load_preset("internal-352b"), cluster, layout, Job(8192, 1, 720), dp_overlap="both")


ROWS = {
    "GPT 175B, 12288 GPUs, batch 6144": lambda: gpt3(12288),
    "GPT 175B, 12288 GPUs, batch 12288": lambda: gpt3(12288, batch_a_replica=64),
    "MoE 352B, 1440 GPUs, batch 720": lambda: moe(1440),
    "MoE 352B, 240 GPUs, batch 720": lambda: moe(240),
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("ranges", [False, True])
def test_step(benchmark: Any, row: str, ranges: bool) -> None:
    inputs = ROWS[row]()
    result = benchmark.pedantic(simulate_step, (inputs,), {"ranges": ranges}, rounds=3, warmup_rounds=1, iterations=1)
    benchmark.extra_info["tasks"] = result.program.program.num_tasks
    benchmark.extra_info["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    assert result.timeline.complete


def test_cost_does_not_follow_the_gpus(benchmark: Any) -> None:
    """Best of five each, turn by turn: 128, 1,024 and 10,240 GPUs with the same pipeline."""
    counts = (128, 1024, 10240)
    asked = {count: gpt3(count) for count in counts}
    best = dict.fromkeys(counts, float("inf"))
    for inputs in asked.values():
        simulate_step(inputs, ranges=False)
    for _ in range(5):
        for count, inputs in asked.items():
            start = perf_counter()
            simulate_step(inputs, ranges=False)
            best[count] = min(best[count], perf_counter() - start)
    for count, seconds in best.items():
        benchmark.extra_info[f"{count}_gpus_s"] = seconds
        print(f"{count:6} GPUs: {seconds * 1e3:7.1f} ms, {seconds / best[counts[0]]:.2f} x {counts[0]} GPUs")
    benchmark.pedantic(simulate_step, (asked[counts[-1]],), {"ranges": False}, rounds=1)

"""Timings: making a schedule, lowering it, freezing and running the program; one pipeline of a 12,288-GPU job.

Run with ``pytest -m benchmark tests/schedule/test_bench_pipeline.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from overlapsim.engine import compiled
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.pipeline import PipelineSchedule
from overlapsim.schedule.pipeline_bubbles import StageTimes
from overlapsim.schedule.pipeline_kinds import make_schedule
from overlapsim.schedule.pipeline_program import lower_pipeline
from overlapsim.schedule.pipeline_work import StageTable, Transfer
from overlapsim.schedule.program import Program
from tests.schedule.pipelines import table

pytestmark = pytest.mark.benchmark

# name, devices, micro-batches, stages a device: the last holds 65,536 actions.
CASES = [("1f1b", 8, 64, None), ("dualpipe", 16, 128, None), ("interleaved", 8, 48, 6), ("interleaved", 16, 256, 8)]


def work(schedule: PipelineSchedule) -> StageTable:
    return table(schedule, StageTimes(10**9, 10**9, 10**9), transfer=Transfer(10**7))


def lower(schedule: PipelineSchedule) -> Program:
    builder = ProgramBuilder()
    pools = [builder.add_pool(132) for _ in range(schedule.num_devices)]
    lower_pipeline(builder, schedule, work(schedule), pools=pools)
    return builder.freeze()


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_make(benchmark: Any, name: str, p: int, m: int, v: int | None) -> None:
    assert benchmark(make_schedule, name, p, m, stages_per_device=v).num_micro_batches == m


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_check_lower_and_freeze(benchmark: Any, name: str, p: int, m: int, v: int | None) -> None:
    schedule = make_schedule(name, p, m, stages_per_device=v)
    program = benchmark(lower, schedule)
    benchmark.extra_info["tasks"] = program.num_tasks


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_run(benchmark: Any, name: str, p: int, m: int, v: int | None) -> None:
    program = lower(make_schedule(name, p, m, stages_per_device=v))
    assert benchmark(compiled.run, program).complete

"""Pipelines of equal stages, run in the compiled engine, and how long their devices idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overlapsim.engine import compiled
from overlapsim.engine.timeline import Timeline
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.pipeline import PipelineSchedule
from overlapsim.schedule.pipeline_bubbles import StageTimes
from overlapsim.schedule.pipeline_links import P2pMode
from overlapsim.schedule.pipeline_program import PipelineTasks, lower_pipeline
from overlapsim.schedule.pipeline_work import Block, StageTable, StageWork, Transfer


def stage_work(times: StageTimes, units: int = 1) -> StageWork:
    """Blocks of a stage; times in ps, divisible by `units`."""
    parts = (times.forward, times.backward, times.input_grad, times.weight_grad)
    assert all(isinstance(part, int) and part % units == 0 for part in parts)
    return StageWork(*(Block(units, int(part) // units) for part in parts))


def table(
    schedule: PipelineSchedule,
    times: StageTimes,
    *,
    transfer: Transfer | None = None,
    joint: bool = True,
    head: StageTimes | None = None,
) -> StageTable:
    """Equal stages, but for the last if `head` is given; F&B pairs at their price, or none if not `joint`."""
    stages: Sequence[StageWork] = [stage_work(times)] * schedule.num_stages
    if head is not None:
        stages = [*stages[:-1], stage_work(head)]
    numbers = range(schedule.num_stages)
    pairs = {(f, b): Block(1, int(times.joint)) for f in numbers for b in numbers} if joint else {}
    between = (transfer,) * (schedule.num_stages - 1)
    return StageTable(stages, pairs=pairs, activations=between, gradients=between)


@dataclass(frozen=True)
class Run:
    """A pipeline that was run."""

    tasks: PipelineTasks
    timeline: Timeline

    def spans(self) -> list[tuple[int, int, int]]:
        """Start, end and busy time of each device, ps."""
        s = self.tasks.schedule
        result = []
        for device in range(s.num_devices):
            own = np.unique(self.tasks.task[s.ptr[device] : s.ptr[device + 1]])
            start, end = self.timeline.t_start[own], self.timeline.t_end[own]
            result.append((int(start.min()), int(end.max()), int((end - start).sum())))
        return result

    def idle(self) -> list[int]:
        """Time that each device idles between its first action and its last, ps."""
        return [end - start - busy for start, end, busy in self.spans()]


def run(schedule: PipelineSchedule, work: StageTable, p2p: P2pMode = "overlapped") -> Run:
    """Lower and run; fails on a deadlock."""
    builder = ProgramBuilder()
    pools = [builder.add_pool(8, device=device) for device in range(schedule.num_devices)]
    tasks = lower_pipeline(builder, schedule, work, pools=pools, p2p=p2p)
    timeline = compiled.run(builder.freeze())
    assert timeline.complete
    return Run(tasks, timeline)


def bubble(schedule: PipelineSchedule, times: StageTimes) -> int:
    """Most that any device idles, all stages alike and transfers taking no time, ps."""
    return max(run(schedule, table(schedule, times)).idle())

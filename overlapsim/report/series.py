"""Quantities over time as step functions: SMs in use of a pool, the rate on a link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlapsim.engine.timeline import Timeline
from overlapsim.report.spans import horizon_ps
from overlapsim.schedule.program import BLOCKS, FLOW, Program

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Steps:
    """A step function: ``value[i]`` holds from ``time_ps[i]`` to ``time_ps[i + 1]``, the last one for ever.

    Attributes
    ----------
    time_ps : int64 array, strictly rising
    value : float64 array; neighbours differ
    """

    time_ps: Int
    value: Float

    def at(self, time_ps: Int) -> Float:
        """Value at each instant of `time_ps`; 0 before the first step."""
        where = np.searchsorted(self.time_ps, time_ps, side="right") - 1
        return (
            np.where(where >= 0, self.value[np.maximum(where, 0)], 0.0) if len(self.value) else np.zeros(len(time_ps))
        )

    def integral(self) -> float:
        """Sum of value times seconds up to the last step."""
        return float(np.sum(self.value[:-1] * np.diff(self.time_ps)) / 1e12)


@dataclass(frozen=True)
class PoolUse:
    """SMs in use in one pool.

    Attributes
    ----------
    compute : Steps
        SMs on which a unit of a BLOCKS task runs.  SMs on which such a task
        spins are not counted: a timeline does not record how many they are.
    communication : Steps
        SMs held by FLOW tasks, spinning or moving.
    exact : bool
        True when taken from recorded cohorts; otherwise `compute` counts a
        BLOCKS task at its most SMs from start to end, cut at the pool's size.
    """

    compute: Steps
    communication: Steps
    exact: bool


def steps_from_spans(start: Int, end: Int, value: Float) -> Steps:
    """Sum of rectangles as a step function.

    Parameters
    ----------
    start, end : int64 arrays, ps, ``start <= end``
    value : float64 array, height of each rectangle

    Examples
    --------
    >>> steps_from_spans(np.array([0, 5]), np.array([10, 20]), np.array([1.0, 2.0])).value.tolist()
    [1.0, 3.0, 2.0, 0.0]
    """
    times, where = np.unique(np.concatenate([start, end]), return_inverse=True)
    if len(times) == 0:
        return Steps(np.zeros(0, np.int64), np.zeros(0))
    delta = np.bincount(where, np.concatenate([value, -value]), len(times))
    count = np.bincount(where, np.repeat([1.0, -1.0], len(start)), len(times))
    level = np.cumsum(delta)
    # Where nothing is left the sum of floats leaves dust behind; counts are exact.
    level[np.cumsum(count) == 0] = 0.0
    level = np.maximum(level, 0.0)
    changed = np.concatenate([[True], level[1:] != level[:-1]])
    return Steps(times[changed].astype(np.int64), level[changed])


def sms_in_use(timeline: Timeline) -> list[PoolUse]:
    """SMs in use over time for each pool of the program, in order.

    Parameters
    ----------
    timeline : Timeline
        With ``record=True`` the counts of running units are exact.
    """
    program, end_ps = timeline.program, _ends(timeline)
    cohorts = timeline.cohorts
    uses = []
    for pool, num_sms in enumerate(program.pool_num_sms.tolist()):
        mine = program.pool == pool
        flows = np.flatnonzero(mine & (program.kind == FLOW) & (program.sm > 0) & (timeline.t_resident >= 0))
        held = steps_from_spans(timeline.t_resident[flows], end_ps[flows], program.sm[flows].astype(np.float64))
        blocks = mine & (program.kind == BLOCKS)
        if cohorts is not None:
            rows = np.flatnonzero(blocks[cohorts.task])
            running = steps_from_spans(
                cohorts.start_ps[rows], cohorts.end_ps[rows], cohorts.units[rows].astype(np.float64)
            )
        else:
            began = np.flatnonzero(blocks & (timeline.t_start >= 0))
            most = np.minimum(program.sm[began], program.units[began]).astype(np.float64)
            running = steps_from_spans(timeline.t_start[began], end_ps[began], most)
            running = Steps(running.time_ps, np.minimum(running.value, float(num_sms)))
        uses.append(PoolUse(running, held, cohorts is not None))
    return uses


def link_rates(timeline: Timeline) -> list[Steps]:
    """Units per second (bytes/s) that move over each resource, in the order of resources.

    With cohorts and speeds recorded this is the engine's own rate: what each
    runner asks, cut at the capacity, times its speed (docs/program.md section
    3.5).  Without them it is each task's total spread evenly from its start to
    its end; a task that never ended counts the units that it finished.

    A timeline does not say whether contention was on: run without it, each
    runner is still cut at the program's capacities, but their sum is not.
    """
    program = timeline.program
    recorded = timeline.cohorts is not None and timeline.speeds is not None
    rows = _recorded_rates(timeline) if recorded else _mean_rates(timeline)
    resource, start, end, rate = rows
    order = np.argsort(resource, kind="stable")
    bounds = np.searchsorted(resource[order], np.arange(program.num_resources + 1))
    return [
        steps_from_spans(start[rows], end[rows], rate[rows])
        for rows in (order[bounds[r] : bounds[r + 1]] for r in range(program.num_resources))
    ]


_Rates = tuple[Int, Int, Int, Float]


def _ends(timeline: Timeline) -> Int:
    return np.where(timeline.t_end >= 0, timeline.t_end, horizon_ps(timeline))


def _mean_rates(timeline: Timeline) -> _Rates:
    program, end_ps = timeline.program, _ends(timeline)
    done = np.where(timeline.t_end >= 0, program.units, timeline.progress)
    owner = np.repeat(np.arange(program.num_tasks), np.diff(program.demand_ptr))
    rows = np.flatnonzero((timeline.t_start >= 0)[owner] & (end_ps > timeline.t_start)[owner])
    task = owner[rows]
    busy_s = (end_ps - timeline.t_start)[task] / 1e12
    rate = program.demand_amount[rows] * done[task] / busy_s
    return program.demand_resource[rows], timeline.t_start[task], end_ps[task], rate


def _recorded_rates(timeline: Timeline) -> _Rates:
    """Rectangles (resource, start, end, rate), cut wherever running units or the speed of a runner change."""
    program = timeline.program
    leader, chunk_ps = _runners(program)
    # full[k, r] of docs/program.md section 3.5, as rows (k, r) in rising order.
    owner = np.repeat(np.arange(program.num_tasks), np.diff(program.demand_ptr))
    pair, place = np.unique(
        leader[owner] * max(1, program.num_resources) + program.demand_resource, return_inverse=True
    )
    full = np.bincount(place, program.demand_amount * 1e12 / chunk_ps[owner], len(pair))
    runner, resource = np.divmod(pair, max(1, program.num_resources))
    first, count = np.searchsorted(runner, np.arange(program.num_tasks)), np.bincount(runner, None, program.num_tasks)

    task, start, end, units, speed = _running(timeline, leader)
    piece = np.repeat(np.arange(len(task)), count[task])
    row = first[task[piece]] + np.arange(len(piece)) - np.searchsorted(piece, piece)
    ask = np.minimum(units[piece] * full[row], program.resource_capacity[resource[row]])
    return resource[row], start[piece], end[piece], ask * speed[piece]


def _running(timeline: Timeline, leader: Int) -> tuple[Int, Int, Int, Float, Float]:
    """Pieces (runner, start, end, running units, speed) with constant units and speed; a group is its leader."""
    cohorts, speeds = timeline.cohorts, timeline.speeds
    assert cohorts is not None and speeds is not None
    mine = np.flatnonzero(leader[cohorts.task] == cohorts.task)
    units = cohorts.units[mine]
    task = np.concatenate([cohorts.task[mine], cohorts.task[mine], speeds.task])
    time = np.concatenate([cohorts.start_ps[mine], cohorts.end_ps[mine], speeds.time_ps])
    change = np.concatenate([units, -units, np.zeros(len(speeds.task), np.int64)])
    speed = np.concatenate([np.full(2 * len(mine), np.nan), speeds.speed])
    order = np.lexsort((time, task))
    task, time, change, speed = task[order], time[order], change[order], speed[order]
    # Changes of one task add up to 0, so one running sum serves all tasks.
    level = np.cumsum(change)
    # Until a speed is recorded it is 1.
    first = np.diff(task, prepend=-1) != 0
    speed[first & np.isnan(speed)] = 1.0
    known = np.maximum.accumulate(np.where(np.isnan(speed), 0, np.arange(len(speed))))
    piece = np.flatnonzero((task[:-1] == task[1:]) & (time[1:] > time[:-1]) & (level[:-1] > 0))
    return task[piece], time[piece], time[piece + 1], level[piece].astype(np.float64), speed[known][piece]


def _runners(program: Program) -> tuple[Int, Int]:
    """Of each task: the runner it belongs to (itself, or its group's lowest member), and the time of a unit there."""
    leader, chunk_ps = np.arange(program.num_tasks), program.unit_ps.copy()
    group, members = program.task_runner_group, program.group_members
    flows = np.flatnonzero(group >= 0)
    slowest = np.zeros(len(members.ptr) - 1, np.int64)
    np.maximum.at(slowest, group[flows], program.unit_ps[flows])
    leader[flows] = members.index[members.ptr[group[flows]]]
    chunk_ps[flows] = slowest[group[flows]]
    return leader, chunk_ps

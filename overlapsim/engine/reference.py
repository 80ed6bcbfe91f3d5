"""The readable engine: SimPy processes that say section 3 of docs/program.md, sentence by sentence.

It is the meaning against which the compiled engine is tested, so it is plain before it is fast.
There is one process per host lane, per launch, per CTA and per group, and an instant (section 3.2)
is what SimPy serves at one time: priorities 0 and 1, SimPy's own, settle; then comes one GRANT
event and, after the CTAs and groups it wakes, one SPEEDS event.  Nothing after SPEEDS happens
within the same instant, because every unit takes at least 1 ps.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import simpy

from overlapsim.engine.share import share
from overlapsim.engine.timeline import Cohorts, Speeds, Timeline
from overlapsim.schedule.program import BLOCKS, FLOW, HOST, Program

GRANT: Final = 2
SPEEDS: Final = 3
"""SimPy priorities of the two last steps of an instant; SimPy's own are 0 (processes, interrupts) and 1."""

Event = Any  # SimPy's types stay behind this module's door.
Process = Generator[Event, None, None]


def run(program: Program, *, contention: bool = True, record: bool = False) -> Timeline:
    """Run `program` and return what happened; a deadlock is an incomplete Timeline, not an error.

    Parameters
    ----------
    program : Program
        Validated; times are integer picoseconds.
    contention : bool
        False runs ``program.without_contention()``: all capacities infinite, all derates 1.
    record : bool
        Fill ``Timeline.cohorts`` and ``Timeline.speeds``.  A HOST task is a cohort of one unit; a
        group gives one row per member and chunk.  A speed row is written at the end of an instant
        for every runner that then runs and either did not run just before the instant, or had
        another speed (bit for bit); rows are sorted by (time, task).

    Returns
    -------
    Timeline
        With `program` as given.

    Examples
    --------
    >>> from overlapsim.schedule.builder import ProgramBuilder
    >>> b = ProgramBuilder()
    >>> _ = b.add_blocks(stream=b.add_stream(), pool=b.add_pool(num_sms=4), units=10, unit_ps=100, sm=4)
    >>> run(b.freeze()).end_ps
    300
    """
    machine = _Machine(program if contention else program.without_contention(), record)
    machine.env.run()
    names = ("t_issued", "t_eligible", "t_resident", "t_start", "t_end", "progress", "held_sm")
    columns = {name: np.array([getattr(task, name) for task in machine.tasks], np.int64) for name in names}
    cohorts, speeds = _recorded(machine) if record else (None, None)
    for part in (columns, vars(cohorts) if cohorts else {}, vars(speeds) if speeds else {}):
        for array in part.values():
            array.flags.writeable = False
    return Timeline(program=program, cohorts=cohorts, speeds=speeds, **columns)


@dataclass(slots=True, eq=False)
class _Edge:
    """Progress of one task that opens another, or one unit of it, `lag_ps` later."""

    opened: Event
    src_units: int
    dst_unit: int
    lag_ps: int


@dataclass(slots=True, eq=False)
class _Pool:
    """SMs of one GPU, or one copy engine."""

    free: int
    derate: float
    contenders: list[tuple[int, int, int, _Task]] = field(default_factory=list)  # in the order of section 3.3


@dataclass(slots=True, eq=False)
class _Task:
    """One task: its row of the program, how far it is, and the events that others wait for."""

    pool: _Pool
    left_queue: Event  # became eligible, so the next of its queue is head
    resident: Event
    ended: Event
    index: int
    kind: int
    launch_ps: int
    units: int
    unit_ps: int
    sm: int
    sm_quantum: int
    weight: float
    num_ctas: int  # BLOCKS: a CTA per unit, or W persistent ones
    priority: int
    in_front: list[Event] = field(default_factory=list)  # left_queue of the one before, ended of the one before
    waits: list[_Edge] = field(default_factory=list)  # edges into -1
    gates: list[_Edge] = field(default_factory=list)  # edges into units not known to be open, lowest unit last
    out: list[_Edge] = field(default_factory=list)  # edges from here not reached, fewest src_units last
    placed: int = 0  # CTAs that got their SM, retired ones included
    held_sm: int = 0  # SMs held now
    progress: int = 0
    finished_ahead: set[int] = field(default_factory=set)  # units finished beyond the prefix
    t_issued: int = -1
    t_eligible: int = -1
    t_resident: int = -1
    t_start: int = -1
    t_end: int = -1


@dataclass(slots=True, eq=False)
class _Runner:
    """A BLOCKS task with its running units, or a group with its moving chunk: what has a speed."""

    index: int  # place in the order of runners: the lowest member
    tasks: list[_Task]
    unit_ps: int  # chunk time = the largest unit_ps among members
    full: dict[int, float]  # resource of finite capacity -> units/s of one unit at speed 1
    running: int = 0  # F: units running, spinning ones not counted
    ran: int = 0  # F at the end of the last instant
    x: float = 1.0
    moving: set[Event] = field(default_factory=set)  # processes that a speed change interrupts


class _Machine:
    """All processes of one run."""

    def __init__(self, program: Program, record: bool) -> None:
        self.env = simpy.Environment()
        self.record = record
        self.cohorts: Counter[tuple[int, int, int]] = Counter()
        self.speed_rows: list[tuple[int, int, float]] = []
        self.capacity: list[float] = program.resource_capacity.tolist()
        self.tasks = _make_tasks(self.env, program)
        self.runners: dict[_Task, _Runner] = {}
        for task in self.tasks:
            if task.kind == BLOCKS:
                self.add_runner(program, [task])
        for g in range(len(program.group_members.ptr) - 1):
            members = [self.tasks[i] for i in program.group_members.row(g).tolist()]
            self.env.process(self.group(members, self.add_runner(program, members)))
        for lane in range(len(program.lane_tasks.ptr) - 1):
            self.env.process(self.host_lane([self.tasks[i] for i in program.lane_tasks.row(lane).tolist()]))
        self.running: set[_Runner] = set()
        self.touched: set[_Runner] = set()
        self.pools_to_grant: set[_Pool] = set()
        self.speeds_event: Event = None

    def add_runner(self, program: Program, members: list[_Task]) -> _Runner:
        unit_ps = max(task.unit_ps for task in members)
        full: dict[int, float] = {}
        for task in members:
            for j in range(program.demand_ptr[task.index], program.demand_ptr[task.index + 1]):
                resource, amount = int(program.demand_resource[j]), float(program.demand_amount[j])
                if self.capacity[resource] != math.inf:
                    full[resource] = full.get(resource, 0.0) + amount * 1e12 / float(unit_ps)
        runner = _Runner(members[0].index, members, unit_ps, full)
        self.runners.update(dict.fromkeys(members, runner))
        return runner

    # Section 3.1: life of a task.
    def host_lane(self, tasks: list[_Task]) -> Process:
        """Issue tasks by index: launches take their time, HOST tasks wait for their edges and block the lane."""
        for task in tasks:
            if task.kind == HOST:
                task.t_issued = self.env.now
                for edge in task.waits:
                    yield edge.opened
                task.t_eligible = task.t_resident = task.t_start = self.env.now
                yield self.env.timeout(task.unit_ps)
                self.finish_unit(task, 0, task.t_start)
            else:
                yield self.env.timeout(task.launch_ps)
                task.t_issued = self.env.now
                self.env.process(self.launch(task))

    def launch(self, task: _Task) -> Process:
        """Wait to be head of the queue, next of the stream, and for all -1 edges: then the task is eligible."""
        # One wait after another ends when the last condition holds: each, once true, stays true.
        yield from task.in_front
        for edge in task.waits:
            yield edge.opened
        task.t_eligible = self.env.now
        task.left_queue.succeed()
        if task.kind == FLOW and task.sm == 0:
            self.make_resident(task)
        else:
            insort(task.pool.contenders, (-task.priority, task.t_eligible, task.index, task))
            self.request_grant(task.pool)

    def make_resident(self, task: _Task) -> None:
        task.t_resident = self.env.now
        task.resident.succeed()

    # Section 3.3: SMs.
    def request_grant(self, pool: _Pool) -> None:
        """Grant free SMs of `pool` when this instant has settled: one came free or a contender came."""
        if not self.pools_to_grant:
            _end_of_instant(self.env, GRANT).callbacks.append(self.grant)
        self.pools_to_grant.add(pool)

    def grant(self, _: Event) -> None:
        """Ask the contenders of each pool in order; each takes what it can before the next is asked."""
        pools, self.pools_to_grant = self.pools_to_grant, set()
        for pool in pools:
            for contender in list(pool.contenders):
                task = contender[-1]
                if task.kind == FLOW:
                    if task.sm > pool.free:
                        break  # takes none and closes the pool for this instant
                    count = want = task.sm
                    self.make_resident(task)
                else:
                    want = task.num_ctas - task.placed
                    count = min(pool.free, task.sm - task.held_sm, want)
                    if count < want:
                        count -= count % task.sm_quantum
                    if count and task.t_resident < 0:
                        self.make_resident(task)
                    for w in range(task.placed, task.placed + count):
                        self.env.process(self.cta(task, w))
                    task.placed += count
                pool.free -= count
                task.held_sm += count
                if count == want:
                    pool.contenders.remove(contender)

    def release(self, task: _Task, count: int) -> None:
        task.held_sm -= count
        task.pool.free += count
        self.request_grant(task.pool)

    # Section 3.4: units, gates, progress.
    def cta(self, task: _Task, w: int) -> Process:
        """Hold one SM, do units w, w + W, w + 2W, ... and retire; without `persistent`, W is all units."""
        for u in range(w, task.units, task.num_ctas):
            yield from self.spin(task, u)
            started = self.env.now
            yield from self.run_unit(self.runners[task])
            self.finish_unit(task, u, started)
        self.release(task, 1)

    def group(self, members: list[_Task], runner: _Runner) -> Process:
        """Wait until all members are resident, move chunk by chunk, and end as one."""
        for task in members:
            yield task.resident
        for u in range(members[0].units):
            for task in members:
                yield from self.spin(task, u)
            started = self.env.now
            yield from self.run_unit(runner)
            for task in members:
                self.finish_unit(task, u, started)
        for task in members:
            self.release(task, task.sm)

    def spin(self, task: _Task, u: int) -> Process:
        """Wait, holding the SMs, until every edge with 0 <= dst_unit <= u is open."""
        while task.gates and task.gates[-1].dst_unit <= u:
            gate = task.gates[-1]
            yield gate.opened
            if task.gates and task.gates[-1] is gate:  # not yet passed by another CTA that waited beside this one
                task.gates.pop()

    def finish_unit(self, task: _Task, u: int, started: int) -> None:
        """Raise progress to the finished prefix and let the edges that it reaches open after their lag."""
        if self.record:
            self.cohorts[started, task.index, self.env.now] += 1
        task.finished_ahead.add(u)
        while task.progress in task.finished_ahead:
            task.finished_ahead.remove(task.progress)
            task.progress += 1
        while task.out and task.out[-1].src_units <= task.progress:
            edge = task.out.pop()
            self.env.timeout(edge.lag_ps).callbacks.append(edge.opened.trigger)
        if task.progress == task.units:
            task.t_end = self.env.now
            task.ended.succeed()

    # Sections 3.5 and 3.6: speeds and numbers.
    def run_unit(self, runner: _Runner) -> Process:
        """Run one unit, or chunk, from its full time down to nothing at the runner's speed."""
        for task in runner.tasks:
            if task.t_start < 0:
                task.t_start = self.env.now
        runner.running += 1
        yield self.request_speeds(runner)
        process = self.env.active_process
        runner.moving.add(process)
        remaining = float(runner.unit_ps)
        while True:
            x, since = runner.x, self.env.now
            try:
                yield self.env.timeout(max(1, math.ceil(remaining / x)))
                break
            except simpy.Interrupt:
                remaining = max(0.0, remaining - x * float(self.env.now - since))
        runner.moving.remove(process)
        runner.running -= 1
        self.request_speeds(runner)

    def request_speeds(self, runner: _Runner) -> Event:
        """Event at the end of this instant by which all speeds are set; `runner` gained or lost a unit."""
        if self.speeds_event is None:
            self.speeds_event = _end_of_instant(self.env, SPEEDS)
            # The first callback: units that start now wait for the event and so find their speed set.
            self.speeds_event.callbacks.append(self.set_speeds)
        self.touched.add(runner)
        return self.speeds_event

    def set_speeds(self, _: Event) -> None:
        """Compute all speeds and interrupt the units whose speed changed; fresh units are not `moving` yet."""
        changed = {runner for runner in self.touched if runner.running != runner.ran}
        self.touched, self.speeds_event = set(), None
        # x depends only on who runs and with how many units: a wave after an equal wave changes nothing.
        if changed:
            self.running = {runner for runner in self.running | changed if runner.running}
            order = sorted(self.running, key=lambda runner: runner.index)
            for runner, x in zip(order, self.speeds(order), strict=True):
                if self.record and (runner.ran == 0 or x != runner.x):
                    self.speed_rows.append((runner.index, self.env.now, x))
                if x != runner.x:
                    runner.x = x
                    for process in runner.moving:
                        process.interrupt()
            for runner in changed:
                runner.ran = runner.running

    def speeds(self, order: list[_Runner]) -> list[float]:
        """Speeds of the runners in `order`, all that run."""
        sm_flows = {task.pool for runner in order for task in runner.tasks if task.kind == FLOW and task.sm > 0}
        cap, weight, ask = [], [], []
        for runner in order:
            first = runner.tasks[0]
            cap.append(first.pool.derate if first.kind == BLOCKS and first.pool in sm_flows else 1.0)
            weight.append(first.weight)
            ask.append({r: min(runner.running * full, self.capacity[r]) for r, full in runner.full.items()})
        return share(cap=cap, weight=weight, ask=ask, capacity=self.capacity)


def _recorded(machine: _Machine) -> tuple[Cohorts, Speeds]:
    rows = sorted((*key, units) for key, units in machine.cohorts.items())
    start, task, end, units = np.array(rows, np.int64).reshape(-1, 4).T.copy()
    runner, time, speed = list(zip(*machine.speed_rows, strict=True)) or [()] * 3
    return (
        Cohorts(task=task, start_ps=start, end_ps=end, units=units),
        Speeds(task=np.array(runner, np.int64), time_ps=np.array(time, np.int64), speed=np.array(speed, np.float64)),
    )


def _end_of_instant(env: Any, priority: int) -> Event:
    """Return an event of this instant that comes after all that SimPy itself schedules."""
    event = env.event()
    event._ok, event._value = True, None
    env.schedule(event, priority)
    return event


def _make_tasks(env: Any, p: Program) -> list[_Task]:
    """Turn the arrays into tasks and tie them together by queue, stream and edges."""
    # -1, the stream and the pool of a HOST task, is the last of each.
    priority = np.append(p.stream_priority, 0)[p.stream]
    pools = [_Pool(*row) for row in zip(p.pool_num_sms.tolist(), p.pool_derate.tolist(), strict=True)] + [_Pool(0, 1.0)]
    num_ctas = np.where(p.persistent, np.minimum(p.sm, p.units), p.units)
    names = ("kind", "launch_ps", "units", "unit_ps", "sm", "sm_quantum", "weight")
    columns = (np.arange(p.num_tasks), *(getattr(p, name) for name in names), num_ctas, priority)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    tasks = [
        _Task(pools[pool], env.event(), env.event(), env.event(), *row)
        for pool, row in zip(p.pool.tolist(), rows, strict=True)
    ]
    for incidence, event in ((p.queue_tasks, "left_queue"), (p.stream_tasks, "ended")):
        for first, last in pairwise(incidence.ptr.tolist()):
            for before, after in pairwise(incidence.index[first:last].tolist()):
                tasks[after].in_front.append(getattr(tasks[before], event))
    edge_columns = (p.edge_src_units.tolist(), p.edge_dst_unit.tolist(), p.edge_lag_ps.tolist())
    edges = [_Edge(env.event(), *row) for row in zip(*edge_columns, strict=True)]
    for e in reversed(p.edges_out.index.tolist()):
        tasks[p.edge_src[e]].out.append(edges[e])
    for e in reversed(p.edges_in.index.tolist()):
        dst = tasks[p.edge_dst[e]]
        (dst.waits if edges[e].dst_unit < 0 else dst.gates).append(edges[e])
    return tasks

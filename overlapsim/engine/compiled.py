"""The fast engine: one compiled loop over the instants of a program, exact to the picosecond (docs/program.md)."""

from __future__ import annotations

import numpy as np

from overlapsim.engine import kernel_layout as at
from overlapsim.engine.kernel_grant import grant, start
from overlapsim.engine.kernel_pack import Packed, packed
from overlapsim.engine.kernel_settle import lane_on, settle
from overlapsim.engine.kernel_speeds import set_speeds
from overlapsim.engine.timeline import Cohorts, Speeds, Timeline
from overlapsim.jit import borrowing, compiled
from overlapsim.schedule.program import Float, Int, Program


def run(program: Program, *, contention: bool = True, record: bool = False) -> Timeline:
    """Run `program` and return what happened.

    The same meaning as :func:`overlapsim.engine.reference.run`, equal to the
    picosecond; section 3 of ``docs/program.md`` is the contract of both.
    Units that one task starts at one instant are one event, so the cost is
    per wave and not per tile.

    Parameters
    ----------
    program : Program
        Not changed; what the engine derives from it is kept with it, so
        later runs of the same object start at once.
    contention : bool
        False: every unit takes its nominal time, as in
        ``program.without_contention()``, and no speed is computed.
    record : bool
        True: fill ``Timeline.cohorts`` and ``Timeline.speeds``.

    Returns
    -------
    Timeline
        In a deadlock the instants that never came are -1; nothing is raised.

    Examples
    --------
    >>> from overlapsim.schedule.builder import ProgramBuilder
    >>> b = ProgramBuilder()
    >>> gpu = b.add_pool(num_sms=4)
    >>> gemm = b.add_blocks(stream=b.add_stream(), pool=gpu, units=10, unit_ps=100, sm=4)
    >>> run(b.freeze()).end_ps
    300
    """
    tables = packed(program)
    contention = contention and tables.shares
    if record:
        return _run_recorded(program, tables, contention)
    out, _, _ = _simulate(*tables, contention, _NO_COHORTS, _NO_SPEEDS, _NO_VALUES)
    return _timeline(program, out, None, None)


# Buffers without room: the rows of a run that does not record are counted and dropped.
_NO_COHORTS = np.empty((0, 4), np.int64)
_NO_SPEEDS = np.empty((0, 2), np.int64)
_NO_VALUES = np.empty(0, np.float64)


def _run_recorded(program: Program, tables: Packed, contention: bool) -> Timeline:
    num_cohorts = num_speeds = 4 * program.num_tasks + 1024
    while True:
        cohort_rows = np.empty((num_cohorts, 4), np.int64)
        speed_rows = np.empty((num_speeds, 2), np.int64)
        speed_values = np.empty(num_speeds, np.float64)
        out, used_cohorts, used_speeds = _simulate(*tables, contention, cohort_rows, speed_rows, speed_values)
        if used_cohorts <= num_cohorts and used_speeds <= num_speeds:
            break
        # Rows without room were counted: a second run of the same program fits exactly.
        num_cohorts, num_speeds = used_cohorts, used_speeds
    cohorts = _sorted_cohorts(cohort_rows[:used_cohorts])
    order = np.lexsort((speed_rows[:used_speeds, 0], speed_rows[:used_speeds, 1]))
    speeds = Speeds(speed_rows[order, 0], speed_rows[order, 1], speed_values[order])
    for array in (*vars(cohorts).values(), *vars(speeds).values()):
        array.flags.writeable = False
    return _timeline(program, out, cohorts, speeds)


def _timeline(program: Program, out: Int, cohorts: Cohorts | None, speeds: Speeds | None) -> Timeline:
    out.flags.writeable = False  # and so are its rows
    return Timeline(program, out[0], out[1], out[2], out[3], out[4], out[5], out[6], cohorts, speeds)


def _sorted_cohorts(rows: Int) -> Cohorts:
    """Rows (task, start, end, units) in the order of Cohorts; crews that ran side by side become one row."""
    rows = rows[np.lexsort((rows[:, 2], rows[:, 0], rows[:, 1]))]
    first = np.ones(len(rows), np.bool_)
    first[1:] = np.any(rows[1:, :3] != rows[:-1, :3], axis=1)
    keys = rows[first]
    units = np.add.reduceat(rows[:, 3], np.flatnonzero(first)) if len(rows) else keys[:, 3].copy()
    return Cohorts(keys[:, 0].copy(), keys[:, 1].copy(), keys[:, 2].copy(), units)


@compiled
def _simulate(
    task_before: Int, runner_before: Int, edge: Int, gate_before: Int, pool_before: Int, line_before: Int,
    lane_before: Int, rate_before: Float, ask_before: Int, demand_before: Float, resource_before: Float,
    num_slots: int, shares: bool, contention: bool, cohort_rows: Int, speed_rows: Int, speed_values: Float,
) -> tuple[Int, int, int]:  # fmt: skip
    """Run on copies of the tables; return the seven rows of Timeline and how many rows there were to record."""
    task, runner, gate, pool = task_before.copy(), runner_before.copy(), gate_before.copy(), pool_before.copy()
    line, lane = line_before.copy(), lane_before.copy()
    rate, resource = rate_before.copy(), resource_before.copy()
    ask, demand = ask_before.copy(), demand_before.copy()
    usage = np.zeros((len(resource), at.USAGE_COLUMNS), np.int64)
    cohort = np.empty((num_slots, at.COHORT_COLUMNS), np.int64)
    left = np.empty(num_slots, np.float64)
    heap = np.empty((len(runner) + len(lane) + len(edge), at.HEAP_COLUMNS), np.int64)
    heap[:, at.PLACE] = at.NEVER
    fresh = np.empty(len(task), np.int64)
    active, open_runners = np.empty(len(runner), np.int64), np.empty(len(runner), np.int64)
    scarce = np.empty(len(resource), np.int64)
    var = np.zeros(at.NUM_VARS, np.int64)
    var[at.LANE_EVENT] = len(runner)
    var[at.EDGE_EVENT] = len(runner) + len(lane)
    for chain in (at.TODO, at.TOUCHED, at.STIRRED, at.FREE_SLOT):
        var[chain] = at.NEVER
    _run_instants(
        task, runner, edge, gate, pool, line, lane, rate, ask, demand, usage, resource, cohort, left, heap, fresh,
        active, open_runners, scarce, var, contention, cohort_rows, speed_rows, speed_values,
    )  # fmt: skip
    out = np.empty((7, len(task)), np.int64)
    for i in range(len(task)):
        for instant in range(5):
            out[instant, i] = task[i, at.ISSUED + instant]
        out[5, i] = task[i, at.PROGRESS]
        out[6, i] = task[i, at.HELD]
    return out, var[at.COHORT_ROWS], var[at.SPEED_ROWS]


@borrowing
def _run_instants(
    task: Int, runner: Int, edge: Int, gate: Int, pool: Int, line: Int, lane: Int, rate: Float, ask: Int,
    demand: Float, usage: Int, resource: Float, cohort: Int, left: Float, heap: Int, fresh: Int, active: Int,
    open_runners: Int, scarce: Int, var: Int, contention: bool, cohort_rows: Int, speed_rows: Int, speed_values: Float,
) -> None:  # fmt: skip
    """The instants of section 3.2, one after another, until nothing is left to happen."""
    for row in range(len(lane)):
        lane_on(task, lane, heap, var, row)
    while True:
        settle(task, runner, edge, gate, pool, lane, cohort, heap, fresh, var, cohort_rows)
        grant(task, runner, pool, line, cohort, fresh, var)
        start(task, runner, cohort, var)
        set_speeds(
            task, runner, pool, cohort, left, rate, ask, demand, usage, resource, heap, active, open_runners,
            scarce, var, contention, speed_rows, speed_values,
        )  # fmt: skip
        if var[at.HEAP_SIZE] == 0:
            break
        var[at.NOW] = heap[0, at.AT]

"""Step 4 of an instant: set speeds and the ends of running units (docs/program.md sections 3.5, 3.6)."""

from __future__ import annotations

import math

from overlapsim.engine import kernel_layout as at
from overlapsim.engine.kernel_heap import schedule
from overlapsim.engine.kernel_share import share
from overlapsim.jit import borrowing, inlined
from overlapsim.schedule.program import Float, Int


@inlined
def _join(active: Int, var: Int, k: int) -> None:
    """Insert runner `k` into the runners that share, which rise by index."""
    place = var[at.NUM_ACTIVE]
    var[at.NUM_ACTIVE] = place + 1
    while place > 0 and active[place - 1] > k:
        active[place] = active[place - 1]
        place -= 1
    active[place] = k


@inlined
def _leave(active: Int, var: Int, k: int) -> None:
    place = var[at.NUM_ACTIVE] - 1
    var[at.NUM_ACTIVE] = place
    moved = active[place]
    while moved != k:
        place -= 1
        following = moved
        moved = active[place]
        active[place] = following


@inlined
def _move(task: Int, runner: Int, pool: Int, k: int) -> None:
    """Count a group that begins or ceases to move at the pools where its members hold SMs."""
    if runner[k, at.MEMBERS] > 0:
        i = runner[k, at.LEAD]
        while i != at.NEVER:
            if task[i, at.SM] > 0:
                pool[task[i, at.POOL], at.MOVING] += 2 * runner[k, at.RUNNING] - 1
            i = task[i, at.MEMBER_NEXT]


@borrowing
def _end(var: Int, left: float, speed: float) -> int:
    return int(var[at.NOW]) + max(1, math.ceil(left / speed))


@borrowing
def _first_end(runner: Int, cohort: Int, k: int) -> int:
    """Earliest end of a running cohort, NEVER if none runs."""
    slot = runner[k, at.HEAD]
    if slot == at.NEVER:
        return at.NEVER
    first = cohort[slot, at.DONE_AT]
    if runner[k, at.WORKERS] > 0:  # otherwise cohorts end in the order they started
        slot = cohort[slot, at.NEXT]
        while slot != at.NEVER:
            other = cohort[slot, at.DONE_AT]
            if first == at.NEVER or (other != at.NEVER and other < first):
                first = other
            slot = cohort[slot, at.NEXT]
    return int(first)


@inlined
def _change_speed(runner: Int, rate: Float, cohort: Int, left: Float, heap: Int, var: Int, k: int) -> None:
    """Give the new speed to what was running before this instant."""
    old = rate[k, at.SPEED]
    new = rate[k, at.NEW_SPEED]
    rate[k, at.SPEED] = new
    slot = runner[k, at.HEAD]
    while slot != at.NEVER:
        if cohort[slot, at.DONE_AT] != at.NEVER and cohort[slot, at.SINCE] != at.NEVER:
            left[slot] = max(0.0, left[slot] - old * float(var[at.NOW] - cohort[slot, at.SINCE]))
            cohort[slot, at.SINCE] = var[at.NOW]
            cohort[slot, at.DONE_AT] = _end(var, left[slot], new)
        slot = cohort[slot, at.NEXT]
    if runner[k, at.RUNNER_NEXT] == at.LOOSE:
        schedule(heap, var, k, _first_end(runner, cohort, k))


@inlined
def _begin(runner: Int, rate: Float, cohort: Int, left: Float, heap: Int, var: Int, k: int) -> None:
    """Set the end of the cohorts that started at this instant, and schedule the runner's next end."""
    unit = runner[k, at.UNIT_TIME]
    speed = rate[k, at.SPEED]
    slot = runner[k, at.HEAD]
    if slot != at.NEVER and runner[k, at.WORKERS] == 0:
        slot = runner[k, at.TAIL]  # all others are older
    while slot != at.NEVER:
        if cohort[slot, at.DONE_AT] != at.NEVER and cohort[slot, at.SINCE] == at.NEVER:
            left[slot] = float(unit)
            cohort[slot, at.SINCE] = var[at.NOW]
            cohort[slot, at.DONE_AT] = var[at.NOW] + unit if speed == 1.0 else _end(var, left[slot], speed)
        slot = cohort[slot, at.NEXT]
    first = _first_end(runner, cohort, k)
    if first != at.NEVER:
        schedule(heap, var, k, first)


@borrowing
def _record(speed_rows: Int, speed_values: Float, var: Int, lead: int, speed: float) -> None:
    row = var[at.SPEED_ROWS]
    var[at.SPEED_ROWS] = row + 1
    if row < speed_rows.shape[0]:
        speed_rows[row, 0] = lead
        speed_rows[row, 1] = var[at.NOW]
        speed_values[row] = speed


@inlined
def set_speeds(
    task: Int, runner: Int, pool: Int, cohort: Int, left: Float, rate: Float, ask: Int,
    demand: Float, usage: Int, resource: Float, heap: Int, active: Int, open_runners: Int, scarce: Int, var: Int,
    contention: bool, speed_rows: Int, speed_values: Float,
) -> None:  # fmt: skip
    """Recompute speeds if other units run than before, then schedule every end that is new or changed."""
    changed = False
    k = var[at.TOUCHED]
    while k != at.NEVER:
        running = runner[k, at.RUNNING]
        ran = runner[k, at.RAN]
        runner[k, at.RAN] = running
        if running != ran and contention and runner[k, at.SHARES] == 1:
            changed = True
            if ran == 0:
                _join(active, var, k)
                _move(task, runner, pool, k)
                rate[k, at.SPEED] = 0.0  # nothing ran: whatever comes is new
            elif running == 0:
                _leave(active, var, k)
                _move(task, runner, pool, k)
        elif running > 0 and ran == 0:
            _record(speed_rows, speed_values, var, runner[k, at.LEAD], rate[k, at.SPEED])
        k = runner[k, at.RUNNER_NEXT]
    if changed:
        share(task, runner, pool, rate, ask, demand, usage, resource, active, open_runners, scarce, var)
        for j in range(var[at.NUM_ACTIVE]):
            k = active[j]
            if rate[k, at.NEW_SPEED] != rate[k, at.SPEED]:
                _record(speed_rows, speed_values, var, runner[k, at.LEAD], rate[k, at.NEW_SPEED])
                _change_speed(runner, rate, cohort, left, heap, var, k)
    while var[at.TOUCHED] != at.NEVER:
        k = var[at.TOUCHED]
        _begin(runner, rate, cohort, left, heap, var, k)
        var[at.TOUCHED] = runner[k, at.RUNNER_NEXT]
        runner[k, at.RUNNER_NEXT] = at.LOOSE

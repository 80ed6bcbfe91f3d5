"""Steps 2 and 3 of an instant: grant free SMs, then start units (docs/program.md sections 3.3, 3.4)."""

from __future__ import annotations

from overlapsim.engine import kernel_layout as at
from overlapsim.engine.kernel_settle import give_slot, touch
from overlapsim.jit import borrowing, inlined
from overlapsim.schedule.program import Int


@borrowing
def _sort(values: Int, size: int) -> None:
    """Shell sort: lists are short or nearly sorted, and seldom long and shuffled."""
    gap = 1
    while gap < size // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for j in range(gap, size):
            value = values[j]
            k = j - gap
            while k >= 0 and values[k] > value:
                values[k + gap] = values[k]
                k -= gap
            values[k + gap] = value
        gap //= 3


@borrowing
def _take_slot(cohort: Int, var: Int) -> int:
    slot = var[at.FREE_SLOT]
    if slot == at.NEVER:
        slot = var[at.SLOTS_USED]
        var[at.SLOTS_USED] = slot + 1
    else:
        var[at.FREE_SLOT] = cohort[slot, at.NEXT]
    return int(slot)


@borrowing
def _append_cohort(runner: Int, cohort: Int, var: Int, k: int, size: int) -> int:
    slot = _take_slot(cohort, var)
    cohort[slot, at.NEXT] = at.NEVER
    cohort[slot, at.SIZE] = size
    if runner[k, at.HEAD] == at.NEVER:
        runner[k, at.HEAD] = slot
    else:
        cohort[runner[k, at.TAIL], at.NEXT] = slot
    runner[k, at.TAIL] = slot
    return slot


@borrowing
def _begin_now(cohort: Int, var: Int, slot: int) -> None:
    cohort[slot, at.BEGAN] = var[at.NOW]
    cohort[slot, at.SINCE] = at.NEVER  # its speed, and so its end, come in step 4
    cohort[slot, at.DONE_AT] = var[at.NOW]


@inlined
def _grant_task(task: Int, runner: Int, cohort: Int, var: Int, i: int, free: int) -> int:
    """Give task `i` what it can take of `free` SMs; return how many, or NEVER if it closes the pool."""
    if task[i, at.CTAS] == 0:
        got = task[i, at.SM]
        if free < got:
            return at.NEVER
        runner[task[i, at.RUNNER], at.RESIDENTS] += 1
    else:
        want = task[i, at.CTAS] - task[i, at.PLACED]
        got = min(free, task[i, at.SM] - task[i, at.HELD], want)
        if got < want:
            got -= got % task[i, at.QUANTUM]
        if got == 0:
            return 0
        if runner[task[i, at.RUNNER], at.WORKERS] > 0:
            slot = _append_cohort(runner, cohort, var, task[i, at.RUNNER], got)
            cohort[slot, at.WORKER] = task[i, at.PLACED]
            cohort[slot, at.ROUND] = 0
            cohort[slot, at.DONE_AT] = at.NEVER
        task[i, at.PLACED] += got
    task[i, at.HELD] += got
    if task[i, at.RESIDENT] == at.NEVER:
        task[i, at.RESIDENT] = var[at.NOW]
    touch(runner, var, task[i, at.RUNNER])
    return int(got)


@inlined
def _grant_pool(task: Int, runner: Int, pool: Int, line: Int, cohort: Int, var: Int, p: int) -> None:
    free = pool[p, at.FREE]
    for n in range(pool[p, at.FIRST_LINE], pool[p, at.LAST_LINE]):
        before = at.NEVER
        i = line[n, at.FIRST]
        while i != at.NEVER and free > 0:
            after = task[i, at.TASK_NEXT]
            got = _grant_task(task, runner, cohort, var, i, free)
            if got == at.NEVER:
                # Nobody behind may take SMs now, or a large FLOW would starve.
                pool[p, at.FREE] = free
                return
            free -= got
            if task[i, at.PLACED] < task[i, at.CTAS]:
                before = i
            else:
                if before == at.NEVER:
                    line[n, at.FIRST] = after
                else:
                    task[before, at.TASK_NEXT] = after
                if after == at.NEVER:
                    line[n, at.LAST] = before
            i = after
        if free == 0:
            break
    pool[p, at.FREE] = free


@inlined
def grant(task: Int, runner: Int, pool: Int, line: Int, cohort: Int, fresh: Int, var: Int) -> None:
    """Line the `fresh` contenders up and grant the SMs of every stirred pool."""
    if var[at.NUM_FRESH] > 1:
        _sort(fresh, var[at.NUM_FRESH])
    for j in range(var[at.NUM_FRESH]):
        i = fresh[j]
        n = task[i, at.LINE]
        task[i, at.TASK_NEXT] = at.NEVER
        if line[n, at.FIRST] == at.NEVER:
            line[n, at.FIRST] = i
        else:
            task[line[n, at.LAST], at.TASK_NEXT] = i
        line[n, at.LAST] = i
    var[at.NUM_FRESH] = 0
    while var[at.STIRRED] != at.NEVER:
        p = var[at.STIRRED]
        var[at.STIRRED] = pool[p, at.POOL_NEXT]
        pool[p, at.POOL_NEXT] = at.LOOSE
        _grant_pool(task, runner, pool, line, cohort, var, p)


@borrowing
def _merge_crews(runner: Int, cohort: Int, var: Int, k: int, slot: int) -> None:
    """Let spinning neighbours in the same round go on as one crew."""
    after = cohort[slot, at.NEXT]
    while (
        after != at.NEVER
        and cohort[after, at.DONE_AT] == at.NEVER
        and cohort[after, at.ROUND] == cohort[slot, at.ROUND]
        and cohort[after, at.WORKER] == cohort[slot, at.WORKER] + cohort[slot, at.SIZE]
    ):
        cohort[slot, at.SIZE] += cohort[after, at.SIZE]
        cohort[slot, at.NEXT] = cohort[after, at.NEXT]
        if runner[k, at.TAIL] == after:
            runner[k, at.TAIL] = slot
        give_slot(cohort, var, after)
        after = cohort[slot, at.NEXT]


@borrowing
def _split_crew(runner: Int, cohort: Int, var: Int, k: int, slot: int, ready: int) -> None:
    """Leave the workers after the first `ready` of a crew behind, spinning."""
    rest = _take_slot(cohort, var)
    cohort[rest, at.NEXT] = cohort[slot, at.NEXT]
    cohort[rest, at.SIZE] = cohort[slot, at.SIZE] - ready
    cohort[rest, at.WORKER] = cohort[slot, at.WORKER] + ready
    cohort[rest, at.ROUND] = cohort[slot, at.ROUND]
    cohort[rest, at.DONE_AT] = at.NEVER
    cohort[slot, at.NEXT] = rest
    cohort[slot, at.SIZE] = ready
    if runner[k, at.TAIL] == slot:
        runner[k, at.TAIL] = rest


@borrowing
def _start_workers(task: Int, runner: Int, cohort: Int, var: Int, k: int) -> int:
    """Start the spinning crews of a persistent kernel whose gates are open; return how many CTAs started."""
    open_to = task[runner[k, at.LEAD], at.OPEN_TO]
    total = 0
    slot = runner[k, at.HEAD]
    while slot != at.NEVER:
        if cohort[slot, at.DONE_AT] == at.NEVER:
            _merge_crews(runner, cohort, var, k, slot)
            ready = open_to - (cohort[slot, at.WORKER] + cohort[slot, at.ROUND] * runner[k, at.WORKERS])
            if ready > 0:
                if ready < cohort[slot, at.SIZE]:
                    _split_crew(runner, cohort, var, k, slot, ready)
                _begin_now(cohort, var, slot)
                total += cohort[slot, at.SIZE]
        slot = cohort[slot, at.NEXT]
    return int(total)


@inlined
def _start_flow(task: Int, runner: Int, cohort: Int, var: Int, k: int) -> None:
    unit = runner[k, at.STARTED]
    if runner[k, at.RUNNING] > 0 or runner[k, at.RESIDENTS] < runner[k, at.MEMBERS]:
        return
    i = runner[k, at.LEAD]
    while i != at.NEVER:
        if task[i, at.OPEN_TO] <= unit:
            return  # a closed gate, or all units done
        i = task[i, at.MEMBER_NEXT]
    runner[k, at.RUNNING] = 1
    runner[k, at.STARTED] = unit + 1
    slot = _append_cohort(runner, cohort, var, k, runner[k, at.RUNNING])
    _begin_now(cohort, var, slot)
    if unit == 0:
        i = runner[k, at.LEAD]
        while i != at.NEVER:
            task[i, at.START] = var[at.NOW]
            i = task[i, at.MEMBER_NEXT]


@inlined
def _start_blocks(task: Int, runner: Int, cohort: Int, var: Int, k: int) -> None:
    i = runner[k, at.LEAD]
    if runner[k, at.WORKERS] > 0:
        size = _start_workers(task, runner, cohort, var, k)
    else:
        size = min(task[i, at.PLACED], task[i, at.OPEN_TO]) - runner[k, at.STARTED]
        if size > 0:
            runner[k, at.STARTED] += size
            _begin_now(cohort, var, _append_cohort(runner, cohort, var, k, size))
    if size > 0:
        runner[k, at.RUNNING] += size
        if task[i, at.START] == at.NEVER:
            task[i, at.START] = var[at.NOW]


@inlined
def start(task: Int, runner: Int, cohort: Int, var: Int) -> None:
    """Start every unit that may, of the touched runners; their cohorts wait for a speed (SINCE is NEVER)."""
    k = var[at.TOUCHED]
    while k != at.NEVER:
        if runner[k, at.MEMBERS] > 0:
            _start_flow(task, runner, cohort, var, k)
        else:
            _start_blocks(task, runner, cohort, var, k)
        k = runner[k, at.RUNNER_NEXT]

"""Step 1 of an instant: finish all that ends now and open what that opens (docs/program.md sections 3.1, 3.2)."""

from __future__ import annotations

from overlapsim.engine import kernel_layout as at
from overlapsim.engine.kernel_heap import pop, schedule
from overlapsim.jit import borrowing, inlined
from overlapsim.schedule.program import Int


@borrowing
def touch(runner: Int, var: Int, k: int) -> None:
    """Have runner `k` looked at in steps 3 and 4."""
    if runner[k, at.RUNNER_NEXT] == at.LOOSE:
        runner[k, at.RUNNER_NEXT] = var[at.TOUCHED]
        var[at.TOUCHED] = k


@borrowing
def stir(pool: Int, var: Int, p: int) -> None:
    """Have the SMs of pool `p` granted in step 2."""
    if pool[p, at.POOL_NEXT] == at.LOOSE:
        pool[p, at.POOL_NEXT] = var[at.STIRRED]
        var[at.STIRRED] = p


@borrowing
def give_slot(cohort: Int, var: Int, slot: int) -> None:
    """Give a row of the cohort table back."""
    cohort[slot, at.NEXT] = var[at.FREE_SLOT]
    var[at.FREE_SLOT] = slot


@borrowing
def _record(cohort_rows: Int, var: Int, i: int, began: int, size: int) -> None:
    row = var[at.COHORT_ROWS]
    var[at.COHORT_ROWS] = row + 1
    # Rows beyond the buffer are counted only: the caller runs again with one that is large enough.
    if row < cohort_rows.shape[0]:
        cohort_rows[row, 0] = i
        cohort_rows[row, 1] = began
        cohort_rows[row, 2] = var[at.NOW]
        cohort_rows[row, 3] = size


@borrowing
def _unblock(task: Int, var: Int, i: int) -> None:
    task[i, at.BLOCKERS] -= 1
    if task[i, at.BLOCKERS] == 0:
        task[i, at.TASK_NEXT] = var[at.TODO]
        var[at.TODO] = i


@borrowing
def _open_edge(task: Int, runner: Int, edge: Int, gate: Int, var: Int, e: int) -> None:
    i = edge[e, at.DST]
    g = edge[e, at.DST_GATE]
    if g == at.NEVER:
        _unblock(task, var, i)
        return
    gate[g, at.OPEN] = 1
    first = task[i, at.GATE]
    if g == first:
        end = task[i, at.GATE_END]
        while first < end and gate[first, at.OPEN] == 1:
            first += 1
        task[i, at.GATE] = first
        task[i, at.OPEN_TO] = gate[first, at.UNIT] if first < end else task[i, at.UNITS]
        touch(runner, var, task[i, at.RUNNER])


@inlined
def _progress(task: Int, runner: Int, edge: Int, gate: Int, heap: Int, var: Int, i: int, done: int) -> None:
    """Open what the first `done` units of task `i` open; end it after the last."""
    task[i, at.PROGRESS] = done
    e = task[i, at.OUT]
    end = task[i, at.OUT_END]
    while e < end and edge[e, at.SRC_UNITS] <= done:
        if edge[e, at.LAG] > 0:
            schedule(heap, var, var[at.EDGE_EVENT] + e, var[at.NOW] + edge[e, at.LAG])
        else:
            _open_edge(task, runner, edge, gate, var, e)
        e += 1
    task[i, at.OUT] = e
    if done == task[i, at.UNITS]:
        task[i, at.END] = var[at.NOW]
        if task[i, at.STREAM_NEXT] != at.NEVER:
            _unblock(task, var, task[i, at.STREAM_NEXT])


@borrowing
def lane_on(task: Int, lane: Int, heap: Int, var: Int, row: int) -> None:
    """Let host lane `row` issue tasks until one takes it some time."""
    i = lane[row]
    while i != at.NEVER:
        if task[i, at.RUNNER] != at.NEVER and task[i, at.HOST_TIME] > 0:
            schedule(heap, var, var[at.LANE_EVENT] + row, var[at.NOW] + task[i, at.HOST_TIME])
            break
        task[i, at.ISSUED] = var[at.NOW]
        _unblock(task, var, i)
        if task[i, at.RUNNER] == at.NEVER:
            break
        i = task[i, at.LANE_NEXT]
    lane[row] = i


@inlined
def _finish_flow(
    task: Int, runner: Int, edge: Int, gate: Int, pool: Int, cohort: Int, heap: Int, var: Int, cohort_rows: Int,
    k: int,
) -> None:  # fmt: skip
    slot = runner[k, at.HEAD]
    runner[k, at.HEAD] = at.NEVER
    runner[k, at.RUNNING] = 0
    done = runner[k, at.STARTED]
    i = runner[k, at.LEAD]
    while i != at.NEVER:
        _record(cohort_rows, var, i, cohort[slot, at.BEGAN], cohort[slot, at.SIZE])
        _progress(task, runner, edge, gate, heap, var, i, done)
        if done == task[i, at.UNITS] and task[i, at.HELD] > 0:
            pool[task[i, at.POOL], at.FREE] += task[i, at.HELD]
            task[i, at.HELD] = 0
            stir(pool, var, task[i, at.POOL])
        i = task[i, at.MEMBER_NEXT]
    give_slot(cohort, var, slot)


@borrowing
def _retire_workers(task: Int, runner: Int, cohort: Int, var: Int, cohort_rows: Int, k: int) -> int:
    """Move the crews that end now to their next round; return how many CTAs are done for good."""
    i = runner[k, at.LEAD]
    units = task[i, at.UNITS]
    workers = runner[k, at.WORKERS]
    retired = 0
    before = at.NEVER
    slot = runner[k, at.HEAD]
    while slot != at.NEVER:
        after = cohort[slot, at.NEXT]
        if cohort[slot, at.DONE_AT] == var[at.NOW]:
            size = cohort[slot, at.SIZE]
            _record(cohort_rows, var, i, cohort[slot, at.BEGAN], size)
            runner[k, at.RUNNING] -= size
            cohort[slot, at.ROUND] += 1
            cohort[slot, at.DONE_AT] = at.NEVER
            # In the last round only the workers in front still have a unit.
            left = min(size, max(0, units - (cohort[slot, at.WORKER] + cohort[slot, at.ROUND] * workers)))
            retired += size - left
            cohort[slot, at.SIZE] = left
            if left == 0:
                if before == at.NEVER:
                    runner[k, at.HEAD] = after
                else:
                    cohort[before, at.NEXT] = after
                if after == at.NEVER:
                    runner[k, at.TAIL] = before
                give_slot(cohort, var, slot)
                slot = after
                continue
        before = slot
        slot = after
    return retired


@borrowing
def _finished_prefix(task: Int, runner: Int, cohort: Int, k: int) -> int:
    """Progress of a persistent kernel: its first unit that some worker has not finished."""
    i = runner[k, at.LEAD]
    workers = runner[k, at.WORKERS]
    first = task[i, at.PLACED] if task[i, at.PLACED] < task[i, at.CTAS] else task[i, at.UNITS]
    slot = runner[k, at.HEAD]
    while slot != at.NEVER:
        first = min(first, cohort[slot, at.WORKER] + cohort[slot, at.ROUND] * workers)
        slot = cohort[slot, at.NEXT]
    return int(first)


@inlined
def _finish_blocks(
    task: Int, runner: Int, edge: Int, gate: Int, pool: Int, cohort: Int, heap: Int, var: Int, cohort_rows: Int,
    k: int,
) -> None:  # fmt: skip
    i = runner[k, at.LEAD]
    retired = 0
    if runner[k, at.WORKERS] > 0:
        retired = _retire_workers(task, runner, cohort, var, cohort_rows, k)
        done = _finished_prefix(task, runner, cohort, k)
    else:
        slot = runner[k, at.HEAD]
        while slot != at.NEVER and cohort[slot, at.DONE_AT] == var[at.NOW]:
            size = cohort[slot, at.SIZE]
            _record(cohort_rows, var, i, cohort[slot, at.BEGAN], size)
            retired += size
            after = cohort[slot, at.NEXT]
            give_slot(cohort, var, slot)
            slot = after
        runner[k, at.HEAD] = slot
        runner[k, at.RUNNING] -= retired
        done = task[i, at.PROGRESS] + retired
    if retired > 0:
        task[i, at.HELD] -= retired
        pool[task[i, at.POOL], at.FREE] += retired
        stir(pool, var, task[i, at.POOL])
    if done > task[i, at.PROGRESS]:
        _progress(task, runner, edge, gate, heap, var, i, done)


@inlined
def _make_eligible(task: Int, runner: Int, pool: Int, heap: Int, fresh: Int, var: Int, i: int) -> None:
    task[i, at.ELIGIBLE] = var[at.NOW]
    k = task[i, at.RUNNER]
    if k == at.NEVER:
        task[i, at.RESIDENT] = var[at.NOW]
        task[i, at.START] = var[at.NOW]
        schedule(heap, var, var[at.LANE_EVENT] + task[i, at.POOL], var[at.NOW] + task[i, at.HOST_TIME])
        return
    if task[i, at.QUEUE_NEXT] != at.NEVER:
        _unblock(task, var, task[i, at.QUEUE_NEXT])
    if task[i, at.LINE] == at.NEVER:
        task[i, at.RESIDENT] = var[at.NOW]
        runner[k, at.RESIDENTS] += 1
        touch(runner, var, k)
    else:
        fresh[var[at.NUM_FRESH]] = i
        var[at.NUM_FRESH] += 1
        stir(pool, var, task[i, at.POOL])


@inlined
def _finish_lane(
    task: Int, runner: Int, edge: Int, gate: Int, lane: Int, heap: Int, var: Int, cohort_rows: Int, row: int
) -> None:
    """End the launch or the HOST task that keeps lane `row` busy, and let the lane go on."""
    i = lane[row]
    lane[row] = task[i, at.LANE_NEXT]
    if task[i, at.RUNNER] == at.NEVER:
        _record(cohort_rows, var, i, task[i, at.START], task[i, at.UNITS])
        _progress(task, runner, edge, gate, heap, var, i, task[i, at.UNITS])
    else:
        task[i, at.ISSUED] = var[at.NOW]
        _unblock(task, var, i)
    lane_on(task, lane, heap, var, row)


@inlined
def settle(
    task: Int, runner: Int, edge: Int, gate: Int, pool: Int, lane: Int, cohort: Int, heap: Int,
    fresh: Int, var: Int, cohort_rows: Int,
) -> None:  # fmt: skip
    """Finish all that ends now until nothing changes; tasks that come to want SMs are listed in `fresh`."""
    while True:
        while var[at.TODO] != at.NEVER:
            i = var[at.TODO]
            var[at.TODO] = task[i, at.TASK_NEXT]
            _make_eligible(task, runner, pool, heap, fresh, var, i)
        if var[at.HEAP_SIZE] == 0 or heap[0, at.AT] != var[at.NOW]:
            break
        event = pop(heap, var)
        if event >= var[at.EDGE_EVENT]:
            _open_edge(task, runner, edge, gate, var, event - var[at.EDGE_EVENT])
        elif event >= var[at.LANE_EVENT]:
            row = event - var[at.LANE_EVENT]
            _finish_lane(task, runner, edge, gate, lane, heap, var, cohort_rows, row)
        else:
            touch(runner, var, event)
            if runner[event, at.MEMBERS] > 0:
                _finish_flow(task, runner, edge, gate, pool, cohort, heap, var, cohort_rows, event)
            else:
                _finish_blocks(task, runner, edge, gate, pool, cohort, heap, var, cohort_rows, event)

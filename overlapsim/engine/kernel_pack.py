"""A Program as the tables of the compiled engine: one compiled pass, once per Program or once per structure."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from overlapsim.engine import kernel_layout as at
from overlapsim.engine.kernel_order import dense, grouped, grouped_and_sorted
from overlapsim.jit import borrowing, compiled
from overlapsim.schedule.program import BLOCKS, FLOW, HOST, Float, Int, Program, validate_program


class Packed(NamedTuple):
    """Tables of :mod:`overlapsim.engine.kernel_layout` in their state before t = 0; a run copies what it changes.

    Attributes
    ----------
    task, runner, edge, gate, pool, line : int64 matrices
    lane : first task of each host lane
    rate, demand, resource : float64 matrices
    ask : int64 matrix, one row per row of `demand`
    num_slots : most cohorts at one time
    shares : whether any speed can differ from 1
    """

    task: Int
    runner: Int
    edge: Int
    gate: Int
    pool: Int
    line: Int
    lane: Int
    rate: Float
    ask: Int
    demand: Float
    resource: Float
    num_slots: int
    shares: bool


_CACHE_KEY: Final = "_compiled_engine_tables"


def packed(program: Program) -> Packed:
    """Tables of `program`, computed once and kept with it, as its cached properties are."""
    kept = vars(program).get(_CACHE_KEY)
    if isinstance(kept, Packed):
        return kept
    if not program.is_validated:
        validate_program(program)  # compiled code does not look where an index points
    structure = program.structure
    tables = pack(program) if structure is program else repriced(packed(structure), program)
    vars(program)[_CACHE_KEY] = tables
    return tables


def pack(program: Program) -> Packed:
    """Compute the tables of `program`."""
    p = program
    return Packed(
        *_pack(
            p.kind, p.host, p.launch_ps, p.stream, p.pool, p.units, p.unit_ps, p.sm, p.sm_quantum, p.persistent,
            p.group, p.weight, p.demand_ptr, p.demand_resource, p.demand_amount, p.edge_src, p.edge_src_units,
            p.edge_dst, p.edge_dst_unit, p.edge_lag_ps, p.pool_num_sms, p.pool_derate, p.resource_capacity,
            p.stream_priority, p.stream_queue,
        )
    )  # fmt: skip


def repriced(tables: Packed, program: Program) -> Packed:
    """`tables` of a program of the same structure with the times and amounts of `program`; the rest is shared."""
    p = program
    task, runner, demand = _repriced(
        tables.task, tables.runner, tables.ask, tables.demand, p.unit_ps, p.demand_ptr, p.demand_resource,
        p.demand_amount, p.resource_capacity,
    )  # fmt: skip
    return tables._replace(task=task, runner=runner, demand=demand)


@compiled
def _pack(
    kind: Int, host: Int, launch_ps: Int, stream: Int, pool_of: Int, units: Int, unit_ps: Int, sm: Int,
    sm_quantum: Int, persistent: npt.NDArray[np.bool_], group: Int, weight: Float, demand_ptr: Int,
    demand_resource: Int, demand_amount: Float, edge_src: Int, edge_src_units: Int, edge_dst: Int,
    edge_dst_unit: Int, edge_lag_ps: Int, pool_num_sms: Int, pool_derate: Float, resource_capacity: Float,
    stream_priority: Int, stream_queue: Int,
) -> tuple[Int, Int, Int, Int, Int, Int, Int, Float, Int, Float, Float, int, bool]:  # fmt: skip
    """Return the fields of Packed."""
    task = np.zeros((len(kind), at.TASK_COLUMNS), np.int64)
    _enter_tasks(task, kind, launch_ps, units, sm, sm_quantum, persistent)
    lane = _chain_lanes(task, kind, host, pool_of)
    _chain_streams(task, stream, stream_queue)
    edge, gate = _edges(task, edge_src, edge_src_units, edge_dst, edge_dst_unit, edge_lag_ps)
    line, pool = _lines(task, kind, stream, pool_of, sm, pool_num_sms, stream_priority)
    num_runners = _number_runners(task, kind, group)
    runner = np.zeros((num_runners, at.RUNNER_COLUMNS), np.int64)
    rate = np.ones((num_runners, at.RATE_COLUMNS))
    _enter_runners(task, runner, rate, kind, pool_of, units, sm, persistent, weight, pool_derate)
    ask = _asks(task, runner, demand_ptr, demand_resource, resource_capacity)
    demand = np.zeros((len(ask), at.DEMAND_COLUMNS))
    resource = np.zeros((len(resource_capacity), at.RESOURCE_COLUMNS))
    for r in range(len(resource)):
        resource[r, at.CAPACITY] = resource_capacity[r]
    shares = False
    most_ctas = num_groups = num_sms = 0
    for k in range(num_runners):
        if runner[k, at.ASK] < runner[k, at.ASK_END] or rate[k, at.DERATE] < 1.0:
            runner[k, at.SHARES] = 1
        shares = shares or runner[k, at.SHARES] == 1
        i = runner[k, at.LEAD]
        if runner[k, at.MEMBERS] > 0:
            num_groups += 1
        else:
            most_ctas += min(units[i], sm[i])
    for p in range(len(pool_num_sms)):
        num_sms += pool_num_sms[p]
    _price(task, runner, ask, demand, unit_ps, demand_ptr, demand_resource, demand_amount, resource_capacity)
    num_slots = min(most_ctas, num_sms) + num_groups
    return task, runner, edge, gate, pool, line, lane, rate, ask, demand, resource, num_slots, shares


@compiled
def _repriced(
    task_before: Int, runner_before: Int, ask: Int, demand_before: Float, unit_ps: Int, demand_ptr: Int,
    demand_resource: Int, demand_amount: Float, resource_capacity: Float,
) -> tuple[Int, Int, Float]:  # fmt: skip
    task, runner, demand = task_before.copy(), runner_before.copy(), np.zeros_like(demand_before)
    _price(task, runner, ask, demand, unit_ps, demand_ptr, demand_resource, demand_amount, resource_capacity)
    return task, runner, demand


@borrowing
def _price(
    task: Int, runner: Int, ask: Int, demand: Float, unit_ps: Int, demand_ptr: Int, demand_resource: Int,
    demand_amount: Float, resource_capacity: Float,
) -> None:  # fmt: skip
    """Enter what durations and amounts decide: times, and full[k, r] of docs/program.md section 3.5."""
    for k in range(len(runner)):
        runner[k, at.UNIT_TIME] = 0
    for i in range(len(task)):
        k = task[i, at.RUNNER]
        if k == at.NEVER:
            task[i, at.HOST_TIME] = unit_ps[i]
        else:
            runner[k, at.UNIT_TIME] = max(runner[k, at.UNIT_TIME], unit_ps[i])
    # Members of a group come by rising index: the order of the sums is the contract's.
    for i in range(len(task)):
        k = task[i, at.RUNNER]
        for j in range(demand_ptr[i], demand_ptr[i + 1]):
            r = demand_resource[j]
            if resource_capacity[r] < np.inf:
                low, high = runner[k, at.ASK], runner[k, at.ASK_END] - 1
                while low < high:
                    middle = (low + high) // 2
                    if ask[middle, at.RESOURCE] < r:
                        low = middle + 1
                    else:
                        high = middle
                demand[low, at.FULL] += demand_amount[j] * 1e12 / float(runner[k, at.UNIT_TIME])


@borrowing
def _enter_tasks(
    task: Int, kind: Int, launch_ps: Int, units: Int, sm: Int, sm_quantum: Int, persistent: npt.NDArray[np.bool_]
) -> None:
    for i in range(len(task)):
        task[i, at.HOST_TIME] = launch_ps[i]
        task[i, at.SM] = sm[i]
        task[i, at.QUANTUM] = sm_quantum[i]
        task[i, at.UNITS] = units[i]
        if kind[i] == BLOCKS:
            task[i, at.CTAS] = min(sm[i], units[i]) if persistent[i] else units[i]
        for column in (at.LANE_NEXT, at.STREAM_NEXT, at.QUEUE_NEXT, at.MEMBER_NEXT, at.TASK_NEXT, at.LINE, at.RUNNER):
            task[i, column] = at.NEVER
        for instant in range(at.ISSUED, at.END + 1):
            task[i, instant] = at.NEVER


@compiled
def _chain_lanes(task: Int, kind: Int, host: Int, pool_of: Int) -> Int:
    """Chain the tasks of each host lane; return the first task of each."""
    lane_of, num_lanes = dense(host)
    first, last = np.full(num_lanes, at.NEVER), np.full(num_lanes, at.NEVER)
    for i in range(len(task)):
        lane = lane_of[i]
        task[i, at.POOL] = lane if kind[i] == HOST else pool_of[i]
        if last[lane] == at.NEVER:
            first[lane] = i
        else:
            task[last[lane], at.LANE_NEXT] = i
        last[lane] = i
    return first


@compiled
def _chain_streams(task: Int, stream: Int, stream_queue: Int) -> None:
    """Chain the tasks of each stream and queue; count them and the issue as what each task waits for."""
    queue_of, num_queues = dense(stream_queue)
    last_of_stream, last_of_queue = np.full(len(stream_queue), at.NEVER), np.full(num_queues, at.NEVER)
    for i in range(len(task)):
        task[i, at.BLOCKERS] = 1
        if stream[i] < 0:
            continue
        before = last_of_stream[stream[i]]
        last_of_stream[stream[i]] = i
        if before != at.NEVER:
            task[before, at.STREAM_NEXT] = i
            task[i, at.BLOCKERS] += 1
        queue = queue_of[stream[i]]
        before = last_of_queue[queue]
        last_of_queue[queue] = i
        if before != at.NEVER:
            task[before, at.QUEUE_NEXT] = i
            task[i, at.BLOCKERS] += 1


@compiled
def _edges(
    task: Int, edge_src: Int, edge_src_units: Int, edge_dst: Int, edge_dst_unit: Int, edge_lag_ps: Int
) -> tuple[Int, Int]:
    """Return edges and gates, entered into `task`: stream waits as blockers, gates as what units wait for."""
    leaving_ptr, leaving = grouped_and_sorted(edge_src, len(task), edge_src_units)
    entering_ptr, entering = grouped_and_sorted(edge_dst, len(task), edge_dst_unit)
    edge = np.empty((len(edge_src), at.EDGE_COLUMNS), np.int64)
    gate = np.zeros((len(edge_src), at.GATE_COLUMNS), np.int64)
    place = np.empty(len(edge_src), np.int64)
    for g in range(len(entering)):
        place[entering[g]] = g
        gate[g, at.UNIT] = edge_dst_unit[entering[g]]
    for row in range(len(leaving)):
        e = leaving[row]
        edge[row, at.SRC_UNITS] = edge_src_units[e]
        edge[row, at.LAG] = edge_lag_ps[e]
        edge[row, at.DST] = edge_dst[e]
        edge[row, at.DST_GATE] = place[e] if edge_dst_unit[e] >= 0 else at.NEVER
    for i in range(len(task)):
        task[i, at.OUT] = leaving_ptr[i]
        task[i, at.OUT_END] = leaving_ptr[i + 1]
        first, end = entering_ptr[i], entering_ptr[i + 1]
        while first < end and gate[first, at.UNIT] < 0:
            first += 1
            task[i, at.BLOCKERS] += 1
        task[i, at.GATE] = first
        task[i, at.GATE_END] = end
        task[i, at.OPEN_TO] = gate[first, at.UNIT] if first < end else task[i, at.UNITS]
    return edge, gate


@compiled
def _lines(
    task: Int, kind: Int, stream: Int, pool_of: Int, sm: Int, pool_num_sms: Int, stream_priority: Int
) -> tuple[Int, Int]:
    """Return empty lines of contenders, entered into `task`, and the pools with their lines."""
    rank, num_ranks = dense(stream_priority)
    task_rank = np.empty(len(task), np.int64)
    wants = np.empty(len(task), np.int64)
    num_wants = 0
    for i in range(len(task)):
        if kind[i] != HOST and sm[i] > 0:
            task_rank[i] = num_ranks - 1 - rank[stream[i]]  # the highest priority first
            wants[num_wants] = i
            num_wants += 1
    _, by_rank = grouped(task_rank, num_ranks, wants[:num_wants])
    ptr, order = grouped(pool_of, len(pool_num_sms), by_rank)
    pool = np.zeros((len(pool_num_sms), at.POOL_COLUMNS), np.int64)
    num_lines = 0
    for p in range(len(pool)):
        pool[p, at.FREE] = pool_num_sms[p]
        pool[p, at.POOL_NEXT] = at.LOOSE
        pool[p, at.FIRST_LINE] = num_lines
        for place in range(ptr[p], ptr[p + 1]):
            if place == ptr[p] or task_rank[order[place]] != task_rank[order[place - 1]]:
                num_lines += 1
            task[order[place], at.LINE] = num_lines - 1
        pool[p, at.LAST_LINE] = num_lines
    return np.full((num_lines, 2), at.NEVER), pool


@compiled
def _number_runners(task: Int, kind: Int, group: Int) -> int:
    """Chain the members of each group, number runners by lowest member, and return how many there are."""
    group_of, num_groups = dense(group)
    last = np.full(num_groups, at.NEVER)
    count = 0
    for i in range(len(task)):
        if kind[i] == HOST:
            continue
        task[i, at.RUNNER] = count
        if kind[i] == FLOW and group[i] >= 0:
            before = last[group_of[i]]
            last[group_of[i]] = i
            if before != at.NEVER:
                task[before, at.MEMBER_NEXT] = i
                task[i, at.RUNNER] = task[before, at.RUNNER]
                continue
        count += 1
    return count


@borrowing
def _enter_runners(
    task: Int, runner: Int, rate: Float, kind: Int, pool_of: Int, units: Int, sm: Int,
    persistent: npt.NDArray[np.bool_], weight: Float, pool_derate: Float,
) -> None:  # fmt: skip
    count = 0
    for i in range(len(task)):
        k = task[i, at.RUNNER]
        if k == at.NEVER:
            continue
        if k == count:  # the lowest member comes first
            count += 1
            runner[k, at.LEAD] = i
            runner[k, at.WORKERS] = min(sm[i], units[i]) if persistent[i] else 0
            runner[k, at.HEAD] = at.NEVER
            runner[k, at.TAIL] = at.NEVER
            runner[k, at.RUNNER_NEXT] = at.LOOSE
            rate[k, at.WEIGHT] = weight[i]
            rate[k, at.DERATE] = pool_derate[pool_of[i]] if kind[i] == BLOCKS else 1.0
        if kind[i] == FLOW:
            runner[k, at.MEMBERS] += 1
            if sm[i] > 0 and pool_derate[pool_of[i]] < 1.0:
                runner[k, at.SHARES] = 1  # its moving slows the BLOCKS of the pool


@compiled
def _asks(task: Int, runner: Int, demand_ptr: Int, demand_resource: Int, resource_capacity: Float) -> Int:
    """Return runner and resource of each demand, entered into `runner`; infinite resources are left out."""
    asker = np.empty(len(demand_resource), np.int64)
    finite = np.empty(len(demand_resource), np.int64)
    num_finite = 0
    for i in range(len(task)):
        for j in range(demand_ptr[i], demand_ptr[i + 1]):
            if resource_capacity[demand_resource[j]] < np.inf:
                asker[j] = task[i, at.RUNNER]
                finite[num_finite] = j
                num_finite += 1
    _, by_resource = grouped(demand_resource, len(resource_capacity), finite[:num_finite])
    ptr, order = grouped(asker, len(runner), by_resource)
    num_rows = 0
    for k in range(len(runner)):
        runner[k, at.ASK] = num_rows
        for place in range(ptr[k], ptr[k + 1]):
            # Two members of a group that ask for one resource share a row.
            if place == ptr[k] or demand_resource[order[place]] != demand_resource[order[place - 1]]:
                order[num_rows] = order[place]
                num_rows += 1
        runner[k, at.ASK_END] = num_rows
    ask = np.full((num_rows, at.ASK_COLUMNS), at.NEVER)
    for row in range(num_rows):
        ask[row, at.RESOURCE] = demand_resource[order[row]]
        ask[row, at.ASKER] = asker[order[row]]
    return ask

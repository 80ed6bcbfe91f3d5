"""A Program as the tables of the compiled engine: numpy only, once per Program, nothing per task in Python."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from overlapsim.engine import kernel_layout as at
from overlapsim.schedule.program import BLOCKS, FLOW, HOST, Float, Incidence, Int, Program


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
    tables = pack(program)
    vars(program)[_CACHE_KEY] = tables
    return tables


def pack(program: Program) -> Packed:
    """Compute the tables of `program`."""
    lead, task_runner = _runners(program)
    line, task_line, pool = _lines(program)
    edge, gate = _edges(program)
    runner = _runner_table(program, lead)
    ask, demand = _demands(program, task_runner, runner)
    resource = np.zeros((program.num_resources, at.RESOURCE_COLUMNS))
    resource[:, at.CAPACITY] = program.resource_capacity
    rate = np.ones((len(lead), at.RATE_COLUMNS))
    rate[:, at.WEIGHT] = program.weight[lead]
    is_blocks = program.kind[lead] == BLOCKS
    if program.num_pools:
        rate[:, at.DERATE] = np.where(is_blocks, program.pool_derate[program.pool[lead]], 1.0)
    runner[:, at.SHARES] = (runner[:, at.ASK] < runner[:, at.ASK_END]) | (rate[:, at.DERATE] < 1.0)
    runner[_derating_groups(program, task_runner), at.SHARES] = 1
    blocks = program.kind == BLOCKS
    most_ctas = int(np.minimum(program.units[blocks], program.sm[blocks]).sum())
    num_groups = len(lead) - int(is_blocks.sum())
    return Packed(
        task=_task_table(program, task_runner, task_line, gate),
        runner=runner,
        edge=edge,
        gate=gate,
        pool=pool,
        line=line,
        lane=program.lane_tasks.index[program.lane_tasks.ptr[:-1]],
        rate=rate,
        ask=ask,
        demand=demand,
        resource=resource,
        num_slots=min(most_ctas, int(program.pool_num_sms.sum())) + num_groups,
        shares=bool(runner[:, at.SHARES].any()),
    )


def _runners(program: Program) -> tuple[Int, Int]:
    """Lowest member of each runner, and the runner of each task (-1 for HOST)."""
    number = np.arange(program.num_tasks)
    lead_of = np.where(program.kind == BLOCKS, number, -1)
    flow = program.kind == FLOW
    first = program.group_members.index[program.group_members.ptr[:-1]]
    lead_of[flow] = first[program.task_runner_group[flow]]
    is_lead = lead_of == number
    rank = np.cumsum(is_lead) - 1
    return np.flatnonzero(is_lead), np.where(lead_of >= 0, rank[lead_of], -1)


def _runner_table(program: Program, lead: Int) -> Int:
    table = np.zeros((len(lead), at.RUNNER_COLUMNS), np.int64)
    table[:, at.LEAD] = lead
    table[:, at.UNIT_TIME] = program.unit_ps[lead]
    members = program.group_members
    flow = np.flatnonzero(program.kind[lead] == FLOW)
    group = program.task_runner_group[lead[flow]]
    table[flow, at.MEMBERS] = members.ptr[group + 1] - members.ptr[group]
    if len(flow):
        # Groups are numbered by lowest member, as runners are, so the order is the same.
        table[flow, at.UNIT_TIME] = np.maximum.reduceat(program.unit_ps[members.index], members.ptr[:-1])
    table[:, at.WORKERS] = np.where(program.persistent[lead], np.minimum(program.sm[lead], program.units[lead]), 0)
    table[:, at.HEAD] = at.NEVER
    table[:, at.TAIL] = at.NEVER
    table[:, at.RUNNER_NEXT] = at.LOOSE
    return table


def _demands(program: Program, task_runner: Int, runner: Int) -> tuple[Int, Float]:
    """Rows of full[k, r] (docs/program.md section 3.5), entered into `runner`; infinite resources are left out."""
    owner = np.repeat(np.arange(program.num_tasks), np.diff(program.demand_ptr))
    finite = np.isfinite(program.resource_capacity[program.demand_resource])
    runner_of = task_runner[owner[finite]]
    # The order of operations is the contract's, and so is the order of members in the sums below.
    full = program.demand_amount[finite] * 1e12 / runner[runner_of, at.UNIT_TIME].astype(np.float64)
    key = runner_of * max(1, program.num_resources) + program.demand_resource[finite]
    rows, row_of = np.unique(key, return_inverse=True)
    demand = np.zeros((len(rows), at.DEMAND_COLUMNS))
    np.add.at(demand[:, at.FULL], row_of, full)
    row_runner = rows // max(1, program.num_resources)
    runner[:, at.ASK] = np.searchsorted(row_runner, np.arange(len(runner)), side="left")
    runner[:, at.ASK_END] = np.searchsorted(row_runner, np.arange(len(runner)), side="right")
    ask = np.full((len(rows), at.ASK_COLUMNS), at.NEVER)
    ask[:, at.RESOURCE] = rows % max(1, program.num_resources)
    ask[:, at.ASKER] = row_runner
    return ask, demand


def _derating_groups(program: Program, task_runner: Int) -> Int:
    """Runners whose moving slows BLOCKS of some pool."""
    holds = np.flatnonzero((program.kind == FLOW) & (program.sm > 0))
    derating = holds[program.pool_derate[program.pool[holds]] < 1.0]
    return task_runner[derating]


def _lines(program: Program) -> tuple[Int, Int, Int]:
    """Empty lines of contenders, the line of each task (-1 = none), and the pools with their lines."""
    pool = np.zeros((program.num_pools, at.POOL_COLUMNS), np.int64)
    pool[:, at.FREE] = program.pool_num_sms
    pool[:, at.POOL_NEXT] = at.LOOSE
    task_line = np.full(program.num_tasks, at.NEVER)
    wants = np.flatnonzero((program.kind != HOST) & (program.sm > 0))
    _, rank = np.unique(-program.stream_priority, return_inverse=True)
    num_ranks = len(rank) or 1
    key = program.pool[wants] * num_ranks + rank[program.stream[wants]]
    lines, task_line[wants] = np.unique(key, return_inverse=True)
    line_pool = lines // num_ranks
    pool[:, at.FIRST_LINE] = np.searchsorted(line_pool, np.arange(len(pool)), side="left")
    pool[:, at.LAST_LINE] = np.searchsorted(line_pool, np.arange(len(pool)), side="right")
    return np.full((len(lines), 2), at.NEVER), task_line, pool


def _edges(program: Program) -> tuple[Int, Int]:
    leaving, entering = program.edges_out.index, program.edges_in.index
    place = np.empty(program.num_edges, np.int64)
    place[entering] = np.arange(program.num_edges)
    edge = np.empty((program.num_edges, at.EDGE_COLUMNS), np.int64)
    edge[:, at.SRC_UNITS] = program.edge_src_units[leaving]
    edge[:, at.LAG] = program.edge_lag_ps[leaving]
    edge[:, at.DST] = program.edge_dst[leaving]
    edge[:, at.DST_GATE] = np.where(program.edge_dst_unit[leaving] >= 0, place[leaving], at.NEVER)
    gate = np.zeros((program.num_edges, at.GATE_COLUMNS), np.int64)
    gate[:, at.UNIT] = program.edge_dst_unit[entering]
    return edge, gate


def _successor(incidence: Incidence, num_tasks: int) -> tuple[Int, Int]:
    """The next task in each task's row, -1 for the last one and for tasks in no row; and whether one comes before."""
    following = np.full(num_tasks, at.NEVER)
    preceded = np.zeros(num_tasks, np.int64)
    index = incidence.index
    same_row = np.ones(max(0, len(index) - 1), np.bool_)
    inner = incidence.ptr[1:-1]
    same_row[inner[(inner > 0) & (inner < len(index))] - 1] = False
    following[index[:-1][same_row]] = index[1:][same_row]
    preceded[index[1:][same_row]] = 1
    return following, preceded


def _task_table(program: Program, task_runner: Int, task_line: Int, gate: Int) -> Int:
    n = program.num_tasks
    table = np.zeros((n, at.TASK_COLUMNS), np.int64)
    host, flow = program.kind == HOST, program.kind == FLOW
    table[:, at.LANE_NEXT], _ = _successor(program.lane_tasks, n)
    table[:, at.STREAM_NEXT], behind_stream = _successor(program.stream_tasks, n)
    table[:, at.QUEUE_NEXT], behind_queue = _successor(program.queue_tasks, n)
    table[:, at.MEMBER_NEXT], _ = _successor(program.group_members, n)
    table[:, at.HOST_TIME] = np.where(host, program.unit_ps, program.launch_ps)
    table[:, at.RUNNER] = task_runner
    table[:, at.POOL] = np.where(host, program.task_lane, program.pool)
    table[:, at.LINE] = task_line
    table[:, at.SM] = program.sm
    table[:, at.QUANTUM] = program.sm_quantum
    workers = np.minimum(program.sm, program.units)
    table[:, at.CTAS] = np.where(flow | host, 0, np.where(program.persistent, workers, program.units))
    table[:, at.UNITS] = program.units
    waits = np.bincount(program.edge_dst[program.edge_dst_unit < 0], minlength=n)
    table[:, at.BLOCKERS] = 1 + behind_stream + behind_queue + waits
    table[:, at.OUT] = program.edges_out.ptr[:-1]
    table[:, at.OUT_END] = program.edges_out.ptr[1:]
    first_gate = program.edges_in.ptr[:-1] + waits
    table[:, at.GATE] = first_gate
    table[:, at.GATE_END] = program.edges_in.ptr[1:]
    table[:, at.OPEN_TO] = program.units
    gated = np.flatnonzero(first_gate < program.edges_in.ptr[1:])
    table[gated, at.OPEN_TO] = gate[first_gate[gated], at.UNIT]
    table[:, at.TASK_NEXT] = at.NEVER
    table[:, [at.ISSUED, at.ELIGIBLE, at.RESIDENT, at.START, at.END]] = at.NEVER
    return table

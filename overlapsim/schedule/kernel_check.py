"""The rules of docs/program.md section 1 in one compiled pass that says only whether all is well.

:mod:`overlapsim.schedule.faults` holds the same rules as sentences.  What
is said to be well here is well there; a test holds the two together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from overlapsim.jit import borrowing, compiled
from overlapsim.schedule.program import BLOCKS, FLOW, HOST, MAX_END_PS, Float, Int, Program
from overlapsim.units import MAX_UNIT_PS

# The sums of `faults` are rounded in another order: what is nearer to the limit than that is left to them.
_SURELY_BEFORE_END = float(MAX_END_PS) * (1 - 1e-6)
# Numbers of queues and groups get a row each in a table; where that is too long for them, `faults` sorts them.
_ROOM = 64


def content_is_fine(program: Program) -> bool:
    """Whether all is surely well; the types of the arrays are right and their lengths agree.

    False says no more than that the careful checks have to look.
    """
    p = program
    return _content(
        p.kind, p.host, p.launch_ps, p.stream, p.pool, p.units, p.unit_ps, p.sm, p.sm_quantum, p.persistent,
        p.group, p.weight, p.demand_ptr, p.demand_resource, p.demand_amount, p.edge_src, p.edge_src_units,
        p.edge_dst, p.edge_dst_unit, p.edge_lag_ps, p.pool_num_sms, p.pool_derate, p.resource_capacity,
        p.stream_queue,
    )  # fmt: skip


def prices_are_fine(program: Program, like: Program) -> bool:
    """Whether durations and amounts break no rule, where `like` breaks none and differs in nothing else."""
    p = program
    for mine, other in ((p.unit_ps, like.unit_ps), (p.demand_amount, like.demand_amount)):
        if mine.dtype != other.dtype or mine.shape != other.shape:
            return False
    return _content_of_prices(p.kind, p.launch_ps, p.units, p.unit_ps, p.demand_amount, p.edge_lag_ps)


@compiled
def _content(
    kind: Int, host: Int, launch_ps: Int, stream: Int, pool: Int, units: Int, unit_ps: Int, sm: Int,
    sm_quantum: Int, persistent: npt.NDArray[np.bool_], group: Int, weight: Float, demand_ptr: Int,
    demand_resource: Int, demand_amount: Float, edge_src: Int, edge_src_units: Int, edge_dst: Int,
    edge_dst_unit: Int, edge_lag_ps: Int, pool_num_sms: Int, pool_derate: Float, resource_capacity: Float,
    stream_queue: Int,
) -> bool:  # fmt: skip
    return (
        _machine(pool_num_sms, pool_derate, resource_capacity)
        and _tasks(
            kind, host, launch_ps, stream, pool, units, sm, sm_quantum, persistent, group, weight, pool_num_sms,
            len(stream_queue),
        )
        and _prices(kind, launch_ps, units, unit_ps, demand_amount, edge_lag_ps)
        and _one_host_a_queue(host, stream, stream_queue)
        and _groups(stream, units, group, weight, len(stream_queue))
        and _demands(kind, demand_ptr, demand_resource, len(resource_capacity))
        and _edges(kind, units, group, edge_src, edge_src_units, edge_dst, edge_dst_unit, edge_lag_ps)
    )  # fmt: skip


@compiled
def _content_of_prices(
    kind: Int, launch_ps: Int, units: Int, unit_ps: Int, demand_amount: Float, edge_lag_ps: Int
) -> bool:
    return _prices(kind, launch_ps, units, unit_ps, demand_amount, edge_lag_ps)


@borrowing
def _machine(pool_num_sms: Int, pool_derate: Float, resource_capacity: Float) -> bool:
    for p in range(len(pool_num_sms)):
        if pool_num_sms[p] < 1 or not 0 < pool_derate[p] <= 1:
            return False
    fine = True
    for r in range(len(resource_capacity)):
        fine = fine and resource_capacity[r] > 0  # NaN is not
    return fine


@borrowing
def _tasks(
    kind: Int, host: Int, launch_ps: Int, stream: Int, pool: Int, units: Int, sm: Int, sm_quantum: Int,
    persistent: npt.NDArray[np.bool_], group: Int, weight: Float, pool_num_sms: Int, num_streams: int,
) -> bool:  # fmt: skip
    for i in range(len(kind)):
        if host[i] < 0 or not 0 <= launch_ps[i] <= MAX_UNIT_PS or units[i] < 1 or sm_quantum[i] < 1:
            return False
        if not 0 < weight[i] < np.inf:
            return False
        if kind[i] == HOST:
            if stream[i] != -1 or pool[i] != -1 or launch_ps[i] != 0 or units[i] != 1:
                return False
        elif kind[i] == BLOCKS or kind[i] == FLOW:
            if not (0 <= stream[i] < num_streams and 0 <= pool[i] < len(pool_num_sms)):
                return False
            if not (1 if kind[i] == BLOCKS else 0) <= sm[i] <= pool_num_sms[pool[i]]:
                return False
        else:
            return False
        if kind[i] == BLOCKS:
            if sm[i] % sm_quantum[i] != 0:
                return False
        elif sm_quantum[i] != 1 or persistent[i]:
            return False
        if group[i] < -1 or (group[i] != -1 and kind[i] != FLOW):
            return False
    return True


@borrowing
def _prices(kind: Int, launch_ps: Int, units: Int, unit_ps: Int, demand_amount: Float, edge_lag_ps: Int) -> bool:
    work_ps = 0.0
    for i in range(len(kind)):
        if not (0 if kind[i] == HOST else 1) <= unit_ps[i] <= MAX_UNIT_PS:
            return False
        work_ps += float(units[i]) * float(unit_ps[i]) + float(launch_ps[i])
    for e in range(len(edge_lag_ps)):
        work_ps += float(edge_lag_ps[e])
    for j in range(len(demand_amount)):
        if not 0 < demand_amount[j] < np.inf:
            return False
    return work_ps < _SURELY_BEFORE_END


@compiled
def _one_host_a_queue(host: Int, stream: Int, stream_queue: Int) -> bool:
    if len(stream_queue) == 0:
        return True
    lowest = stream_queue.min()
    span = stream_queue.max() - lowest
    if not 0 <= span < _ROOM * (len(stream_queue) + 1):  # below 0: the difference does not fit
        return False
    host_of = np.full(span + 1, -1)
    for i in range(len(host)):
        if stream[i] >= 0:
            queue = stream_queue[stream[i]] - lowest
            if host_of[queue] != -1 and host_of[queue] != host[i]:
                return False
            host_of[queue] = host[i]
    return True


@compiled
def _groups(stream: Int, units: Int, group: Int, weight: Float, num_streams: int) -> bool:
    num_groups = 0
    for i in range(len(group)):
        num_groups = max(num_groups, group[i] + 1)
    if num_groups > _ROOM * len(group):
        return False
    before = np.empty(len(group), np.int64)
    last = np.full(num_groups, -1)
    for i in range(len(group)):
        if group[i] >= 0:
            before[i] = last[group[i]]
            if before[i] != -1 and (units[i] != units[before[i]] or weight[i] != weight[before[i]]):
                return False
            last[group[i]] = i
    user = np.full(num_streams, -1)  # the last group seen to use each stream
    for g in range(num_groups):
        i = last[g]
        while i != -1:
            if user[stream[i]] == g:
                return False
            user[stream[i]] = g
            i = before[i]
    return True


@compiled
def _demands(kind: Int, demand_ptr: Int, demand_resource: Int, num_resources: int) -> bool:
    num_tasks, num_demands = len(kind), len(demand_resource)
    if len(demand_ptr) != num_tasks + 1 or demand_ptr[0] != 0 or demand_ptr[num_tasks] != num_demands:
        return False
    asked_by = np.full(num_resources, -1)  # the last task seen to name each resource
    for i in range(num_tasks):
        first, end = demand_ptr[i], demand_ptr[i + 1]
        if not first <= end <= num_demands or (first < end and kind[i] == HOST):
            return False
        for j in range(first, end):
            r = demand_resource[j]
            if not 0 <= r < num_resources or asked_by[r] == i:
                return False
            asked_by[r] = i
    return True


@borrowing
def _edges(
    kind: Int, units: Int, group: Int, edge_src: Int, edge_src_units: Int, edge_dst: Int, edge_dst_unit: Int,
    edge_lag_ps: Int,
) -> bool:  # fmt: skip
    for e in range(len(edge_src)):
        src, dst = edge_src[e], edge_dst[e]
        if not (0 <= src < len(kind) and 0 <= dst < len(kind)):
            return False
        if not (1 <= edge_src_units[e] <= units[src] and -1 <= edge_dst_unit[e] < units[dst]):
            return False
        if not 0 <= edge_lag_ps[e] <= MAX_UNIT_PS:
            return False
        if edge_dst_unit[e] == -1:
            if src >= dst:
                return False
        else:
            alone = src == dst and kind[dst] == FLOW
            within = group[src] >= 0 and group[src] == group[dst]
            if alone or within or kind[dst] == HOST:
                return False
    return True

"""What a program contains and what happened when it ran, as words: random tests count them to show their reach."""

from __future__ import annotations

import numpy as np

from overlapsim.engine.timeline import Timeline
from overlapsim.schedule.program import BLOCKS, FLOW, HOST, Program


def features(program: Program) -> frozenset[str]:
    """Name the parts of the engine contract (``docs/program.md`` section 1) that `program` uses.

    Examples
    --------
    >>> from overlapsim.schedule.builder import ProgramBuilder
    >>> b = ProgramBuilder()
    >>> task = b.add_blocks(stream=b.add_stream(), pool=b.add_pool(4), units=4, unit_ps=100, sm=4, persistent=True)
    >>> sorted(features(b.freeze()))
    ['persistent kernel', 'uncontended machine']
    """
    p = program
    blocks, flow, host = p.kind == BLOCKS, p.kind == FLOW, p.kind == HOST
    _, group_size = np.unique(p.group[p.group >= 0], return_counts=True)
    finite = np.isfinite(p.resource_capacity)
    demanded = finite[p.demand_resource]
    wait = p.edge_dst_unit < 0
    partial = p.edge_src_units < p.units[p.edge_src]
    signal = wait & partial & blocks[p.edge_src] & flow[p.edge_dst]
    queued = np.flatnonzero(~host)
    used_streams = np.unique(p.stream[queued])
    used_pools = p.pool[queued]
    times = np.concatenate([p.unit_ps[queued], p.launch_ps[p.launch_ps > 0], p.edge_lag_ps[p.edge_lag_ps > 0]])
    found = {
        "uncontended machine": not demanded.any() and not np.any(p.pool_derate < 1),
        "finite capacity": demanded.any(),
        "infinite capacity": np.any(~demanded),
        "several finite resources": len(np.unique(p.demand_resource[demanded])) > 1,
        "like resources": _like_resources(p),
        "derate": np.any(p.pool_derate[p.pool[blocks]] < 1),
        "weight": np.any(p.weight != 1),
        "wave-group signal": signal.any(),
        "wave-group signal with lag": np.any(signal & (p.edge_lag_ps > 0)),
        "wait with lag": np.any(wait & (p.edge_lag_ps > 0)),
        "unit gate": np.any(~wait),
        "unit gate with lag": np.any(~wait & (p.edge_lag_ps > 0)),
        "gate into group": np.any(~wait & (p.group[p.edge_dst] >= 0)),
        "backward gate": np.any(p.edge_src > p.edge_dst),
        "gate on itself": np.any(p.edge_src == p.edge_dst),
        "group": np.any(group_size > 1),
        "folded group": np.any(group_size == 1),
        "group over several pools": _any_group_spans(p, p.pool),
        "group with unequal times": _any_group_spans(p, p.unit_ps),
        "shared queue": len(np.unique(p.stream_queue[used_streams])) < len(used_streams),
        "several host lanes": len(np.unique(p.host)) > 1,
        "host task": host.any(),
        "host task of 0 ps": np.any(host & (p.unit_ps == 0)),
        "persistent kernel": p.persistent.any(),
        "persistent kernel of several rounds": np.any(p.persistent & (p.units > p.sm) & (p.sm > 1)),
        "sm_quantum": np.any(p.sm_quantum > 1),
        "persistent kernel with sm_quantum": np.any(p.persistent & (p.sm_quantum > 1)),
        "copy engine": np.any(flow & (p.sm == 1) & (p.pool_num_sms[p.pool] == 1)) and len(p.pool_num_sms) > 1,
        "flow without SMs": np.any(flow & (p.sm == 0)),
        "priorities": len(np.unique(p.stream_priority[used_streams])) > 1,
        "launch time": np.any(p.launch_ps > 0),
        "equal times": len(np.unique(times)) < len(times),
        "several pools": len(np.unique(used_pools)) > 1,
        "over 40 tasks": p.num_tasks > 40,
        "over 100 units": np.any(p.units > 100),
    }
    return frozenset(name for name, present in found.items() if present)


def happenings(timeline: Timeline) -> frozenset[str]:
    """Name what happened in a run, read from its instants and, where recorded, its cohorts and speeds.

    Without ``record=True`` the words that need cohorts or speeds are
    absent: late persistent worker, slowed, several speeds at one instant.
    """
    p, t = timeline.program, timeline
    blocks, flow, host = p.kind == BLOCKS, p.kind == FLOW, p.kind == HOST
    waited = (t.t_resident > t.t_eligible) & (t.t_eligible >= 0)
    resident = t.t_resident >= 0
    spun = resident & ((t.t_start > t.t_resident) | (t.t_start < 0))
    ends = t.t_end[t.t_end >= 0]
    found = {
        "deadlock": not t.complete,
        "flow waited for SMs": np.any(waited & flow),
        "blocks waited for SMs": np.any(waited & blocks),
        "spinning at a gate": np.any(spun & blocks),
        "group member waited for others": np.any(spun & flow & (p.group >= 0)),
        "issued before eligible": np.any((t.t_eligible > t.t_issued) & (t.t_issued >= 0) & ~host),
        "host task waited": np.any(host & (t.t_eligible > t.t_issued) & (t.t_issued >= 0)),
        "equal ends": len(np.unique(ends)) < len(ends),
        "late persistent worker": _late_persistent_worker(t),
    }
    if t.speeds is not None:
        slow = t.speeds.speed < 1
        at_once = t.speeds.time_ps[1:] == t.speeds.time_ps[:-1]
        found["slowed"] = slow.any()
        found["several speeds at one instant"] = np.any(
            at_once & (t.speeds.speed[1:] != t.speeds.speed[:-1]) & slow[1:] & slow[:-1]
        )
    return frozenset(name for name, present in found.items() if present)


def _any_group_spans(p: Program, value: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bool:
    """True if members of some group differ in `value`."""
    pairs = np.unique(np.column_stack([p.group, value])[p.group >= 0], axis=0)
    return len(pairs) > len(np.unique(pairs[:, 0]))


def _like_resources(p: Program) -> bool:
    """True if two resources have equal capacity and equal lists of demands: their lam may tie."""
    kind = p.kind[np.repeat(np.arange(p.num_tasks), np.diff(p.demand_ptr))]
    profiles = set()
    for resource in np.flatnonzero(np.isfinite(p.resource_capacity)):
        mine = p.demand_resource == resource
        if np.count_nonzero(mine) < 2:
            continue
        profile = (float(p.resource_capacity[resource]), *zip(kind[mine], p.demand_amount[mine], strict=True))
        if profile in profiles:
            return True
        profiles.add(profile)
    return False


def _late_persistent_worker(t: Timeline) -> bool:
    """True if a persistent task without gates began with fewer CTAs than it has: the rest came later."""
    if t.cohorts is None:
        return False
    p, c = t.program, t.cohorts
    gated = np.zeros(p.num_tasks, bool)
    gated[p.edge_dst[p.edge_dst_unit >= 0]] = True
    first = c.start_ps == t.t_start[c.task]
    began = np.bincount(c.task[first], c.units[first], minlength=p.num_tasks)
    ended = t.t_end >= 0
    return bool(np.any(p.persistent & ~gated & ended & (began < np.minimum(p.sm, p.units))))

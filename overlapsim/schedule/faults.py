"""The rules of docs/program.md section 1 as sentences: what :func:`validate_program` says of a program it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from overlapsim.errors import ProgramError
from overlapsim.schedule.program import BLOCKS, FLOW, HOST, MAX_END_PS, Program
from overlapsim.units import MAX_UNIT_PS


def refuse_wrong_form(program: Program) -> None:
    """Refuse arrays of the wrong type or shape, and lengths that do not agree.

    Raises
    ------
    ProgramError
        Naming the first offending array.
    """
    p = program
    _refuse_types(p)
    lengths: Mapping[str, tuple[int, tuple[str, ...]]] = {
        "task": (p.num_tasks, _TASK_ARRAYS),
        "edge": (p.num_edges, ("edge_src_units", "edge_dst", "edge_dst_unit", "edge_lag_ps")),
        "pool": (p.num_pools, ("pool_derate", "pool_device")),
        "stream": (p.num_streams, ("stream_queue",)),
        "demand": (len(p.demand_resource), ("demand_amount",)),
    }
    for what, (length, names) in lengths.items():
        for name in names:
            if len(getattr(p, name)) != length:
                raise ProgramError(f"{name} has {len(getattr(p, name))} entries for {length} {what}s; they must agree")
    for what, names, length in (
        ("task", ("op", "tag"), p.num_tasks),
        ("pool", ("pool_name",), p.num_pools),
        ("resource", ("resource_name",), p.num_resources),
        ("stream", ("stream_name",), p.num_streams),
    ):
        for name in names:
            if len(getattr(p, name)) != length:
                raise ProgramError(f"{name} has {len(getattr(p, name))} entries for {length} {what}s; they must agree")


def refuse_faults(program: Program) -> None:
    """Refuse what breaks a rule, in arrays whose form is right.

    Raises
    ------
    ProgramError
        Naming the first offending pool, stream, task or edge.
    """
    p = program
    _check(p.pool_num_sms >= 1, "pool", "num_sms must be at least 1", p.pool_num_sms)
    _check((p.pool_derate > 0) & (p.pool_derate <= 1), "pool", "derate must be in (0, 1]", p.pool_derate)
    _check(
        p.resource_capacity > 0, "resource", "capacity must be positive (inf = never contended)", p.resource_capacity
    )
    _refuse_tasks(p)
    _refuse_groups(p)
    _refuse_demands(p)
    _refuse_edges(p)


_TASK_ARRAYS: Final = (
    "host",
    "launch_ps",
    "stream",
    "pool",
    "units",
    "unit_ps",
    "sm",
    "sm_quantum",
    "persistent",
    "group",
    "weight",
    "mem_start",
    "mem_end",
)


def _check(good: npt.NDArray[np.bool_] | np.bool_, what: str, rule: str, given: npt.NDArray[Any]) -> None:
    bad = np.flatnonzero(~np.asarray(good))
    if len(bad):
        raise ProgramError(f"{what} {bad[0]}: {rule}; given {given[bad[0]]}")


_ARRAY_TYPES: Final = {"Int": np.int64, "Float": np.float64, "npt.NDArray[np.bool_]": np.bool_}


def _refuse_types(p: Program) -> None:
    for spec in fields(p):
        value = getattr(p, spec.name)
        if spec.type not in _ARRAY_TYPES:
            if not isinstance(value, tuple):
                raise ProgramError(f"{spec.name} must be a tuple of strings; given {type(value).__name__}")
            continue
        dtype = np.dtype(_ARRAY_TYPES[spec.type])
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype != dtype:
            given = f"{value.ndim}-d {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
            raise ProgramError(f"{spec.name} must be a 1-d array of {dtype}; given {given}")


def _refuse_tasks(p: Program) -> None:
    host, flow, blocks = p.kind == HOST, p.kind == FLOW, p.kind == BLOCKS
    _check(host | flow | blocks, "task", "kind must be BLOCKS (0), FLOW (1) or HOST (2)", p.kind)
    _check((p.stream >= 0) & (p.stream < p.num_streams) | host, "task", "stream does not exist", p.stream)
    _check((p.pool >= 0) & (p.pool < p.num_pools) | host, "task", "pool does not exist", p.pool)
    _check(~host | (p.stream == -1), "task", "a HOST task has stream -1", p.stream)
    _check(~host | (p.pool == -1), "task", "a HOST task has pool -1", p.pool)
    _check(p.host >= 0, "task", "host lane must be >= 0", p.host)
    _check((p.launch_ps >= 0) & (p.launch_ps <= MAX_UNIT_PS), "task", "launch_ps must be 0 .. 2^46", p.launch_ps)
    _check(~host | (p.launch_ps == 0), "task", "a HOST task has launch_ps 0", p.launch_ps)
    _check(p.units >= 1, "task", "units must be at least 1", p.units)
    _check(~host | (p.units == 1), "task", "a HOST task has one unit", p.units)
    _check(
        (p.unit_ps >= np.where(host, 0, 1)) & (p.unit_ps <= MAX_UNIT_PS),
        "task",
        "unit_ps must be 1 .. 2^46 (HOST from 0)",
        p.unit_ps,
    )
    work_ps = (
        float(np.sum(p.units.astype(np.float64) * p.unit_ps))
        + float(np.sum(p.launch_ps))
        + float(np.sum(p.edge_lag_ps))
    )
    if work_ps > MAX_END_PS:
        raise ProgramError(
            f"all tasks one after another take {work_ps / 1e12:.3g} s; the clock holds {MAX_END_PS / 1e12:.3g} s: "
            "check the units of the durations"
        )
    pool_sms = p.pool_num_sms[np.where(host, 0, p.pool)] if p.num_pools else np.zeros(p.num_tasks, np.int64)
    _check(
        host | ~blocks | (p.sm >= 1) & (p.sm <= pool_sms), "task", "sm of BLOCKS must be 1 .. num_sms of its pool", p.sm
    )
    _check(
        host | ~flow | (p.sm >= 0) & (p.sm <= pool_sms), "task", "sm of a FLOW must be 0 .. num_sms of its pool", p.sm
    )
    _check(p.sm_quantum >= 1, "task", "sm_quantum must be at least 1", p.sm_quantum)
    _check(~blocks | (p.sm % np.maximum(p.sm_quantum, 1) == 0), "task", "sm_quantum must divide sm", p.sm_quantum)
    _check(blocks | (p.sm_quantum == 1), "task", "sm_quantum other than 1 is for BLOCKS", p.sm_quantum)
    _check(blocks | ~p.persistent, "task", "persistent is for BLOCKS", p.persistent)
    _check(flow | (p.group == -1), "task", "group is for FLOW tasks (-1 = alone)", p.group)
    _check(p.group >= -1, "task", "group must be >= -1", p.group)
    _check((p.weight > 0) & np.isfinite(p.weight), "task", "weight must be positive and finite", p.weight)
    queued = np.flatnonzero(~host)
    if len(queued):
        order = queued[np.argsort(p.task_queue[queued], kind="stable")]
        same = p.task_queue[order][1:] == p.task_queue[order][:-1]
        bad = np.flatnonzero(same & (p.host[order][1:] != p.host[order][:-1]))
        if len(bad):
            a, b = order[bad[0]], order[bad[0] + 1]
            raise ProgramError(
                f"tasks {a} and {b} share a queue but have hosts {p.host[a]} and {p.host[b]}; "
                "all tasks of one queue have the same host"
            )


def _refuse_groups(p: Program) -> None:
    member = np.flatnonzero(p.group >= 0)
    order = member[np.argsort(p.group[member], kind="stable")]
    same = p.group[order][1:] == p.group[order][:-1]
    for name in ("units", "weight"):
        value = getattr(p, name)[order]
        bad = np.flatnonzero(same & (value[1:] != value[:-1]))
        if len(bad):
            raise ProgramError(
                f"tasks {order[bad[0]]} and {order[bad[0] + 1]} are in group {p.group[order[bad[0]]]} "
                f"with different {name}; members have equal units and weight"
            )
    by_stream = member[np.lexsort((p.stream[member], p.group[member]))]
    twice = np.flatnonzero(
        (p.group[by_stream][1:] == p.group[by_stream][:-1]) & (p.stream[by_stream][1:] == p.stream[by_stream][:-1])
    )
    if len(twice):
        a, b = by_stream[twice[0]], by_stream[twice[0] + 1]
        raise ProgramError(f"tasks {a} and {b} of group {p.group[a]} share stream {p.stream[a]}; streams must differ")


def _refuse_demands(p: Program) -> None:
    ptr = p.demand_ptr
    if len(ptr) != p.num_tasks + 1 or ptr[0] != 0 or ptr[-1] != len(p.demand_resource) or np.any(np.diff(ptr) < 0):
        raise ProgramError(
            f"demand_ptr must rise from 0 to {len(p.demand_resource)} in {p.num_tasks + 1} steps; rebuild the program"
        )
    _check(
        (p.demand_resource >= 0) & (p.demand_resource < p.num_resources),
        "demand",
        "resource does not exist",
        p.demand_resource,
    )
    _check(
        (p.demand_amount > 0) & np.isfinite(p.demand_amount),
        "demand",
        "amount must be positive and finite",
        p.demand_amount,
    )
    owner = np.repeat(np.arange(p.num_tasks), np.diff(ptr))
    _check(p.kind[owner] != HOST, "demand", "a HOST task has no demands (task given)", owner)
    pair = owner * max(1, p.num_resources) + p.demand_resource
    if len(np.unique(pair)) != len(pair):
        raise ProgramError("a task names one resource twice in its demands; add the amounts up")


def _refuse_edges(p: Program) -> None:
    src, dst, n = p.edge_src, p.edge_dst, p.num_tasks
    _check((src >= 0) & (src < n), "edge", "source task does not exist", src)
    _check((dst >= 0) & (dst < n), "edge", "destination task does not exist", dst)
    _check(
        (p.edge_src_units >= 1) & (p.edge_src_units <= p.units[src]),
        "edge",
        "src_units must be 1 .. units of the source",
        p.edge_src_units,
    )
    _check(
        (p.edge_dst_unit >= -1) & (p.edge_dst_unit < p.units[dst]),
        "edge",
        "dst_unit must be -1 .. units of the destination - 1",
        p.edge_dst_unit,
    )
    _check((p.edge_lag_ps >= 0) & (p.edge_lag_ps <= MAX_UNIT_PS), "edge", "lag_ps must be 0 .. 2^46", p.edge_lag_ps)
    wait = p.edge_dst_unit == -1
    _check(~wait | (src < dst), "edge", "a stream wait (dst_unit -1) needs src < dst (source given)", src)
    _check(
        wait | (p.kind[dst] != HOST),
        "edge",
        "a gate (dst_unit >= 0) cannot go into a HOST task (destination given)",
        dst,
    )
    _check(wait | (src != dst) | (p.kind[dst] != FLOW), "edge", "a gate cannot stay within one group (task given)", src)
    grouped = (p.group[src] >= 0) & (p.group[src] == p.group[dst])
    _check(wait | ~grouped, "edge", "a gate cannot stay within one group (source given)", src)

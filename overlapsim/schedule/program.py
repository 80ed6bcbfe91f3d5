"""The engine's input: tasks on streams, in arrays (docs/program.md section 1), checked, hashed and stored."""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from overlapsim.errors import ProgramError
from overlapsim.units import MAX_UNIT_PS

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]

BLOCKS: Final = 0
FLOW: Final = 1
HOST: Final = 2
KIND_NAMES: Final = ("BLOCKS", "FLOW", "HOST")
MAX_END_PS: Final = 2**62
"""Latest instant the clock holds, 53 days in picoseconds (docs/program.md section 3.6)."""


@dataclass(frozen=True)
class Incidence:
    """A compressed list of lists: items of row i are ``index[ptr[i]:ptr[i + 1]]``."""

    ptr: Int
    index: Int

    @classmethod
    def by_key(cls, key: Int, num_rows: int, *order: Int) -> Incidence:
        """Positions of `key` grouped by its value in 0 .. num_rows - 1, rows sorted by `order` (first is major)."""
        index = np.lexsort((*reversed(order), key)) if order else np.argsort(key, kind="stable")
        ptr = np.zeros(num_rows + 1, np.int64)
        np.cumsum(np.bincount(key, minlength=num_rows), out=ptr[1:])
        return cls(ptr, index.astype(np.int64))

    def row(self, i: int) -> Int:
        """Items of row `i`."""
        return self.index[self.ptr[i] : self.ptr[i + 1]]


@dataclass(frozen=True, eq=False)
class Program:
    """Tasks on streams, as arrays; immutable, hashable by content.

    Build one with :class:`overlapsim.schedule.builder.ProgramBuilder`; the
    constructor checks nothing, :func:`validate_program` checks everything.
    Times are integer picoseconds, capacities units per second.  The meaning
    of every array is section 1 of ``docs/program.md``.

    Attributes
    ----------
    pool_num_sms, pool_derate : arrays of shape (pools,)
    resource_capacity : array of shape (resources,), units/s, inf = never contended
    stream_priority, stream_queue : arrays of shape (streams,)
    kind, host, launch_ps, stream, pool, units, unit_ps, sm, sm_quantum, persistent, group, weight
        Arrays of shape (tasks,); the index is the order.
    demand_ptr, demand_resource, demand_amount
        CSR: task i asks ``demand_amount[j]`` of ``demand_resource[j]`` per
        unit of work, ``j`` in ``demand_ptr[i] : demand_ptr[i + 1]``.
    edge_src, edge_src_units, edge_dst, edge_dst_unit, edge_lag_ps
        Arrays of shape (edges,).
    op, tag, pool_name, pool_device, resource_name, stream_name, mem_start, mem_end
        Reports; the engine reads none of them.  `pool_device` is the
        device number a pool belongs to; `mem_start` / `mem_end` are bytes
        a task allocates at its start and frees at its end.
    """

    pool_num_sms: Int
    pool_derate: Float
    resource_capacity: Float
    stream_priority: Int
    stream_queue: Int
    kind: Int
    host: Int
    launch_ps: Int
    stream: Int
    pool: Int
    units: Int
    unit_ps: Int
    sm: Int
    sm_quantum: Int
    persistent: npt.NDArray[np.bool_]
    group: Int
    weight: Float
    demand_ptr: Int
    demand_resource: Int
    demand_amount: Float
    edge_src: Int
    edge_src_units: Int
    edge_dst: Int
    edge_dst_unit: Int
    edge_lag_ps: Int
    mem_start: Float
    mem_end: Float
    pool_device: Int
    op: tuple[str, ...] = field(default=())
    tag: tuple[str, ...] = field(default=())
    pool_name: tuple[str, ...] = field(default=())
    resource_name: tuple[str, ...] = field(default=())
    stream_name: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, np.ndarray):
                value.flags.writeable = False

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.kind)

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return len(self.edge_src)

    @property
    def num_pools(self) -> int:
        """Number of pools."""
        return len(self.pool_num_sms)

    @property
    def num_resources(self) -> int:
        """Number of resources."""
        return len(self.resource_capacity)

    @property
    def num_streams(self) -> int:
        """Number of streams."""
        return len(self.stream_priority)

    # Derived incidences, each computed once: the engines walk these.
    @cached_property
    def stream_tasks(self) -> Incidence:
        """Tasks of each stream, in index order; HOST tasks are in none."""
        return _tasks_by(self.stream, self.num_streams)

    @cached_property
    def task_queue(self) -> Int:
        """Hardware queue of each task, renumbered 0 .. queues - 1; -1 for HOST."""
        _, dense = np.unique(self.stream_queue, return_inverse=True)
        if self.num_streams == 0:
            return np.full(self.num_tasks, -1, np.int64)
        return np.where(self.stream >= 0, dense.astype(np.int64)[self.stream], -1)

    @cached_property
    def queue_tasks(self) -> Incidence:
        """Tasks of each hardware queue, in index order."""
        return _tasks_by(self.task_queue, int(self.task_queue.max(initial=-1)) + 1)

    @cached_property
    def task_lane(self) -> Int:
        """Host lane of each task, renumbered 0 .. lanes - 1."""
        return np.unique(self.host, return_inverse=True)[1].astype(np.int64)

    @cached_property
    def lane_tasks(self) -> Incidence:
        """Tasks of each host lane, in index order."""
        return _tasks_by(self.task_lane, int(self.task_lane.max(initial=-1)) + 1)

    @cached_property
    def task_runner_group(self) -> Int:
        """Dense group number of each FLOW (a lone FLOW is a group of one), ordered by lowest member; -1 otherwise."""
        result = np.full(self.num_tasks, -1, np.int64)
        flows = np.flatnonzero(self.kind == FLOW)
        key = np.where(self.group[flows] >= 0, self.group[flows], -1 - flows)
        _, first, dense = np.unique(key, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        result[flows] = rank[dense]
        return result

    @cached_property
    def group_members(self) -> Incidence:
        """Members of each dense group, in index order."""
        return _tasks_by(self.task_runner_group, int(self.task_runner_group.max(initial=-1)) + 1)

    @cached_property
    def edges_out(self) -> Incidence:
        """Edges by source task, sorted by `edge_src_units`: progress opens a prefix of a row."""
        return Incidence.by_key(self.edge_src, self.num_tasks, self.edge_src_units)

    @cached_property
    def edges_in(self) -> Incidence:
        """Edges by destination task, sorted by `edge_dst_unit`: stream waits (-1) come first, then gates."""
        return Incidence.by_key(self.edge_dst, self.num_tasks, self.edge_dst_unit)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all arrays the engine reads: equal digests run alike (the block cache key)."""
        digest = hashlib.sha256()
        for name in _ENGINE_ARRAYS:
            array = np.ascontiguousarray(getattr(self, name))
            digest.update(f"{name}:{array.dtype.str}:{array.shape};".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.digest == other.digest

    def without_contention(self) -> Program:
        """The same program with all capacities infinite and all derates 1."""
        values = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        values["resource_capacity"] = np.full(self.num_resources, np.inf)
        values["pool_derate"] = np.ones(self.num_pools)
        return Program(**values)

    def save(self, path: str | Path) -> None:
        """Write one ``.npz`` file (through a temporary file, then a rename); equal programs give equal bytes.

        Raises
        ------
        OSError
            If the folder cannot be written.
        """
        target = Path(path)
        temporary = target.with_name(target.name + ".part")
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            for spec in fields(self):
                value = getattr(self, spec.name)
                array = value if isinstance(value, np.ndarray) else np.array(value, dtype=np.str_)
                buffer = io.BytesIO()
                np.lib.format.write_array(buffer, array, allow_pickle=False)
                # A fixed date keeps equal programs equal on disk.
                archive.writestr(zipfile.ZipInfo(spec.name + ".npy", (1980, 1, 1, 0, 0, 0)), buffer.getvalue())
        temporary.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> Program:
        """Read a file written by :meth:`save` and validate it.

        Raises
        ------
        ProgramError
            If the file is not a program or breaks the contract.
        """
        values: dict[str, Any] = {}
        try:
            # Not np.load: zipfile checks each array's checksum before numpy looks at it.
            with zipfile.ZipFile(path) as archive:
                for spec in fields(cls):
                    stored = io.BytesIO(archive.read(spec.name + ".npy"))
                    array = np.lib.format.read_array(stored, allow_pickle=False)
                    strings = array.dtype.kind == "U" and array.ndim == 1
                    values[spec.name] = tuple(str(x) for x in array) if strings else array
        except (KeyError, ValueError, OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise ProgramError(
                f"{path} is not a program file ({error}); expected an .npz written by Program.save"
            ) from error
        program = cls(**values)
        validate_program(program)
        return program


_ENGINE_ARRAYS: Final = tuple(
    spec.name
    for spec in fields(Program)
    if spec.name
    not in ("op", "tag", "pool_name", "pool_device", "resource_name", "stream_name", "mem_start", "mem_end")
)


def _tasks_by(key: Int, num_rows: int) -> Incidence:
    members = np.flatnonzero(key >= 0)
    grouped = Incidence.by_key(key[members], num_rows)
    return Incidence(grouped.ptr, members[grouped.index].astype(np.int64))


def validate_program(program: Program) -> None:
    """Refuse everything that section 1 of the engine contract excludes.

    No search for cycles is needed: stream waits (``dst_unit`` -1) rise in
    index, and a cycle through gates is a deadlock, reported when run.

    Raises
    ------
    ProgramError
        Naming the first offending pool, stream, task or edge.
    """
    p = program
    _validate_types(p)
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
    _check(p.pool_num_sms >= 1, "pool", "num_sms must be at least 1", p.pool_num_sms)
    _check((p.pool_derate > 0) & (p.pool_derate <= 1), "pool", "derate must be in (0, 1]", p.pool_derate)
    _check(
        p.resource_capacity > 0, "resource", "capacity must be positive (inf = never contended)", p.resource_capacity
    )
    _validate_tasks(p)
    _validate_groups(p)
    _validate_demands(p)
    _validate_edges(p)


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


def _validate_types(p: Program) -> None:
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


def _validate_tasks(p: Program) -> None:
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


def _validate_groups(p: Program) -> None:
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


def _validate_demands(p: Program) -> None:
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


def _validate_edges(p: Program) -> None:
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

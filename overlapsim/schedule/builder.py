"""Collects tasks one by one and freezes them into a Program; arrays are made once, in numpy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from overlapsim.errors import ProgramError
from overlapsim.schedule.program import BLOCKS, FLOW, HOST, Float, Int, Program, validate_program


class TaskKind(NamedTuple):
    """What many tasks have in common, for :meth:`ProgramBuilder.add_copies`; made by `blocks_kind` and `flow_kind`.

    Attributes
    ----------
    integers, floats : columns of a task
    demands : resource to amount per unit
    op : operator name for reports
    """

    integers: tuple[int, ...]
    floats: tuple[float, float, float]
    demands: Mapping[int, float]
    op: str


def blocks_kind(
    *,
    stream: int,
    pool: int,
    units: int,
    unit_ps: int,
    sm: int,
    host: int = 0,
    demands: Mapping[int, float] | None = None,
    op: str = "",
    mem_start: float = 0.0,
    mem_end: float = 0.0,
) -> TaskKind:
    """Kernels as :meth:`ProgramBuilder.add_blocks` adds them."""
    integers = (BLOCKS, host, 0, stream, pool, units, unit_ps, sm, 1, -1)
    return TaskKind(integers, (1.0, mem_start, mem_end), demands or {}, op)


def flow_kind(
    *,
    stream: int,
    pool: int,
    units: int,
    unit_ps: int,
    sm: int,
    host: int = 0,
    weight: float = 1.0,
    demands: Mapping[int, float] | None = None,
    op: str = "",
) -> TaskKind:
    """Transfers as :meth:`ProgramBuilder.add_flow` adds them."""
    integers = (FLOW, host, 0, stream, pool, units, unit_ps, sm, 1, -1)
    return TaskKind(integers, (weight, 0.0, 0.0), demands or {}, op)


class ProgramBuilder:
    """Adds pools, resources, streams, tasks and edges; :meth:`freeze` makes the Program.

    Every ``add_`` method returns the number of what it added.  Tasks are
    ordered as they are added: that order is what a host issues and a
    stream runs.

    Examples
    --------
    >>> b = ProgramBuilder()
    >>> gpu = b.add_pool(num_sms=4)
    >>> s = b.add_stream()
    >>> gemm = b.add_blocks(stream=s, pool=gpu, units=10, unit_ps=100, sm=4)
    >>> b.freeze().num_tasks
    1
    """

    def __init__(self) -> None:
        self._pools: list[tuple[int, float, str, int]] = []
        self._resources: list[tuple[float, str]] = []
        self._resource_by_name: dict[str, int] = {}
        self._streams: list[tuple[int, int, str]] = []
        # Rows one after another in flat lists: each list becomes one array, and nothing is made per row.
        self._integers: list[int] = []
        self._floats: list[float] = []
        self._persistent: list[bool] = []
        self._ops: list[str] = []
        self._tags: list[str] = []
        self._demand_ptr: list[int] = [0]
        self._demand_resources: list[int] = []
        self._demand_amounts: list[float] = []
        self._late_demands: list[tuple[int, int, float]] = []
        self._edges: list[int] = []

    def add_pool(self, num_sms: int, *, derate: float = 1.0, name: str = "", device: int = 0) -> int:
        """Add the SMs of one GPU, or one copy engine (`num_sms` 1)."""
        self._pools.append((num_sms, derate, name, device))
        return len(self._pools) - 1

    def add_resource(self, capacity: float, name: str = "") -> int:
        """Add a shared rate of `capacity` units/s; a name given before returns the same resource."""
        if name and name in self._resource_by_name:
            number = self._resource_by_name[name]
            if self._resources[number][0] != capacity:
                raise ProgramError(
                    f"resource {name!r} was added with capacity {self._resources[number][0]:g}, now {capacity:g}; "
                    "one name is one resource"
                )
            return number
        self._resources.append((capacity, name))
        if name:
            self._resource_by_name[name] = len(self._resources) - 1
        return len(self._resources) - 1

    def add_stream(self, *, priority: int = 0, queue: int | None = None, name: str = "") -> int:
        """Add a stream; without `queue` it gets a hardware queue of its own."""
        number = len(self._streams)
        # Own queues count down from -1 so that they never meet the caller's numbers.
        self._streams.append((priority, -1 - number if queue is None else queue, name))
        return number

    def add_blocks(
        self,
        *,
        stream: int,
        pool: int,
        units: int,
        unit_ps: int,
        sm: int,
        sm_quantum: int = 1,
        persistent: bool = False,
        host: int = 0,
        launch_ps: int = 0,
        weight: float = 1.0,
        demands: Mapping[int, float] | None = None,
        op: str = "",
        tag: str = "",
        mem_start: float = 0.0,
        mem_end: float = 0.0,
    ) -> int:
        """Add a kernel of `units` tiles, at most `sm` at once; `demands` maps resource to amount per tile."""
        return self._add(
            (BLOCKS, host, launch_ps, stream, pool, units, unit_ps, sm, sm_quantum, -1),
            (weight, mem_start, mem_end),
            persistent,
            demands,
            op,
            tag,
        )

    def add_flow(
        self,
        *,
        stream: int,
        pool: int,
        units: int,
        unit_ps: int,
        sm: int,
        group: int = -1,
        host: int = 0,
        launch_ps: int = 0,
        weight: float = 1.0,
        demands: Mapping[int, float] | None = None,
        op: str = "",
        tag: str = "",
        mem_start: float = 0.0,
        mem_end: float = 0.0,
    ) -> int:
        """Add a transfer of `units` chunks that holds `sm` SMs; `demands` maps resource to amount per chunk."""
        return self._add(
            (FLOW, host, launch_ps, stream, pool, units, unit_ps, sm, 1, group),
            (weight, mem_start, mem_end),
            False,
            demands,
            op,
            tag,
        )

    def add_host(self, *, unit_ps: int, host: int = 0, op: str = "", tag: str = "") -> int:
        """Add work of a host thread that blocks its lane for `unit_ps`, after its edges open."""
        return self._add((HOST, host, 0, -1, -1, 1, unit_ps, 0, 1, -1), (1.0, 0.0, 0.0), False, None, op, tag)

    def add_copies(self, kinds: Sequence[TaskKind], which: Int, tags: Sequence[str], groups: Int | None = None) -> None:
        """Add many tasks of a few kinds, numbered on as they come.

        Parameters
        ----------
        kinds : sequence of TaskKind
        which : int64 array of shape (tasks,): kind of each task
        tags : of each task, for reports
        groups : int64 array of shape (tasks,): group of each; none is in one by default

        Examples
        --------
        >>> b = ProgramBuilder()
        >>> kind = blocks_kind(stream=b.add_stream(), pool=b.add_pool(4), units=2, unit_ps=100, sm=1)
        >>> b.add_copies([kind], np.zeros(3, np.int64), ["a", "b", "c"])
        >>> b.num_tasks
        3
        """
        integers = np.array([kind.integers for kind in kinds], np.int64).reshape(-1, len(_TASK_INTEGERS))[which]
        if groups is not None:
            integers[:, _GROUP] = groups
        self._integers += integers.reshape(-1).tolist()
        floats = np.array([kind.floats for kind in kinds], np.float64).reshape(-1, len(_TASK_FLOATS))[which]
        self._floats += floats.reshape(-1).tolist()
        self._persistent += [False] * len(which)
        counts = np.array([len(kind.demands) for kind in kinds], np.int64)
        resources = [list(kind.demands) for kind in kinds]
        amounts = [list(kind.demands.values()) for kind in kinds]
        chosen = which.tolist()
        self._demand_resources += [resource for kind in chosen for resource in resources[kind]]
        self._demand_amounts += [amount for kind in chosen for amount in amounts[kind]]
        self._demand_ptr += (self._demand_ptr[-1] + np.cumsum(counts[which])).tolist()
        ops = [kind.op for kind in kinds]
        self._ops += [ops[kind] for kind in chosen]
        self._tags += tags

    def add_edges(self, src: Int, dst: Int) -> None:
        """Let each task of `dst` wait for all units of the task of `src` beside it; int64 arrays of one shape."""
        units = np.array(self.column("units"), np.int64)[src]
        nothing = np.zeros_like(src)
        self._edges += np.stack((src, units, dst, nothing - 1, nothing), axis=1).reshape(-1).tolist()

    def add_edge(
        self,
        src: int,
        dst: int,
        *,
        src_units: int | None = None,
        dst_unit: int = -1,
        lag_ps: int = 0,
    ) -> None:
        """Open `dst` (or its unit `dst_unit`) `lag_ps` after the first `src_units` units of `src` (default: all)."""
        if not 0 <= src < len(self._ops):
            raise ProgramError(f"edge from task {src}, but {len(self._ops)} tasks were added; add tasks before edges")
        units = self._integers[src * len(_TASK_INTEGERS) + _UNITS] if src_units is None else src_units
        self._edges.extend((src, units, dst, dst_unit, lag_ps))

    @property
    def num_tasks(self) -> int:
        """Tasks added so far; the next one gets this number."""
        return len(self._ops)

    def add_memory(self, task: int, allocates_bytes: float = 0.0, frees_bytes: float = 0.0) -> None:
        """Let `task` allocate that much more at its start and free that much more at its end."""
        at = task * len(_TASK_FLOATS)
        self._floats[at + _TASK_FLOATS.index("mem_start")] += allocates_bytes
        self._floats[at + _TASK_FLOATS.index("mem_end")] += frees_bytes

    def add_demand(self, task: int, resource: int, amount: float) -> None:
        """Let each unit of `task` take `amount` of a further resource."""
        if not 0 <= task < len(self._ops):
            raise ProgramError(f"demand of task {task}, but {len(self._ops)} tasks were added")
        self._late_demands.append((task, resource, amount))

    def column(self, name: str) -> list[int]:
        """Values of one integer column of all tasks so far: ``kind``, ``stream``, ``pool``, ``sm`` ..."""
        return self._integers[_TASK_INTEGERS.index(name) :: len(_TASK_INTEGERS)]

    def stream_queues(self) -> list[int]:
        """Hardware queue of each stream so far."""
        return [queue for _, queue, _ in self._streams]

    def stream_names(self) -> list[str]:
        """Name of each stream so far."""
        return [name for _, _, name in self._streams]

    def waits(self) -> Iterator[tuple[int, int]]:
        """Yield (source, task) of every edge so far by which a task may not become eligible."""
        width = len(_EDGE_INTEGERS)
        for i in range(0, len(self._edges), width):
            src, _, dst, dst_unit, _ = self._edges[i : i + width]
            if dst_unit < 0:
                yield src, dst

    def _add(
        self,
        integers: tuple[int, ...],
        floats: tuple[float, float, float],
        persistent: bool,
        demands: Mapping[int, float] | None,
        op: str,
        tag: str,
    ) -> int:
        self._integers.extend(integers)
        self._floats.extend(floats)
        self._persistent.append(persistent)
        if demands:
            self._demand_resources.extend(demands)
            self._demand_amounts.extend(demands.values())
        self._demand_ptr.append(len(self._demand_resources))
        self._ops.append(op)
        self._tags.append(tag)
        return len(self._ops) - 1

    def freeze(self) -> Program:
        """Make and validate the Program.

        Raises
        ------
        ProgramError
            If anything breaks the engine contract.
        """
        pools: list[Any] = list(zip(*self._pools, strict=True)) or [()] * 4
        resources: list[Any] = list(zip(*self._resources, strict=True)) or [()] * 2
        streams: list[Any] = list(zip(*self._streams, strict=True)) or [()] * 3
        kind, host, launch_ps, stream, pool, units, unit_ps, sm, sm_quantum, group = _integer_columns(
            _TASK_INTEGERS, self._integers
        )
        weight, mem_start, mem_end = _float_columns(_TASK_FLOATS, self._floats)
        demand_ptr, demand_resource, demand_amount = self._demands()
        edge_src, edge_src_units, edge_dst, edge_dst_unit, edge_lag_ps = _integer_columns(_EDGE_INTEGERS, self._edges)
        program = Program.of_read_only(
            pool_num_sms=_integers("num_sms", pools[0]),
            pool_derate=_floats("derate", pools[1]),
            pool_name=pools[2],
            pool_device=_integers("device", pools[3]),
            resource_capacity=_floats("capacity", resources[0]),
            resource_name=resources[1],
            stream_priority=_integers("priority", streams[0]),
            stream_queue=_integers("queue", streams[1]),
            stream_name=streams[2],
            kind=kind,
            host=host,
            launch_ps=launch_ps,
            stream=stream,
            pool=pool,
            units=units,
            unit_ps=unit_ps,
            sm=sm,
            sm_quantum=sm_quantum,
            persistent=_read_only("persistent", np.array(self._persistent, np.bool_)),
            group=group,
            weight=weight,
            demand_ptr=demand_ptr,
            demand_resource=demand_resource,
            demand_amount=demand_amount,
            edge_src=edge_src,
            edge_src_units=edge_src_units,
            edge_dst=edge_dst,
            edge_dst_unit=edge_dst_unit,
            edge_lag_ps=edge_lag_ps,
            op=tuple(self._ops),
            tag=tuple(self._tags),
            mem_start=mem_start,
            mem_end=mem_end,
        )
        validate_program(program, form_is_right=True)
        return program

    def _demands(self) -> tuple[Int, Int, Float]:
        """Demands by task: those it was added with, then later ones in the order they came."""
        ptr = _integers("demand_ptr", self._demand_ptr)
        resources = _integers("resource of a demand", self._demand_resources)
        amounts = _floats("amount of a demand", self._demand_amounts)
        if not self._late_demands:
            return ptr, resources, amounts
        tasks, late, more = (np.array(column) for column in zip(*self._late_demands, strict=True))
        order = np.argsort(tasks, kind="stable")
        tasks, at = tasks[order], ptr[tasks[order] + 1]
        counts = np.bincount(tasks, minlength=len(self._ops))
        return (
            _read_only("demand_ptr", ptr + np.concatenate([[0], np.cumsum(counts)])),
            _read_only("resource of a demand", np.insert(resources, at, late[order])),
            _read_only("amount of a demand", np.insert(amounts, at, more[order])),
        )


_TASK_INTEGERS = ("kind", "host", "launch_ps", "stream", "pool", "units", "unit_ps", "sm", "sm_quantum", "group")
_TASK_FLOATS = ("weight", "mem_start", "mem_end")
_EDGE_INTEGERS = ("edge src", "edge src_units", "edge dst", "edge dst_unit", "edge lag_ps")
_UNITS, _GROUP = _TASK_INTEGERS.index("units"), _TASK_INTEGERS.index("group")
_INT64, _FLOAT64 = np.dtype(np.int64), np.dtype(np.float64)


def _integer_columns(names: Sequence[str], values: list[int]) -> Int:
    """Rows one after another as a read-only matrix with one column of them, `names` each, in a row."""
    array = np.array(values, None if values else _INT64)
    if array.dtype is not _INT64 or array.ndim != 1:
        # Column by column, to name the one that holds something else.
        array = np.array([_integers(name, values[column :: len(names)]) for column, name in enumerate(names)]).T
    return _read_only_columns(array.reshape(-1, len(names)))


def _float_columns(names: Sequence[str], values: list[float]) -> Float:
    return _read_only_columns(_floats(", ".join(names), values).reshape(-1, len(names)))


def _integers(name: str, values: Sequence[Any]) -> Int:
    """Array of `values`; refuses what is no integer, since rounding silently would hide a time given in seconds."""
    array = np.array(values, None if len(values) else _INT64)
    if array.dtype is not _INT64:  # the type itself first: comparing is slow for each array of each small program
        if array.dtype.kind not in "iu" or array.dtype == np.uint64:
            raise ProgramError(
                f"{name} must be integers below 2^63; given {values[:4]!r} ... (times: see units.ps_from_s)"
            )
        array = array.astype(np.int64, copy=False)
    return _read_only(name, array)


def _floats(name: str, values: Sequence[Any]) -> Float:
    return _read_only(name, np.array(values, _FLOAT64))


def _read_only(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.ndim != 1:
        raise ProgramError(f"{name} must be one number each; given arrays of shape {array.shape[1:]}")
    array.setflags(write=False)
    return array


def _read_only_columns(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    columns = np.ascontiguousarray(rows.T)
    columns.setflags(write=False)  # and so are views of it
    return columns

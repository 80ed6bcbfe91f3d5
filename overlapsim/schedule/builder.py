"""Collects tasks one by one and freezes them into a Program; arrays are made once, in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from overlapsim.errors import ProgramError
from overlapsim.schedule.program import BLOCKS, FLOW, HOST, Int, Program, validate_program


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
        self._tasks: list[tuple[Any, ...]] = []
        self._demands: list[tuple[int, float]] = []
        self._num_demands: list[int] = []
        self._edges: list[tuple[int, int, int, int, int]] = []

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
            BLOCKS, host, launch_ps, stream, pool, units, unit_ps, sm, sm_quantum, persistent, -1, weight,
            demands, op, tag, mem_start, mem_end,
        )  # fmt: skip

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
            FLOW, host, launch_ps, stream, pool, units, unit_ps, sm, 1, False, group, weight,
            demands, op, tag, mem_start, mem_end,
        )  # fmt: skip

    def add_host(self, *, unit_ps: int, host: int = 0, op: str = "", tag: str = "") -> int:
        """Add work of a host thread that blocks its lane for `unit_ps`, after its edges open."""
        return self._add(HOST, host, 0, -1, -1, 1, unit_ps, 0, 1, False, -1, 1.0, None, op, tag, 0.0, 0.0)

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
        if not 0 <= src < len(self._tasks):
            raise ProgramError(f"edge from task {src}, but {len(self._tasks)} tasks were added; add tasks before edges")
        units = self._tasks[src][5] if src_units is None else src_units
        self._edges.append((src, units, dst, dst_unit, lag_ps))

    def _add(self, *row: Any) -> int:
        *engine, demands, op, tag, mem_start, mem_end = row
        self._tasks.append((*engine, op, tag, mem_start, mem_end))
        if demands:
            self._demands.extend(demands.items())
        self._num_demands.append(len(demands) if demands else 0)
        return len(self._tasks) - 1

    def freeze(self) -> Program:
        """Make and validate the Program.

        Raises
        ------
        ProgramError
            If anything breaks the engine contract.
        """
        columns: list[Any] = list(zip(*self._tasks, strict=True)) or [()] * 16
        pools: list[Any] = list(zip(*self._pools, strict=True)) or [()] * 4
        resources: list[Any] = list(zip(*self._resources, strict=True)) or [()] * 2
        streams: list[Any] = list(zip(*self._streams, strict=True)) or [()] * 3
        demands = np.array(self._demands, np.float64).reshape(-1, 2)
        edges = _integers("edge", self._edges).reshape(-1, 5)
        ints = [_integers(name, column) for name, column in zip(_TASK_INTEGERS, columns[:9], strict=True)]
        program = Program(
            pool_num_sms=_integers("num_sms", pools[0]),
            pool_derate=np.array(pools[1], np.float64),
            pool_name=tuple(pools[2]),
            pool_device=_integers("device", pools[3]),
            resource_capacity=np.array(resources[0], np.float64),
            resource_name=tuple(resources[1]),
            stream_priority=_integers("priority", streams[0]),
            stream_queue=_integers("queue", streams[1]),
            stream_name=tuple(streams[2]),
            kind=ints[0],
            host=ints[1],
            launch_ps=ints[2],
            stream=ints[3],
            pool=ints[4],
            units=ints[5],
            unit_ps=ints[6],
            sm=ints[7],
            sm_quantum=ints[8],
            persistent=np.array(columns[9], np.bool_),
            group=_integers("group", columns[10]),
            weight=np.array(columns[11], np.float64),
            demand_ptr=np.concatenate([[0], np.cumsum(np.array(self._num_demands, np.int64))]).astype(np.int64),
            demand_resource=demands[:, 0].astype(np.int64),
            demand_amount=demands[:, 1].copy(),
            edge_src=edges[:, 0].copy(),
            edge_src_units=edges[:, 1].copy(),
            edge_dst=edges[:, 2].copy(),
            edge_dst_unit=edges[:, 3].copy(),
            edge_lag_ps=edges[:, 4].copy(),
            op=tuple(columns[12]),
            tag=tuple(columns[13]),
            mem_start=np.array(columns[14], np.float64),
            mem_end=np.array(columns[15], np.float64),
        )
        validate_program(program)
        return program


_TASK_INTEGERS = ("kind", "host", "launch_ps", "stream", "pool", "units", "unit_ps", "sm", "sm_quantum")


def _integers(name: str, values: Sequence[Any]) -> Int:
    """Array of `values`; refuses what is no integer, since rounding silently would hide a time given in seconds."""
    array = np.array(values, None if len(values) else np.int64)
    if array.dtype.kind not in "iu" or array.dtype == np.uint64:
        raise ProgramError(f"{name} must be integers below 2^63; given {values[:4]!r} ... (times: see units.ps_from_s)")
    return array.astype(np.int64, copy=False)

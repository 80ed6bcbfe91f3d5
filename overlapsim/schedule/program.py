"""The engine's input: tasks on streams, in arrays (docs/program.md section 1), checked, hashed and stored."""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from overlapsim.errors import ProgramError

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
        values = vars(self)
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                # Compiled code is made for one kind of array: plain, in order, and read-only.
                if type(value) is not np.ndarray or value.flags.num & _IN_ORDER != _IN_ORDER:
                    values[name] = value = np.array(value, order="C")
                value.setflags(write=False)

    @classmethod
    def of_read_only(cls, **values: Any) -> Program:
        """All fields, the arrays plain, in order and read-only already: spares the constructor's look at each."""
        program = cls.__new__(cls)
        vars(program).update(values)
        return program

    def __getstate__(self) -> dict[str, Any]:
        # What an engine keeps with a program is quicker to make than to send.
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

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

    @property
    def structure(self) -> Program:
        """The program that this one shares all but durations and amounts with: itself, unless :meth:`repriced`."""
        original = vars(self).get("_structure", self)
        assert isinstance(original, Program)
        return original

    def repriced(self, unit_ps: Int, demand_amount: Float | None = None) -> Program:
        """The same tasks, edges and machine with other durations and, if given, other amounts of demand.

        Cheaper than a new program: only what is new is checked, and what
        was derived from the structure, here or by an engine, is shared.

        Parameters
        ----------
        unit_ps : int64 array of shape (tasks,), ps
        demand_amount : float64 array of shape (demands,), optional
            Amount per unit of work, in the order of ``demand_amount``; by
            default the amounts stay.

        Raises
        ------
        ProgramError
            As :func:`validate_program` would.

        Examples
        --------
        >>> from overlapsim.schedule.builder import ProgramBuilder
        >>> b = ProgramBuilder()
        >>> gemm = b.add_blocks(stream=b.add_stream(), pool=b.add_pool(4), units=10, unit_ps=100, sm=4)
        >>> program = b.freeze()
        >>> program.repriced(program.unit_ps * 2).unit_ps.tolist()
        [200]
        """
        values = {name: value for name, value in vars(self).items() if name[0] != "_" and name != "digest"}
        values["unit_ps"] = _owned(unit_ps)
        if demand_amount is not None:
            values["demand_amount"] = _owned(demand_amount)
        program = Program.of_read_only(**values, _structure=self.structure)

        from overlapsim.schedule.kernel_check import prices_are_fine  # see validate_program

        if not prices_are_fine(program, self):
            validate_program(program)
        if self.is_validated:
            vars(program)[_VALIDATED] = True
        return program

    @property
    def is_validated(self) -> bool:
        """Whether :func:`validate_program` has passed this object."""
        return _VALIDATED in vars(self)

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


_IN_ORDER: Final = 0x101  # C-contiguous and aligned, in ndarray.flags.num
_VALIDATED: Final = "_validated"

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


def _owned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A read-only copy: the caller goes on using its own."""
    copy = np.array(array, order="C")
    copy.setflags(write=False)
    return copy


def validate_program(program: Program, *, form_is_right: bool = False) -> None:
    """Refuse everything that section 1 of the engine contract excludes.

    No search for cycles is needed: stream waits (``dst_unit`` -1) rise in
    index, and a cycle through gates is a deadlock, reported when run.

    Parameters
    ----------
    program : Program
    form_is_right : bool
        The types of the arrays are right and their lengths agree, by the
        way they were made: look at their content only.

    Raises
    ------
    ProgramError
        Naming the first offending pool, stream, task or edge.
    """
    # Here, not above: programs are read and shown where nothing is compiled.
    from overlapsim.schedule.faults import refuse_faults, refuse_wrong_form
    from overlapsim.schedule.kernel_check import content_is_fine

    if not form_is_right:
        refuse_wrong_form(program)
    if not content_is_fine(program):
        refuse_faults(program)
    vars(program)[_VALIDATED] = True

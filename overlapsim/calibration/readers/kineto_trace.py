"""One rank's torch profiler trace: its collective kernels with their metadata, its GEMMs, and when it computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlapsim.calibration.readers.json_stream import Beside, items
from overlapsim.calibration.readers.reading import collective_of, dtype_of, element_bytes
from overlapsim.errors import CalibrationError

_GEMM_OPS: Final = {"aten::mm": (0, 1), "aten::addmm": (1, 2)}
_NCCL_KERNEL: Final = re.compile(r"^(?:nccl|rccl|msccl)", re.IGNORECASE)
PER_US: Final = 1e-6


@dataclass(frozen=True)
class Call:
    """One collective kernel on one rank.

    Attributes
    ----------
    key : what the same call is called on the other ranks: group, collective and sequence number
    collective, size_bytes, dtype, ranks : size as nccl-tests defines it
    members : ranks of the group, as far as the trace lists them
    start_s, duration_s : on this rank's clock; the duration holds the wait for the last rank
    """

    key: tuple[str, ...]
    collective: str
    size_bytes: int
    dtype: str
    ranks: int
    members: tuple[int, ...]
    start_s: float
    duration_s: float


@dataclass(frozen=True)
class Gemm:
    """One GEMM of a linear layer on one rank."""

    m: int
    n: int
    k: int
    dtype: str
    start_s: float
    duration_s: float


@dataclass
class Spans:
    """Times at which something ran, as a function to integrate."""

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    _edges: NDArray[np.float64] | None = None
    _busy: NDArray[np.float64] | None = None

    def add(self, start_s: float, duration_s: float) -> None:
        """Add one interval."""
        self.starts.append(start_s)
        self.ends.append(start_s + duration_s)

    def overlap_s(self, start_s: float, end_s: float) -> float:
        """Time between `start_s` and `end_s` during which at least one interval ran."""
        if not self.starts:
            return 0.0
        if self._edges is None or self._busy is None:
            order = np.argsort(self.starts, kind="stable")
            starts, ends = np.asarray(self.starts)[order], np.maximum.accumulate(np.asarray(self.ends)[order])
            first = np.concatenate(([True], starts[1:] > ends[:-1]))
            last = np.concatenate((first[1:], [True]))
            low, high = starts[first], ends[last]
            self._edges = np.stack((low, high), axis=1).ravel()
            self._busy = np.concatenate(
                ([0.0], np.cumsum(np.diff(self._edges) * (np.arange(self._edges.size - 1) % 2 == 0)))
            )
        low_s, high_s = np.interp((start_s, end_s), self._edges, self._busy)
        return float(high_s - low_s)


@dataclass
class Trace:
    """What one file holds.

    Attributes
    ----------
    rank : None where the file does not say
    left_out : collectives that cannot be used, by reason
    """

    rank: int | None = None
    device: str = ""
    nccl: str = ""
    cut_off: bool = False
    num_events: int = 0
    calls: list[Call] = field(default_factory=list)
    gemms: list[Gemm] = field(default_factory=list)
    compute: Spans = field(default_factory=Spans)
    communication: Spans = field(default_factory=Spans)
    left_out: dict[str, int] = field(default_factory=dict)


class _Kernel(NamedTuple):
    """What is kept of a GPU kernel until all CPU operators are known: a trace may hold millions."""

    start_us: float
    duration_us: float
    is_nccl: bool
    identity: int | None
    told: Mapping[str, Any] | None


def _kernel(event: Mapping[str, Any], arguments: Mapping[str, Any]) -> _Kernel | None:
    start, duration, identity = _number(event.get("ts")), _number(event.get("dur")), arguments.get("External id")
    if start is None or not duration:
        return None
    return _Kernel(
        start,
        duration,
        _NCCL_KERNEL.match(str(event.get("name"))) is not None,
        identity if isinstance(identity, int) else None,
        arguments if "Collective name" in arguments else None,
    )


def read_trace(path: Path, progress: Callable[[int], None] | None = None) -> Trace:
    """Read one trace, event by event.

    Raises
    ------
    CalibrationError
        If it is not JSON or holds no GPU kernel.
    """
    beside = Beside()
    trace = Trace()
    kernels: list[_Kernel] = []
    metadata: dict[int, Mapping[str, Any]] = {}
    shapes: dict[int, tuple[int, int, int, str]] = {}
    for event in items(path, "traceEvents", beside, progress=progress):
        trace.num_events += 1
        if not isinstance(event, dict) or event.get("ph") != "X" or not isinstance(event.get("args"), dict):
            continue
        arguments, category = event["args"], event.get("cat")
        if category == "kernel":
            if (kernel := _kernel(event, arguments)) is not None:
                kernels.append(kernel)
        elif category == "cpu_op" and isinstance(identity := arguments.get("External id"), int):
            if "Collective name" in arguments:
                metadata[identity] = arguments
            elif event.get("name") in _GEMM_OPS and (shape := _shape(str(event["name"]), arguments)):
                shapes[identity] = shape
    if not kernels:
        raise CalibrationError(
            f"{path.name}: no GPU kernel among {trace.num_events} events; profile with ProfilerActivity.CUDA"
        )
    trace.cut_off = beside.cut_off
    base_s = float(_number(beside.values.get("baseTimeNanoseconds")) or 0) * 1e-9
    _describe(trace, beside.values)
    _sort_kernels(trace, kernels, metadata, shapes, base_s)
    return trace


def _describe(trace: Trace, values: Mapping[str, Any]) -> None:
    info = values.get("distributedInfo")
    if isinstance(info, dict):
        rank = info.get("rank")
        trace.rank = rank if isinstance(rank, int) else None
        trace.nccl = str(info.get("nccl_version", ""))[:16] if isinstance(info.get("nccl_version"), str) else ""
    devices = values.get("deviceProperties")
    if isinstance(devices, list) and devices and isinstance(devices[0], dict):
        trace.device = str(devices[0].get("name", ""))


def _sort_kernels(
    trace: Trace,
    kernels: Sequence[_Kernel],
    metadata: Mapping[int, Mapping[str, Any]],
    shapes: Mapping[int, tuple[int, int, int, str]],
    base_s: float,
) -> None:
    counts: dict[tuple[str, ...], int] = {}
    gemms: dict[int, list[tuple[float, float]]] = {}
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        start_s, duration_s = base_s + kernel.start_us * PER_US, kernel.duration_us * PER_US
        told = kernel.told or (metadata.get(kernel.identity, {}) if kernel.identity is not None else {})
        if told or kernel.is_nccl:
            trace.communication.add(start_s, duration_s)
            call = _call(told, counts, start_s, duration_s)
            if isinstance(call, Call):
                trace.calls.append(call)
            else:
                trace.left_out[call] = trace.left_out.get(call, 0) + 1
            continue
        trace.compute.add(start_s, duration_s)
        if kernel.identity is not None and kernel.identity in shapes:
            gemms.setdefault(kernel.identity, []).append((start_s, duration_s))
    for identity, parts in gemms.items():
        m, n, k, dtype = shapes[identity]
        # A split-k GEMM is two kernels one after the other.
        trace.gemms.append(Gemm(m, n, k, dtype, parts[0][0], sum(duration for _, duration in parts)))


def _call(told: Mapping[str, Any], counts: dict[tuple[str, ...], int], start_s: float, duration_s: float) -> Call | str:
    """The call that a kernel belongs to, or the reason why it cannot be used."""
    if not told:
        return "kernels without metadata (torch 2.4 or later records it)"
    name = str(told.get("Collective name", ""))
    dtype = dtype_of(str(told.get("dtype", "")))
    width = element_bytes(dtype)
    collective = collective_of(name)
    if collective is None and name.replace("_", "").lower() == "alltoallv" and _equal_splits(told):
        collective = "all_to_all"
    if collective == "all_to_all" and not _equal_splits(told):
        return "all-to-all with unequal splits"
    if collective is None or collective == "send_recv" or name in ("send", "recv"):
        return f"{name or 'unnamed'} calls"
    elements = [_number(told.get(f"{side} msg nelems")) or 0 for side in ("In", "Out")]
    ranks = told.get("Group size")
    if width is None or not isinstance(ranks, int) or ranks < 2 or min(elements) < 1:
        return "calls without sizes, type or group"
    size = int(elements[1] if collective == "all_gather" else elements[0]) * width
    members = _members(told.get("Process Group Ranks"))
    group = (str(told.get("Process Group Name", "")), ",".join(map(str, members)), collective)
    sequence = told.get("Seq")
    if not isinstance(sequence, int):
        sequence = counts[group] = counts.get(group, 0) + 1
    return Call((*group, str(sequence)), collective, size, dtype, ranks, members, start_s, duration_s)


def _equal_splits(told: Mapping[str, Any]) -> bool:
    splits = [value for side in ("In", "Out") for value in _members(told.get(f"{side} split size"))]
    return len(set(splits)) <= 1


def _members(value: object) -> tuple[int, ...]:
    """Numbers of a list, or of its text; nothing where the list is shortened."""
    if isinstance(value, list):
        return tuple(item for item in value if isinstance(item, int))
    text = str(value or "")
    return () if "..." in text else tuple(int(number) for number in re.findall(r"\d+", text))


def _shape(name: str, arguments: Mapping[str, Any]) -> tuple[int, int, int, str] | None:
    left, right = _GEMM_OPS[name]
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    try:
        (m, k), (k2, n) = dims[left], dims[right]  # type: ignore[index]
        dtype = dtype_of(str(types[left]))  # type: ignore[index]
    except (TypeError, ValueError, IndexError):
        return None
    return (m, n, k, dtype) if k == k2 and min(m, n, k) > 0 else None


def _number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None

"""Checks a Chrome trace for what viewers lose or misdraw without a word."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

Event = Mapping[str, Any]


class Slice(NamedTuple):
    """A slice of one thread, from an ``X`` event or a ``B``/``E`` pair; times in microseconds as written."""

    position: int
    pid: int
    tid: int
    name: str
    ts: float
    dur: float


def check_trace(events: Iterable[Event]) -> list[str]:
    """Faults of the events of a Chrome trace, as sentences; an empty list means none.

    Looked for: slices that partly overlap on a thread, in picoseconds or in
    the whole nanoseconds that viewers keep, rounded or truncated; thread 0
    (Perfetto merges it across processes) and unnamed threads and processes; negative, infinite or
    missing times; ``B`` without ``E``; flow ids without exactly one start
    and an end, that run backwards, or that touch no slice; counters that go
    back in time or have no number.

    Parameters
    ----------
    events : iterable of dict
        ``json.loads(trace)["traceEvents"]``, in file order.

    Examples
    --------
    >>> bad = {"ph": "X", "pid": 1, "tid": 0, "name": "a", "ts": 0.0, "dur": -1.0}
    >>> any("tid 0" in fault for fault in check_trace([bad]))
    True
    """
    listed = list(events)
    faults = _faults_of_fields(listed)
    if faults:
        return faults  # the rest would trip over what is missing
    slices, faults = slices_of(listed)
    by_thread: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for item in slices:
        by_thread[item.pid, item.tid].append(item)
    for thread in by_thread.values():
        faults.extend(_overlaps(thread))
    faults.extend(_faults_of_names(listed))
    faults.extend(_faults_of_flows(listed, by_thread))
    faults.extend(_faults_of_counters(listed))
    return faults


def slices_of(events: Iterable[Event]) -> tuple[list[Slice], list[str]]:
    """Slices of a trace in file order of their beginnings, and faults of ``B``/``E`` pairs."""
    slices: list[Slice] = []
    faults: list[str] = []
    open_ones: dict[tuple[int, int], list[tuple[int, Event]]] = defaultdict(list)
    for position, event in enumerate(events):
        if event["ph"] == "X":
            where = (int(event["pid"]), int(event["tid"]))
            slices.append(Slice(position, *where, str(event.get("name", "")), event["ts"], event["dur"]))
        elif event["ph"] == "B":
            open_ones[event["pid"], event["tid"]].append((position, event))
        elif event["ph"] == "E":
            stack = open_ones[event["pid"], event["tid"]]
            if not stack:
                faults.append(f"event {position}: E without B on pid {event['pid']} tid {event['tid']}")
                continue
            began, first = stack.pop()
            name = str(first.get("name", ""))
            slices.append(Slice(began, first["pid"], first["tid"], name, first["ts"], event["ts"] - first["ts"]))
    for stack in open_ones.values():
        faults.extend(f"event {position}: B without E ({event.get('name')!r})" for position, event in stack)
    slices.sort(key=lambda item: item.position)
    return slices, faults


def kept_slices(slices: Iterable[Slice]) -> int:
    """How many slices Perfetto keeps: times in whole nanoseconds, one stack a thread, misfits dropped.

    Compared with Perfetto v52 on 20,000 touching slices of random lengths.
    """
    by_thread: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for item in slices:
        by_thread[item.pid, item.tid].append(item)
    return sum(len(thread) - len(_misfits(thread, _rounded_ns, "")) for thread in by_thread.values())


def _exact_ps(us: float) -> int:
    return round(us * 1e6)


def _rounded_ns(us: float) -> int:
    return int(us * 1000.0 + 0.5)


def _truncated_ns(us: float) -> int:
    return int(us * 1000.0)


def _faults_of_fields(events: list[Event]) -> list[str]:
    faults = []
    for position, event in enumerate(events):
        phase = event.get("ph")
        label = f"event {position} ({phase} {event.get('name')!r})"
        if "pid" not in event:
            faults.append(f"{label}: no pid")
        if phase in ("X", "B", "E", "s", "t", "f", "i") and event.get("tid", 0) == 0:
            faults.append(f"{label}: tid 0 or none; Perfetto merges it across processes, number from 1")
        for key in ("ts", "dur") if phase == "X" else () if phase == "M" else ("ts",):
            value = event.get(key)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                faults.append(f"{label}: {key} is {value!r}; expected a finite number >= 0")
    return faults


def _overlaps(thread: list[Slice]) -> list[str]:
    """Partly overlapping slices of one thread: exactly, and as viewers round or truncate them."""
    return (
        _misfits(thread, _exact_ps, "ps")
        or _misfits(thread, _rounded_ns, "ns (rounded)")
        or _misfits(thread, _truncated_ns, "ns (truncated)")
    )


def _misfits(thread: list[Slice], clock: Callable[[float], int], unit: str) -> list[str]:
    """One fault for each slice that a viewer with this clock would drop; it reads by time, the longest first."""
    faults = []
    stack: list[tuple[int, Slice]] = []
    for start, negative, _, item in sorted((clock(s.ts), -clock(s.dur), s.position, s) for s in thread):
        end = start - negative
        while stack and stack[-1][0] <= start:
            stack.pop()
        if stack and end > stack[-1][0]:
            limit, other = stack[-1]
            faults.append(
                f"event {item.position}: slice {item.name!r} [{start}, {end}) partly overlaps event "
                f"{other.position} {other.name!r}, which ends at {limit} {unit} (pid {item.pid} tid {item.tid})"
            )
            continue
        stack.append((end, item))
    return faults


def _faults_of_names(events: list[Event]) -> list[str]:
    processes = {e["pid"] for e in events if e["ph"] == "M" and e.get("name") == "process_name"}
    threads = {(e["pid"], e.get("tid")) for e in events if e["ph"] == "M" and e.get("name") == "thread_name"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] in ("X", "B")}
    drawn = {e["pid"] for e in events if e["ph"] in ("X", "B", "C")}
    faults = [f"pid {pid} has no process_name" for pid in sorted(drawn - processes)]
    return faults + [f"pid {pid} tid {tid} has no thread_name" for pid, tid in sorted(used - threads)]


def _faults_of_flows(events: list[Event], by_thread: Mapping[tuple[int, int], list[Slice]]) -> list[str]:
    ends: dict[Any, dict[str, list[tuple[int, Event]]]] = defaultdict(lambda: {"s": [], "f": []})
    for position, event in enumerate(events):
        if event["ph"] in ("s", "f"):
            ends[event.get("cat"), event.get("id")][event["ph"]].append((position, event))
    faults = []
    spans = {where: _covered(thread) for where, thread in by_thread.items()}
    for (_, number), sides in ends.items():
        if len(sides["s"]) != 1 or len(sides["f"]) != 1:
            faults.append(f"flow {number!r}: {len(sides['s'])} starts and {len(sides['f'])} ends; expected one each")
            continue
        (left, tail), (arrived, head) = sides["s"][0], sides["f"][0]
        if (head["ts"], arrived) < (tail["ts"], left):
            faults.append(f"flow {number!r}: arrives at {head['ts']} before it leaves at {tail['ts']}")
        faults.extend(
            f"flow {number!r}: no slice at {event['ts']} on pid {event['pid']} tid {event['tid']}"
            for event in (tail, head)
            if not _covers(spans.get((event["pid"], event["tid"]), ([], [])), _exact_ps(event["ts"]))
        )
    return faults


def _covered(thread: list[Slice]) -> tuple[list[int], list[int]]:
    """Starts of a thread's slices, rising, and the latest end of any slice up to there."""
    spans = sorted((_exact_ps(s.ts), _exact_ps(s.ts) + _exact_ps(s.dur)) for s in thread)
    return [start for start, _ in spans], list(accumulate((end for _, end in spans), max))


def _covers(spans: tuple[list[int], list[int]], at_ps: int) -> bool:
    before = bisect_right(spans[0], at_ps)
    return before > 0 and spans[1][before - 1] >= at_ps


def _faults_of_counters(events: list[Event]) -> list[str]:
    latest: dict[tuple[int, str], float] = {}
    faults = []
    for position, event in enumerate(events):
        if event["ph"] != "C":
            continue
        key = (event["pid"], event["name"])
        if event["ts"] < latest.get(key, 0.0):
            faults.append(f"event {position}: counter {key[1]!r} goes back from {latest[key]} to {event['ts']}")
        latest[key] = event["ts"]
        values = event.get("args", {}).values()
        if not values or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
            faults.append(f"event {position}: counter {key[1]!r} has args {event.get('args')!r}; expected numbers")
    return faults

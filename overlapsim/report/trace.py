"""A Timeline as a Chrome trace: opens in ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from overlapsim.engine.timeline import Timeline
from overlapsim.errors import UsageError
from overlapsim.report.arrows import progress_arrows
from overlapsim.report.files import write_bytes
from overlapsim.report.lanes import assign_lanes
from overlapsim.report.series import link_rates, sms_in_use
from overlapsim.report.spans import Span, Track, task_name, task_spans, task_tracks
from overlapsim.report.threads import Event, Threads, microseconds, safe_duration_ps
from overlapsim.schedule.program import BLOCKS, KIND_NAMES, Program

Detail = Literal["tasks", "cohorts"]


def chrome_trace(timeline: Timeline, *, title: str = "", detail: Detail = "tasks") -> bytes:
    """Chrome trace (JSON object format) of a timeline.

    One process per device with a thread per stream, one process for the
    host lanes, one for link rates.  Slices of a thread never overlap: where
    they would, further threads ("compute #2") take them, since viewers drop
    partly overlapping slices without a word.  A task is up to three slices,
    ``wait SM`` (eligible, no SM yet), ``spin`` (SMs held, peers or flags
    missing) and its own name; what never ends in a deadlock is drawn past
    the last instant and marked ``never_ends``.  Counters show SMs in use
    and units per second on every resource, arrows show progress edges
    between tracks.

    Times are microseconds; ``round(ts * 1e6)`` gives the picosecond back for
    timelines of up to an hour.  A ``dur`` may be up to half a nanosecond
    short, which keeps neighbours apart in viewers that round to nanoseconds;
    the exact instants are in the args ``start_ps`` and ``end_ps``.  An arrow
    leaves one picosecond before the moment it stands for, so that its slice
    still contains it.  Equal timelines give equal bytes.

    Parameters
    ----------
    timeline : Timeline
        Complete or deadlocked.  Recorded cohorts and speeds make counters
        and arrows exact; see :mod:`overlapsim.report.series`.
    title : str
        Stored in ``otherData``.
    detail : "tasks" or "cohorts"
        ``cohorts`` adds threads ("compute waves") with every cohort of
        BLOCKS units, and needs a recorded timeline.

    Returns
    -------
    bytes
        UTF-8 JSON.

    Raises
    ------
    UsageError
        If `detail` is unknown, or ``cohorts`` for a timeline without them.
    """
    if detail not in ("tasks", "cohorts"):
        raise UsageError(f"trace detail is {detail!r}; expected 'tasks' or 'cohorts'")
    if detail == "cohorts" and timeline.cohorts is None:
        raise UsageError("trace detail 'cohorts' needs a timeline with cohorts; run the engine with record=True")
    threads = Threads(timeline.program)
    timed = list(_task_slices(timeline, threads))
    if detail == "cohorts":
        timed.extend(_cohort_slices(timeline, threads))
    timed.extend(_arrows(timeline, threads))
    timed.extend(_counters(timeline, threads))
    timed.sort(key=lambda item: item.order)
    document = {
        "displayTimeUnit": "ns",
        "otherData": {
            "title": title,
            "program_sha256": timeline.program.digest,
            "duration_s": timeline.duration_s,
            "deadlock": not timeline.complete,
        },
        "traceEvents": threads.metadata() + [item.event for item in timed],
    }
    return msgspec.json.encode(document)


def write_trace(timeline: Timeline, path: str | Path, *, title: str = "", detail: Detail = "tasks") -> None:
    """Write :func:`chrome_trace` to `path`, compressed when its name ends in ``.gz``; whole or not at all.

    Raises
    ------
    UsageError
        As :func:`chrome_trace`, or if `path` cannot be written.
    """
    data = chrome_trace(timeline, title=title, detail=detail)
    if str(path).endswith(".gz"):
        # Time 0 keeps equal traces equal on disk.
        data = gzip.compress(data, compresslevel=6, mtime=0)
    write_bytes(path, data)


class _Timed(NamedTuple):
    """An event and its place in the file: by time, at one instant slices before arrows before counters."""

    order: tuple[int, int, int]
    event: Event


_SLICE, _LEAVE, _ARRIVE, _COUNT = range(4)


def _slice(slot: tuple[int, int], name: str, category: str, start_ps: int, end_ps: int, args: Event) -> _Timed:
    event = {
        "ph": "X",
        "pid": slot[0],
        "tid": slot[1],
        "name": name,
        "cat": category,
        "ts": microseconds(start_ps),
        "dur": microseconds(safe_duration_ps(start_ps, end_ps)),
        "args": args | {"start_ps": start_ps, "end_ps": end_ps},
    }
    return _Timed((start_ps, _SLICE, end_ps), event)


def _task_slices(timeline: Timeline, threads: Threads) -> Iterator[_Timed]:
    for track, tasks in task_spans(timeline).items():
        start = np.array([spans[0].start_ps for spans in tasks], np.int64)
        end = np.array([spans[-1].end_ps for spans in tasks], np.int64)
        for spans, lane in zip(tasks, assign_lanes(start, end).tolist(), strict=True):
            slot = threads.slot(track, "", lane)
            if spans[0].phase != "launch":
                threads.file(spans, slot)
            for span in spans:
                yield _task_slice(timeline.program, span, slot)


def _task_slice(program: Program, span: Span, slot: tuple[int, int]) -> _Timed:
    i, running = span.task, span.phase == "run"
    args: Event = {"task": i}
    args |= {key: text for key, text in (("op", program.op[i]), ("tag", program.tag[i])) if text}
    if running and program.stream[i] >= 0:
        args |= {"units": int(program.units[i]), "unit_ps": int(program.unit_ps[i]), "sm": int(program.sm[i])}
        if program.group[i] >= 0:
            args["group"] = int(program.group[i])
        demands = _demands(program, i)
        if demands:
            args["bytes"] = demands
    if not span.ended:
        args["never_ends"] = True
    name = task_name(program, i)
    if span.phase == "launch":
        name = f"launch {name}"
    elif not running:
        name = span.phase
    category = KIND_NAMES[program.kind[i]].lower() if running else span.phase
    return _slice(slot, name, category, span.start_ps, span.end_ps, args)


def _demands(program: Program, task: int) -> dict[str, float]:
    """Total amount a task asks of each resource, by name."""
    total: dict[str, float] = {}
    for j in range(int(program.demand_ptr[task]), int(program.demand_ptr[task + 1])):
        name = _resource_name(program, int(program.demand_resource[j]))
        total[name] = total.get(name, 0.0) + float(program.demand_amount[j] * program.units[task])
    return total


def _resource_name(program: Program, resource: int) -> str:
    return program.resource_name[resource] or f"resource {resource}"


def _cohort_slices(timeline: Timeline, threads: Threads) -> Iterator[_Timed]:
    program, cohorts = timeline.program, timeline.cohorts
    assert cohorts is not None
    tracks = task_tracks(program)
    rows_of: dict[Track, list[int]] = {}
    for row in np.flatnonzero(program.kind[cohorts.task] == BLOCKS).tolist():
        rows_of.setdefault(tracks[cohorts.task[row]], []).append(row)
    for track in sorted(rows_of):
        rows = np.array(rows_of[track], np.int64)
        lanes = assign_lanes(cohorts.start_ps[rows], cohorts.end_ps[rows])
        for row, lane in zip(rows.tolist(), lanes.tolist(), strict=True):
            task, units = int(cohorts.task[row]), int(cohorts.units[row])
            yield _slice(
                threads.slot(track, " waves", lane),
                f"{task_name(program, task)} x{units}",
                "wave",
                int(cohorts.start_ps[row]),
                int(cohorts.end_ps[row]),
                {"task": task, "units": units},
            )


def _arrows(timeline: Timeline, threads: Threads) -> Iterator[_Timed]:
    tracks = task_tracks(timeline.program)
    for number, arrow in enumerate(progress_arrows(timeline), 1):
        if tracks[arrow.src] == tracks[arrow.dst]:
            continue
        head, arrive_ps = threads.anchor(arrow.dst, arrow.arrive_ps)
        tail, leave_ps = threads.anchor(arrow.src, min(arrow.leave_ps - 1, arrive_ps))
        ends = (("s", _LEAVE, tail, leave_ps), ("f", _ARRIVE, head, arrive_ps))
        for phase, rank, (pid, tid), at in ends:
            event = {
                "ph": phase,
                "pid": pid,
                "tid": tid,
                "ts": microseconds(at),
                "id": number,
                "name": "edge",
                "cat": "edge",
            }
            if phase == "f":
                # Without this the head would bind to the next slice instead of the one around it.
                event["bp"] = "e"
            yield _Timed((at, rank, number), event)


def _counters(timeline: Timeline, threads: Threads) -> Iterator[_Timed]:
    program = timeline.program
    names = [f"SMs in use, {name or f'pool {pool}'}" for pool, name in enumerate(program.pool_name)]
    owners = list(zip(program.pool_device.tolist(), names, strict=True))
    for pool, use in enumerate(sms_in_use(timeline)):
        pid = threads.pid(owners[pool][0])
        # One counter a pool: two of one name in one process would be drawn as one.
        name = names[pool] if owners.count(owners[pool]) == 1 else f"{names[pool]} (pool {pool})"
        times = np.union1d(use.compute.time_ps, use.communication.time_ps)
        compute, communication = use.compute.at(times), use.communication.at(times)
        label = "compute" if use.exact else "compute (at most)"
        for at, a, b in zip(times.tolist(), compute.tolist(), communication.tolist(), strict=True):
            yield _counter(pid, name, at, {label: int(a), "communication": int(b)}, pool)
    recorded = timeline.cohorts is not None and timeline.speeds is not None
    label = "bytes/s" if recorded else "bytes/s (mean)"
    for resource, rate in enumerate(link_rates(timeline)):
        name = _resource_name(program, resource)
        for at, value in zip(rate.time_ps.tolist(), rate.value.tolist(), strict=True):
            yield _counter(threads.use_rates(), name, at, {label: value}, program.num_pools + resource)


def _counter(pid: int, name: str, at: int, args: Event, number: int) -> _Timed:
    event = {"ph": "C", "pid": pid, "name": name, "ts": microseconds(at), "args": args}
    return _Timed((at, _COUNT, number), event)

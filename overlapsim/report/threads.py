"""Numbers of a trace's processes and threads, and times as trace viewers can read them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from overlapsim.report.spans import HOST_DEVICE, Span, Track, track_name
from overlapsim.schedule.program import Program

Event = dict[str, Any]


class Threads:
    """Numbers processes and threads, both from 1: viewers merge thread 0 of all processes into one.

    Devices come first, in order of their numbers, then the host, then the
    link rates; a process that nothing was filed under is not named.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        devices = np.unique(program.pool_device).tolist()
        self._pid = {device: 1 + i for i, device in enumerate(devices)} | {HOST_DEVICE: 1 + len(devices)}
        self.rates_pid = 2 + len(devices)
        self._tid: dict[tuple[Track, str, int], int] = {}
        self._count: dict[int, int] = {}
        self._used = {1 + i for i in range(len(devices))}
        self._filed: dict[int, tuple[tuple[int, int], list[Span]]] = {}

    def pid(self, device: int) -> int:
        """Process of a device, or of the host."""
        self._used.add(self._pid[device])
        return self._pid[device]

    def slot(self, track: Track, suffix: str, lane: int) -> tuple[int, int]:
        """(pid, tid) of a lane of a track; `suffix` tells waves from tasks."""
        pid = self.pid(track.device)
        key = (track, suffix, lane)
        if key not in self._tid:
            self._count[pid] = self._tid[key] = self._count.get(pid, 0) + 1
        return pid, self._tid[key]

    def file(self, spans: list[Span], slot: tuple[int, int]) -> None:
        """Remember where the spans of one task are."""
        self._filed[spans[0].task] = (slot, spans)

    def anchor(self, task: int, at_ps: int) -> tuple[tuple[int, int], int]:
        """Slot of a task, and `at_ps` moved inside the slice that is there as it is written."""
        slot, spans = self._filed[task]
        span = next((s for s in reversed(spans) if s.start_ps <= at_ps), spans[0])
        last = span.start_ps + safe_duration_ps(span.start_ps, span.end_ps) - 1
        return slot, max(span.start_ps, min(at_ps, last))

    def use_rates(self) -> int:
        """Process under which link rates are counted."""
        self._used.add(self.rates_pid)
        return self.rates_pid

    def metadata(self) -> list[Event]:
        """Events that name and order all processes and threads used so far."""
        names = {pid: "host" if device == HOST_DEVICE else f"GPU {device}" for device, pid in self._pid.items()}
        names[self.rates_pid] = "links"
        events = []
        for pid in sorted(self._used):
            events.append(_meta(pid, None, "process_name", {"name": names[pid]}))
            events.append(_meta(pid, None, "process_sort_index", {"sort_index": pid}))
        # A lane stays beside its track, wherever it was opened.
        placed = sorted(self._tid.items(), key=lambda item: (self._pid[item[0][0].device], item[0]))
        for position, ((track, suffix, lane), tid) in enumerate(placed, 1):
            name = track_name(self.program, track) + suffix + (f" #{lane + 1}" if lane else "")
            pid = self._pid[track.device]
            events.append(_meta(pid, tid, "thread_name", {"name": name}))
            events.append(_meta(pid, tid, "thread_sort_index", {"sort_index": position}))
        return events


def _meta(pid: int, tid: int | None, name: str, args: Event) -> Event:
    event: Event = {"ph": "M", "pid": pid, "name": name, "args": args}
    return event if tid is None else event | {"tid": tid}


def microseconds(ps: int) -> float:
    """Microseconds of `ps`, a hair up where ``us * 1000`` would fall to the wrong side of a nanosecond or a half."""
    us = ps / 1e6
    while int(us * 1000.0) < ps // 1000 or int(us * 1000.0 + 0.5) < (ps + 500) // 1000:
        us = math.nextafter(us, math.inf)
    return us


def safe_duration_ps(start_ps: int, end_ps: int) -> int:
    """Duration to write, at most half a nanosecond below the true one.

    Viewers turn start and duration into whole nanoseconds, each by itself,
    and then drop a slice that overlaps its neighbour by the nanosecond that
    rounding made up.  This is the longest duration with which the end does
    not move past the rounded true end, whether a viewer rounds or truncates.
    """
    room_ns = (end_ps + 500) // 1000 - (start_ps + 500) // 1000
    return min(end_ps - start_ps, room_ns * 1000 + 499)

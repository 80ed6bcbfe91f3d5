"""Rectangles and labels of a Gantt chart, before any drawing library sees them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from overlapsim.engine.timeline import Timeline
from overlapsim.report.spans import HOST_DEVICE, Phase, Span, Track, task_name, task_spans, track_name
from overlapsim.schedule.program import BLOCKS, FLOW, HOST, Program

Int = npt.NDArray[np.int64]


class Bar(NamedTuple):
    """A rectangle of a row: ``[start_ps, end_ps)`` by ``[bottom, top)``, the row being [0, 1).

    `style` is a phase name for waiting, or the family of a running task.
    A solid bar is units running; a pale one the task around them.
    """

    row: int
    start_ps: int
    end_ps: int
    bottom: float
    top: float
    style: str
    solid: bool


class Label(NamedTuple):
    """Texts for one task, the fullest first: the first that fits is written; `running` tasks are dark below it."""

    row: int
    start_ps: int
    end_ps: int
    texts: tuple[str, ...]
    running: bool


class Rows(NamedTuple):
    """One panel: names of rows from top to bottom, and what is in them."""

    names: list[str]
    bars: list[Bar]
    labels: list[Label]
    num_hidden: int


WAITING: Final[Mapping[Phase, str]] = {
    "wait SM": "waiting for SMs",
    "spin": "spinning on SMs",
    "wait host": "host waiting",
}
"""Legend text of the phases in which a task does no work."""
LAUNCH: Final = "launch"
_NUMBER: Final = re.compile(r" \d+$")


def family_names(timelines: Mapping[str, Timeline]) -> tuple[list[str], list[str]]:
    """Sorted names of all operator families: those that compute, and those that communicate."""
    found: set[tuple[bool, str]] = set()
    for timeline in timelines.values():
        program = timeline.program
        ran = (timeline.t_start >= 0) & (program.kind != HOST)
        found |= {(program.kind[i] == FLOW, family(program, i)) for i in np.flatnonzero(ran).tolist()}
    return sorted(name for flow, name in found if not flow), sorted(name for flow, name in found if flow)


def family(program: Program, task: int) -> str:
    """Operator family of a task: what stands before the first dot of its name, and whether it moves data."""
    if program.kind[task] == HOST:
        return "host"
    # Blocks of a step bear the number of their stage.
    prefix = _NUMBER.sub("", program.op[task].split(".", 1)[0])
    if program.kind[task] == BLOCKS:
        return prefix or "compute"
    return f"{prefix} comm" if prefix else "communication"


def panel_rows(timeline: Timeline, sm_scale: Mapping[str, int], max_rows: int) -> Rows:
    """Rows of one timeline: streams by device, then host lanes.

    Parameters
    ----------
    timeline : Timeline
        With cohorts recorded, BLOCKS are drawn as their waves, as high as
        the SMs that they run on.
    sm_scale : dict from row name to int
        SMs that fill a row; see :func:`most_sms`.
    max_rows : int
        Further rows are left out and counted in `num_hidden`.
    """
    program = timeline.program
    spans = task_spans(timeline)
    devices = {track.device for track in spans if track.device != HOST_DEVICE}
    kept = list(spans)[:max_rows]
    names = [row_name(program, track, len(devices) > 1) for track in kept]
    bars: list[Bar] = []
    labels: list[Label] = []
    drawn: dict[int, int] = {}
    for row, track in enumerate(kept):
        for task in spans[track]:
            for span in task:
                bars.append(_span_bar(program, span, row))
                if span.phase == "run":
                    drawn[span.task] = row
                if span.phase == "run" or not span.ended:
                    texts, running = _texts(program, span.task), span.phase == "run"
                    labels.append(Label(row, span.start_ps, span.end_ps, texts, running))
    bars.extend(_cohort_bars(timeline, drawn, [sm_scale.get(name, 1) for name in names]))
    return Rows(names, bars, labels, len(spans) - len(kept))


def most_sms(timelines: Mapping[str, Timeline]) -> dict[str, int]:
    """Most SMs that any BLOCKS task uses at once, by row name: a smaller use leaves a gap that can be seen."""
    most: dict[str, int] = {}
    for timeline in timelines.values():
        program = timeline.program
        spans = task_spans(timeline)
        several = len({track.device for track in spans if track.device != HOST_DEVICE}) > 1
        for track, tasks in spans.items():
            name = row_name(program, track, several)
            blocks = [task[0].task for task in tasks if program.kind[task[0].task] == BLOCKS]
            most[name] = max([most.get(name, 1), *(min(int(program.sm[i]), int(program.units[i])) for i in blocks)])
    return most


def row_name(program: Program, track: Track, several_devices: bool) -> str:
    """Name of a row; the device is named when there is more than one."""
    name = track_name(program, track)
    return f"GPU {track.device}  {name}" if several_devices and track.device != HOST_DEVICE else name


def _span_bar(program: Program, span: Span, row: int) -> Bar:
    if span.phase == "run":
        host = program.kind[span.task] == HOST
        return Bar(row, span.start_ps, span.end_ps, 0.0, 1.0, family(program, span.task), host)
    style = LAUNCH if span.phase == "launch" else WAITING[span.phase]
    return Bar(row, span.start_ps, span.end_ps, 0.0, 1.0, style, span.phase == "launch")


def _texts(program: Program, task: int) -> tuple[str, ...]:
    """Name and tag, then ever shorter: a kernel keeps its name, a transfer the end of its tag ("group 2/4")."""
    op, words = program.op[task], program.tag[task].split()
    shorter = [" ".join(words[first:]) for first in range(len(words))]
    full = task_name(program, task) if op or words else ""
    texts = [full, *([op] if program.kind[task] != FLOW else []), *shorter]
    return tuple(dict.fromkeys(text for text in texts if text))


def _cohort_bars(timeline: Timeline, drawn: Mapping[int, int], scale: list[int]) -> Iterator[Bar]:
    """Solid bars: cohorts when recorded, else each task as one bar."""
    program, cohorts = timeline.program, timeline.cohorts
    if cohorts is None:
        for task, row in drawn.items():
            if program.kind[task] != HOST and timeline.t_end[task] >= 0:
                start, end = int(timeline.t_start[task]), int(timeline.t_end[task])
                top = min(1.0, min(int(program.sm[task]), int(program.units[task])) / scale[row])
                yield Bar(
                    row, start, end, 0.0, top if program.kind[task] == BLOCKS else 1.0, family(program, task), True
                )
        return
    places = [_SmPlaces(sms) for sms in scale]
    columns = (cohorts.task, cohorts.start_ps, cohorts.end_ps, cohorts.units)
    for task, start, end, units in zip(*(column.tolist() for column in columns), strict=True):
        if task not in drawn or program.kind[task] == HOST:
            continue
        row, style = drawn[task], family(program, task)
        if program.kind[task] == FLOW:
            yield Bar(row, start, end, 0.0, 1.0, style, True)
            continue
        for first, last in places[row].take(start, end, units):
            yield Bar(row, start, end, first / scale[row], last / scale[row], style, True)


class _SmPlaces:
    """Gives cohorts of one row the lowest free places, so that waves pile up without overlapping."""

    def __init__(self, num_sms: int) -> None:
        self._free_at = np.zeros(num_sms, np.int64)

    def take(self, start_ps: int, end_ps: int, units: int) -> list[tuple[int, int]]:
        """Ranges ``[first, last)`` of places for `units` that start together; starts must not fall."""
        mine = np.flatnonzero(self._free_at <= start_ps)[:units]
        self._free_at[mine] = end_ps
        if len(mine) == 0:
            return []
        breaks = np.flatnonzero(np.diff(mine) > 1)
        firsts = mine[np.concatenate([[0], breaks + 1])]
        lasts = mine[np.concatenate([breaks, [len(mine) - 1]])] + 1
        return list(zip(firsts.tolist(), lasts.tolist(), strict=True))

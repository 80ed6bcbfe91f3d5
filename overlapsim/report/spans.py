"""What each task did from eligible to end, as spans on tracks: the common ground of trace and plots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from overlapsim.engine.timeline import Timeline
from overlapsim.schedule.program import HOST, Program

Phase = Literal["launch", "wait host", "wait SM", "spin", "run"]
PHASES: Final[tuple[Phase, ...]] = ("launch", "wait host", "wait SM", "spin", "run")
HOST_DEVICE: Final = -1
"""Device number under which host lanes are filed."""


class Track(NamedTuple):
    """Where a span is drawn: a stream of a device, or a lane of the host (device :data:`HOST_DEVICE`)."""

    device: int
    number: int


@dataclass(frozen=True, slots=True)
class Span:
    """A task in one phase during ``[start_ps, end_ps)``.

    Attributes
    ----------
    task : int
    phase : Phase
        ``launch``: the host thread issues it.  ``wait host``: a HOST task
        waits for its edges.  ``wait SM``: eligible, no SM granted yet.
        ``spin``: SMs held, waiting for peers or flags.  ``run``: from the
        first unit's start to the last one's end.
    start_ps, end_ps : int
    ended : bool
        False when the task is in this phase for ever (a deadlock); `end_ps`
        is then :func:`horizon_ps`.
    """

    task: int
    phase: Phase
    start_ps: int
    end_ps: int
    ended: bool = True


def last_instant_ps(timeline: Timeline) -> int:
    """Latest instant at which anything happened; the end of the timeline when every task ended."""
    instants = (timeline.t_issued, timeline.t_eligible, timeline.t_resident, timeline.t_start, timeline.t_end)
    last = max(int(values.max(initial=0)) for values in instants)
    if timeline.cohorts is not None:
        last = max(last, int(timeline.cohorts.end_ps.max(initial=0)))
    return last


def horizon_ps(timeline: Timeline) -> int:
    """Where drawings end: the last instant; for a deadlock a twentieth more, so that what never ends can be seen."""
    last = last_instant_ps(timeline)
    return last if timeline.complete else last + max(1, last // 20)


def task_tracks(program: Program) -> list[Track]:
    """Track of each task: its stream on the device of its pool, or its host lane."""
    device, lane = program.pool_device, program.task_lane
    return [
        Track(HOST_DEVICE, int(lane[i])) if kind == HOST else Track(int(device[program.pool[i]]), stream)
        for i, (kind, stream) in enumerate(zip(program.kind.tolist(), program.stream.tolist(), strict=True))
    ]


def task_spans(timeline: Timeline) -> dict[Track, list[list[Span]]]:
    """Spans of every task that got anywhere, by track.

    Empty phases are left out, except the run of a HOST task that takes no
    time.

    Parameters
    ----------
    timeline : Timeline
        Complete or deadlocked.

    Returns
    -------
    dict from Track to list of list of Span
        Devices by number, then the host; per track one list of adjoining
        spans for each task, in the order of tasks.  Launches are filed
        under their host lane as lists of their own.
    """
    program = timeline.program
    horizon = horizon_ps(timeline)
    tracks = task_tracks(program)
    found: dict[Track, list[list[Span]]] = {}
    lanes, launches, kinds = program.task_lane.tolist(), program.launch_ps.tolist(), program.kind.tolist()
    instants = zip(
        timeline.t_issued.tolist(),
        timeline.t_eligible.tolist(),
        timeline.t_resident.tolist(),
        timeline.t_start.tolist(),
        timeline.t_end.tolist(),
        strict=True,
    )
    for i, (issued, eligible, resident, start, end) in enumerate(instants):
        if launches[i] > 0 and issued >= 0:
            found.setdefault(Track(HOST_DEVICE, lanes[i]), []).append([Span(i, "launch", issued - launches[i], issued)])
        if kinds[i] == HOST:
            marks: list[tuple[Phase, int, int]] = [("wait host", issued, start), ("run", start, end)]
        else:
            marks = [("wait SM", eligible, resident), ("spin", resident, start), ("run", start, end)]
        spans = []
        for phase, begin, finish in marks:
            if begin < 0:
                break
            if finish > begin or finish < 0 or (phase == "run" and kinds[i] == HOST):
                spans.append(Span(i, phase, begin, horizon if finish < 0 else finish, finish >= 0))
        if spans:
            found.setdefault(tracks[i], []).append(spans)
    return {track: found[track] for track in sorted(found, key=lambda t: (t.device == HOST_DEVICE, t))}


def task_name(program: Program, task: int) -> str:
    """Name for people: operator and tag, said once where the tag holds the operator; or the task's number."""
    op, tag = program.op[task], program.tag[task]
    if op and op in tag.split():
        return tag
    return " ".join(part for part in (op, tag) if part) or f"task {task}"


def track_name(program: Program, track: Track) -> str:
    """Name for people of a stream or host lane."""
    if track.device == HOST_DEVICE:
        return f"host lane {track.number}"
    return program.stream_name[track.number] or f"stream {track.number}"

"""Phases of tasks."""

from __future__ import annotations

from overlapsim.engine.reference import run
from overlapsim.report.spans import HOST_DEVICE, Track, horizon_ps, last_instant_ps, task_name, task_spans, track_name
from tests.report import samples


def as_text(spans: object) -> list[str]:
    assert isinstance(spans, list)
    return [f"{s.task} {s.phase} {s.start_ps}-{s.end_ps}{'' if s.ended else ' open'}" for task in spans for s in task]


def test_waiting_for_sms_and_a_launch() -> None:
    found = task_spans(run(samples.steal()))
    assert list(found) == [Track(0, 0), Track(0, 1), Track(HOST_DEVICE, 0)]
    assert as_text(found[Track(0, 0)]) == ["0 run 0-320"]
    assert as_text(found[Track(0, 1)]) == ["1 wait SM 50-100", "1 run 100-220"]
    assert as_text(found[Track(HOST_DEVICE, 0)]) == ["1 launch 0-50"]


def test_spinning_for_a_peer() -> None:
    found = task_spans(run(samples.skew()))
    assert as_text(found[Track(0, 0)]) == ["0 spin 0-500", "0 run 500-760"]
    assert as_text(found[Track(1, 2)]) == ["2 run 0-500", "3 run 500-760"]


def test_a_host_that_waits() -> None:
    found = task_spans(run(samples.host_lane()))
    assert as_text(found[Track(HOST_DEVICE, 0)]) == [
        "0 launch 0-5",
        "1 launch 5-10",
        "2 wait host 10-49",
        "2 run 49-52",
        "3 launch 52-57",
    ]


def test_what_never_ends_is_drawn_a_little_past_the_last_instant() -> None:
    timeline = run(samples.deadlock())
    assert (last_instant_ps(timeline), horizon_ps(timeline)) == (0, 1)
    found = task_spans(timeline)
    assert [as_text(found[track])[0] for track in found] == [
        "0 spin 0-1 open",
        "1 wait SM 0-1 open",
        "2 spin 0-1 open",
        "3 wait SM 0-1 open",
    ]
    later = samples.timeline_of(samples.steal(), [(0, 0, 0, 0, 4000), (50, 50, -1, -1, -1)])
    assert as_text(task_spans(later)[Track(0, 1)]) == ["1 wait SM 50-4200 open"]


def test_a_task_that_was_never_eligible_has_no_span() -> None:
    timeline = samples.timeline_of(samples.steal(), [(0, 0, 0, 0, 320), (-1, -1, -1, -1, -1)])
    assert list(task_spans(timeline)) == [Track(0, 0)]


def test_names() -> None:
    program = samples.signal()
    assert task_name(program, 0) == "mlp.fc2 fwd gemm"
    assert track_name(program, Track(0, 1)) == "comm"
    unnamed = samples.late_worker()
    assert task_name(unnamed, 2) == "task 2"
    assert track_name(unnamed, Track(0, 2)) == "stream 2"
    assert track_name(unnamed, Track(HOST_DEVICE, 3)) == "host lane 3"

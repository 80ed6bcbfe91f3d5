"""Chrome traces that lose nothing in a viewer."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.engine import compiled
from overlapsim.engine.reference import run
from overlapsim.engine.timeline import Timeline
from overlapsim.errors import UsageError
from overlapsim.report.arrows import progress_arrows
from overlapsim.report.spans import task_spans, task_tracks
from overlapsim.report.threads import microseconds, safe_duration_ps
from overlapsim.report.trace import chrome_trace, write_trace
from overlapsim.schedule.program import BLOCKS, Program
from overlapsim.testing.programs import random_program
from overlapsim.testing.traces import check_trace, kept_slices, slices_of
from tests.report import samples


def events_of(timeline: Timeline, **options: Any) -> list[dict[str, Any]]:
    document = json.loads(chrome_trace(timeline, **options))
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def slower(program: Program, factor: int) -> Program:
    """The same program with all times `factor` longer, or by less where a timeline would pass an hour."""
    factor = max(1, min(factor, 10**10 // int(program.unit_ps.max())))
    return replace(
        program,
        unit_ps=program.unit_ps * factor,
        launch_ps=program.launch_ps * factor,
        edge_lag_ps=program.edge_lag_ps * factor,
        demand_amount=program.demand_amount * factor,
    )


# Odd factors put instants between whole nanoseconds, where viewers round.
@pytest.mark.parametrize("factor", [1, 37, 1001, 1234567])
@pytest.mark.parametrize("seed", range(25))
def test_nothing_is_lost(seed: int, factor: int) -> None:
    program = slower(random_program(seed), factor)
    recorded, plain = run(program, record=True), run(program)
    num_spans = sum(len(task) for tasks in task_spans(recorded).values() for task in tasks)
    assert recorded.cohorts is not None
    num_waves = int((program.kind[recorded.cohorts.task] == BLOCKS).sum())
    tracks = task_tracks(program)
    for events, num_slices in (
        (events_of(plain), num_spans),
        (events_of(recorded), num_spans),
        (events_of(recorded, detail="cohorts"), num_spans + num_waves),
    ):
        assert check_trace(events) == []
        slices, _ = slices_of(events)
        assert len(slices) == kept_slices(slices) == num_slices
        count = Counter(event["ph"] for event in events)
        arrows = [a for a in progress_arrows(recorded) if tracks[a.src] != tracks[a.dst]]
        assert count["s"] == count["f"] == len(arrows)


@pytest.mark.parametrize("seed", [3, 8, 21])
def test_instants_come_back_exactly(seed: int) -> None:
    timeline = run(slower(random_program(seed), 1234567))
    shown: dict[tuple[int, str], tuple[int, int]] = {}
    for event in events_of(timeline):
        if event["ph"] == "X":
            args = event["args"]
            assert round(event["ts"] * 1e6) == args["start_ps"]
            assert 0 <= args["end_ps"] - args["start_ps"] - round(event["dur"] * 1e6) <= 501
            shown[args["task"], event["cat"]] = (args["start_ps"], args["end_ps"])
    for tasks in task_spans(timeline).values():
        for span in (span for task in tasks for span in task if span.phase != "run"):
            assert shown[span.task, span.phase] == (span.start_ps, span.end_ps)
    for task in (timeline.t_end >= 0).nonzero()[0].tolist():
        kind = ("blocks", "flow", "host")[timeline.program.kind[task]]
        assert shown[task, kind] == (timeline.t_start[task], timeline.t_end[task])


@given(st.integers(0, 10**15), st.integers(0, 10**10), st.integers(0, 10**10))
@settings(max_examples=300)
def test_rounding_never_makes_neighbours_overlap(start: int, first: int, second: int) -> None:
    middle, end = start + first, start + first + second
    clocks = (lambda us: int(us * 1000.0), lambda us: int(us * 1000.0 + 0.5), lambda us: round(us * 1e6))
    for clock in clocks:
        for a, b in ((start, middle), (middle, end), (start, end)):
            assert clock(microseconds(a)) + clock(microseconds(safe_duration_ps(a, b))) <= clock(microseconds(b))
    assert first - safe_duration_ps(start, middle) <= 501


def test_whole_nanoseconds_stay_whole() -> None:
    # 1.001 us times 1000 is 1000.9999999999999 in floats.
    for ns in range(5000):
        assert int(microseconds(ns * 1000) * 1000.0) == ns
        assert int(microseconds(ns * 1000 + 500) * 1000.0 + 0.5) == ns + 1


def test_what_a_reader_sees() -> None:
    events = events_of(run(samples.steal(), record=True), title="golden 3")
    names = {
        (event["pid"], event.get("tid")): event["args"]["name"] for event in events if event["name"].endswith("_name")
    }
    assert names == {(1, None): "GPU 0", (1, 1): "compute", (1, 2): "comm", (2, None): "host", (2, 1): "host lane 0"}
    slices = [(names[e["pid"], e["tid"]], e["name"], e["ts"]) for e in events if e["ph"] == "X"]
    assert slices == [
        ("host lane 0", "launch mlp.fc1 all_reduce", 0.0),
        ("compute", "mlp.fc1", 0.0),
        ("comm", "wait SM", 0.00005),
        ("comm", "mlp.fc1 all_reduce", 0.0001),
    ]
    counters = [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert counters[:2] == [
        ("SMs in use, sms", 0.0, {"compute": 4, "communication": 0}),
        ("SMs in use, sms", 0.0001, {"compute": 2, "communication": 2}),
    ]


def test_args_arrows_and_rates() -> None:
    events = events_of(run(samples.signal(), record=True))
    flow = next(e for e in events if e["ph"] == "X" and e["name"] == "mlp.fc2 group 1/2")
    assert flow["args"] == {
        "task": 1, "op": "mlp.fc2", "tag": "group 1/2", "units": 1, "unit_ps": 150, "sm": 1,
        "bytes": {"nvlink_out[0]": 15.0}, "start_ps": 110, "end_ps": 260,
    }  # fmt: skip
    arrows = [(e["id"], e["ph"], e["ts"]) for e in events if e["ph"] in "sf"]
    assert arrows == [(1, "s", 0.000099), (1, "f", 0.00011), (2, "s", 0.000299), (2, "f", 0.00031)]
    assert [e.get("bp") for e in events if e["ph"] in "sf"] == [None, "e", None, "e"]
    rates = [(e["ts"], e["args"]) for e in events if e["ph"] == "C" and e["name"] == "nvlink_out[0]"]
    assert rates == [
        (0.00011, {"bytes/s": 1e11}),
        (0.00026, {"bytes/s": 0.0}),
        (0.00031, {"bytes/s": 1e11}),
        (0.00036, {"bytes/s": 0.0}),
    ]
    plain = [e["args"] for e in events_of(run(samples.signal())) if e["ph"] == "C"]
    assert {key for args in plain for key in args} == {"compute (at most)", "communication", "bytes/s (mean)"}


def test_waves_have_threads_of_their_own() -> None:
    events = events_of(run(samples.steal(), record=True), detail="cohorts")
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["compute", "compute waves", "compute waves #2", "comm", "host lane 0"]
    waves = [e["name"] for e in events if e.get("cat") == "wave"]
    assert waves == ["mlp.fc1 x4", "mlp.fc1 x2", "mlp.fc1 x2", "mlp.fc1 x2"]


def test_overlapping_tasks_of_one_stream_get_a_second_lane() -> None:
    program = samples.signal()
    timeline = samples.timeline_of(program, [(0, 0, 0, 0, 300), (0, 100, 100, 110, 400), (0, 200, 350, 350, 500)])
    events = events_of(timeline)
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["compute", "comm", "comm #2"]
    assert check_trace(events) == []


def test_a_deadlock_shows_who_waits() -> None:
    document = json.loads(chrome_trace(run(samples.deadlock(), record=True)))
    assert document["otherData"]["deadlock"] is True
    events = document["traceEvents"]
    assert check_trace(events) == []
    waiting = [(e["name"], e["args"]["tag"], e["args"]["never_ends"]) for e in events if e["ph"] == "X"]
    assert waiting == [("spin", "b0", True), ("wait SM", "b1", True), ("spin", "b1", True), ("wait SM", "b0", True)]


def test_pools_of_one_name_on_one_device_have_counters_of_their_own() -> None:
    program = replace(samples.skew(), pool_device=samples.skew().pool_device * 0)
    names = {e["name"] for e in events_of(run(program)) if e["ph"] == "C"}
    assert names == {"SMs in use, sms (pool 0)", "SMs in use, sms (pool 1)"}


def test_equal_timelines_give_equal_bytes(tmp_path: Path) -> None:
    program = random_program(11)
    one, two = run(program, record=True), run(random_program(11), record=True)
    assert chrome_trace(one, detail="cohorts") == chrome_trace(two, detail="cohorts")
    plain, packed, again = tmp_path / "a.json", tmp_path / "a.json.gz", tmp_path / "b.json.gz"
    write_trace(one, plain, title="t")
    write_trace(one, packed, title="t")
    write_trace(two, again, title="t")
    assert plain.read_bytes() == chrome_trace(one, title="t")
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert packed.read_bytes() == again.read_bytes()
    assert packed.read_bytes()[4:8] == bytes(4)  # no date


def test_an_empty_program_is_an_empty_trace() -> None:
    empty = run(samples.ProgramBuilder().freeze(), record=True)
    assert events_of(empty) == []


def test_refusals(tmp_path: Path) -> None:
    timeline = run(samples.steal())
    with pytest.raises(UsageError, match="record=True"):
        chrome_trace(timeline, detail="cohorts")
    with pytest.raises(UsageError, match="'waves'"):
        chrome_trace(timeline, detail="waves")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"missing/x\.json"):
        write_trace(timeline, tmp_path / "missing" / "x.json")


def test_traces_need_no_plotting_library() -> None:
    code = "import sys, overlapsim.report.trace; print('matplotlib' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize("seed", range(10))
def test_both_engines_give_the_same_trace(seed: int) -> None:
    program = random_program(seed)
    fast, readable = compiled.run(program, record=True), run(program, record=True)
    assert chrome_trace(fast, detail="cohorts") == chrome_trace(readable, detail="cohorts")

"""The checker finds what it is for."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from overlapsim.testing.traces import check_trace, kept_slices, slices_of

NAMES = [
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "GPU 0"}},
    {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "compute"}},
    {"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": {"name": "comm"}},
]


def x(ts: float, dur: float, tid: int = 1, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": tid, "name": "k", "ts": ts, "dur": dur} | more


def arrow(ph: str, ts: float, tid: int = 1, number: int = 7) -> dict[str, Any]:
    return {"ph": ph, "pid": 1, "tid": tid, "ts": ts, "id": number, "cat": "edge", "name": "edge", "bp": "e"}


def counter(ts: float, value: object = 1.0) -> dict[str, Any]:
    return {"ph": "C", "pid": 1, "name": "SMs", "ts": ts, "args": {"sm": value}}


GOOD = [
    *NAMES,
    x(0.0, 10.0),
    x(2.0, 3.0),  # nested
    x(5.0, 5.0),  # ends with its parent
    x(10.0, 1.5),  # touches
    {"ph": "B", "pid": 1, "tid": 2, "name": "outer", "ts": 0.0},
    {"ph": "B", "pid": 1, "tid": 2, "name": "inner", "ts": 1.0},
    {"ph": "E", "pid": 1, "tid": 2, "ts": 2.0},
    {"ph": "E", "pid": 1, "tid": 2, "ts": 4.0},
    arrow("s", 1.0, tid=1),
    arrow("f", 2.0, tid=2),
    counter(1.0),
    counter(1.0, 2),
    counter(3.0),
]


def test_a_good_trace_has_no_faults() -> None:
    assert check_trace(GOOD) == []
    slices, faults = slices_of(GOOD)
    assert faults == []
    assert [(s.name, s.ts, s.dur) for s in slices][-2:] == [("outer", 0.0, 4.0), ("inner", 1.0, 1.0)]
    assert kept_slices(slices) == len(slices) == 6


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        ([x(11.0, 1.0)], "partly overlaps"),
        # 0.6 + 1.6 ns touches 2.2 ns, yet rounds to [1, 3) and [2, 3).
        ([x(20.0006, 0.0016), x(20.0022, 0.0049)], r"ns \(rounded\)"),
        # Nested from 0.9 to 3.1 ns in picoseconds, and rounded; truncated the child [1, 3) leaves its parent [0, 2).
        ([x(30.0009, 0.0022), x(30.001, 0.0021)], r"ns \(truncated\)"),
        ([x(50.0, 1.0, tid=0)], "tid 0"),
        ([{"ph": "X", "pid": 1, "name": "k", "ts": 50.0, "dur": 1.0}], "tid 0"),
        ([x(50.0, -1.0)], "dur is -1.0"),
        ([x(-50.0, 1.0)], "ts is -50.0"),
        ([x(float("nan"), 1.0)], "ts is nan"),
        ([{"ph": "X", "pid": 1, "tid": 1, "name": "k", "ts": 5.0}], "dur is None"),
        ([{"ph": "X", "tid": 1, "name": "k", "ts": 5.0, "dur": 1.0}], "no pid"),
        ([x(50.0, 1.0, tid=9)], "tid 9 has no thread_name"),
        ([x(50.0, 1.0, pid=9)], "pid 9 has no process_name"),
        ([{"ph": "B", "pid": 1, "tid": 2, "name": "open", "ts": 50.0}], "B without E"),
        ([{"ph": "E", "pid": 1, "tid": 2, "ts": 50.0}], "E without B"),
        ([arrow("s", 1.0, number=8)], "1 starts and 0 ends"),
        ([arrow("f", 1.0)], "1 starts and 2 ends"),
        ([arrow("s", 3.0, number=8), arrow("f", 2.0, number=8)], "before it leaves"),
        ([arrow("s", 11.0, number=8), arrow("f", 60.0, number=8)], "no slice at 60.0"),
        ([counter(2.0)], "goes back from 3.0 to 2.0"),
        ([counter(9.0, "many")], "expected numbers"),
    ],
)
def test_bad_traces(bad: list[dict[str, Any]], fault: str) -> None:
    faults = check_trace([*GOOD, *bad])
    assert any(re.search(fault, line) for line in faults), faults


def test_kept_slices_agree_with_the_real_importer() -> None:
    # Perfetto v52 kept 18,525 of these (ui.perfetto.dev's trace processor, counted by SQL).
    draw = random.Random(1)
    at, events = 0, []
    for _ in range(20000):
        length = draw.randint(1, 5000)
        events.append(x(at / 1e6, length / 1e6))
        at += length
    slices, _ = slices_of(events)
    assert kept_slices(slices) == 18525

"""Idle time of equal blocks in the compiled engine against the published closed forms, to the picosecond."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.schedule.pipeline_bubbles import StageTimes
from overlapsim.schedule.pipeline_kinds import SCHEDULES, make_schedule
from tests.schedule.pipelines import bubble, run, table

EQUAL = StageTimes(1000, 1000, 1000)
durations = st.integers(1, 40)
devices = st.integers(1, 7)


@st.composite
def any_times(draw: st.DrawFn) -> StageTimes:
    return StageTimes(draw(durations), draw(durations), draw(durations))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@settings(deadline=None)
@given(p=devices, m=st.integers(1, 20), t=any_times())
def test_gpipe_and_1f1b(name: str, p: int, m: int, t: StageTimes) -> None:
    assert bubble(make_schedule(name, p, m), t) == (p - 1) * (t.forward + t.backward)


@settings(deadline=None)
@given(p=devices, v=st.integers(2, 5), groups=st.integers(1, 4), t=any_times())
def test_interleaved(p: int, v: int, groups: int, t: StageTimes) -> None:
    schedule = make_schedule("interleaved", p, p * groups, stages_per_device=v)
    assert bubble(schedule, t) == (p - 1) * (t.forward + t.backward)  # of one stage: 1/v of what a device holds


@settings(deadline=None)
@given(p=devices, rounds=st.integers(2, 5), t=any_times())
def test_zero_bubble(p: int, rounds: int, t: StageTimes) -> None:
    f, i, w = t.forward, t.input_grad, t.weight_grad
    m = rounds * p
    h1, h2 = (bubble(make_schedule(name, p, m), t) for name in ("zb_h1", "zb_h2"))
    if w <= f:
        assert h1 == (p - 1) * (f + t.backward - 2 * w)
        if f + i >= 2 * w:
            assert h2 == (p - 1) * (f + t.backward - 3 * w)
    # Beyond what was published, too.
    assert h1 == (p - 1) * max(f + i - w, i)
    assert h2 == (p - 1) * max(f + i - 2 * w, i - f, 0)


@settings(deadline=None)
@given(p=devices, more=st.integers(0, 12), equal=durations)
def test_zbv_has_none(p: int, more: int, equal: int) -> None:
    assert bubble(make_schedule("zbv", p, 2 * p - 1 + more), StageTimes(equal, equal, equal)) == 0


@settings(deadline=None)
@given(half=st.integers(1, 4), more=st.integers(0, 6), f=durations, w=durations, short=st.integers(0, 20))
def test_dualpipe(half: int, more: int, f: int, w: int, short: int) -> None:
    """Exact where a forward takes as long as an input gradient, and pairs save nothing or are few."""
    w = min(f, w)
    for saved in {0, min(short, f)} if half <= 2 else {0}:
        t = StageTimes(f, f, w, pair=2 * f + w - saved)
        form = (half - 1) * (t.joint + t.backward - 3 * w)
        m = 2 * (2 * half + more)
        assert bubble(make_schedule("dualpipe", 2 * half, m), t) == form
        # Folded in the middle: as many stages on half of the devices.
        assert bubble(make_schedule("dualpipev", half, m // 2), t) == form


@settings(deadline=None)
@given(half=st.integers(3, 5), f=st.integers(10, 40), w=durations, saved=st.integers(1, 10))
def test_shorter_pairs_leave_less_than_the_published_bubble(half: int, f: int, w: int, saved: int) -> None:
    w = min(f, w)
    t = StageTimes(f, f, w, pair=2 * f + w - saved)
    assert bubble(make_schedule("dualpipe", 2 * half, 4 * half), t) <= (half - 1) * (t.joint + t.backward - 3 * w)


@pytest.mark.parametrize("name", [name for name, kind in SCHEDULES.items() if kind.bubble is not None])
def test_closed_forms_of_the_registry_hold_where_they_are_given(name: str) -> None:
    form = SCHEDULES[name].bubble
    assert form is not None
    given_forms = 0
    v = SCHEDULES[name].stages_per_device or 3
    for p in (2, 4, 6):
        for t in (EQUAL, StageTimes(1000, 1000, 400), StageTimes(700, 1100, 600), StageTimes(600, 500, 900)):
            schedule = make_schedule(name, p, 4 * p, stages_per_device=SCHEDULES[name].stages_per_device or v)
            published = form(p, v, t)
            if published is not None:
                given_forms += 1
                assert bubble(schedule, t) == published
    assert given_forms >= 3


def test_f10_interleaved_against_dualpipe() -> None:
    """B = 2 F = 2 W: the question of DualPipe issue 15, both formulas exactly, and which is smaller when.

    "Smaller for vpp > 3" is the limit of many devices: exactly it is
    ``vpp > 3 (pp - 1) / (pp - 2)``, so that 4 stages a device win from 6 devices on.
    """
    f = 840  # of a device's whole share of the model; 1 .. 8 divide it
    whole = StageTimes(f, f, f)
    for pp in (2, 4, 6, 8):
        for acc in (2 * pp, 3 * pp, 4 * pp):
            dual = bubble(make_schedule("dualpipe", pp, acc), whole)
            assert dual == (pp - 2) * f
            work = acc * 3 * f
            assert dual * 3 * acc == (pp - 2) * work  # 1/3 (pp - 2) / acc of the work, as the issue has it
            for vpp in (2, 3, 4, 5, 6, 7, 8):
                stage = StageTimes(f // vpp, f // vpp, f // vpp)
                inter = bubble(make_schedule("interleaved", pp, acc, stages_per_device=vpp), stage)
                assert inter * vpp == (pp - 1) * 3 * f
                assert inter * vpp * acc == (pp - 1) * work  # 1/vpp (pp - 1) / acc
                assert (inter < dual) == (vpp * (pp - 2) > 3 * (pp - 1))
    assert 4 * (4 - 2) <= 3 * (4 - 1)  # so on 4 devices DualPipe is ahead of 4 stages a device
    assert 4 * (6 - 2) > 3 * (6 - 1)


def test_order_of_the_family_at_equal_times() -> None:
    """What the zero-bubble paper's comparison says at F = I = W: 1, 1/3, 0, 0 of the bubble of 1F1B."""
    p, m = 4, 12
    full = bubble(make_schedule("1f1b", p, m), EQUAL)
    assert full == 3 * bubble(make_schedule("zb_h1", p, m), EQUAL)
    assert bubble(make_schedule("zb_h2", p, m), EQUAL) == bubble(make_schedule("zbv", p, m), EQUAL) == 0


def test_pairs_hide_what_they_save() -> None:
    """Interleaved with pairs: each pair of the steady state is one block, so a shorter block shortens the step."""
    p, m, v = 4, 16, 2
    schedule = make_schedule("interleaved_pairs", p, m, stages_per_device=v)
    serial = run(schedule, table(schedule, EQUAL, joint=False)).timeline.end_ps
    alike = run(schedule, table(schedule, EQUAL)).timeline.end_ps
    quicker = run(schedule, table(schedule, StageTimes(1000, 1000, 1000, pair=2400))).timeline.end_ps
    num_pairs = [int(schedule.paired[schedule.ptr[d] : schedule.ptr[d + 1]].sum()) for d in range(p)]
    assert serial <= alike
    assert quicker <= alike - 600 * min(num_pairs)

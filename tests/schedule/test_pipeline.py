"""Schedules as data: every action once, no deadlock, what they keep alive, and refusals with one reason."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.errors import DeadlockError, LayoutError, PlanError
from overlapsim.schedule.pipeline import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    WEIGHT_GRAD,
    Action,
    PipelineSchedule,
    Slot,
)
from overlapsim.schedule.pipeline_bubbles import StageTimes
from overlapsim.schedule.pipeline_check import check_schedule
from overlapsim.schedule.pipeline_kinds import SCHEDULES, make_schedule
from overlapsim.schedule.pipeline_memory import peak_in_flight, peak_kept, peak_put_off
from tests.schedule.pipelines import run, table

TIMES = StageTimes(70, 110, 60)


def text(schedule: PipelineSchedule, device: int) -> str:
    return " ".join("&".join(map(str, slot)) for slot in schedule.slots(device))


def accepts(name: str, p: int, m: int, v: int | None) -> bool:
    """What each schedule demands, said a second time."""
    if name.startswith("interleaved"):
        return v is not None and v >= 2 and m % p == 0
    if name == "zbv":
        return v in (None, 2) and m >= 2 * p - 1
    if name == "dualpipev":
        return v in (None, 2) and m >= 2 * p
    if name == "dualpipe":
        return v in (None, 1) and p % 2 == 0 and m % 2 == 0 and m >= 2 * p
    return v in (None, 1)


@settings(deadline=None, max_examples=300)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    p=st.integers(1, 8),
    m=st.integers(1, 34),
    v=st.sampled_from([None, 1, 2, 2, 3, 4]),
)
def test_accepted_schedules_run_and_others_are_refused(name: str, p: int, m: int, v: int | None) -> None:
    if not accepts(name, p, m, v):
        with pytest.raises(LayoutError) as refused:
            make_schedule(name, p, m, stages_per_device=v)
        assert str(refused.value).count("expected") <= 1  # one reason
        return
    schedule = make_schedule(name, p, m, stages_per_device=v)
    check_schedule(schedule)
    kind = SCHEDULES[name]
    per_device = kind.stages_per_device or v or 1
    assert (schedule.num_devices, schedule.num_micro_batches, schedule.num_copies) == (p, m, kind.copies)
    assert schedule.num_stages == p * per_device
    assert bool((schedule.kind == WEIGHT_GRAD).any()) <= kind.splits_backward
    assert bool(schedule.paired.any()) <= kind.has_pairs
    # Every stage forwards and backwards every micro-batch: each device works m times through its share.
    done = run(schedule, table(schedule, TIMES))
    work = m * per_device * (TIMES.forward + TIMES.backward)
    assert [busy for _, _, busy in done.spans()] == [work] * p


@settings(deadline=None, max_examples=100)
@given(p=st.integers(1, 5), m=st.integers(1, 30), v=st.integers(2, 4), group=st.integers(1, 12), pairs=st.booleans())
def test_groups_of_micro_batches(p: int, m: int, v: int, group: int, pairs: bool) -> None:
    name = "interleaved_pairs" if pairs else "interleaved"
    if group < p or 0 < m % group < p:
        with pytest.raises(LayoutError, match="group"):
            make_schedule(name, p, m, stages_per_device=v, group_size=group)
        return
    check_schedule(make_schedule(name, p, m, stages_per_device=v, group_size=group))


def test_orders_as_published() -> None:
    assert text(make_schedule("gpipe", 2, 2), 1) == "1F0 1F1 1B0 1B1"
    assert text(make_schedule("1f1b", 4, 5), 1) == "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4"
    # Megatron: 2 (p - d - 1) + (v - 1) p forwards ahead, groups of p through one stage and then the next.
    assert text(make_schedule("interleaved", 2, 4, stages_per_device=2), 0) == (
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    )
    assert text(make_schedule("interleaved_pairs", 2, 4, stages_per_device=2), 1) == (
        "1F0 1F1 3F0 3F1&3B0 1F2&3B1 1F3&1B0 3F2&1B1 3F3&3B2 3B3 1B2 1B3"
    )
    assert text(make_schedule("zb_h1", 3, 4), 0) == "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3"
    assert text(make_schedule("zb_h1", 3, 4), 2) == "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3"
    assert text(make_schedule("zb_h2", 2, 3), 0) == "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2"
    assert text(make_schedule("zb_h2", 2, 3), 1) == "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"


def test_dualpipe_is_symmetric_and_placed_at_both_ends() -> None:
    p, m = 4, 10
    s = make_schedule("dualpipe", p, m)
    assert s.placement.tolist() == [[0, 1, 2, 3], [3, 2, 1, 0]]
    assert s.copy_of.tolist() == [0] * 5 + [1] * 5
    assert s.hosts(1) == [(0, 1), (1, 2)]

    def mirrored(action: Action) -> Action:
        return action._replace(micro_batch=(action.micro_batch + 5) % 10)

    for device in range(p):
        mirror = [tuple(mirrored(action) for action in slot) for slot in s.slots(p - 1 - device)]
        assert list(s.slots(device)) == mirror


def test_what_is_kept_as_published() -> None:
    """In activations of one stage: Megatron's and the zero-bubble papers' tables, and the DualPipe repository's."""
    p, m, v = 4, 16, 3
    assert peak_kept(make_schedule("gpipe", p, m)).tolist() == [m] * p
    assert peak_kept(make_schedule("1f1b", p, m)).tolist() == [p, p - 1, p - 2, p - 3]
    # 1 + (p - 1) / (p v) of 1F1B, a stage being 1/v of a device's share.
    interleaved = peak_kept(make_schedule("interleaved", p, m, stages_per_device=v))
    assert interleaved.max() / v == pytest.approx(p * (1 + (p - 1) / (p * v)))
    assert interleaved.tolist() == [p * v + p - 1 - 2 * d for d in range(p)]
    assert peak_kept(make_schedule("zb_h1", p, m)).tolist() == [p] * p
    assert peak_kept(make_schedule("zb_h2", p, m)).tolist() == [2 * p - 1] * p
    assert peak_kept(make_schedule("zbv", p, m)).tolist() == [2 * p] * p  # halves of a device's share
    assert peak_kept(make_schedule("dualpipe", p, m)).tolist() == [p + 1] * p
    assert peak_kept(make_schedule("dualpipev", p, m)).tolist() == [2 * p + 1] * p


def test_weight_gradients_that_wait() -> None:
    p, m = 4, 16
    h1 = make_schedule("zb_h1", p, m)
    assert peak_in_flight(h1).tolist() == [[4, 3, 2, 1]]
    assert peak_put_off(h1).tolist() == [[1, 2, 3, 4]]
    assert peak_put_off(make_schedule("1f1b", p, m)).tolist() == [[0] * p]
    # Half of it is freed with the input gradient: less than p whole ones on devices that put off.
    kept = peak_kept(h1, 1.0, 0.5)
    assert kept[0] == p
    assert all(kept[1:] < p)
    # By stage: the last one also keeps logits.
    assert peak_kept(make_schedule("1f1b", p, m), [1, 1, 1, 10]).tolist() == [4, 3, 2, 10]
    dual = make_schedule("dualpipe", p, m)
    assert peak_in_flight(dual).tolist() == [[4, 3, 2, 1]] * 2
    with pytest.raises(PlanError, match="one for each of 4 stages"):
        peak_kept(h1, [1.0, 2.0])


def test_peak_matches_a_replay() -> None:
    s = make_schedule("dualpipev", 3, 7)
    for device in range(s.num_devices):
        kept = peak = 0.0
        for slot in s.slots(device):
            for kind, stage, _ in slot:
                cost, late = 1.0 + stage, 0.25 * (1 + stage)
                kept += {FORWARD: cost, BACKWARD: -cost, INPUT_GRAD: late - cost, WEIGHT_GRAD: -late}[kind]
                peak = max(peak, kept)
        assert kept == 0
        stages = np.arange(1.0, 1.0 + s.num_stages)
        assert peak_kept(s, stages, 0.25 * stages)[device] == peak


def broken(slots: list[list[Slot]], **changes: object) -> PipelineSchedule:
    arguments = {"placement": [list(range(len(slots)))], "copy_of": [0], **changes}
    return PipelineSchedule.of_slots("mine", slots, **arguments)  # type: ignore[arg-type]


F0, B0, I0, W0 = (Action(kind, 0, 0) for kind in (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD))
F1, B1 = Action(FORWARD, 1, 0), Action(BACKWARD, 1, 0)


@pytest.mark.parametrize(
    ("slots", "reason"),
    [
        ([[(F0,), (B0,), (B0,)]], "0B0: it is there more than once"),
        ([[(F0,)]], "no backward of micro-batch 0 on stage 0"),
        ([[(B0,)]], "no forward of micro-batch 0 on stage 0"),
        ([[(F0,), (I0,)]], "input and weight gradient do not come together for micro-batch 0 on stage 0"),
        ([[(F0,), (B0,), (W0,)]], "input and weight gradient do not come together"),
        ([[(F0,), (B0,), (I0,), (W0,)]], "a full backward and an input gradient of micro-batch 0"),
        ([[(F0,), (B0,), (F1,), (B1,)]], "expected stages below 1"),
        ([[(F0,), (B0,), (F1,)], [(B1,)]], "device 0: action 1F0: its stage is placed on another device"),
        ([[(F0,), (B0,), (Action(FORWARD, 0, 1),)]], "expected stages below 1 and micro-batches below 1"),
    ],
)
def test_broken_schedules(slots: list[list[Slot]], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        check_schedule(broken(slots))


def test_slots_hold_one_action_or_a_pair() -> None:
    with pytest.raises(PlanError, match="expected one action, or a forward and a full backward"):
        broken([[(F0, I0)]])


@pytest.mark.parametrize(
    ("slots", "reason"),
    [
        ([[(B0,), (F0,)]], "device 0 cannot run 0B0, which needs 0F0"),
        ([[(F0,), (W0,), (I0,)]], "device 0 cannot run 0W0, which needs 0I0"),
        ([[(F0, B0)]], "device 0 cannot run 0F0, which needs 0F0"),
        ([[(F0,), (B0,)], [(B1,), (F1,)]], "device 0 cannot run 0B0, which needs 1B0; device 1 cannot run 1B0"),
    ],
)
def test_orders_that_wait_for_themselves(slots: list[list[Slot]], reason: str) -> None:
    with pytest.raises(DeadlockError, match=reason):
        check_schedule(broken(slots))


@pytest.mark.parametrize(
    ("name", "p", "m", "more", "reason"),
    [
        ("1f1B", 4, 8, {}, "did you mean '1f1b'"),
        ("nothing", 4, 8, {}, "known schedules: gpipe, 1f1b"),
        ("1f1b", 0, 8, {}, "at least one of each"),
        ("1f1b", 4, 8, {"stages_per_device": 2}, "always has 1"),
        ("gpipe", 4, 8, {"group_size": 4}, "no groups"),
        ("interleaved", 4, 8, {}, "needs stages_per_device"),
        ("interleaved", 4, 8, {"stages_per_device": 1}, "take 1f1b"),
        ("interleaved", 4, 10, {"stages_per_device": 2}, "leave a group of 2"),
        ("zbv", 4, 6, {}, "at least 2 x devices - 1 = 7"),
        ("dualpipe", 3, 8, {}, "expected an even number"),
        ("dualpipe", 4, 9, {}, "an even number, at least 2 x devices = 8"),
        ("dualpipe", 4, 6, {}, "at least 2 x devices = 8"),
        ("dualpipev", 4, 7, {}, "2 x devices = 8 stages"),
    ],
)
def test_refusals(name: str, p: int, m: int, more: dict[str, int], reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        make_schedule(name, p, m, **more)


def test_equality_is_of_content() -> None:
    one, same = make_schedule("zbv", 2, 4), make_schedule("zbv", 2, 4)
    assert one == same
    assert hash(one) == hash(same)
    assert one != make_schedule("zbv", 2, 5)
    with pytest.raises(ValueError, match="read-only"):
        one.kind[0] = 1

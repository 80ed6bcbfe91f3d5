"""CSV of torch.distributed.pipelining: round trips, refusals, and torch itself as the judge."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.errors import DeadlockError, PlanError
from overlapsim.schedule.pipeline import PipelineSchedule
from overlapsim.schedule.pipeline_csv import schedule_from_csv, schedule_to_csv
from overlapsim.schedule.pipeline_kinds import SCHEDULES, make_schedule

SPLIT = "0F0,0F1,0I0,0I1,0W1,0W0\n1F0,1I0,1F1,1W0,1B1\n"
ONE_F_ONE_B = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1B0,1F2,1B1,1B2\n2F0,2B0,2F1,2B1,2F2,2B2\n"
# Stages 0 and 3 on one device, 1 and 2 on the other.
TURN = "0F0,3F0,3B0,0F1,(3F1;0B0)OVERLAP_F_B,3I1,3W1,0B1\n1F0,2F0,2B0,1B0,1F1,2F1,2B1,1B1\n"
CASES = [
    (name, p, m, v)
    for name, kind in SCHEDULES.items()
    if kind.copies == 1
    for p, m in ((1, 3), (2, 4), (4, 8))
    for v in ([2, 3] if kind.stages_per_device is None else [None])
    if m % p == 0
]


@pytest.mark.parametrize("text", [SPLIT, ONE_F_ONE_B, TURN])
def test_text_round_trip(text: str) -> None:
    assert schedule_to_csv(schedule_from_csv(text)) == text


def test_what_is_read() -> None:
    schedule = schedule_from_csv(TURN)
    assert schedule.placement.tolist() == [[0, 1, 1, 0]]
    assert schedule.num_micro_batches == 2
    assert [len(slot) for slot in schedule.slots(0)] == [1, 1, 1, 1, 2, 1, 1, 1]
    # Empty cells are idle slots, rows may differ in length and end as on Windows.
    padded = " 0F0 ,0F1,, ,0B0,0B1\r\n,1F0,1F1,1B0,1B1,,"
    assert schedule_from_csv(padded) == schedule_from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1")


@pytest.mark.parametrize(("name", "p", "m", "v"), CASES)
def test_schedule_round_trip(name: str, p: int, m: int, v: int | None) -> None:
    schedule = make_schedule(name, p, m, stages_per_device=v)
    assert schedule_from_csv(schedule_to_csv(schedule)) == schedule


def test_one_f_one_b_is_the_file_that_torch_accepted() -> None:
    assert schedule_to_csv(make_schedule("1f1b", 3, 3)) == ONE_F_ONE_B


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ONE_F_ONE_B + "\n", "row 4 of the schedule is empty"),
        ("", "row 1 of the schedule is empty"),
        ("stage,micro\n0F0,0B0", "row 1, cell 1 of the schedule is 'stage'; expected <stage>"),
        ("0f0,0B0", "'0f0'; expected <stage>"),
        ("0Z0,0B0", "'0Z0'"),
        ("0F0,0B0 0F1", "cell 2 of the schedule is '0B0 0F1'"),
        ("0F0,0SEND_F0,0B0", "computation only"),
        ("0UNSHARD,0F0,0B0", "computation only"),
        ("(0F0;0B0),0F1", "expected <stage>"),
        ("(0F0)OVERLAP_F_B,0F1", "expected <stage>"),
        ("(0B0;0F1)OVERLAP_F_B,0F0,0B1", "a forward and a full backward"),
        ("0F0,0B0,0B0", "more than once"),
        ("0F0,0B0\n0F1,0B1", "stage 0 is on rows 1 and 2"),
        ("0F0,0B0\n2F0,2B0", "3 stages and 1 micro-batches"),
        ("0F0,0B0,0F99999999999,0B99999999999", "give the rest"),
        ("0F0,0I0,0F1,0B1", "do not come together"),
        ("0F\u0661,0B0", "expected <stage>"),
    ],
)
def test_refusals(text: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        schedule_from_csv(text)


def test_deadlock_is_refused() -> None:
    with pytest.raises(DeadlockError, match="device 1 cannot run 1B0, which needs 1F0"):
        schedule_from_csv("0F0,0B0\n1B0,1F0")


def test_two_copies_do_not_fit() -> None:
    with pytest.raises(PlanError, match="take a V-shaped schedule such as dualpipev"):
        schedule_to_csv(make_schedule("dualpipe", 2, 4))


@settings(deadline=None)
@given(st.text(alphabet="0123FBIWO(;)VERLAP_, \n", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        schedule = schedule_from_csv(text)
    except (PlanError, DeadlockError):
        return
    assert schedule_from_csv(schedule_to_csv(schedule)) == schedule


# torch judges: its own orders, and its own reader.


def torch_schedules() -> Any:
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_order(kind: str, p: int, m: int, v: int) -> str:
    """What torch generates, as its cells; its classes want processes, but the order needs these numbers only."""
    schedules = torch_schedules()
    numbers = SimpleNamespace(
        pp_group_size=p, num_stages=p * v, n_local_stages=v, _n_microbatches=m,
        microbatches_per_round=m // max(1, m // p),
    )  # fmt: skip
    make = getattr(schedules, kind)._calculate_single_rank_operations
    rows = [[str(action) for action in make(numbers, rank) if action is not None] for rank in range(p)]
    return "\n".join(",".join(row) for row in rows) + "\n"


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (3, 9)])
@pytest.mark.parametrize(
    ("ours", "theirs", "v"),
    [
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("zb_h1", "ScheduleInterleavedZeroBubble", 1),
        ("zbv", "ScheduleZBVZeroBubble", 2),
        ("dualpipev", "ScheduleDualPipeV", 2),
    ],
)
def test_same_order_as_torch(ours: str, theirs: str, v: int, p: int, m: int) -> None:
    schedule = make_schedule(ours, p, m, stages_per_device=v)
    assert schedule_to_csv(schedule) == torch_order(theirs, p, m, v)


def load_in_torch(path: Path, schedule: PipelineSchedule) -> Any:
    """Load a file the way torchtitan does, with stand-ins for the stages of device 0."""
    schedules = torch_schedules()
    stages = [
        SimpleNamespace(
            stage_index=stage, num_stages=schedule.num_stages, group_size=schedule.num_devices, group_rank=0,
            has_backward=True, is_first=stage == 0, is_last=stage == schedule.num_stages - 1, submod=None,
            stage_index_to_group_rank=dict(enumerate(schedule.placement[0].tolist())),
        )
        for _, stage in schedule.hosts(0)
    ]  # fmt: skip
    loaded = schedules._PipelineScheduleRuntime(
        stages, n_microbatches=schedule.num_micro_batches, loss_fn=lambda output, target: output
    )
    loaded._load_csv(str(path), format="compute_only")
    return loaded


@pytest.mark.parametrize(("name", "p", "m", "v"), [case for case in CASES if case[1] == 4])
def test_torch_loads_what_is_written(name: str, p: int, m: int, v: int | None, tmp_path: Path) -> None:
    schedule = make_schedule(name, p, m, stages_per_device=v)
    path = tmp_path / "schedule.csv"
    path.write_text(schedule_to_csv(schedule), encoding="utf-8")
    loaded = load_in_torch(path, schedule)
    rows = [[str(action) for action in loaded.pipeline_order[rank] if action is not None] for rank in range(p)]
    assert "\n".join(",".join(row) for row in rows) + "\n" == schedule_to_csv(schedule)
    assert loaded.pipeline_order_with_comms

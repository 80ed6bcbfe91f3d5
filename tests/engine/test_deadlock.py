"""Every way to get stuck is told apart, and told in words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from overlapsim.engine import compiled, reference
from overlapsim.engine.deadlock import ClosedEdge, Shortage, StuckTask, explain, raise_if_deadlocked
from overlapsim.engine.timeline import Timeline
from overlapsim.errors import DeadlockError
from overlapsim.testing.programs import random_program
from tests.engine.golden import GOLDEN, Builder, deadlock, waves

Run = Callable[..., Timeline]

pytestmark = pytest.mark.parametrize("run", [reference.run, compiled.run], ids=["reference", "compiled"])


def test_a_complete_program_has_nothing_to_explain(run: Run) -> None:
    timeline = run(waves())
    assert explain(timeline) == ()
    raise_if_deadlocked(timeline)


def test_two_groups_in_opposite_order(run: Run) -> None:
    assert explain(run(deadlock())) == (
        StuckTask(0, "resident", 0, 1, missing_members=(3,)),
        StuckTask(1, "not resident", 0, 0, shortage=Shortage(0, 1, 0, ((0, 1),), -1)),
        StuckTask(2, "resident", 0, 1, missing_members=(1,)),
        StuckTask(3, "not resident", 0, 0, shortage=Shortage(1, 1, 0, ((2, 1),), -1)),
    )


def test_spinning_kernel_starves_what_it_waits_for(run: Run) -> None:
    b = Builder(2)
    b.B(4, 10, 2)
    b.F(2, 5, 1)
    b.e(1, 1, 0, 1)
    gate = ClosedEdge(0, src=1, src_units=1, progress=0, dst=0, dst_unit=1)
    # Unit 0 ends and its SM is granted to unit 2 of the older contender: units 1 and 2 spin, unit 3 has no CTA
    # because the kernel itself may hold no more than two SMs.
    assert explain(run(b.freeze())) == (
        StuckTask(0, "resident", 1, 2, closed_edges=(gate,)),
        StuckTask(1, "not resident", 0, 0, shortage=Shortage(0, 1, 0, ((0, 2),), -1)),
    )


def test_kernel_short_of_sms_behind_a_flow_that_wants_all(run: Run) -> None:
    b = Builder(3, 1)
    b.F(1, 10, 1, group=0)  # holds an SM, waits for task 3 for ever
    b.F(1, 10, 3)  # wants three, two are free
    b.B(4, 10, 2, sm_quantum=2)  # would fit
    late = b.add_stream()
    b.F(1, 10, 0, pool=1, group=0, stream=late)
    b.e(2, 1, 3, -1)
    stuck = explain(run(b.freeze()))
    assert [s.state for s in stuck] == ["resident", "not resident", "not resident", "not eligible"]
    assert stuck[1].shortage == Shortage(0, 3, 2, ((0, 1),), -1)
    assert stuck[2].shortage == Shortage(0, 2, 2, ((0, 1),), behind=1)
    assert stuck[3].closed_edges == (ClosedEdge(0, src=2, src_units=1, progress=0, dst=3, dst_unit=-1),)


def test_resident_kernel_short_of_sms(run: Run) -> None:
    b = Builder(3)
    b.B(2, 10, 2)  # both spin on its gate
    b.B(4, 10, 2, persistent=True)  # one worker of two gets an SM, and does units 0 and 2
    b.B(9, 10, 1, priority=-1)
    b.e(2, 9, 0, 0)
    b.e(2, 9, 1, 2)
    first, second, third = explain(run(b.freeze()))
    assert (first.held_sm, first.shortage) == (2, None)
    assert (second.progress, second.held_sm) == (1, 1)
    assert second.shortage == Shortage(0, 1, 0, ((0, 2), (1, 1)), -1)
    assert [e.dst_unit for e in second.closed_edges] == [2]
    assert third.shortage == Shortage(0, 1, 0, ((0, 2), (1, 1)), -1)


def test_host_queue_and_stream_in_front(run: Run) -> None:
    b = Builder(4)
    stream, other = b.add_stream(queue=0), b.add_stream(queue=0)
    b.B(1, 10, 1)
    b.F(1, 10, 0, stream=stream)
    b.F(1, 10, 0, stream=stream)
    b.F(1, 10, 0, stream=other)
    b.add_host(unit_ps=5)
    b.B(1, 10, 1)
    b.add_host(unit_ps=5)
    b.e(1, 1, 0, 0)  # 0 spins until 1 has moved
    b.e(0, 1, 1, -1)  # 1 waits for 0
    b.e(2, 1, 4, -1)
    assert explain(run(b.freeze())) == (
        StuckTask(0, "resident", 0, 1, closed_edges=(ClosedEdge(0, 1, 1, 0, 0, 0),)),
        StuckTask(1, "not eligible", 0, 0, closed_edges=(ClosedEdge(1, 0, 1, 0, 1, -1),)),
        StuckTask(2, "not eligible", 0, 0, queue_head=1, stream_predecessor=1),
        StuckTask(3, "not eligible", 0, 0, queue_head=1),
        StuckTask(4, "not eligible", 0, 0, closed_edges=(ClosedEdge(2, 2, 1, 0, 4, -1),)),
        StuckTask(5, "not issued", 0, 0, host_in_front=4),
        StuckTask(6, "not issued", 0, 0, host_in_front=4),
    )


def test_group_is_held_by_the_gate_of_another_member(run: Run) -> None:
    b = Builder(1, 1)
    s = b.add_stream()
    b.F(2, 10, 1, group=0, stream=s)
    b.F(2, 10, 1, group=0, pool=1)
    b.B(3, 10, 1, stream=s)
    b.e(2, 3, 1, 1)
    gate = ClosedEdge(0, src=2, src_units=3, progress=0, dst=1, dst_unit=1)
    assert explain(run(b.freeze())) == (
        StuckTask(0, "resident", 1, 1, closed_edges=(gate,)),
        StuckTask(1, "resident", 1, 1, closed_edges=(gate,)),
        StuckTask(2, "not eligible", 0, 0, stream_predecessor=0),
    )


def test_an_edge_in_its_lag_has_opened_by_the_end(run: Run) -> None:
    b = Builder(1)
    b.B(2, 10, 1)
    b.F(1, 10, 0)
    b.e(0, 1, 1, -1, lag=1000)
    b.e(1, 1, 0, 0)
    b.e(0, 1, 0, 1, lag=1000)
    assert [e.edge for e in explain(run(b.freeze()))[0].closed_edges] == [1, 2]


def test_message_names_tasks_pools_and_the_way_out(run: Run) -> None:
    b = Builder()
    gpu = b.add_pool(1, name="gpu0.sm")
    gemm = b.B(6, 10, 1, pool=gpu, op="mlp.fc1", tag="mb0")
    gather = b.F(4, 10, 1, pool=gpu, op="mlp.fc1.ag")
    b.e(gather, 4, gemm, 0)
    with pytest.raises(DeadlockError) as caught:
        raise_if_deadlocked(run(b.freeze()))
    first, *lines, advice = str(caught.value).splitlines()
    assert first == "deadlock: 2 of 2 tasks never end, and no task starts or ends after 0 ps"
    assert [line.strip() for line in lines] == [
        "BLOCKS task 0 (mlp.fc1 mb0), resident, holds 1 SM: "
        "waits for FLOW task 1 (mlp.fc1.ag) to finish 4 units (0 done) before unit 0",
        "FLOW task 1 (mlp.fc1.ag), not resident: "
        "needs 1 SM of pool gpu0.sm, 0 free, held by BLOCKS task 0 (mlp.fc1 mb0) (1 SM)",
    ]
    assert advice.startswith("Break the cycle:")


def test_long_reports_are_cut(run: Run) -> None:
    b = Builder(1)
    b.B(1, 10, 1)
    s = b.add_stream()
    for _ in range(50):
        b.F(1, 10, 0, stream=s)
    for flow in range(1, 11):
        b.e(flow, 1, 0, 0)
    b.e(0, 1, 1, -1)
    with pytest.raises(DeadlockError) as caught:
        raise_if_deadlocked(run(b.freeze()))
    text = str(caught.value)
    assert "51 of 51" in text and "and 39 more" in text and "and 6 more" in text
    assert len(text.splitlines()) < 20


def test_every_stuck_task_of_random_programs_has_a_cause(run: Run) -> None:
    seen = 0
    for program in [random_program(seed) for seed in range(400)] + [golden.build() for golden in GOLDEN]:
        timeline = run(program)
        stuck = explain(timeline)
        assert [s.task for s in stuck] == (timeline.t_end < 0).nonzero()[0].tolist()
        for s in stuck:
            seen += 1
            in_front = max(s.host_in_front, s.queue_head, s.stream_predecessor)
            assert in_front >= 0 or s.closed_edges or s.missing_members or s.shortage, (program.digest, s)
            assert s.shortage is None or s.shortage.free < s.shortage.needed or s.shortage.behind >= 0
            # What blocks a stuck task is itself stuck, or the report would point at the innocent.
            blockers = [s.host_in_front, s.queue_head, s.stream_predecessor, *s.missing_members]
            blockers += [e.src for e in s.closed_edges]
            blockers += [task for task, _ in s.shortage.holders] if s.shortage else []
            assert all(timeline.t_end[task] < 0 for task in blockers if task >= 0)
    assert seen > 50

"""Lowering: what waits for what, transfers beside and between blocks, the head, gradient buckets, both engines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.engine import compiled, reference
from overlapsim.errors import DeadlockError, ProgramError
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.pipeline_bubbles import StageTimes
from overlapsim.schedule.pipeline_kinds import SCHEDULES, make_schedule
from overlapsim.schedule.pipeline_links import P2P_MODES, P2pMode
from overlapsim.schedule.pipeline_program import lower_pipeline
from overlapsim.schedule.pipeline_work import Block, StageTable, StageWork, Transfer
from overlapsim.schedule.program import BLOCKS, FLOW
from tests.schedule.pipelines import Run, run, stage_work, table

F, B = 1000, 2000
TIMES = StageTimes(F, 1100, 900)


def end_1f1b(p: int, m: int, t: int, mode: P2pMode, head: int = 0) -> int:
    schedule = make_schedule("1f1b", p, m)
    last = StageTimes(F + head // 2, 1100 + head - head // 2, 900)
    return run(schedule, table(schedule, TIMES, transfer=Transfer(t), head=last), mode).timeline.end_ps


# Closed forms with transfers.


@pytest.mark.parametrize("p", [2, 3, 4, 6])
@pytest.mark.parametrize("t", [1, 150, 700])
def test_one_micro_batch_is_the_way_there_and_back(p: int, t: int) -> None:
    for mode in P2P_MODES:
        assert end_1f1b(p, 1, t, mode) == p * (F + B) + 2 * (p - 1) * t


@pytest.mark.parametrize("p", [3, 4, 6])
@pytest.mark.parametrize("t", [40, 300])
@pytest.mark.parametrize("head", [0, 100, 300, 1000])
def test_blocking_transfers_and_the_head(p: int, t: int, head: int) -> None:
    """Non-interleaved Megatron: a middle device exchanges twice a micro-batch, the last one once.

    So of a head of h on the last stage only ``h - t`` is left of it in each
    further micro-batch: the weight of the head in
    ``(m - 1)(F + B + 2 t + w h)`` is ``w = max(0, 1 - t / h)``, neither 1 nor
    1/2 but what the transfers leave.
    """
    more = end_1f1b(p, 3 * p, t, "blocking", head) - end_1f1b(p, 2 * p, t, "blocking", head)
    assert more == p * (F + B + 2 * t + max(0, head - t))


@pytest.mark.parametrize("head", [0, 1000])
def test_blocking_on_two_devices(head: int) -> None:
    """Both devices are at an end: one exchange for each micro-batch."""
    t = 300
    assert end_1f1b(2, 9, t, "blocking", head) - end_1f1b(2, 8, t, "blocking", head) == F + B + t + head


@pytest.mark.parametrize("p", [2, 3, 5])
@pytest.mark.parametrize("t", [0, 40, 300])
@pytest.mark.parametrize("head", [0, 100, 1000])
def test_overlapped_transfers_of_1f1b(p: int, t: int, head: int) -> None:
    """The whole head counts (w = 1), unless the round trip of transfers is longer than 1F1B's forwards ahead cover."""
    more = end_1f1b(p, 4 * p, max(t, 1), "overlapped", head) - end_1f1b(p, 3 * p, max(t, 1), "overlapped", head)
    round_trip = p * (F + B) + head + 2 * (p - 1) * max(t, 1)
    assert more == max(p * (F + B + head), round_trip)


def test_interleaved_hides_what_1f1b_cannot() -> None:
    p, m, t = 4, 16, 100
    half = StageTimes(500, 550, 450)

    def end(mode: P2pMode, group_size: int) -> int:
        schedule = make_schedule("interleaved", p, m, stages_per_device=2, group_size=group_size)
        return run(schedule, table(schedule, half, transfer=Transfer(t)), mode).timeline.end_ps

    free = m * (F + B) + 3 * (F + B) // 2
    # Groups of p go in step: who waits for its transfer would have waited for the first micro-batch to come round.
    assert free < end("overlapped", p) == end("steady", p) < end_1f1b(p, m, t, "blocking")
    # Larger groups come round later, and there each forward of the warm-up pays for its own transfer.
    assert free < end("overlapped", 2 * p) < end("steady", 2 * p) < end_1f1b(p, m, t, "blocking")


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    p=st.sampled_from([2, 4]),
    rounds=st.integers(2, 3),
    sm=st.integers(0, 2),
    mode=st.sampled_from(P2P_MODES),
)
def test_longer_waits_are_never_quicker(name: str, p: int, rounds: int, sm: int, mode: P2pMode) -> None:
    """Order fixed and nothing shared: more waits end later, and nothing ends before the free transfer would let it."""
    kind = SCHEDULES[name]
    schedule = make_schedule(name, p, p * rounds, stages_per_device=kind.stages_per_device or 2)
    free = run(schedule, table(schedule, TIMES)).timeline
    overlapped = run(schedule, table(schedule, TIMES, transfer=Transfer(37, sm=sm))).timeline
    assert free.end_ps < overlapped.end_ps
    try:
        waiting = run(schedule, table(schedule, TIMES, transfer=Transfer(37, sm=sm)), mode).timeline
    except DeadlockError:
        assert mode == "blocking"
        return
    assert overlapped.end_ps <= waiting.end_ps


def test_blocking_transfers_that_cannot_meet_are_refused() -> None:
    refused = []
    for name, kind in SCHEDULES.items():
        schedule = make_schedule(name, 4, 8, stages_per_device=kind.stages_per_device or 2)
        work = table(schedule, TIMES, transfer=Transfer(10))
        try:
            run(schedule, work, "blocking")
        except DeadlockError as error:
            assert "take overlapped transfers" in str(error)
            refused.append(name)
    # Rendezvous suits what goes one way with no more forwards ahead than there are devices to come.
    assert refused == ["interleaved", "interleaved_pairs", "zb_h2", "zbv", "dualpipe", "dualpipev"]


def test_a_blocking_receive_is_posted_after_the_send_before_it() -> None:
    """Warm-up: the middle device passes micro-batch 0 on, and only then asks for micro-batch 1."""
    schedule = make_schedule("1f1b", 3, 3)
    done = run(schedule, table(schedule, StageTimes(10, 10, 10), transfer=Transfer(5)), "blocking")
    tag = done.timeline.program.tag
    start = {tag[task]: int(done.timeline.t_start[task]) for task in range(len(tag))}
    assert [start[name] for name in ("0F0", "0F0 to 1", "1F0", "0F1", "1F0 to 2")] == [0, 10, 15, 15, 25]
    assert (start["0F1 to 1"], start["1F1"]) == (30, 35)
    # A forward and a gradient are exchanged in one call: both wait for the later end.
    assert start["1F1 to 2"] == start["2B0 to 1"] == max(35 + 10, start["2B0"] + 20)


# Structure.


def lowered(sm: int, mode: P2pMode = "overlapped") -> tuple[ProgramBuilder, Run]:
    schedule = make_schedule("1f1b", 3, 4)
    builder = ProgramBuilder()
    pools = [builder.add_pool(8, derate=0.9) for _ in range(3)]
    tasks = lower_pipeline(
        builder, schedule, table(schedule, TIMES, transfer=Transfer(50, sm=sm)), pools=pools, p2p=mode
    )
    return builder, Run(tasks, compiled.run(builder.freeze()))


def test_streams_pools_and_groups() -> None:
    _, alone = lowered(sm=0)
    program = alone.timeline.program
    # 3 compute streams, 4 ordered pairs of neighbours; 24 blocks, 2 x 2 x 4 transfers.
    assert program.num_streams == 7
    assert (program.kind == BLOCKS).sum() == 24
    assert (program.kind == FLOW).sum() == 16
    assert program.group.tolist() == [-1] * 40
    assert program.sm[program.kind == BLOCKS].tolist() == [1] * 24
    assert program.host.tolist() == program.pool.tolist()
    assert program.tag[:3] == ("0F0", "0F1", "0F0 to 1")

    _, both = lowered(sm=2)
    program = both.timeline.program
    assert program.num_streams == 11
    flows = np.flatnonzero(program.kind == FLOW)
    assert len(flows) == 32
    senders = flows[::2]
    assert program.group[flows].tolist() == np.repeat(senders, 2).tolist()  # a group bears its first member's number
    assert all(abs(program.pool[senders] - program.pool[senders + 1]) == 1)
    # SMs held on both ends derate the blocks beside them.
    assert both.timeline.end_ps > alone.timeline.end_ps


def test_order_in_the_program_is_the_order_on_the_device() -> None:
    schedule = make_schedule("dualpipev", 3, 8)
    done = run(schedule, table(schedule, TIMES, transfer=Transfer(10)))
    assert "(0F6;5B3)" in done.timeline.program.tag
    for device in range(3):
        own = done.tasks.task[schedule.ptr[device] : schedule.ptr[device + 1]]
        assert all(np.diff(own) >= 0)
        # Both actions of a pair are one task.
        paired = schedule.paired[schedule.ptr[device] : schedule.ptr[device + 1]]
        assert ((np.diff(own) == 0) == paired[:-1]).all()


def test_pair_without_a_block_is_a_forward_and_a_backward() -> None:
    schedule = make_schedule("dualpipev", 2, 6)
    joint, apart = (run(schedule, table(schedule, TIMES, joint=joint)) for joint in (True, False))
    assert apart.timeline.program.num_tasks == schedule.num_actions
    assert joint.timeline.program.num_tasks == schedule.num_actions - schedule.paired.sum()
    assert [span[2] for span in apart.spans()] == [span[2] for span in joint.spans()]


def test_every_dependency_is_kept() -> None:
    for name, kind in SCHEDULES.items():
        schedule = make_schedule(name, 4, 8, stages_per_device=kind.stages_per_device or 2)
        done = run(schedule, table(schedule, TIMES, transfer=Transfer(10)))
        start, end = done.timeline.t_start[done.tasks.task], done.timeline.t_end[done.tasks.task]
        producer, consumer = schedule.hand_overs
        apart = schedule.device[producer] != schedule.device[consumer]
        assert (start[consumer] - end[producer] >= np.where(apart, 10, 0)).all(), name


def test_demands_and_memory_go_with_the_block() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    builder = ProgramBuilder()
    pools = [builder.add_pool(4), builder.add_pool(4)]
    hbm, link = builder.add_resource(3e12, "hbm"), builder.add_resource(1e11, "link")
    forward = Block(4, 100, {hbm: 50.0}, op="layers", mem_start=7.0)
    stage = StageWork(forward, Block(4, 200, {hbm: 80.0}, mem_end=7.0))
    transfer = Transfer(30, units=2, sm=1, weight=0.5, demands={link: 9.0})
    work = StageTable([stage] * 2, activations=[transfer], gradients=[transfer])
    tasks = lower_pipeline(builder, schedule, work, pools=pools)
    p = builder.freeze()
    block = int(tasks.task[0])
    assert (p.units[block], p.unit_ps[block], p.op[block], p.mem_start[block]) == (4, 100, "layers", 7.0)
    flows = np.flatnonzero(p.kind == FLOW)
    assert p.weight[flows].tolist() == [0.5] * 8
    asked = [p.demand_amount[p.demand_ptr[f] : p.demand_ptr[f + 1]].tolist() for f in flows]
    assert asked == [[9.0], []] * 4  # the route once
    assert p.mem_start.sum() == p.mem_end.sum() == 28.0


@pytest.mark.parametrize("mode", P2P_MODES)
def test_both_engines_agree(mode: P2pMode) -> None:
    schedule = make_schedule("1f1b", 3, 5)
    builder = ProgramBuilder()
    pools = [builder.add_pool(4, derate=0.8) for _ in range(3)]
    link = builder.add_resource(1e12, "fabric")
    between = [Transfer(77, units=3, sm=1, demands={link: 60.0})] * 2
    work = StageTable([stage_work(StageTimes(300, 330, 270), units=3)] * 3, activations=between, gradients=between)
    lower_pipeline(builder, schedule, work, pools=pools, p2p=mode)
    program = builder.freeze()
    assert compiled.run(program).same_instants(reference.run(program))


def held(name: str, p: int, m: int) -> list[str]:
    """Steps whose transfers their device waits for in steady mode, and not in overlapped."""
    schedule = make_schedule(name, p, m, stages_per_device=SCHEDULES[name].stages_per_device or 2)
    ends = []
    for mode in P2P_MODES[:2]:
        program = run(schedule, table(schedule, TIMES, transfer=Transfer(10)), mode).timeline.program
        pairs = zip(program.edge_src.tolist(), program.edge_dst.tolist(), strict=True)
        ends.append({(program.tag[src], program.tag[dst]) for src, dst in pairs})
    assert ends[0] < ends[1]
    return sorted(src for src, _ in ends[1] - ends[0])


def test_steady_mode_waits_outside_the_steady_state_only() -> None:
    # Device 1 runs F0 F1 | F2 B0 F3 B1 | B2 B3: nothing follows the last.
    assert held("1f1b", 4, 4) == ["0F0 to 1", "0F1 to 1", "0F2 to 1", "1B2 to 0", "1F0 to 2", "1F1 to 2", "2F0 to 3"]
    # Of an F&B pair both sends belong to the steady state: 0F2 | 0F3&2B0 2F2&2B1 2F3&0B0 | 0B1 2B2 2B3 0B2 0B3.
    assert held("interleaved_pairs", 2, 4) == [
        *("0F0 to 1", "0F1 to 1", "0F2 to 1", "1B2 to 0", "1F0 to 0", "1F1 to 0"),
        *("2B2 to 1", "2B3 to 1", "2F0 to 1", "2F1 to 1", "3B3 to 0"),
    ]


# What is attached later.


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "dualpipe", "interleaved_pairs"])
def test_gradient_buckets(name: str) -> None:
    """Buckets start as the last backward of their stage proceeds, whichever action that is."""
    p, m, units = 4, 8, 10
    v = SCHEDULES[name].stages_per_device or 2
    schedule = make_schedule(name, p, m, stages_per_device=v)
    builder = ProgramBuilder()
    pools = [builder.add_pool(8) for _ in range(p)]
    work = StageTable([stage_work(TIMES, units)] * schedule.num_stages)
    tasks = lower_pipeline(builder, schedule, work, pools=pools)
    buckets = []
    for device in range(p):
        for copy, stage in schedule.hosts(device):
            for done in (0.3, 0.7, 1.0):
                stream = builder.add_stream()
                flow = builder.add_flow(stream=stream, pool=pools[device], units=1, unit_ps=5, sm=1)
                tasks.add_gradient_edge(builder, flow, stage, copy=copy, done=done, lag_ps=2)
                buckets.append((flow, copy, stage, device, done))
    timeline = compiled.run(builder.freeze())
    for flow, copy, stage, device, done in buckets:
        of_copy = np.flatnonzero(schedule.copy_of == copy)
        actions = schedule.gradient_index[stage, of_copy]
        assert (schedule.device[actions] == device).all()
        last = max(timeline.t_end[tasks.task[actions]])
        assert schedule.device[tasks.last_backward(stage, copy)] == device
        assert schedule.device[tasks.first_forward(stage, copy)] == device
        (task,) = {int(t) for t in tasks.task[actions] if timeline.t_end[t] == last}
        start, unit = int(timeline.t_start[task]), int(timeline.program.unit_ps[task])
        assert timeline.t_start[flow] == start + round(done * units) * unit + 2
    with pytest.raises(ProgramError, match=r"share in \(0, 1\]"):
        tasks.add_gradient_edge(builder, 0, 0, done=0.0)


def test_weights_that_are_gathered_first() -> None:
    schedule = make_schedule("1f1b", 2, 3)
    builder = ProgramBuilder()
    pools = [builder.add_pool(8), builder.add_pool(8)]
    tasks = lower_pipeline(builder, schedule, StageTable([stage_work(TIMES, 10)] * 2), pools=pools)
    for stage, (duration, unit) in enumerate([(5000, 0), (9000, 5)]):
        flow = builder.add_flow(stream=builder.add_stream(), pool=pools[stage], units=1, unit_ps=duration, sm=1)
        tasks.add_weight_edge(builder, flow, stage, unit=unit, lag_ps=1)
    timeline = compiled.run(builder.freeze())
    first = [int(tasks.task[tasks.first_forward(stage)]) for stage in range(2)]
    assert timeline.t_start[first[0]] == 5001
    # Half of the second stage's first forward does not need its weights yet: it starts, and then spins.
    assert timeline.t_start[first[1]] == 5001 + F
    assert timeline.t_end[first[1]] == 9001 + F // 2


# Refusals.


def test_refusals() -> None:
    builder = ProgramBuilder()
    pool = builder.add_pool(8)
    schedule = make_schedule("zb_h1", 2, 2)
    whole = StageTable([StageWork(Block(1, F), Block(1, B))] * 2)
    with pytest.raises(ProgramError, match="runs 0I0 on device 0, but stage 0 has no input_grad block"):
        lower_pipeline(builder, schedule, whole, pools=[pool, pool])
    with pytest.raises(ProgramError, match="1 pools for 2 devices"):
        lower_pipeline(builder, schedule, table(schedule, TIMES), pools=[pool])
    with pytest.raises(ProgramError, match="expected one of overlapped, steady, blocking"):
        lower_pipeline(builder, schedule, table(schedule, TIMES), pools=[pool, pool], p2p="late")  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match="2 transfers of activations for 2 stages"):
        StageTable(whole.stages, activations=[Transfer(1)] * 2)


def test_seconds_round_as_the_engine_does() -> None:
    assert Block.of_seconds(1e-9, units=3).unit_ps == 333
    assert Transfer.of_seconds(1.5e-6, sm=2) == Transfer(1_500_000, sm=2)

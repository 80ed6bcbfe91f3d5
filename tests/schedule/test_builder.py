"""ProgramBuilder: defaults, numbering, and what it refuses."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from overlapsim.errors import ProgramError
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import BLOCKS, FLOW, HOST, KIND_NAMES, Program


def test_defaults() -> None:
    b = ProgramBuilder()
    gpu, stream = b.add_pool(4), b.add_stream()
    b.add_blocks(stream=stream, pool=gpu, units=10, unit_ps=100, sm=4)
    b.add_flow(stream=stream, pool=gpu, units=2, unit_ps=50, sm=0)
    b.add_host(unit_ps=7)
    b.add_edge(0, 1)
    p = b.freeze()
    assert [KIND_NAMES[kind] for kind in p.kind] == ["BLOCKS", "FLOW", "HOST"]
    assert p.kind.tolist() == [BLOCKS, FLOW, HOST]
    assert p.pool_derate.tolist() == [1.0]
    assert p.stream_priority.tolist() == [0]
    assert p.host.tolist() == [0, 0, 0]
    assert p.launch_ps.tolist() == [0, 0, 0]
    assert p.stream.tolist() == [0, 0, -1]
    assert p.pool.tolist() == [0, 0, -1]
    assert p.units.tolist() == [10, 2, 1]
    assert p.unit_ps.tolist() == [100, 50, 7]
    assert p.sm.tolist() == [4, 0, 0]
    assert p.sm_quantum.tolist() == [1, 1, 1]
    assert p.persistent.tolist() == [False] * 3
    assert p.group.tolist() == [-1] * 3
    assert p.weight.tolist() == [1.0] * 3
    assert p.demand_ptr.tolist() == [0, 0, 0, 0]
    assert p.mem_start.tolist() == p.mem_end.tolist() == [0.0] * 3
    assert p.op == p.tag == ("", "", "")
    # All units of the source, into the stream wait, at once.
    assert (p.edge_src_units.tolist(), p.edge_dst_unit.tolist(), p.edge_lag_ps.tolist()) == ([10], [-1], [0])


def test_everything_given_arrives() -> None:
    b = ProgramBuilder()
    first, second = b.add_pool(8, derate=0.5, name="gpu0", device=3), b.add_pool(1, name="ce0", device=3)
    hbm, link = b.add_resource(3e12, "hbm"), b.add_resource(float("inf"), "link")
    stream, other = b.add_stream(priority=5, queue=2, name="comm"), b.add_stream(priority=-1)
    b.add_blocks(
        stream=other, pool=first, units=9, unit_ps=11, sm=6, sm_quantum=3, persistent=True, host=4, launch_ps=13,
        weight=2.5, demands={link: 7.0, hbm: 5.0}, op="mlp.fc1", tag="fwd", mem_start=1e9, mem_end=2e9,
    )  # fmt: skip
    b.add_flow(
        stream=stream, pool=second, units=2, unit_ps=17, sm=1, group=6, host=1, launch_ps=19, weight=0.5,
        demands={hbm: 1.5}, op="rs", tag="bwd", mem_end=3.0,
    )  # fmt: skip
    b.add_host(unit_ps=23, host=4, op="sync", tag="x")
    b.add_edge(0, 1, src_units=3, dst_unit=1, lag_ps=29)
    p = b.freeze()
    assert p.pool_num_sms.tolist() == [8, 1]
    assert (p.pool_derate.tolist(), p.pool_name, p.pool_device.tolist()) == ([0.5, 1.0], ("gpu0", "ce0"), [3, 3])
    assert (p.resource_capacity.tolist(), p.resource_name) == ([3e12, float("inf")], ("hbm", "link"))
    assert (p.stream_priority.tolist(), p.stream_name) == ([5, -1], ("comm", ""))
    assert p.host.tolist() == [4, 1, 4]
    assert p.launch_ps.tolist() == [13, 19, 0]
    assert p.stream.tolist() == [1, 0, -1]
    assert p.pool.tolist() == [0, 1, -1]
    assert (p.sm.tolist(), p.sm_quantum.tolist()) == ([6, 1, 0], [3, 1, 1])
    assert p.persistent.tolist() == [True, False, False]
    assert p.group.tolist() == [-1, 6, -1]
    assert p.weight.tolist() == [2.5, 0.5, 1.0]
    assert p.demand_ptr.tolist() == [0, 2, 3, 3]
    assert p.demand_resource.tolist() == [link, hbm, hbm]
    assert p.demand_amount.tolist() == [7.0, 5.0, 1.5]
    assert (p.op, p.tag) == (("mlp.fc1", "rs", "sync"), ("fwd", "bwd", "x"))
    assert (p.mem_start.tolist(), p.mem_end.tolist()) == ([1e9, 0.0, 0.0], [2e9, 3.0, 0.0])
    edge = (p.edge_src, p.edge_src_units, p.edge_dst, p.edge_dst_unit, p.edge_lag_ps)
    assert [column.tolist() for column in edge] == [[0], [3], [1], [1], [29]]


def test_numbers_count_up() -> None:
    b = ProgramBuilder()
    assert [b.add_pool(1), b.add_pool(1)] == [0, 1]
    assert [b.add_resource(1.0), b.add_resource(1.0)] == [0, 1]
    assert [b.add_stream(), b.add_stream()] == [0, 1]
    tasks = [
        b.add_blocks(stream=0, pool=0, units=1, unit_ps=1, sm=1),
        b.add_flow(stream=1, pool=1, units=1, unit_ps=1, sm=1),
        b.add_host(unit_ps=0),
    ]
    assert tasks == [0, 1, 2]


def test_a_stream_without_queue_has_one_of_its_own() -> None:
    b = ProgramBuilder()
    for queue in (None, 0, None, 0, 5):
        b.add_stream(queue=queue)
    queues = b.freeze().stream_queue.tolist()
    assert queues[1] == queues[3]
    assert len(set(queues)) == 4


def test_a_resource_name_is_one_resource() -> None:
    b = ProgramBuilder()
    first = b.add_resource(2e12, "hbm0")
    assert b.add_resource(2e12, "hbm0") == first
    assert b.add_resource(2e12) != b.add_resource(2e12)
    with pytest.raises(ProgramError, match=r"'hbm0' was added with capacity 2e\+12, now 3e\+12"):
        b.add_resource(3e12, "hbm0")


def test_arrays_have_the_types_of_the_contract() -> None:
    """The empty builder too: numpy would make an empty list float64."""
    b = ProgramBuilder()
    for program in (b.freeze(), _one_task(b)):
        for name, value in vars(program).items():
            if isinstance(value, np.ndarray) and name in {spec.name for spec in fields(program)}:
                assert value.ndim == 1, name
                assert not value.flags.writeable, name
        assert program.units.dtype == program.edge_src.dtype == program.stream_queue.dtype == np.int64
        assert program.weight.dtype == program.demand_amount.dtype == program.pool_derate.dtype == np.float64
        assert program.persistent.dtype == np.bool_


def _one_task(b: ProgramBuilder) -> Program:
    b.add_blocks(stream=b.add_stream(), pool=b.add_pool(np.int64(2)), units=1, unit_ps=np.int32(3), sm=1)
    return b.freeze()


def test_freezing_does_not_end_building() -> None:
    b = ProgramBuilder()
    stream, gpu = b.add_stream(), b.add_pool(2)
    b.add_blocks(stream=stream, pool=gpu, units=1, unit_ps=1, sm=1)
    before = b.freeze()
    b.add_blocks(stream=stream, pool=gpu, units=1, unit_ps=1, sm=1)
    assert (before.num_tasks, b.freeze().num_tasks) == (1, 2)


@pytest.mark.parametrize("bad", [{"unit_ps": 1.5}, {"units": "3"}, {"launch_ps": 1e-6}, {"unit_ps": 2**64}])
def test_refuses_what_is_no_integer(bad: dict[str, object]) -> None:
    """A time in seconds must not turn into 0 or 1 ps unseen."""
    b = ProgramBuilder()
    good = {"stream": b.add_stream(), "pool": b.add_pool(4), "units": 1, "unit_ps": 1, "sm": 1}
    b.add_blocks(**good)  # type: ignore[arg-type]
    b.add_blocks(**(good | bad))  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match=f"{next(iter(bad))} must be integers below 2.63"):
        b.freeze()


def test_refuses_a_lag_that_is_no_integer() -> None:
    b = ProgramBuilder()
    gpu = b.add_pool(4)
    for _ in range(2):
        b.add_blocks(stream=b.add_stream(), pool=gpu, units=1, unit_ps=1, sm=1)
    b.add_edge(0, 1, lag_ps=1e-6)  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match="edge lag_ps must be integers"):
        b.freeze()


@pytest.mark.parametrize("src", [1, -1, 7])
def test_refuses_an_edge_from_a_task_not_added(src: int) -> None:
    b = ProgramBuilder()
    b.add_blocks(stream=b.add_stream(), pool=b.add_pool(4), units=1, unit_ps=1, sm=1)
    with pytest.raises(ProgramError, match=f"edge from task {src}, but 1 tasks were added"):
        b.add_edge(src, 0)


def test_freeze_validates() -> None:
    b = ProgramBuilder()
    b.add_blocks(stream=b.add_stream(), pool=b.add_pool(4), units=1, unit_ps=1, sm=5)
    with pytest.raises(ProgramError, match=r"task 0: sm of BLOCKS must be 1 \.\. num_sms of its pool; given 5"):
        b.freeze()

"""Program: what validate_program refuses, equality by content, derived incidences."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from overlapsim.errors import ProgramError
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import FLOW, HOST, Incidence, Program, validate_program
from overlapsim.testing.programs import random_program

ENGINE_FREE = (
    "op", "tag", "pool_name", "pool_device", "resource_name", "stream_name", "mem_start", "mem_end",
)  # fmt: skip


def small_program() -> Program:
    """Tasks 0 BLOCKS, 1 and 2 a group, 3 HOST, 4 BLOCKS; edges 0 and 1 stream waits, 2 a gate."""
    b = ProgramBuilder()
    gpu, engine = b.add_pool(4, derate=0.9, name="gpu"), b.add_pool(1)
    hbm, link = b.add_resource(2e12, "hbm"), b.add_resource(float("inf"))
    s = [b.add_stream(name="compute"), b.add_stream(priority=5), b.add_stream(), b.add_stream(queue=7)]
    b.add_blocks(
        stream=s[0], pool=gpu, units=8, unit_ps=100, sm=4, sm_quantum=2, demands={hbm: 50.0, link: 1.0}, op="a"
    )
    b.add_flow(stream=s[1], pool=gpu, units=3, unit_ps=40, sm=2, group=0, demands={link: 8.0})
    b.add_flow(stream=s[2], pool=engine, units=3, unit_ps=50, sm=1, group=0)
    b.add_host(unit_ps=0)
    b.add_blocks(stream=s[3], pool=gpu, units=2, unit_ps=100, sm=1, persistent=True, launch_ps=3)
    b.add_edge(0, 1, src_units=4, lag_ps=10)
    b.add_edge(0, 3)
    b.add_edge(4, 2, src_units=1, dst_unit=1)
    return b.freeze()


def changed(name: str, where: int, value: Any) -> Program:
    """The small program with one entry of one array replaced, not validated."""
    array = getattr(small_program(), name).copy()
    array[where] = value
    return replace(small_program(), **{name: array})


BAD_FIELDS = [
    ("pool_num_sms", 0, 0, "pool 0: num_sms must be at least 1; given 0"),
    ("pool_derate", 1, 0.0, "pool 1: derate must be in (0, 1]; given 0.0"),
    ("pool_derate", 0, 1.1, "pool 0: derate must be in (0, 1]; given 1.1"),
    ("pool_derate", 0, np.nan, "pool 0: derate must be in (0, 1]; given nan"),
    ("resource_capacity", 0, 0.0, "resource 0: capacity must be positive"),
    ("resource_capacity", 0, np.nan, "resource 0: capacity must be positive"),
    ("kind", 0, 3, "task 0: kind must be BLOCKS (0), FLOW (1) or HOST (2); given 3"),
    ("stream", 0, 4, "task 0: stream does not exist; given 4"),
    ("stream", 0, -1, "task 0: stream does not exist; given -1"),
    ("stream", 3, 0, "task 3: a HOST task has stream -1; given 0"),
    ("pool", 2, 2, "task 2: pool does not exist; given 2"),
    ("pool", 2, -1, "task 2: pool does not exist; given -1"),
    ("pool", 3, 0, "task 3: a HOST task has pool -1; given 0"),
    ("host", 3, -1, "task 3: host lane must be >= 0; given -1"),
    ("launch_ps", 0, -1, "task 0: launch_ps must be 0 .. 2^46; given -1"),
    ("launch_ps", 0, 2**46 + 1, "task 0: launch_ps must be 0 .. 2^46"),
    ("launch_ps", 3, 1, "task 3: a HOST task has launch_ps 0; given 1"),
    ("units", 0, 0, "task 0: units must be at least 1; given 0"),
    ("units", 3, 2, "task 3: a HOST task has one unit; given 2"),
    ("units", 0, 2**62 // 100 + 1000, "all tasks one after another take 4.61e+06 s; the clock holds 4.61e+06 s"),
    ("unit_ps", 0, 0, "task 0: unit_ps must be 1 .. 2^46 (HOST from 0); given 0"),
    ("unit_ps", 1, 2**46 + 1, "task 1: unit_ps must be 1 .. 2^46"),
    ("unit_ps", 3, -1, "task 3: unit_ps must be 1 .. 2^46 (HOST from 0); given -1"),
    ("sm", 0, 0, "task 0: sm of BLOCKS must be 1 .. num_sms of its pool; given 0"),
    ("sm", 0, 6, "task 0: sm of BLOCKS must be 1 .. num_sms of its pool; given 6"),
    ("sm", 1, -1, "task 1: sm of a FLOW must be 0 .. num_sms of its pool; given -1"),
    ("sm", 2, 2, "task 2: sm of a FLOW must be 0 .. num_sms of its pool; given 2"),
    ("sm_quantum", 0, 0, "task 0: sm_quantum must be at least 1; given 0"),
    ("sm_quantum", 0, 3, "task 0: sm_quantum must divide sm; given 3"),
    ("sm_quantum", 1, 2, "task 1: sm_quantum other than 1 is for BLOCKS; given 2"),
    ("sm_quantum", 3, 2, "task 3: sm_quantum other than 1 is for BLOCKS; given 2"),
    ("persistent", 1, True, "task 1: persistent is for BLOCKS"),
    ("persistent", 3, True, "task 3: persistent is for BLOCKS"),
    ("group", 0, 0, "task 0: group is for FLOW tasks (-1 = alone); given 0"),
    ("group", 3, 2, "task 3: group is for FLOW tasks (-1 = alone); given 2"),
    ("group", 1, -2, "task 1: group must be >= -1; given -2"),
    ("weight", 0, 0.0, "task 0: weight must be positive and finite; given 0.0"),
    ("weight", 4, np.inf, "task 4: weight must be positive and finite; given inf"),
    ("weight", 4, np.nan, "task 4: weight must be positive and finite; given nan"),
    ("units", 2, 4, "tasks 1 and 2 are in group 0 with different units"),
    ("weight", 2, 2.0, "tasks 1 and 2 are in group 0 with different weight"),
    ("stream", 2, 1, "tasks 1 and 2 of group 0 share stream 1"),
    ("demand_resource", 0, 2, "demand 0: resource does not exist; given 2"),
    ("demand_resource", 0, -1, "demand 0: resource does not exist; given -1"),
    ("demand_resource", 1, 0, "names one resource twice"),
    ("demand_amount", 0, 0.0, "demand 0: amount must be positive and finite; given 0.0"),
    ("demand_amount", 0, np.inf, "demand 0: amount must be positive and finite; given inf"),
    ("edge_src", 0, 5, "edge 0: source task does not exist; given 5"),
    ("edge_src", 0, -1, "edge 0: source task does not exist; given -1"),
    ("edge_dst", 0, 5, "edge 0: destination task does not exist; given 5"),
    ("edge_dst", 0, -1, "edge 0: destination task does not exist; given -1"),
    ("edge_src_units", 0, 0, "edge 0: src_units must be 1 .. units of the source; given 0"),
    ("edge_src_units", 0, 9, "edge 0: src_units must be 1 .. units of the source; given 9"),
    ("edge_dst_unit", 0, -2, "edge 0: dst_unit must be -1 .. units of the destination - 1; given -2"),
    ("edge_dst_unit", 0, 3, "edge 0: dst_unit must be -1 .. units of the destination - 1; given 3"),
    ("edge_lag_ps", 0, -1, "edge 0: lag_ps must be 0 .. 2^46; given -1"),
    ("edge_lag_ps", 0, 2**46 + 1, "edge 0: lag_ps must be 0 .. 2^46"),
    ("edge_dst_unit", 1, 0, "edge 1: a gate (dst_unit >= 0) cannot go into a HOST task (destination given); given 3"),
    ("edge_dst", 0, 0, "edge 0: a stream wait (dst_unit -1) needs src < dst (source given); given 0"),
    ("edge_dst_unit", 2, -1, "edge 2: a stream wait (dst_unit -1) needs src < dst (source given); given 4"),
    ("edge_src", 2, 1, "edge 2: a gate cannot stay within one group (source given); given 1"),
    ("edge_src", 2, 2, "edge 2: a gate cannot stay within one group"),
]


@pytest.mark.parametrize(("name", "where", "value", "message"), BAD_FIELDS)
def test_refuses(name: str, where: int, value: Any, message: str) -> None:
    with pytest.raises(ProgramError) as error:
        validate_program(changed(name, where, value))
    assert message in str(error.value)


@pytest.mark.parametrize("ptr", [(1, 2, 3, 3, 3, 3), (0, 3, 2, 3, 3, 3), (0, 2, 3, 3, 3, 2), (0, 2, 3), ()])
def test_refuses_a_demand_ptr_that_does_not_count_demands(ptr: tuple[int, ...]) -> None:
    with pytest.raises(ProgramError, match="demand_ptr must rise from 0 to 3 in 6 steps"):
        validate_program(replace(small_program(), demand_ptr=np.array(ptr, np.int64)))


def test_refuses_demands_of_a_host_task() -> None:
    with pytest.raises(ProgramError, match=r"a HOST task has no demands \(task given\); given 3"):
        validate_program(replace(small_program(), demand_ptr=np.array([0, 2, 2, 2, 3, 3])))


def test_launches_and_lags_count_towards_the_clock() -> None:
    b = ProgramBuilder()
    gpu, stream = b.add_pool(1), b.add_stream()
    tasks = [b.add_blocks(stream=stream, pool=gpu, units=1, unit_ps=1, sm=1, launch_ps=2**46) for _ in range(2**15)]
    b.freeze()
    for task in tasks:
        b.add_edge(task, 0, dst_unit=0, lag_ps=2**46)
    with pytest.raises(ProgramError, match="the clock holds"):
        b.freeze()


def test_the_small_program_itself_is_fine() -> None:
    validate_program(small_program())


def test_refuses_a_gate_of_a_lone_flow_onto_itself_but_not_of_blocks() -> None:
    b = ProgramBuilder()
    gpu = b.add_pool(2)
    b.add_blocks(stream=b.add_stream(), pool=gpu, units=4, unit_ps=1, sm=2)
    b.add_flow(stream=b.add_stream(), pool=gpu, units=4, unit_ps=1, sm=0)
    b.add_edge(0, 0, src_units=1, dst_unit=2)
    b.freeze()
    b.add_edge(1, 1, src_units=1, dst_unit=2)
    with pytest.raises(ProgramError, match="edge 1: a gate cannot stay within one group"):
        b.freeze()


def test_refuses_two_hosts_on_one_queue() -> None:
    b = ProgramBuilder()
    gpu = b.add_pool(2)
    for host in (0, 1):
        b.add_blocks(stream=b.add_stream(queue=3), pool=gpu, units=1, unit_ps=1, sm=1, host=host)
    with pytest.raises(ProgramError, match="tasks 0 and 1 share a queue but have hosts 0 and 1"):
        b.freeze()


def test_refuses_two_hosts_on_one_stream() -> None:
    b = ProgramBuilder()
    gpu, stream = b.add_pool(2), b.add_stream()
    for host in (2, 0):
        b.add_blocks(stream=stream, pool=gpu, units=1, unit_ps=1, sm=1, host=host)
    with pytest.raises(ProgramError, match="share a queue but have hosts 2 and 0"):
        b.freeze()


@pytest.mark.parametrize("spec", fields(Program), ids=lambda spec: spec.name)
def test_refuses_a_wrong_length(spec: Any) -> None:
    value = getattr(small_program(), spec.name)
    longer = (*value, "x") if isinstance(value, tuple) else np.append(value, value[-1:])
    with pytest.raises(ProgramError):
        validate_program(replace(small_program(), **{spec.name: longer}))


@pytest.mark.parametrize("spec", fields(Program), ids=lambda spec: spec.name)
def test_refuses_a_wrong_type(spec: Any) -> None:
    value = getattr(small_program(), spec.name)
    for wrong in (np.array(5), [1], np.zeros((len(value), 2)), np.array(["x"] * len(value))):
        with pytest.raises(ProgramError, match=rf"^{spec.name} must be a "):
            validate_program(replace(small_program(), **{spec.name: wrong}))


def test_arrays_are_read_only() -> None:
    program = small_program()
    with pytest.raises(ValueError, match="read-only"):
        program.units[0] = 5
    with pytest.raises(AttributeError):
        program.units = program.sm  # type: ignore[misc]


def test_equality_and_hash_are_by_content() -> None:
    one, other = small_program(), small_program()
    assert one is not other
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other, changed("launch_ps", 0, 1)}) == 2
    assert one != "something else"


@pytest.mark.parametrize("spec", fields(Program), ids=lambda spec: spec.name)
def test_digest_covers_exactly_what_the_engine_reads(spec: Any) -> None:
    value = getattr(small_program(), spec.name)
    if isinstance(value, tuple):
        different = (*value[:-1], "another name")
    elif value.dtype == np.bool_:
        different = ~value
    else:
        different = value + 1
    program = replace(small_program(), **{spec.name: different})
    assert (program == small_program()) == (spec.name in ENGINE_FREE)
    assert (program.digest == small_program().digest) == (spec.name in ENGINE_FREE)


def test_digest_is_stable() -> None:
    """Block caches outlive the process: a change of the digest is a change of their format."""
    b = ProgramBuilder()
    b.add_blocks(stream=b.add_stream(), pool=b.add_pool(4), units=10, unit_ps=100, sm=4)
    assert b.freeze().digest == b.freeze().digest
    assert len(b.freeze().digest) == 64


def test_without_contention() -> None:
    program = small_program()
    free = program.without_contention()
    validate_program(free)
    assert np.all(np.isinf(free.resource_capacity))
    assert np.all(free.pool_derate == 1)
    for spec in fields(Program):
        if spec.name not in ("resource_capacity", "pool_derate"):
            assert np.array_equal(getattr(program, spec.name), getattr(free, spec.name))
    assert program.pool_derate[0] == 0.9
    assert free != program
    assert free.without_contention() == free


def test_incidence_by_key_against_brute_force() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        size, rows = int(rng.integers(0, 30)), int(rng.integers(1, 8))
        key, major, minor = (rng.integers(0, limit, size) for limit in (rows, 4, 3))
        for order in ((), (major,), (major, minor)):
            incidence = Incidence.by_key(key, rows, *order)
            assert len(incidence.ptr) == rows + 1
            for row in range(rows):
                expected = sorted((i for i in range(size) if key[i] == row), key=lambda i: [o[i] for o in order])
                assert incidence.row(row).tolist() == expected


def rows(incidence: Incidence) -> list[list[int]]:
    return [incidence.row(i).tolist() for i in range(len(incidence.ptr) - 1)]


@pytest.mark.parametrize("seed", range(40))
def test_derived_incidences_against_brute_force(seed: int) -> None:
    p = random_program(seed)
    tasks = range(p.num_tasks)
    kind, stream, queue, host, group = (a.tolist() for a in (p.kind, p.stream, p.stream_queue, p.host, p.group))
    assert rows(p.stream_tasks) == [[i for i in tasks if stream[i] == s] for s in range(p.num_streams)]

    used = sorted(set(queue))
    task_queue = [used.index(queue[stream[i]]) if kind[i] != HOST else -1 for i in tasks]
    assert p.task_queue.tolist() == task_queue
    assert rows(p.queue_tasks) == [[i for i in tasks if task_queue[i] == q] for q in range(max(task_queue) + 1)]

    lanes = sorted(set(host))
    assert p.task_lane.tolist() == [lanes.index(host[i]) for i in tasks]
    assert rows(p.lane_tasks) == [[i for i in tasks if host[i] == lane] for lane in lanes]

    groups: dict[Any, list[int]] = {}
    for i in tasks:
        if kind[i] == FLOW:
            groups.setdefault(group[i] if group[i] >= 0 else ("alone", i), []).append(i)
    assert rows(p.group_members) == sorted(groups.values())
    dense = {i: g for g, members in enumerate(sorted(groups.values())) for i in members}
    assert p.task_runner_group.tolist() == [dense.get(i, -1) for i in tasks]

    edges = range(p.num_edges)
    src, src_units, dst, dst_unit = (
        a.tolist() for a in (p.edge_src, p.edge_src_units, p.edge_dst, p.edge_dst_unit)
    )  # fmt: skip
    assert rows(p.edges_out) == [sorted((e for e in edges if src[e] == i), key=src_units.__getitem__) for i in tasks]
    assert rows(p.edges_in) == [sorted((e for e in edges if dst[e] == i), key=dst_unit.__getitem__) for i in tasks]


def test_empty_and_host_only_programs() -> None:
    empty = ProgramBuilder().freeze()
    assert (empty.num_tasks, empty.num_edges, empty.num_streams) == (0, 0, 0)
    for incidence in (empty.stream_tasks, empty.queue_tasks, empty.lane_tasks, empty.group_members):
        assert rows(incidence) == []
    b = ProgramBuilder()
    b.add_host(unit_ps=5)
    only_host = b.freeze()
    assert only_host.task_queue.tolist() == [-1]
    assert rows(only_host.lane_tasks) == [[0]]
    assert rows(only_host.queue_tasks) == []

"""Random programs: reproducible, valid, of the stated size; and what features and happenings call things."""

from __future__ import annotations

import numpy as np
import pytest

from overlapsim.engine.reference import run
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import validate_program
from overlapsim.testing.draws import Draw
from overlapsim.testing.programs import features, happenings, random_program


def test_a_seed_is_a_program() -> None:
    programs = [random_program(seed) for seed in range(200)]
    assert programs == [random_program(seed) for seed in range(200)]
    assert len(set(programs)) == 200


def test_programs_are_valid_and_mostly_small() -> None:
    programs = [random_program(seed) for seed in range(300)]
    for program in programs:
        validate_program(program)
    num_tasks = np.array([program.num_tasks for program in programs])
    assert num_tasks.min() >= 2
    assert 8 <= np.median(num_tasks) <= 20
    assert 0.01 < np.mean(num_tasks > 40) < 0.1


def test_size_can_be_forced() -> None:
    assert np.median([random_program(seed, large=True).num_tasks for seed in range(30)]) > 30
    assert max(random_program(seed, large=False).num_tasks for seed in range(100)) < 100
    assert max(random_program(seed, large=False).units.max() for seed in range(100)) <= 21


def test_draws() -> None:
    draw = Draw(3)
    values = [draw.between(2, 4) for _ in range(2000)]
    assert set(values) == {2, 3, 4}
    assert all(0 <= draw.real() < 1 for _ in range(2000))
    assert {draw.pick("ab") for _ in range(100)} == {"a", "b"}
    assert sorted(draw.sample(range(5), 5)) == [0, 1, 2, 3, 4]
    assert not draw.chance(0.0)
    assert draw.chance(1.0)
    assert [Draw(7).real() for _ in range(2)] == [Draw(7).real()] * 2


def test_features_of_a_plain_program() -> None:
    b = ProgramBuilder()
    b.add_blocks(stream=b.add_stream(), pool=b.add_pool(4), units=8, unit_ps=100, sm=4)
    assert features(b.freeze()) == {"uncontended machine"}
    assert features(ProgramBuilder().freeze()) == {"uncontended machine"}


def _signals() -> ProgramBuilder:
    b = ProgramBuilder()
    gpu = b.add_pool(4)
    comm = b.add_stream(priority=5)
    b.add_blocks(stream=b.add_stream(), pool=gpu, units=9, unit_ps=100, sm=3)
    for units in (3, 9):
        flow = b.add_flow(stream=comm, pool=gpu, units=1, unit_ps=150, sm=1)
        b.add_edge(0, flow, src_units=units, lag_ps=10)
    return b


def test_features_of_signals() -> None:
    assert features(_signals().freeze()) == {
        "uncontended machine", "wave-group signal", "wave-group signal with lag", "wait with lag", "priorities",
        "equal times",
    }  # fmt: skip


def test_features_of_groups_and_contention() -> None:
    b = ProgramBuilder()
    pools = [b.add_pool(4, derate=0.5), b.add_pool(1)]
    hbm = [b.add_resource(1e12), b.add_resource(1e12), b.add_resource(float("inf"))]
    streams = [b.add_stream(queue=3), b.add_stream(queue=3)]
    for pool, resource, unit_ps in zip(pools, hbm, (10, 20), strict=False):
        for stream in streams[:1] if pool else streams[1:]:
            b.add_flow(stream=stream, pool=pool, units=2, unit_ps=unit_ps, sm=1, group=0, demands={resource: 1.0})
    for device in (0, 1):
        b.add_flow(stream=streams[device], pool=0, units=2, unit_ps=30, sm=0, weight=2.0, demands={hbm[device]: 2.0})
    b.add_flow(stream=streams[0], pool=0, units=1, unit_ps=40, sm=2, group=9, demands={hbm[2]: 1.0})
    found = features(b.freeze())
    assert found >= {
        "finite capacity", "infinite capacity", "several finite resources", "like resources", "weight", "group",
        "folded group", "group over several pools", "group with unequal times", "shared queue", "copy engine",
        "flow without SMs", "several pools",
    }  # fmt: skip
    assert not found & {"derate", "unit gate", "host task", "persistent kernel", "uncontended machine", "priorities"}


def test_happenings() -> None:
    timeline = run(_signals().freeze(), record=True)
    assert happenings(timeline) == {"issued before eligible"}
    b = ProgramBuilder()
    gpu = b.add_pool(2)
    b.add_flow(stream=b.add_stream(), pool=gpu, units=1, unit_ps=50, sm=1)
    b.add_blocks(stream=b.add_stream(), pool=gpu, units=4, unit_ps=100, sm=2, persistent=True)
    late = happenings(run(b.freeze(), record=True))
    assert late == {"late persistent worker"}
    assert happenings(run(b.freeze())) == set()
    b.add_edge(1, 1, src_units=4, dst_unit=3)
    assert happenings(run(b.freeze(), record=True)) == {"deadlock"}


def test_happenings_of_contention() -> None:
    b = ProgramBuilder()
    r = b.add_resource(1e12)
    for weight in (1.0, 2.0):
        b.add_flow(
            stream=b.add_stream(), pool=b.add_pool(1), units=1, unit_ps=90, sm=0, weight=weight, demands={r: 90.0}
        )
    assert happenings(run(b.freeze(), record=True)) == {"slowed", "several speeds at one instant"}


@pytest.mark.parametrize("seed", range(5))
def test_happenings_need_a_record_only_for_what_it_holds(seed: int) -> None:
    program = random_program(seed)
    with_record, without = happenings(run(program, record=True)), happenings(run(program))
    assert without == with_record - {"late persistent worker", "slowed", "several speeds at one instant"}

"""Both engines against the golden programs, single rules, and closed forms, and what they record."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.engine import compiled, reference
from overlapsim.engine.timeline import Timeline
from tests.engine.golden import GOLDEN, RULES, Builder, Golden, instants, steal, two_flows

Run = Callable[..., Timeline]

both_engines = pytest.mark.parametrize("run", [reference.run, compiled.run], ids=["reference", "compiled"])


def rows(*columns: np.ndarray) -> list[tuple[float, ...]]:
    return list(zip(*(column.tolist() for column in columns), strict=True))


property_test = settings(deadline=None, max_examples=60, derandomize=True)


@both_engines
@pytest.mark.parametrize("golden", GOLDEN + RULES, ids=lambda golden: golden.name)
def test_golden_program(run: Run, golden: Golden) -> None:
    timeline = run(golden.build(), contention=golden.contention)
    assert instants(timeline) == golden.rows
    assert timeline.complete == all(row[-1] >= 0 for row in golden.rows)
    assert timeline.progress.tolist() == [
        units if row[-1] >= 0 else 0 for units, row in zip(timeline.program.units, golden.rows, strict=True)
    ]


@both_engines
def test_golden_programs_without_shared_resources_do_not_contend(run: Run) -> None:
    for golden in GOLDEN:
        if not golden.contention:
            assert instants(run(golden.build())) == golden.rows, golden.name


@both_engines
def test_deadlock_keeps_what_was_held(run: Run) -> None:
    timeline = run(GOLDEN[-1].build())
    assert timeline.held_sm.tolist() == [1, 0, 1, 0]
    assert not run(GOLDEN[0].build()).held_sm.any()


@both_engines
def test_empty_program(run: Run) -> None:
    timeline = run(Builder(1).freeze(), record=True)
    assert timeline.complete and timeline.end_ps == 0
    assert timeline.cohorts is not None and len(timeline.cohorts.task) == 0
    assert timeline.speeds is not None and len(timeline.speeds.task) == 0


@both_engines
def test_nothing_is_recorded_unless_asked(run: Run) -> None:
    timeline = run(two_flows())
    assert timeline.cohorts is None and timeline.speeds is None


@both_engines
def test_cohorts_of_a_stolen_wave(run: Run) -> None:
    cohorts = run(steal(), record=True).cohorts
    assert cohorts is not None
    assert rows(cohorts.start_ps, cohorts.task, cohorts.end_ps, cohorts.units) == [
        (0, 0, 100, 4),
        (100, 0, 200, 2),
        (100, 1, 220, 1),
        (200, 0, 300, 2),
        (220, 0, 320, 2),
    ]


@both_engines
def test_cohorts_of_a_group_and_of_a_host_task(run: Run) -> None:
    b = Builder(1, 1)
    b.F(2, 10, 1, group=0)
    b.F(2, 10, 1, group=0, pool=1)
    b.add_host(unit_ps=7)
    cohorts = run(b.freeze(), record=True).cohorts
    assert cohorts is not None
    assert rows(cohorts.start_ps, cohorts.task, cohorts.end_ps, cohorts.units) == [
        (0, 0, 10, 1),
        (0, 1, 10, 1),
        (0, 2, 7, 1),
        (10, 0, 20, 1),
        (10, 1, 20, 1),
    ]


@both_engines
def test_speed_rows_are_changes(run: Run) -> None:
    speeds = run(two_flows(), record=True).speeds
    assert speeds is not None
    assert rows(speeds.time_ps, speeds.task, speeds.speed) == [
        (0, 0, 1.0),
        (300, 0, 0.5),
        (300, 1, 0.5),
        (1100, 0, 1.0),
    ]


@both_engines
def test_speed_row_again_after_a_pause_but_not_between_waves(run: Run) -> None:
    b = Builder(2)
    b.B(6, 10, 2)
    b.F(1, 35, 0)
    b.e(1, 1, 0, 4)  # two waves without a gap, then a pause from 20 to 35
    timeline = run(b.freeze(), record=True)
    speeds = timeline.speeds
    assert speeds is not None
    assert rows(speeds.time_ps, speeds.task, speeds.speed) == [(0, 0, 1.0), (0, 1, 1.0), (35, 0, 1.0)]
    assert timeline.end_ps == 45


@both_engines
@given(
    units=st.integers(1, 50),
    unit_ps=st.integers(1, 2**46),
    sm=st.integers(1, 9),
    persistent=st.booleans(),
    demand=st.floats(0.01, 1e15),
    weight=st.floats(1e-3, 1e3),
    contention=st.booleans(),
)
@property_test
def test_kernel_alone_takes_its_waves(
    run: Run, units: int, unit_ps: int, sm: int, persistent: bool, demand: float, weight: float, contention: bool
) -> None:
    b = Builder(9, derate=0.5)
    hbm = b.add_resource(1e12)
    b.B(units, unit_ps, sm, persistent=persistent, demands={hbm: demand}, weight=weight)
    # A runner alone is never slowed, however much it asks for.
    assert run(b.freeze(), contention=contention).end_ps == -(-units // sm) * unit_ps


@both_engines
@given(
    chunks=st.integers(1, 20),
    members=st.lists(
        st.tuples(st.integers(1, 2**46), st.floats(0.01, 1e15), st.integers(0, 2)), min_size=1, max_size=4
    ),
    weight=st.floats(1e-3, 1e3),
    contention=st.booleans(),
)
@property_test
def test_group_alone_takes_its_slowest_member(
    run: Run, chunks: int, members: list[tuple[int, float, int]], weight: float, contention: bool
) -> None:
    b = Builder(*[2] * len(members))
    link = b.add_resource(1e12)
    for pool, (unit_ps, demand, sm) in enumerate(members):
        b.F(chunks, unit_ps, sm, pool=pool, group=0, demands={link: demand}, weight=weight)
    timeline = run(b.freeze(), contention=contention)
    assert timeline.t_end.tolist() == [chunks * max(unit_ps for unit_ps, _, _ in members)] * len(members)


@both_engines
@given(
    tile_ps=st.integers(1, 1000),
    num_sms=st.integers(2, 12),
    reserved=st.integers(1, 4),
    groups=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5000)), min_size=1, max_size=8),
)
@property_test
def test_wave_groups_follow_the_recurrence(
    run: Run, tile_ps: int, num_sms: int, reserved: int, groups: list[tuple[int, int]]
) -> None:
    reserved = min(reserved, num_sms - 1)
    sm = num_sms - reserved
    b = Builder(num_sms)
    gemm = b.B(sum(tiles for tiles, _ in groups), tile_ps, sm)
    comm = b.add_stream(priority=1)
    expected, done, c = [], 0, 0
    for tiles, tau_ps in groups:
        done += tiles
        c = max(tile_ps * -(-done // sm), c) + tau_ps
        expected.append(c)
        b.e(gemm, done, b.F(1, tau_ps, reserved, stream=comm), -1)
    timeline = run(b.freeze())
    assert timeline.t_end.tolist() == [tile_ps * -(-done // sm), *expected]

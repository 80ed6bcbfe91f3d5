"""Edges as arrows."""

from __future__ import annotations

import numpy as np
import pytest

from overlapsim.engine.reference import run
from overlapsim.report.arrows import progress_arrows
from overlapsim.report.spans import horizon_ps
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.testing.programs import random_program
from tests.report import samples


def moments(timeline: object) -> list[tuple[int, int, int, int]]:
    return [(a.src, a.dst, a.leave_ps, a.arrive_ps) for a in progress_arrows(timeline)]  # type: ignore[arg-type]


def test_a_signal_leaves_when_its_tiles_are_done() -> None:
    assert moments(run(samples.signal(), record=True)) == [(0, 1, 100, 110), (0, 2, 300, 310)]


def test_without_cohorts_the_latest_possible_moment_is_taken() -> None:
    assert moments(run(samples.signal())) == [(0, 1, 100, 110), (0, 2, 300, 310)]


def test_a_hole_in_a_persistent_kernel_is_not_counted_over() -> None:
    # Four units are finished at 200, but the first four only at 300, when the late worker did its share... and 400.
    timeline = run(samples.late_worker(), record=True)
    arrow = progress_arrows(timeline)[0]
    assert arrow.leave_ps == arrow.arrive_ps == timeline.t_eligible[2]


def gated(record: bool) -> list[tuple[int, int, int, int]]:
    """Golden program 6: arrival flags inside a kernel."""
    b = ProgramBuilder()
    gpu = b.add_pool(num_sms=2)
    flow = b.add_flow(stream=b.add_stream(), pool=gpu, units=3, unit_ps=100, sm=0)
    gemm = b.add_blocks(stream=b.add_stream(), pool=gpu, units=6, unit_ps=60, sm=2)
    for chunk, unit in ((1, 0), (2, 3), (3, 5)):
        b.add_edge(flow, gemm, src_units=chunk, dst_unit=unit, lag_ps=5)
    return moments(run(b.freeze(), record=record))


def test_gates_point_at_the_unit_that_they_open() -> None:
    assert gated(record=True) == [(0, 1, 100, 105), (0, 1, 200, 205), (0, 1, 300, 305)]


def test_gates_without_cohorts_never_point_back() -> None:
    for _, _, leave, arrive in gated(record=False):
        assert leave <= arrive


def test_a_source_that_goes_on_for_longer_is_not_followed_past_the_end() -> None:
    b = ProgramBuilder()
    gpu = b.add_pool(num_sms=2)
    flow = b.add_flow(stream=b.add_stream(), pool=gpu, units=9, unit_ps=100, sm=0)
    gemm = b.add_blocks(stream=b.add_stream(), pool=gpu, units=2, unit_ps=60, sm=1)
    b.add_edge(flow, gemm, src_units=1, dst_unit=1)
    assert moments(run(b.freeze())) == [(0, 1, 159, 159)]
    assert moments(run(b.freeze(), record=True)) == [(0, 1, 100, 100)]


def test_no_arrow_for_an_edge_that_never_opened() -> None:
    b = ProgramBuilder()
    gpu = b.add_pool(num_sms=1)
    one = b.add_blocks(stream=b.add_stream(), pool=gpu, units=1, unit_ps=10, sm=1)
    two = b.add_blocks(stream=b.add_stream(), pool=gpu, units=1, unit_ps=10, sm=1)
    b.add_edge(two, one, dst_unit=0)
    timeline = run(b.freeze(), record=True)
    assert not timeline.complete
    assert moments(timeline) == []


@pytest.mark.parametrize("seed", range(60))
def test_arrows_of_random_programs(seed: int) -> None:
    program = random_program(seed)
    recorded, plain = run(program, record=True), run(program)
    exact, rough = progress_arrows(recorded), progress_arrows(plain)
    assert [a.edge for a in exact] == [a.edge for a in rough]
    reached = recorded.progress[program.edge_src] >= program.edge_src_units
    shown = np.flatnonzero(reached & (recorded.t_eligible[program.edge_dst] >= 0))
    assert [a.edge for a in exact] == shown.tolist()
    for arrow in (*exact, *rough):
        assert 0 <= arrow.leave_ps <= arrow.arrive_ps < max(1, horizon_ps(recorded))
        assert recorded.t_eligible[arrow.dst] <= arrow.arrive_ps
    for arrow in exact:
        if recorded.t_end[arrow.src] >= 0:
            assert recorded.t_start[arrow.src] <= arrow.leave_ps <= recorded.t_end[arrow.src]
        if program.edge_dst_unit[arrow.edge] < 0 and not program.persistent[arrow.src]:
            assert arrow.leave_ps + program.edge_lag_ps[arrow.edge] <= arrow.arrive_ps

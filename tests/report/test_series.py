"""SMs in use and link rates over time."""

from __future__ import annotations

import numpy as np
import pytest

from overlapsim.engine.reference import run
from overlapsim.engine.timeline import Timeline
from overlapsim.report.series import Steps, link_rates, sms_in_use, steps_from_spans
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import BLOCKS, FLOW
from overlapsim.testing.programs import random_program
from tests.report import samples


def pairs(steps: Steps) -> list[tuple[int, float]]:
    return list(zip(steps.time_ps.tolist(), steps.value.tolist(), strict=True))


def test_steps_drop_what_does_not_change() -> None:
    start, end, value = np.array([0, 10, 5]), np.array([10, 20, 5]), np.array([2.0, 2.0, 7.0])
    assert pairs(steps_from_spans(start, end, value)) == [(0, 2.0), (20, 0.0)]


def test_steps_return_to_zero_exactly() -> None:
    steps = steps_from_spans(np.array([0, 1, 2]), np.array([9, 8, 7]), np.array([0.1, 0.7, 1e9 / 3]))
    assert steps.value[-1] == 0.0
    assert steps.at(np.array([-1, 0, 3, 20])).tolist() == [0.0, 0.1, steps.value[2], 0.0]


def test_sms_of_a_stolen_kernel() -> None:
    exact = sms_in_use(run(samples.steal(), record=True))[0]
    assert exact.exact
    assert pairs(exact.compute) == [(0, 4.0), (100, 2.0), (220, 4.0), (300, 2.0), (320, 0.0)]
    assert pairs(exact.communication) == [(100, 2.0), (220, 0.0)]
    rough = sms_in_use(run(samples.steal()))[0]
    assert not rough.exact
    assert pairs(rough.compute) == [(0, 4.0), (320, 0.0)]


def test_an_unrecorded_count_stops_at_the_size_of_the_pool() -> None:
    b = ProgramBuilder()
    gpu = b.add_pool(num_sms=4)
    for _ in range(2):
        b.add_blocks(stream=b.add_stream(), pool=gpu, units=8, unit_ps=10, sm=3)
    assert sms_in_use(run(b.freeze()))[0].compute.value.max() == 4.0


def test_a_spinning_flow_holds_its_sms_and_a_deadlocked_one_for_ever() -> None:
    assert pairs(sms_in_use(run(samples.skew()))[0].communication) == [(0, 1.0), (760, 0.0)]
    assert pairs(sms_in_use(run(samples.deadlock(), record=True))[0].communication) == [(0, 1.0), (1, 0.0)]


def two_flows() -> Timeline:
    """Golden program 10: a second flow halves the first one's speed."""
    b = ProgramBuilder()
    gpu, link = b.add_pool(num_sms=1), b.add_resource(1e12, "link")
    b.add_flow(stream=b.add_stream(), pool=gpu, units=1, unit_ps=1000, sm=0, demands={link: 1000.0})
    b.add_flow(stream=b.add_stream(), pool=gpu, units=1, unit_ps=400, sm=0, demands={link: 400.0}, launch_ps=300)
    return run(b.freeze(), record=True)


def test_two_flows_share_a_link() -> None:
    assert pairs(link_rates(two_flows())[0]) == [(0, 1e12), (1400, 0.0)]


def test_a_group_s_speed_counts_for_every_member() -> None:
    b = ProgramBuilder()
    pools = [b.add_pool(num_sms=1, device=d) for d in (0, 1)]
    links = [b.add_resource(1e12, f"link[{d}]") for d in (0, 1)]
    for pool, link in zip(pools, links, strict=True):
        b.add_flow(stream=b.add_stream(), pool=pool, units=1, unit_ps=100, sm=0, group=0, demands={link: 100.0})
    b.add_flow(stream=b.add_stream(), pool=pools[0], units=1, unit_ps=100, sm=0, demands={links[0]: 100.0})
    rates = link_rates(run(b.freeze(), record=True))
    assert pairs(rates[0]) == [(0, 1e12), (200, 0.0)]
    assert pairs(rates[1]) == [(0, 0.5e12), (200, 0.0)]


def total_demand(timeline: Timeline) -> np.ndarray:
    program = timeline.program
    owner = np.repeat(np.arange(program.num_tasks), np.diff(program.demand_ptr))
    return np.bincount(program.demand_resource, program.demand_amount * timeline.progress[owner], program.num_resources)


@pytest.mark.parametrize("seed", range(40))
def test_every_byte_is_counted_once(seed: int) -> None:
    program = random_program(seed).without_contention()
    for record in (True, False):
        timeline = run(program, record=record)
        if not timeline.complete:
            continue
        moved = [steps.integral() for steps in link_rates(timeline)]
        assert moved == pytest.approx(total_demand(timeline).tolist(), rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_no_link_carries_more_than_its_capacity(seed: int) -> None:
    timeline = run(random_program(seed), record=True)
    for steps, capacity in zip(link_rates(timeline), timeline.program.resource_capacity.tolist(), strict=True):
        assert np.all(steps.value <= capacity * (1 + 1e-9))
        assert np.all(np.diff(steps.time_ps) > 0)


@pytest.mark.parametrize("seed", range(40))
def test_no_pool_runs_more_than_its_sms_and_busy_time_adds_up(seed: int) -> None:
    timeline = run(random_program(seed), record=True)
    program, cohorts = timeline.program, timeline.cohorts
    assert cohorts is not None
    for pool, use in enumerate(sms_in_use(timeline)):
        times = np.union1d(use.compute.time_ps, use.communication.time_ps)
        together = use.compute.at(times) + use.communication.at(times)
        assert np.all(together <= program.pool_num_sms[pool])
        mine = (program.pool == pool) & (program.kind == BLOCKS)
        rows = mine[cohorts.task]
        busy = np.sum(((cohorts.end_ps - cohorts.start_ps) * cohorts.units)[rows]) / 1e12
        assert use.compute.integral() == pytest.approx(busy, rel=1e-12)
        assert np.any((program.pool == pool) & (program.kind == FLOW)) or len(use.communication.value) == 0

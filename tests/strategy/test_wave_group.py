"""wave_group against the published numbers, against its recurrence in both engines, and in degenerate form."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.prices import PriceBook
from overlapsim.engine import compiled, reference
from overlapsim.errors import StrategyError
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.operator import build, simulate
from overlapsim.planner.partition import best_by_groups, solve
from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.operators import GemmOp, gemm_and_collective
from tests.cost.published import stored_plans
from tests.planner.published_prices import published_context, tau_s

ENGINES = {"reference": reference, "compiled": compiled}
# M: (D s, exact optimum ms, groups of the optimum)
GOLDEN = {8192: (2.3613457679748535e-3, 2.5491, 7), 32768: (8.68088e-3, 8.9673, 11)}
POINT = {"tile": (256, 128, 32), "swizzle": 8, "sms": "reserve"}


def partition_of(context: Context):
    strategy = load_strategy("wave_group")
    space = strategy.parameters(context)
    assert space.partitions is not None
    (partition,) = space.partitions(POINT)
    return partition


@pytest.mark.parametrize("m", GOLDEN)
@pytest.mark.parametrize("engine", ENGINES)
def test_optimum_of_the_published_problem_in_both_engines(m: int, engine: str) -> None:
    seconds, best_ms, groups = GOLDEN[m]
    context = published_context(m, seconds)
    partition = partition_of(context)
    split = solve(partition)[0]
    assert split.num_groups == groups
    assert split.value_s * 1e3 == pytest.approx(best_ms, abs=1e-4)
    program = build(load_strategy("wave_group"), context, partition.to_parameters(split.cuts))
    timeline = ENGINES[engine].run(program, contention=False)
    assert timeline.duration_s * 1e3 == pytest.approx(best_ms, abs=1e-4)


@pytest.mark.parametrize("plan", stored_plans(), ids=lambda plan: str(plan.m))
def test_stored_plan_has_the_published_value(plan) -> None:
    context = published_context(plan.m, plan.gemm_ms * 1e-3)
    published_ms = {8192: 2.6033, 32768: 9.2432}[plan.m]
    parameters = {**POINT, "group_tiles": plan.group_tiles}
    timeline = simulate(load_strategy("wave_group"), context, parameters, contention=False)
    assert timeline.duration_s * 1e3 == pytest.approx(published_ms, abs=1e-4)


def recurrence_ps(program) -> int:
    """Integer recurrence of docs/program.md section 4 read off the program's own arrays."""
    gemm, flows = 0, range(1, program.num_tasks)
    wave, sms = int(program.unit_ps[gemm]), int(program.sm[gemm])
    done = 0
    into = {
        int(d): int(u)
        for s, u, d in zip(program.edge_src, program.edge_src_units, program.edge_dst, strict=True)
        if s == 0
    }
    lag = int(program.edge_lag_ps[0])
    for flow in flows:
        done = max(wave * -(-into[flow] // sms), done) + lag + int(program.unit_ps[flow])
    return done


@settings(deadline=None, max_examples=60)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 40),
    ragged=st.integers(0, 127),
    k=st.sampled_from([512, 4096]),
    ranks=st.sampled_from([2, 4, 8]),
    swizzle=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 2**32 - 1),
)
def test_program_equals_the_recurrence_to_the_picosecond(m, n, ragged, k, ranks, swizzle, seed) -> None:
    gemm = GemmOp(m * 256 + ragged, n * 128 + ragged, k, "fp16")
    context = Context(
        gemm_and_collective(gemm, "all_reduce", ranks),
        PriceBook(load_cluster("a100-sxm8"), ranks, gemm=gemm, kind="all_reduce", tile=(256, 128, 32)),
    )
    strategy = load_strategy("wave_group")
    applicability = strategy.applies_to(context)
    if not applicability.applies:
        assert applicability.cause == "under_one_wave"
        return
    point = {"tile": (256, 128, 32), "swizzle": swizzle, "sms": "reserve"}
    (partition,) = strategy.parameters(context).partitions(point)
    waves = len(partition.wave_end_s)
    rng = np.random.default_rng(seed)
    cuts = (*tuple(np.flatnonzero(rng.random(waves - 1) < 0.4) + 1), waves)
    if len(cuts) < 2:
        cuts = (1, waves)
    program = build(strategy, context, partition.to_parameters(cuts))
    expected = recurrence_ps(program)
    for engine in ENGINES.values():
        assert engine.run(program, contention=False).end_ps == expected
    value = max(partition.wave_end_s[cuts[0] - 1], 0.0) + partition.tau_s[0, cuts[0] - 1]
    for v, w in itertools.pairwise(cuts):
        value = max(partition.wave_end_s[w - 1], value) + partition.tau_s[v, w - 1]
    # Rounding each unit to a picosecond costs at most half of one per wave and per group.
    assert abs(expected - value * 1e12) <= waves + 2 * len(cuts)


def test_one_group_takes_all_sms_and_equals_kernel_then_collective() -> None:
    context = published_context(8192, GOLDEN[8192][0])
    split = best_by_groups(partition_of(context), 1)[0]
    program = build(load_strategy("wave_group"), context, partition_of(context).to_parameters(split.cuts))
    assert int(program.sm[0]) == 108
    expected = GOLDEN[8192][0] + float(tau_s(np.array([8192.0 * 8192]))[0])
    assert compiled.run(program, contention=False).duration_s == pytest.approx(expected, abs=1e-9)


def test_settings_hold_what_kernels_need() -> None:
    context = published_context(8192, GOLDEN[8192][0])
    settings_ = load_strategy("wave_group").settings(context, {**POINT, "group_tiles": (1024, 1024)})
    assert settings_["group_tiles"] == [1024, 1024]
    assert (settings_["bm"], settings_["bn"], settings_["bk"]) == (256, 128, 32)
    assert settings_["map_kind"] == "tile"
    assert settings_["sm_reserve"] == 2


@pytest.mark.parametrize("groups", [(), (1000,), (2048, 0), (3000, -952)])
def test_wrong_groups_are_refused(groups: tuple[int, ...]) -> None:
    context = published_context(8192, GOLDEN[8192][0])
    with pytest.raises(StrategyError, match="2048 tiles"):
        build(load_strategy("wave_group"), context, {**POINT, "group_tiles": groups})


@pytest.mark.parametrize(
    ("gemm", "kind", "cause"),
    [
        (GemmOp(64, 8192, 7168, "fp16"), "all_reduce", "under_one_wave"),
        (GemmOp(8192, 8192, 4096, "fp16"), "all_gather", "none"),
    ],
)
def test_refusals(gemm: GemmOp, kind, cause: str) -> None:
    prices = PriceBook(load_cluster("rtx4090-pcie8"), 4, gemm=gemm, kind=kind)
    answer = load_strategy("wave_group").applies_to(Context(gemm_and_collective(gemm, kind, 4), prices))
    assert not answer.applies
    assert answer.reasons
    assert answer.cause == cause

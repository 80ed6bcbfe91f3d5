"""Rank skew: ranks with hosts of their own; what collectives cost behind slow hosts, and beside fast ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from overlapsim.cost.base import Spread
from overlapsim.cost.launch import launch_stack
from overlapsim.engine import compiled, reference
from overlapsim.engine.timeline import Timeline
from overlapsim.hardware.loading import load_cluster
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import FLOW, Program, validate_program
from overlapsim.step.blocks import PASSES, repeated, simulate_piece
from overlapsim.step.categories import COMM_KINDS, COMPUTE_KINDS
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import simulate_step, step_prices
from overlapsim.step.skew import MOST_RANKS, SEED, Skew, may_wait_for_host, rank_tasks, spread_ranks
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Composition, compose
from overlapsim.strategy.tasks import Site
from overlapsim.workload.build import GraphBuilder, Which
from overlapsim.workload.families import gpt
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.recipe import RECIPES

CLUSTER = load_cluster("a100-sxm8")
HOSTS = launch_stack("megatron-2021")
PROFILED = launch_stack("megatron-2021-profiled")
HOST_S = launch_stack("megatron-2021").host_s


def inputs_of(hidden: int, tp: int, micro_batch: int, **more) -> StepInputs:
    model = gpt(8, hidden, 16, 50257, 1024, dtype="fp16")
    layout = Layout(tp=tp, sequence_parallel=False)
    job = Job(1024, micro_batch, global_batch=4 * micro_batch)
    return StepInputs(model, CLUSTER, layout, job, recipe=RECIPES["megatron-2021"], **more)


def context_of(hidden: int, tp: int, micro_batch: int, which: Which) -> Context:
    inputs = inputs_of(hidden, tp, micro_batch)
    prices = step_prices(inputs)
    builder = GraphBuilder(inputs.model, inputs.layout, inputs.recipe, micro_batch, 1024)
    return Context(builder.layer(inputs.model.layers[0], which), prices)


def one_rank(context: Context, copies: int, launch_s: float = HOST_S) -> Program:
    builder = ProgramBuilder()
    graph = repeated(context.graph, copies)
    compose(Context(graph, context.prices), Composition(), Site(builder, context.prices, launch_s=launch_s))
    return builder.freeze()


def residence(timeline: Timeline, tasks: int, passes: int) -> float:
    """Mean time that collectives stand on a rank, over what they move in: the factor that a profile shows."""
    program = timeline.program
    flows = np.flatnonzero((program.kind == FLOW) & (np.arange(program.num_tasks) % tasks >= tasks // passes))
    stands = (timeline.t_end - timeline.t_resident)[flows].mean()
    return float(stands / (timeline.t_end - timeline.t_start)[flows].mean())


def measured(hidden: int, tp: int, micro_batch: int, passes: int = PASSES) -> float:
    """The factor over forward and backward together."""
    found = []
    for which in ("forward", "backward"):
        program = one_rank(context_of(hidden, tp, micro_batch, which), passes)
        timeline = compiled.run(spread_ranks(program, Skew.of(HOSTS, tp)))
        found.append(residence(timeline, program.num_tasks, passes))
    return sum(found) / 2


# Programs of several ranks


def test_ranks_in_step_do_what_one_rank_does() -> None:
    program = one_rank(context_of(1024, 4, 1, "backward"), 2)
    alone = compiled.run(program)
    skew = Skew(4, 0.0)
    together = compiled.run(spread_ranks(program, skew))
    for rank in range(4):
        own = rank_tasks(together.program, rank, skew)
        for name in ("t_issued", "t_eligible", "t_resident", "t_start", "t_end"):
            assert np.array_equal(getattr(together, name)[own], getattr(alone, name))


def test_the_program_of_several_ranks_is_sound_and_both_engines_agree() -> None:
    spread = spread_ranks(one_rank(context_of(1024, 2, 1, "forward"), 1), Skew(2, 0.2))
    validate_program(spread)
    assert compiled.run(spread).same_instants(reference.run(spread))


def test_members_end_together_and_the_last_one_sets_the_pace() -> None:
    program = one_rank(context_of(1024, 4, 1, "forward"), 4)
    skew = Skew(4, 0.3)
    timeline = compiled.run(spread_ranks(program, skew))
    for task in np.flatnonzero(program.kind == FLOW).tolist():
        members = task + program.num_tasks * np.arange(4)
        assert len(set(timeline.t_end[members].tolist())) == 1
        assert (timeline.t_start[members] == timeline.t_resident[members].max()).all()


def test_launches_keep_their_mean() -> None:
    program = one_rank(context_of(1024, 8, 4, "backward"), 16)
    spread = spread_ranks(program, Skew(8, 0.167))
    assert spread.launch_ps.mean() == pytest.approx(program.launch_ps.mean(), rel=0.01)
    # Each launch spreads by itself: of a task of n kernels the variance is n times that of one.
    kernels = np.rint(program.launch_ps / (HOST_S * 1e12))
    deviation = (spread.launch_ps.reshape(8, -1) - program.launch_ps) / np.sqrt(kernels)
    assert deviation.std() == pytest.approx(0.167 * HOST_S * 1e12, rel=0.03)


def test_the_spread_is_that_of_the_stack() -> None:
    skew = Skew.of(HOSTS, 64)
    draws = np.exp(np.random.default_rng(0).normal(0, skew.sigma, 100_000))
    low, high = np.quantile(draws, [0.05, 0.95])
    assert high / low == pytest.approx(HOSTS.spread.high / HOSTS.spread.low, rel=0.01)
    assert skew.ranks == MOST_RANKS and Skew.of(HOSTS, 2).ranks == 2


# What collectives cost


CELLS = [(1024, 2, 1), (1024, 4, 1), (1024, 8, 4), (2048, 4, 1), (2048, 8, 1)]
"""Host-bound cells of a published single-node table: hidden size, ranks, micro-batch."""


def test_behind_slow_hosts_collectives_cost_several_times_their_curve() -> None:
    """Over a step of 16 layers and 4 micro-batches, in which no host waits: 3.2 times in that table, nothing fitted."""
    factors = [measured(*cell, passes=64) for cell in CELLS]
    assert 2 < min(factors) < max(factors) < 6
    assert sum(factors) / len(factors) == pytest.approx(3.2, abs=1.0)


@pytest.mark.parametrize("cell", CELLS)
def test_hosts_drift_apart_as_they_go(cell: tuple[int, int, int]) -> None:
    assert 1.2 < measured(*cell, passes=8) < measured(*cell, passes=48) * 1.1


@pytest.mark.parametrize(("hidden", "tp", "micro_batch"), [(2048, 2, 8), (2048, 4, 8)])
def test_where_the_gpu_is_what_all_wait_for_collectives_cost_their_curve(
    hidden: int, tp: int, micro_batch: int
) -> None:
    """Hosts are ahead: their skew is gone before a collective starts; multi-node steps of large models show 1.0."""
    assert measured(hidden, tp, micro_batch) == pytest.approx(1.0, abs=0.02)


def test_more_ranks_wait_longer() -> None:
    assert measured(1024, 2, 1) < measured(1024, 4, 1) < measured(1024, 8, 1)


# Blocks and steps


def test_a_host_bound_block_is_no_faster_and_its_kinds_sum_up() -> None:
    context = context_of(1024, 8, 4, "backward")
    in_step = simulate_piece(context, Composition(), launch_s=HOST_S)
    skewed = simulate_piece(context, Composition(), launch_s=HOST_S, hosts=HOSTS)
    assert in_step.duration_s < skewed.duration_s < 1.1 * in_step.duration_s
    assert sum(skewed.kinds_s.values()) == pytest.approx(skewed.duration_s, rel=1e-9)
    # Peers are waited for in collectives; what computes and moves is the same.
    assert skewed.kinds_s["bubble"] > in_step.kinds_s["bubble"] == 0
    for kind in (*COMPUTE_KINDS, *COMM_KINDS):
        assert skewed.kinds_s[kind] == pytest.approx(in_step.kinds_s[kind], rel=0.05, abs=1e-6)
    assert skewed.demands == in_step.demands


@pytest.mark.parametrize("launch_s", [0.0, 5e-6])
def test_a_block_that_is_not_host_bound_is_simulated_once(launch_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(2048, 4, 8, "forward")
    assert not may_wait_for_host(one_rank(context, 1, launch_s), 2e-3, HOSTS)
    monkeypatch.setattr("overlapsim.step.blocks.spread_ranks", None)
    piece = simulate_piece(context, Composition(), launch_s=launch_s, hosts=HOSTS)
    assert piece == simulate_piece(context, Composition(), launch_s=launch_s)


def test_hosts_in_step_are_asked_for_by_a_spread_of_one() -> None:
    context = context_of(1024, 4, 1, "backward")
    alike = simulate_piece(
        context, Composition(), launch_s=HOST_S, hosts=replace(HOSTS, spread=Spread(1.0, 1.0, "measured"))
    )
    in_step = simulate_piece(context, Composition(), launch_s=HOST_S)
    assert alike.duration_s == pytest.approx(in_step.duration_s, rel=0.02)
    assert alike.kinds_s["bubble"] == 0


def profiled(hidden: int, tp: int, micro_batch: int, spread: float) -> tuple[float, float]:
    """Seconds of forward and backward among others like them, and with hosts that meet before each."""
    found = [0.0, 0.0]
    for which in ("forward", "backward"):
        context = context_of(hidden, tp, micro_batch, which)
        for number, stack in enumerate((HOSTS, PROFILED)):
            hosts = replace(stack, spread=Spread(1 / spread, spread, "prior"))
            found[number] += simulate_piece(context, Composition(), launch_s=HOST_S, hosts=hosts).duration_s
    return found[0], found[1]


@pytest.mark.parametrize(("hidden", "tp", "micro_batch"), [(2048, 4, 4), (1024, 4, 8), (2048, 2, 2)])
def test_a_profiled_pass_starts_on_an_idle_gpu(hidden: int, tp: int, micro_batch: int) -> None:
    """Even with equal hosts: where the GPU takes about as long as its host, the first kernels are waited for."""
    among, alone = profiled(hidden, tp, micro_batch, 1.0)
    assert 1.05 * among < alone < 1.4 * among


def test_a_profiled_pass_is_as_long_as_its_slowest_host() -> None:
    context = context_of(1024, 8, 1, "backward")
    program = one_rank(context, 1)
    ends = [
        compiled.run(spread_ranks(program, replace(Skew.of(PROFILED, 8), seed=SEED + draw))).end_ps / 1e12
        for draw in range(PASSES)
    ]
    piece = simulate_piece(context, Composition(), launch_s=HOST_S, hosts=PROFILED)
    assert piece.duration_s == pytest.approx(np.mean(ends), rel=1e-9)
    assert sum(piece.kinds_s.values()) == pytest.approx(piece.duration_s, rel=1e-9)
    # Of eight ranks one is behind; over many passes without a meeting they would fall behind in turn.
    in_step = compiled.run(program).end_ps / 1e12
    assert in_step < min(ends) and np.mean(ends) < 1.15 * in_step


def test_more_spread_more_skew() -> None:
    alike, little, much = (profiled(1024, 4, 1, spread)[1] for spread in (1.0, 1.3, 2.0))
    assert alike < little < much


def test_a_rank_without_a_group_meets_nobody() -> None:
    context = context_of(1024, 1, 1, "forward")
    pieces = [simulate_piece(context, Composition(), launch_s=HOST_S, hosts=stack) for stack in (HOSTS, PROFILED)]
    assert pieces[0] == pieces[1]


def test_a_step_is_the_same_each_time_and_its_range_holds_the_host() -> None:
    inputs = inputs_of(1024, 4, 1, stack="megatron-2021")
    first, second = (simulate_step(inputs) for _ in range(2))
    assert (first.step_time_s, first.breakdown_s) == (second.step_time_s, second.breakdown_s)
    assert sum(first.breakdown_s.values()) == pytest.approx(first.step_time_s, rel=1e-9)
    # All of it follows the host, and so does the interval.
    assert first.high_s / first.step_time_s > 1.2 and first.low_s / first.step_time_s < 0.85

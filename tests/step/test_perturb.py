"""Perturbation: what the text says, closed forms of slow ranks and links, which pipelines are simulated, seeds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.group_collective import GroupModel, GroupPlace
from overlapsim.errors import UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.step.categories import COMPUTE_KINDS
from overlapsim.step.inputs import StepInputs
from overlapsim.step.perturb import Degraded, Perturbation, jitter_factors
from overlapsim.step.replicas import HEALTHY, Station, coupled_ranks, num_pipelines, replicas
from overlapsim.step.routed import routing_findings
from overlapsim.step.simulate import simulate_step
from overlapsim.strategy.base import YES
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.families import gpt
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.presets import load_model
from overlapsim.workload.recipe import Recipe

GPT = gpt(num_layers=8, hidden=2048, num_heads=16, vocabulary=51200, max_positions=1024)
MOE = replace(load_model("qwen3-30b-a3b")[0], layers=load_model("qwen3-30b-a3b")[0].layers[:4])


def step(model, layout: str, text: str = "", *, batch=8, nodes=2, seq=1024, **more):
    cluster = load_cluster("h100-sxm8").with_nodes(nodes)
    job = Job(seq, global_batch=batch)
    perturbation = Perturbation.parse(text)
    inputs = StepInputs(model, cluster, Layout.parse(layout), job, perturbation=perturbation, **more)
    return inputs


def seconds(*args, **more) -> float:
    return simulate_step(step(*args, **more), ranges=False).step_time_s


# The text

places = st.builds(Degraded, st.integers(1, 100).map(lambda n: n / 100), st.integers(-1, 500))


@given(
    st.builds(
        Perturbation,
        st.lists(places, max_size=2).map(tuple),
        st.lists(places, max_size=2).map(tuple),
        st.lists(places, max_size=2).map(tuple),
        st.integers(0, 100).map(lambda n: n / 100),
        st.integers(100, 300).map(lambda n: n / 100),
        st.integers(0, 99),
    )
)
def test_text_is_read_back(perturbation: Perturbation) -> None:
    assert Perturbation.parse(str(perturbation)) == perturbation


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("slow", "no perturbation"),
        ("speed=0.9", "no perturbation"),
        ("slow=1.5@3", "healthy speed"),
        ("slow=0@3", "healthy speed"),
        ("slow=0.9@x", "number of a rank"),
        ("jitter=0.1,jitter=0.2", "twice"),
        ("jitter=2", "standard deviation"),
        ("jitter=nan", "a number"),
        ("imbalance=0.5", "at least 1"),
        ("seed=1.5", "whole number"),
        ("seed=-1", "whole number"),
    ],
)
def test_bad_text(text: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        Perturbation.parse(text)


def test_a_rank_beyond_the_layout_is_refused() -> None:
    with pytest.raises(UsageError, match="beyond the 16 ranks"):
        seconds(GPT, "tp=8,dp=2", "slow=0.9@16")
    with pytest.raises(UsageError, match="beyond the 2 nodes"):
        seconds(GPT, "tp=8,dp=2", "nic=0.9@2")


# Closed forms


@pytest.mark.parametrize("layout", ["tp=8,dp=2", "tp=2,cp=2,cp_kind=allgather,dp=4", "dp=16"])
def test_a_slow_rank_stretches_the_compute_of_its_pipeline_and_nothing_else(layout: str) -> None:
    serial = {"batch": 16, "contention": False, "recipe": Recipe(tp_overlap=False)}
    healthy = simulate_step(step(GPT, layout, **serial), ranges=False)
    slow = simulate_step(step(GPT, layout, "slow=0.8@5", **serial), ranges=False)
    compute = sum(healthy.breakdown_s[kind] for kind in COMPUTE_KINDS)
    # Everything is serial: all wait for the slow rank, at its collectives or when gradients are summed.
    assert slow.step_time_s - healthy.step_time_s == pytest.approx(compute * (1 / 0.8 - 1), rel=0.01)


def test_replicas_wait_for_the_slowest_pipeline_where_gradients_are_summed() -> None:
    base = step(GPT, "tp=8,dp=2", "slow=0.5@9", contention=False)
    result = simulate_step(base, ranges=False)
    program, timeline = result.program, result.timeline
    sums = [t for t, op in enumerate(program.program.op) if op.startswith("grad.")]
    assert {int(program.device[t]) for t in sums} == {0, 1}
    ends = {device: timeline.t_end[sums][program.device[sums] == device].tolist() for device in (0, 1)}
    assert ends[0] == ends[1]
    # The healthy pipeline is there early and waits.
    waits = timeline.t_start[sums] - timeline.t_resident[sums]
    assert waits[program.device[sums] == 0].max() > 0 == waits[program.device[sums] == 1].max()


def test_a_slow_stage_sets_the_pace_of_its_pipeline() -> None:
    """1F1B whose second stage is the slowest: its m forwards and backwards, one behind the other."""
    healthy = seconds(GPT, "tp=2,pp=4,dp=1", batch=16, nodes=1)
    slow = simulate_step(step(GPT, "tp=2,pp=4,dp=1", "slow=0.25@2", batch=16, nodes=1), ranges=False)
    pieces = slow.program.pieces
    own = 16 * (pieces["forward 1"].duration_s + pieces["backward 1"].duration_s)
    assert pieces["forward 1"].duration_s > 2 * pieces["forward 2"].duration_s
    assert healthy < own < slow.step_time_s < 1.25 * own


def test_speed_one_changes_nothing() -> None:
    assert seconds(GPT, "tp=2,pp=2,dp=4", "slow=1@3,nic=1@0,imbalance=1") == seconds(GPT, "tp=2,pp=2,dp=4")


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 15), st.integers(5, 10))
def test_slower_is_never_faster(rank: int, tenths: int) -> None:
    layout = "tp=2,pp=2,dp=4"
    first = seconds(GPT, layout, f"slow={tenths / 10}@{rank}", contention=False)
    second = seconds(GPT, layout, f"slow={tenths / 10 - 0.1}@{rank}", contention=False)
    assert seconds(GPT, layout, contention=False) <= first < second


# Links


@pytest.mark.parametrize("place", [GroupPlace(8), GroupPlace(16, 2, 200e9)])
def test_slower_links_stretch_bytes_and_no_latency(place: GroupPlace) -> None:
    cluster = load_cluster("h100-sxm8").with_nodes(2)
    healthy = GroupModel(cluster, "all_reduce", place)
    slower = GroupModel(cluster, "all_reduce", replace(place, slower=2.0))
    small, large = 8.0, 2.0**36
    assert slower.seconds(small) == pytest.approx(healthy.seconds(small), rel=1e-3)
    assert slower.seconds(large) == pytest.approx(2 * healthy.seconds(large), rel=0.02)
    assert slower.bandwidth_seconds(large) == 2 * healthy.bandwidth_seconds(large)
    assert slower.cost(large).duration_s == pytest.approx(float(slower.seconds(large)))


def test_a_slow_nic_slows_what_leaves_its_node() -> None:
    healthy = simulate_step(step(GPT, "tp=8,dp=2", contention=False), ranges=False)
    slow = simulate_step(step(GPT, "tp=8,dp=2", "nic=0.5@1", contention=False), ranges=False)
    for kind, before in healthy.breakdown_s.items():
        if kind == "exposed_dp":
            assert 1.7 * before < slow.breakdown_s[kind] < 2 * before
        else:
            assert slow.breakdown_s[kind] == pytest.approx(before, abs=1e-9)


def test_a_slow_nvlink_slows_its_tensor_parallel_group() -> None:
    slow = simulate_step(step(GPT, "tp=8,dp=2", "nvlink=0.5@3", contention=False), ranges=False)
    healthy = simulate_step(step(GPT, "tp=8,dp=2", contention=False), ranges=False)
    tp = healthy.breakdown_s["exposed_tp"]
    # All-reduces of 4 MB are half latency.
    assert 0.1 * tp < slow.step_time_s - healthy.step_time_s < tp


# Which pipelines


def test_ranks_that_wait_for_each_other() -> None:
    assert coupled_ranks(step(GPT, "tp=4,dp=4"), 5) == (4, 5, 6, 7)
    assert coupled_ranks(step(GPT, "tp=2,cp=2,dp=4"), 5) == (4, 5, 6, 7)
    # Experts over data-parallel ranks tie their pipelines together.
    assert coupled_ranks(step(MOE, "ep=8,pp=2,dp=8")) == tuple(range(8))
    # Groups of experts reach over those of tensors: ranks that share either are one, from whichever it starts.
    crossed = step(MOE, "tp=2,ep=4,etp=1,dp=4")
    assert {coupled_ranks(crossed, rank) for rank in range(8)} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert num_pipelines(step(MOE, "ep=8,pp=2,dp=8")) == 1
    assert num_pipelines(step(GPT, "tp=2,pp=2,dp=4")) == 4


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("", 1),
        ("slow=0.9@0", 2),
        ("slow=0.9@0,slow=0.9@2", 2),  # two replicas of the same kind
        ("slow=0.9@0,slow=0.8@2", 3),
        ("slow=0.9@0,slow=0.9@10", 3),  # other stage
        ("slow=0.9@0,slow=0.9@2,slow=0.9@4,slow=0.9@6", 1),  # all replicas alike
        ("slow=0.9@0,slow=0.8@1", 2),  # one group
        ("nic=0.5@1", 1),  # all second stages
        ("jitter=0.1", 4),
    ],
)
def test_pipelines_that_are_alike_are_simulated_once(text: str, kinds: int) -> None:
    assert len(replicas(step(GPT, "tp=2,pp=2,dp=4", text))[0]) == kinds


def test_the_slowest_rank_of_a_station_sets_its_speed() -> None:
    found, _ = replicas(step(GPT, "tp=2,pp=2,dp=4", "slow=0.9@8,slow=0.7@9,nvlink=0.5@9"))
    assert {replica.stations for replica in found} == {
        (HEALTHY, HEALTHY),
        (HEALTHY, Station(0.7, 1.0, 0.5)),
    }


def test_cost_does_not_grow_with_replicas() -> None:
    """12,288 GPUs with one slow rank: two pipelines, whatever their number."""
    model = load_model("gpt3-175b")[0]
    result = simulate_step(
        step(model, "tp=8,pp=8,dp=192", "slow=0.9@1000", batch=6144, nodes=1536, seq=2048), ranges=False
    )
    assert set(result.program.device.tolist()) == set(range(16))


# Jitter


@given(st.floats(0.0, 0.5), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_draws_have_mean_one_and_the_deviation_asked_for(jitter: float, seed: int) -> None:
    factors = jitter_factors([seed], 20_000, jitter, 1)
    assert factors.mean() == pytest.approx(1, abs=5 * jitter / math.sqrt(20_000) + 1e-12)
    assert factors.std() == pytest.approx(jitter, rel=0.1, abs=1e-9)


def test_the_largest_of_several_draws() -> None:
    draws = np.random.default_rng(0).lognormal(0, 0.1, (50_000, 8)).max(axis=1)
    ours = jitter_factors([0], 50_000, math.sqrt(math.expm1(0.01)), 8) * math.exp(0.005)
    assert ours.mean() == pytest.approx(draws.mean(), rel=2e-3)
    assert ours.std() == pytest.approx(draws.std(), rel=0.03)


def test_jitter_is_drawn_by_its_seed() -> None:
    layout = "tp=2,pp=2,dp=4"
    first = seconds(GPT, layout, "jitter=0.1,seed=1", batch=32)
    assert first == seconds(GPT, layout, "jitter=0.1,seed=1", batch=32)
    assert first != seconds(GPT, layout, "jitter=0.1,seed=2", batch=32)
    assert first > seconds(GPT, layout, batch=32)


def test_more_ranks_to_wait_for_make_jitter_dearer() -> None:
    def loss(layout: str) -> float:
        healthy = seconds(GPT, layout, batch=64, contention=False)
        return seconds(GPT, layout, "jitter=0.1,seed=3", batch=64, contention=False) / healthy - 1

    alone = loss("tp=1,dp=1,pp=1")
    assert -0.01 < alone < 0.01 < loss("tp=1,pp=4,dp=4") < loss("tp=8,dp=1") < 0.2


def test_jitter_of_many_replicas_is_drawn_for_some_and_said() -> None:
    model = load_model("gpt3-175b")[0]
    inputs = step(model, "tp=8,pp=8,dp=192", "jitter=0.05", batch=192, nodes=1536, seq=2048)
    found, findings = replicas(inputs)
    assert len(found) == 16 and [f.code for f in findings] == ["replicas_left_out"]


def test_places_that_are_not_given_are_drawn_by_the_seed() -> None:
    one = Perturbation.parse("slow=0.9,seed=5")
    assert list(one.places("slow", 64)) == list(one.places("slow", 64))
    drawn = {next(iter(Perturbation.parse(f"slow=0.9,seed={s}").places("slow", 64))).place for s in range(20)}
    assert len(drawn) > 10 and drawn <= set(range(64))


# Experts


def test_imbalance_multiplies_the_rows_of_the_fullest_rank() -> None:
    even = simulate_step(step(MOE, "ep=8,dp=16", batch=16, contention=False), ranges=False)
    full = simulate_step(step(MOE, "ep=8,dp=16", "imbalance=2", batch=16, contention=False), ranges=False)
    for kind in ("attention", "optimizer", "exposed_dp"):
        assert full.breakdown_s[kind] == pytest.approx(even.breakdown_s[kind], rel=1e-6)
    assert 1.5 < full.breakdown_s["exposed_ep"] / even.breakdown_s["exposed_ep"] <= 2.0
    assert full.breakdown_s["gemm"] > 1.1 * even.breakdown_s["gemm"]
    assert full.fullest.activations > even.fullest.activations


def test_imbalance_without_experts_is_said() -> None:
    for asked in ("imbalance=2", "routing=zipf:1"):
        assert [f.code for f in routing_findings(step(GPT, "dp=16", asked, batch=16))] == ["imbalance_not_applied"]
    codes = [f.code for f in routing_findings(step(MOE, "dp=16", "imbalance=2", batch=16))]
    assert codes == ["imbalance_beyond_routing", "routing_assumed"], "one rank has all experts"


def test_a_perturbed_breakdown_sums_to_the_step() -> None:
    for text in ("slow=0.7@3", "jitter=0.2", "slow=0.9@1,nic=0.5@0,jitter=0.05,seed=9"):
        result = simulate_step(step(GPT, "tp=2,pp=2,dp=4", text, batch=32), ranges=False)
        assert sum(result.breakdown_s.values()) == pytest.approx(result.step_time_s, rel=1e-9)


def test_a_chosen_strategy_stays_at_the_ends_of_ranges_and_on_slow_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it applies is asked of prices of healthy ranks, at no end: it was chosen once, for all of them."""
    chunked, order = load_strategy("chunked"), load_strategy("operator_order")
    composition = Composition((Chosen(order, {"beam": 4}),), {("mlp.fc2", "fwd"): Chosen(chunked, {"chunks": 2})})
    asked = []

    def applies(context):
        asked.append(context.prices)
        return YES

    for strategy in (chunked, order):
        monkeypatch.setattr(type(strategy), "applies_to", lambda self, context: applies(context))
    simulate_step(step(GPT, "tp=4,dp=4", "slow=0.5@3,nvlink=0.5@5", composition=composition))
    assert asked and all(not prices.ends and not prices.factors for prices in asked)
    assert {place.slower for prices in asked for place in prices.groups.values()} == {1.0}

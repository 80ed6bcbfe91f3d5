"""Sharded parameters: what is gathered and scattered, closed forms of serial steps, prefetch, steps of many layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapsim.errors import StrategyError
from overlapsim.hardware.loading import load_cluster
from overlapsim.step import sharded_pieces
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import graph_builder
from overlapsim.step.sharded import Entry, sharded_graph, stage_entries, turned
from overlapsim.step.simulate import StepResult, simulate_step, step_prices
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.operators import CollectiveOp, OperatorGraph
from overlapsim.workload.presets import load_model
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recompute import Recompute
from overlapsim.workload.stage_weights import stage_parameters

LLAMA = load_model("llama3-8b")[0]
QWEN = load_model("qwen3-30b-a3b")[0]


def few(model: ModelSpec, count: int) -> ModelSpec:
    return replace(model, layers=model.layers[:count])


def prefetch(depth: int = 2, **more: object) -> Composition:
    parameters = {"layers_per_group": 1, "depth": depth, "rate_limit": True, "reshard_after_forward": True}
    chosen = Chosen(load_strategy("fsdp_prefetch"), {**parameters, "keep_last": False, **more})
    return Composition(arranging=(chosen,))


def inputs_of(model: ModelSpec, layout: str, *, batch: int = 16, seq: int = 4096, nodes: int = 2, **more) -> StepInputs:
    cluster = load_cluster("h100-sxm8").with_nodes(nodes)
    return StepInputs(model, cluster, Layout.parse(layout, 8 * nodes), Job(seq, global_batch=batch), **more)


def run(*args, **more) -> StepResult:
    return simulate_step(inputs_of(*args, **more), ranges=False)


def step_collectives(graph: OperatorGraph) -> list[CollectiveOp]:
    return [op for op in graph.of_type(CollectiveOp) if op.name.startswith(("param.", "grad."))]


def turn_graph(inputs: StepInputs) -> OperatorGraph:
    layers = [(layer, True) for layer in inputs.model.layers]
    forward = stage_entries(layers, "forward", first=True, last=True)
    return sharded_graph(inputs, graph_builder(inputs), [*forward, *turned(forward)])


# What is gathered


@pytest.mark.parametrize(("model", "layout"), [(few(LLAMA, 3), "zero=3"), (few(QWEN, 2), "ep=4,zero=3")])
def test_all_parameters_are_gathered_twice_and_scattered_once(model: ModelSpec, layout: str) -> None:
    inputs = inputs_of(model, layout)
    found = step_collectives(turn_graph(inputs))
    local = stage_parameters(model, inputs.layout, 0)
    forward = sum(op.size_bytes for op in found if op.kind == "all_gather" and op.pass_ == "fwd")
    backward = sum(op.size_bytes for op in found if op.kind == "all_gather" and op.pass_ == "dgrad")
    scattered = sum(op.size_bytes for op in found if op.kind == "reduce_scatter")
    # The last norm belongs to the logits' unit and is too small to count apart.
    assert forward == pytest.approx(2 * local.total, rel=1e-5)
    table = model.vocabulary * model.hidden
    assert backward == pytest.approx(2 * (local.total - table), rel=1e-3)
    assert scattered == pytest.approx(4 * local.total, rel=1e-5)
    experts = [op for op in found if op.name.endswith("experts")]
    assert {op.group for op in experts} == ({"expert_shard"} if local.expert else set())
    assert all(op.ranks == inputs.layout.expert_shards for op in experts)


def test_gathers_need_nothing_and_their_first_and_last_user_need_them() -> None:
    inputs = inputs_of(few(QWEN, 2), "ep=4,zero=3")
    graph = turn_graph(inputs)
    users: dict[int, list[int]] = {}
    for a, b in graph.dependencies:
        users.setdefault(a, []).append(b)
    for position, op in enumerate(graph.operators):
        if isinstance(op, CollectiveOp) and op.name.startswith("param."):
            assert not graph.producers(position)
            assert len(users[position]) in (1, 2)
            if op.name == "param.experts":
                assert {graph.operators[user].name for user in users[position]} == {"moe.fc1", "moe.fc2"}
        if isinstance(op, CollectiveOp) and op.name.startswith("grad."):
            assert len(graph.producers(position)) == 1


def test_a_single_rank_shards_nothing() -> None:
    inputs = inputs_of(few(LLAMA, 2), "zero=3,tp=8,dp=1", nodes=1)
    assert not step_collectives(turn_graph(inputs))


# Closed forms


@pytest.mark.parametrize("batch", [16, 48])
@pytest.mark.parametrize(("model", "layout"), [(few(LLAMA, 3), "zero={}"), (few(QWEN, 2), "ep=4,zero={}")])
def test_serial_gathers_and_scatters_add_their_times_in_each_micro_batch(
    model: ModelSpec, layout: str, batch: int
) -> None:
    more = {"batch": batch, "contention": False, "recipe": Recipe(tp_overlap=False)}
    sharded = run(model, layout.format(3), **more)
    apart = run(model, layout.format(2), **more)
    inputs = inputs_of(model, layout.format(3), **more)
    prices = step_prices(inputs)
    moved = sum(prices.flow(op)[0] for op in step_collectives(turn_graph(inputs))) * inputs.num_micro_batches
    assert sharded.breakdown_s["exposed_dp"] == pytest.approx(moved, rel=1e-6)
    # The rest is the step of ZeRO 2, without what that moves at its end.
    assert sharded.step_time_s - moved == pytest.approx(apart.step_time_s - apart.breakdown_s["exposed_dp"], rel=1e-6)


def test_parameters_that_stay_cost_what_zero_2_costs() -> None:
    kept = run(few(LLAMA, 4), "zero=3", batch=32, reshard=False, dp_overlap="both")
    zero2 = run(few(LLAMA, 4), "zero=2", batch=32, dp_overlap="both")
    assert kept.step_time_s == zero2.step_time_s
    assert kept.memory == zero2.memory
    dropped = run(few(LLAMA, 4), "zero=3", batch=32)
    assert dropped.fullest.parameters < kept.fullest.parameters / 8


def test_replicas_of_shards_sum_their_gradients_once() -> None:
    result = run(few(LLAMA, 4), "zero=3,hsdp=2", batch=32)
    sums = [
        op for op, tag in zip(result.program.program.op, result.program.program.tag, strict=True) if "replica" in tag
    ]
    assert sums == ["grad.dense"]


def test_recomputed_layers_gather_once_for_a_backward() -> None:
    plain = inputs_of(few(LLAMA, 2), "zero=3")
    again = replace(plain, recompute=Recompute("full"))
    assert step_collectives(turn_graph(plain)) == step_collectives(turn_graph(again))


# Ahead of use


def test_prefetch_hides_what_fits_under_the_layer_before() -> None:
    """On one node gathers are shorter than layers: the first gather, the last scatter and the ends remain."""
    model, more = few(LLAMA, 6), {"nodes": 1, "batch": 8, "contention": False}
    serial, ahead = run(model, "zero=3", **more), run(model, "zero=3", composition=prefetch(), **more)
    inputs = inputs_of(model, "zero=3", **more)
    prices = step_prices(inputs)
    found = step_collectives(turn_graph(inputs))
    ends = sum(prices.flow(op)[0] for op in (found[0], found[1], found[-1]))
    assert ahead.breakdown_s["exposed_dp"] < 0.35 * serial.breakdown_s["exposed_dp"]
    assert ahead.breakdown_s["exposed_dp"] >= 0.9 * ends
    assert ahead.step_time_s < serial.step_time_s


def test_depth_one_is_serial() -> None:
    serial = run(few(LLAMA, 4), "zero=3", contention=False)
    # Gathers of one layer's units are merged, which saves latency alone.
    alone = run(few(LLAMA, 4), "zero=3", contention=False, composition=prefetch(1))
    assert alone.step_time_s == pytest.approx(serial.step_time_s, rel=0.02)
    assert alone.step_time_s < serial.step_time_s


def test_a_longer_look_ahead_is_no_slower_without_contention() -> None:
    times = [
        run(few(LLAMA, 6), "zero=3", contention=False, seq=2048, composition=prefetch(depth)).step_time_s
        for depth in (1, 2, 3)
    ]
    assert times[0] > times[1] >= times[2] * 0.999


def test_a_step_is_never_faster_than_its_computation_or_its_traffic() -> None:
    inputs = inputs_of(few(LLAMA, 6), "zero=3", seq=1024, contention=False, composition=prefetch(4))
    result, prices = simulate_step(inputs, ranges=False), step_prices(inputs)
    found = step_collectives(turn_graph(inputs))
    gathered = sum(prices.flow(op)[0] for op in found if op.kind == "all_gather")
    assert result.step_time_s > max(
        gathered, sum(result.breakdown_s[k] for k in ("gemm", "attention", "other_compute"))
    )


def test_serial_gathers_are_a_finding() -> None:
    assert "gathers_serial" in {f.code for f in run(few(LLAMA, 2), "zero=3").findings}
    assert "gathers_serial" not in {f.code for f in run(few(LLAMA, 2), "zero=3", composition=prefetch()).findings}


def test_a_strategy_that_nothing_takes_is_refused() -> None:
    with pytest.raises(StrategyError, match="no part of it takes it: parameters are not sharded"):
        run(few(LLAMA, 2), "zero=1", composition=prefetch())


# Many layers


@pytest.mark.parametrize("composition", [Composition(), prefetch(2), prefetch(4)], ids=["serial", "ahead 2", "ahead 4"])
@pytest.mark.parametrize(("model", "layout"), [(few(LLAMA, 24), "zero=3"), (few(QWEN, 24), "ep=8,zero=3")])
def test_what_one_more_layer_adds_is_right(
    model: ModelSpec, layout: str, composition: Composition, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = run(model, layout, composition=composition)
    monkeypatch.setattr(sharded_pieces, "MANY", 100)
    whole = run(model, layout, composition=composition)
    assert short.step_time_s == pytest.approx(whole.step_time_s, rel=0.005)
    for kind, seconds in whole.breakdown_s.items():
        assert short.breakdown_s[kind] == pytest.approx(seconds, abs=0.01 * whole.step_time_s)


def test_layers_of_several_kinds() -> None:
    model = load_model("deepseek-v3")[0]
    mixed = replace(model, layers=(*model.layers[:3], *model.layers[3:10]), num_mtp_layers=0)
    result = run(mixed, "ep=16,zero=3", batch=16, seq=1024)
    assert sum(result.breakdown_s.values()) == pytest.approx(result.step_time_s, rel=1e-9)
    alone = run(replace(mixed, layers=model.layers[3:10]), "ep=16,zero=3", batch=16, seq=1024)
    assert alone.step_time_s < result.step_time_s


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dualpipe"])
def test_sharded_stages_of_a_pipeline(schedule: str) -> None:
    model = few(QWEN, 8)
    sharded = run(model, "ep=4,pp=2,zero=3", batch=32, schedule=schedule)
    assert sharded.step_time_s > run(model, "ep=4,pp=2,zero=2", batch=32, schedule=schedule).step_time_s
    assert sum(sharded.breakdown_s.values()) == pytest.approx(sharded.step_time_s, rel=1e-9)


def test_entries_of_a_stage() -> None:
    layers = [(layer, True) for layer in LLAMA.layers[:2]]
    units = [entry.unit for entry in stage_entries(layers, "backward", first=True, last=True)]
    assert units == ["logits", "layer", "layer", "embed"]
    assert [e.unit for e in stage_entries(layers, "input_grad", first=True, last=False)] == ["layer", "layer"]
    assert turned((Entry("embed", "forward"), Entry("logits", "forward")))[0] == Entry("logits", "backward")

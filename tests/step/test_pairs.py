"""F&B pairs: order of two passes in one graph, and what a pair costs: no more than both, no less than any resource."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.hardware.loading import load_cluster
from overlapsim.step.inputs import StepInputs
from overlapsim.step.line import Line
from overlapsim.step.pieces import StagePieces
from overlapsim.step.simulate import simulate_step, step_prices, step_schedule
from overlapsim.strategy.pairing import STREAMS, paired
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.operators import CollectiveOp, GemmOp, OperatorGraph
from overlapsim.workload.presets import load_model

QWEN = load_model("qwen3-30b-a3b")[0]
DEEPSEEK = load_model("deepseek-v3")[0]
LLAMA = load_model("llama3-8b")[0]


def few(model, count: int, first: int = 0):
    return replace(model, layers=model.layers[first : first + count], num_mtp_layers=0)


def inputs_of(
    model, layout: str, *, schedule="dualpipe", batch=32, seq=2048, cluster="h100-sxm8", **more
) -> StepInputs:
    degrees = Layout.parse(layout)
    machine = load_cluster(cluster).with_nodes(-(-degrees.world_size // 8))
    return StepInputs(model, machine, degrees, Job(seq, global_batch=batch), schedule=schedule, **more)


def pieces_of(inputs: StepInputs) -> StagePieces:
    return StagePieces(inputs, step_prices(inputs), step_schedule(inputs))


def chain(*operators) -> OperatorGraph:
    return OperatorGraph(operators, tuple((i, i + 1) for i in range(len(operators) - 1)))


# The graph


def gemm(name: str) -> GemmOp:
    return GemmOp(64, 64, 64, name=name)


def exchange(name: str) -> CollectiveOp:
    return CollectiveOp("all_to_all", 4096.0, 8, name=name)


def test_operators_are_issued_by_the_progress_of_their_own_pass() -> None:
    forward, backward = chain(gemm("mlp.fc1"), gemm("mlp.fc2")), chain(*(gemm("attn.out"),) * 4)
    names = [op.name for op in paired(forward, backward, lambda op: 1.0).operators]
    assert names == ["mlp.fc1", "attn.out", "attn.out", "mlp.fc2", "attn.out", "attn.out"]


@given(st.integers(1, 6), st.integers(1, 6), st.lists(st.floats(0.1, 10), min_size=12, max_size=12))
def test_each_pass_keeps_its_order_and_its_dependencies(first: int, second: int, times: list[float]) -> None:
    forward = chain(*(GemmOp(64, 64, 64 + i, name="mlp.fc1") for i in range(first)))
    backward = chain(*(GemmOp(64, 64, 64 + i, name="mlp.fc2", pass_="dgrad") for i in range(second)))
    price = {op: times[i] for i, op in enumerate((*forward.operators, *backward.operators))}
    both = paired(forward, backward, lambda op: price[op])
    for graph in (forward, backward):
        own = [i for i, op in enumerate(both.operators) if op in graph.operators]
        assert [both.operators[i] for i in own] == list(graph.operators)
        assert [(own.index(a), own.index(b)) for a, b in both.dependencies if a in own] == list(graph.dependencies)


def test_collectives_leave_the_compute_stream() -> None:
    forward = chain(gemm("moe.router"), exchange("moe.dispatch"), gemm("mlp.fc1"))
    both = paired(forward, forward, lambda op: 1.0)
    streams = {(type(op).__name__, both.stream_of(i)) for i, op in enumerate(both.operators)}
    assert streams == {("GemmOp", "compute"), ("CollectiveOp", STREAMS[0]), ("CollectiveOp", STREAMS[1])}


# Blocks

CASES = [
    (few(QWEN, 2), "ep=8,pp=2,dp=8"),
    (few(QWEN, 2), "tp=2,ep=4,etp=1,pp=2,dp=4"),
    (few(DEEPSEEK, 2, 3), "ep=32,pp=2,dp=32"),
    (few(LLAMA, 2), "tp=4,pp=2,dp=2"),
    (few(LLAMA, 2), "pp=2,dp=2"),
]


@pytest.mark.parametrize(("model", "layout"), CASES)
@pytest.mark.parametrize("seq", [512, 4096])
@pytest.mark.parametrize("cluster", ["h100-sxm8", "h20-sxm8"])
def test_a_pair_is_between_its_resources_and_both_passes(model, layout: str, seq: int, cluster: str) -> None:
    pieces = pieces_of(inputs_of(model, layout, batch=8 * Layout.parse(layout).dp, seq=seq, cluster=cluster))
    layer, make, prices = model.layers[0], pieces.builder, pieces.prices
    forward, backward = (pieces.layer(layer, which, rebuilt=True) for which in ("forward", "backward"))
    pair = pieces._pair(layer, layer)
    assert pair.duration_s <= (forward.duration_s + backward.duration_s) * (1 + 1e-9)
    operators = [op for which in ("forward", "backward") for op in make.layer(layer, which).operators]
    compute_s = sum(prices.operator_s(op) for op in operators if not isinstance(op, CollectiveOp))
    assert pair.duration_s >= compute_s * (1 - 1e-6)
    for name, amount in pair.demands.items():
        assert pair.duration_s >= amount / pair.capacities[name] * (1 - 1e-6), name
    assert sum(pair.kinds_s.values()) == pytest.approx(pair.duration_s, rel=1e-9)


def test_exchanges_hide_under_the_other_pass() -> None:
    pieces = pieces_of(inputs_of(few(QWEN, 2), "ep=8,pp=2,dp=8", batch=64, seq=4096))
    layer = QWEN.layers[0]
    apart = [pieces.layer(layer, which, rebuilt=True) for which in ("forward", "backward")]
    exposed = sum(piece.kinds_s["exposed_ep"] for piece in apart)
    assert pieces._pair(layer, layer).kinds_s["exposed_ep"] < 0.5 * exposed


def test_passes_without_collectives_gain_nothing() -> None:
    pieces = pieces_of(inputs_of(few(LLAMA, 2), "pp=2,dp=2", batch=16))
    layer = LLAMA.layers[0]
    apart = sum(pieces.layer(layer, which, rebuilt=True).duration_s for which in ("forward", "backward"))
    assert pieces._pair(layer, layer).duration_s == pytest.approx(apart, rel=1e-6)


# Steps


def bound_s(inputs: StepInputs) -> float:
    """Computation of the busiest device: every micro-batch of the stages it holds, forward and backward."""
    pieces, schedule = pieces_of(inputs), step_schedule(inputs)
    found = [0.0] * schedule.num_devices
    for copy in range(schedule.num_copies):
        micro_batches = int((schedule.copy_of == copy).sum())
        for stage in range(schedule.num_stages):
            for which in ("forward", "backward"):
                kinds = pieces.stage(stage, which).kinds_s
                own = sum(kinds[kind] for kind in ("gemm", "attention", "other_compute"))
                found[int(schedule.placement[copy, stage])] += micro_batches * own
    return max(found)


@pytest.mark.parametrize(
    ("schedule", "model", "layout"),
    [
        ("dualpipe", few(QWEN, 4), "ep=4,pp=4,dp=4"),
        ("dualpipe", few(LLAMA, 4), "tp=2,pp=4,dp=1"),
        ("dualpipev", few(QWEN, 8), "ep=4,pp=4,vpp=2,dp=4"),
        ("interleaved_pairs", few(QWEN, 8), "ep=4,pp=4,vpp=2,dp=4"),
        ("interleaved_pairs", few(LLAMA, 8), "tp=2,pp=4,vpp=2,dp=1"),
    ],
)
def test_steps_with_pairs_are_no_slower_than_forward_then_backward(
    schedule: str, model, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(model, layout, schedule=schedule, batch=16 * Layout.parse(layout).dp)
    joint = simulate_step(inputs, ranges=False)
    assert any(name.startswith("pair") for name in joint.program.pieces)
    computed = bound_s(inputs)
    monkeypatch.setattr(Line, "pair", lambda *args: None)
    apart = simulate_step(inputs, ranges=False)
    assert not any(name.startswith("pair") for name in apart.program.pieces)
    # A pair ends both of its passes at once, so that whoever waits for the first one waits longer.
    assert computed <= joint.step_time_s <= apart.step_time_s * 1.01
    if schedule != "interleaved_pairs" and model.name == QWEN.name:
        assert joint.step_time_s < 0.99 * apart.step_time_s


@settings(max_examples=6, deadline=None)
@given(st.sampled_from([512, 1024, 4096]), st.sampled_from([8, 16, 24]))
def test_breakdowns_of_paired_steps_sum_up(seq: int, micro_batches: int) -> None:
    result = simulate_step(inputs_of(few(QWEN, 4), "ep=4,pp=4,dp=4", batch=4 * micro_batches, seq=seq), ranges=False)
    assert sum(result.breakdown_s.values()) == pytest.approx(result.step_time_s, rel=1e-9)

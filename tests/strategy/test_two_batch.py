"""Two batches in turn: closed form of a chain, kernels of half the rows, and batches too small to be halved."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.prices import PriceBook
from overlapsim.errors import StrategyError
from overlapsim.hardware.loading import load_cluster
from overlapsim.step.inputs import StepInputs
from overlapsim.step.serving import ForwardInputs, simulate_forward
from overlapsim.step.simulate import simulate_step
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.registry import load_strategy
from overlapsim.testing.expert_layers import expert_layers
from overlapsim.workload.batches import in_batches
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import CollectiveOp, GemmOp, GroupedGemmOp, KernelOp, OperatorGraph
from overlapsim.workload.presets import load_model
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.serving import ForwardBatch
from tests.strategy.steps import arranged, collective, graph_of, kernel, prices, run

TWO = load_strategy("two_batch")


def layer(layers: int, mib: float, *, rows: int = 8192) -> OperatorGraph:
    """Layers of a memory-bound kernel and an exchange behind it, one after another."""
    operators = [
        op
        for _ in range(layers)
        for op in (
            KernelOp(MemoryOp("rmsnorm", rows, 8192), "mlp.norm"),
            collective("all_to_all", mib, "moe.dispatch", "fwd"),
        )
    ]
    return graph_of(operators, *((i, i + 1) for i in range(len(operators) - 1)))


@pytest.mark.parametrize("mib", [32, 512])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_a_chain_of_computation_and_exchange_in_turn(layers: int, mib: float) -> None:
    """c + (2 L - 1) max(c, x) + x: halves of computation c and of exchange x alternate, each hiding the other."""
    book = prices().without_latency()
    context = Context(layer(layers, mib), book)
    half, _ = in_batches(context.graph.operators[0], 2) or ()
    sent, _ = in_batches(context.graph.operators[1], 2) or ()
    c, x = book.operator_s(half), book.operator_s(sent)
    timeline = run("two_batch", context, {"batches": 2})
    assert timeline.duration_s == pytest.approx(c + (2 * layers - 1) * max(c, x) + x, rel=1e-6)
    whole = run("two_batch", context, {"batches": 1})
    assert whole.duration_s == pytest.approx(book.serial_s(context.graph), rel=1e-6)


def test_each_half_runs_to_its_exchange_and_its_tokens_wait_for_no_other() -> None:
    graph = arranged("two_batch", Context(layer(2, 64), prices()), {"batches": 2})
    assert [isinstance(op, CollectiveOp) for op in graph.operators] == [False, True] * 4
    assert graph.dependencies == ((0, 1), (1, 4), (2, 3), (3, 6), (4, 5), (6, 7))
    assert {graph.stream_of(i) for i in (1, 3, 5, 7)} == {"two_batch comm"}


def test_parameters_are_gathered_once_and_gradients_reduced_once() -> None:
    operators = [
        collective("all_gather", 8, "param.mlp.fc1", "fwd"),
        GemmOp(512, 512, 512, name="mlp.fc1"),
        collective("all_to_all", 8, "moe.dispatch", "fwd"),
        GemmOp(512, 512, 512, name="mlp.fc1", pass_="wgrad"),
        collective("reduce_scatter", 8, "grad.mlp.fc1", "wgrad"),
    ]
    context = Context(graph_of(operators, (0, 1), (1, 2), (2, 3), (3, 4)), prices())
    graph = arranged("two_batch", context, {"batches": 2})
    names = [op.name for op in graph.operators]
    assert names.count("param.mlp.fc1") == names.count("grad.mlp.fc1") == 1
    first, last = names.index("param.mlp.fc1"), names.index("grad.mlp.fc1")
    assert {dst for src, dst in graph.dependencies if src == first} == {
        i for i, op in enumerate(graph.operators) if (op.name, op.pass_) == ("mlp.fc1", "fwd")
    }
    assert len(graph.producers(last)) == 2


# Cutting operators


@given(st.integers(2, 5000), st.integers(1, 4000), st.integers(1, 4000), st.sampled_from(["fwd", "dgrad", "wgrad"]))
def test_halves_have_the_work_of_the_whole(m: int, n: int, k: int, pass_: str) -> None:
    op = GemmOp(m, n, k + 1, name="mlp.fc1", pass_=pass_)
    parts = in_batches(op, 2)
    assert parts is not None and sum(part.flop for part in parts) == op.flop
    # A weight gradient keeps its size and loses depth; all others lose rows.
    assert {(part.n, part.m if pass_ == "wgrad" else part.k) for part in parts} == {
        (n, m if pass_ == "wgrad" else k + 1)
    }


@given(st.lists(st.integers(0, 99), min_size=1, max_size=16).filter(lambda rows: sum(rows) > 20))
def test_experts_share_their_odd_rows_evenly(rows: list[int]) -> None:
    parts = in_batches(KernelOp(GroupedGemmOp(tuple(rows), 64, 64), "moe.fc1"), 2)
    assert parts is not None
    counts = [sum(part.work.rows) for part in parts]
    assert sum(counts) == sum(rows)
    odd = sum(count % 2 for count in rows)
    assert abs(counts[0] - counts[1]) <= max(1, odd)
    assert all(a + b == count for a, b, count in zip(parts[0].work.rows, parts[1].work.rows, rows, strict=True))


def test_what_cannot_be_cut_is_named() -> None:
    one = expert_layers(4, sequences=1)["forward"]
    answer = TWO.applies_to(Context(one, PriceBook(load_cluster("h100-sxm8"), 4)))
    assert not answer.applies and "attn.core" in answer.reasons[0] and "one sequence" in answer.reasons[0]
    timed = graph_of([kernel(1e-3, "mlp.norm", "fwd"), collective("all_to_all", 8, "moe.dispatch", "fwd")], (0, 1))
    assert "mlp.norm" in TWO.applies_to(Context(timed, prices())).reasons[0]
    alone = graph_of([GemmOp(512, 512, 512)])
    assert TWO.applies_to(Context(alone, prices())).cause == "little_to_hide"


# Whole layers and steps


def test_training_layers_of_two_sequences_gain() -> None:
    book = PriceBook(load_cluster("h100-sxm8"), 4)
    for which in ("forward", "backward"):
        context = Context(expert_layers(4, 2, 4096)[which], book)
        assert TWO.applies_to(context).applies
        given, cut = (run("two_batch", context, {"batches": count}).duration_s for count in (1, 2))
        assert cut < given, which


def training(micro_batch: int, *chosen: Chosen) -> StepInputs:
    model = load_model("qwen3-30b-a3b")[0]
    return StepInputs(
        replace(model, layers=model.layers[:2]),
        load_cluster("h100-sxm8"),
        Layout(ep=8, dp=8),
        Job(4096, micro_batch, global_batch=32),
        recipe=Recipe(dispatcher="deepep"),
        composition=Composition(tuple(chosen)),
    )


def test_a_training_step_with_two_micro_batches_in_turn() -> None:
    serial, both = (simulate_step(training(2, *chosen), ranges=False) for chosen in ((), (Chosen(TWO),)))
    assert both.step_time_s < serial.step_time_s
    assert both.breakdown_s["exposed_ep"] < 0.3 * serial.breakdown_s["exposed_ep"]
    assert both.breakdown_s["gemm"] > serial.breakdown_s["gemm"], "weights are read twice"
    with pytest.raises(StrategyError, match="attention of one sequence"):
        simulate_step(training(1, Chosen(TWO)), ranges=False)


def decoding(batch: int, **more) -> ForwardInputs:
    """DeepSeek-V3 on 64 H20: experts over all GPUs, low-latency dispatch."""
    model = load_model("deepseek-v3")[0]
    model = replace(model, layers=model.layers[-2:], num_mtp_layers=0)
    return ForwardInputs(
        model,
        load_cluster("h20-sxm8").with_nodes(8),
        Layout(ep=64, dp=64),
        ForwardBatch.decode(batch, 2048),
        recipe=Recipe(fp8=True, dispatcher="deepep_low_latency"),
        **more,
    )


BOTH = Composition(arranging=(Chosen(TWO, {"batches": 2}),))


def test_small_batches_lose_because_halves_repeat_their_tiles() -> None:
    """D08: below 64 rows of a half a GEMM takes as long for half of them, so that only larger batches are halved."""
    assert [_decode_gain(batch) > 1 for batch in (16, 32, 128, 256)] == [False, False, True, True]
    inputs = decoding(64)
    graph = inputs.graphs.layer(inputs.model.layers[-1])
    gemm = next(op for op in graph.of_type(GemmOp) if op.name == "attn.out")
    book = PriceBook(inputs.cluster, 64)
    half, _ = in_batches(gemm, 2) or ()
    assert (gemm.m, half.m) == (64, 32)
    assert book.operator_s(half) > 0.95 * book.operator_s(gemm)
    large = replace(gemm, m=2048)
    assert book.operator_s(replace(gemm, m=1024)) < 0.6 * book.operator_s(large)


def _decode_gain(batch: int) -> float:
    """Time of the step over that with two batches; 0 where the strategy refuses."""
    serial = simulate_forward(decoding(batch), ranges=False).time_s
    try:
        return serial / simulate_forward(decoding(batch, composition=BOTH), ranges=False).time_s
    except StrategyError as error:
        assert "too few to be halved" in str(error)
        return 0.0


def test_serving_needs_a_dispatcher_that_writes_into_peers_memory() -> None:
    inputs = decoding(256, composition=BOTH)
    with pytest.raises(StrategyError, match="peers' memory; it is alltoall"):
        simulate_forward(replace(inputs, recipe=Recipe(fp8=True)), ranges=False)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(1, 600))
def test_never_below_what_both_halves_compute_or_exchange(layers: int, mib: int) -> None:
    book = prices().without_latency()
    context = Context(layer(layers, mib), book)
    graph = arranged("two_batch", context, {"batches": 2})
    seconds = run("two_batch", context, {"batches": 2}).duration_s
    for exchanges in (True, False):
        own = (op for op in graph.operators if isinstance(op, CollectiveOp) == exchanges)
        assert seconds >= sum(map(book.operator_s, own)) * (1 - 1e-9)

"""F&B pairs as a strategy: what it takes, weight gradients behind exchanges, a searched order no slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapsim.cost.prices import PriceBook
from overlapsim.errors import StrategyError
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.order import order_operators
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import StagePieces
from overlapsim.step.simulate import simulate_step, step_prices, step_schedule
from overlapsim.strategy.base import Context
from overlapsim.strategy.compatibility import Setting, check_compatible
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.pairing import STREAMS, parted
from overlapsim.strategy.registry import load_strategy
from overlapsim.testing.expert_layers import expert_layers
from overlapsim.testing.layers import training_layers
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.operators import CollectiveOp
from overlapsim.workload.presets import load_model
from overlapsim.workload.recompute import Recompute
from tests.strategy.steps import arranged, run

PAIR = load_strategy("expert_pair")
QWEN = replace(load_model("qwen3-30b-a3b")[0], layers=load_model("qwen3-30b-a3b")[0].layers[:8])
DELAYED = Chosen(PAIR, {"delay_wgrad": True})
SEARCHED = Chosen(load_strategy("operator_order"), {"beam": 16, "search": "engine"})


def pair(length: int = 4096) -> Context:
    return Context(expert_layers(4, 2, length)["pair"], PriceBook(load_cluster("h100-sxm8"), 4))


def test_both_passes_keep_their_order_and_exchange_on_their_own_streams() -> None:
    context = pair()
    graph = arranged("expert_pair", context, {})
    passes, given = parted(graph), parted(context.graph)
    assert passes is not None and given is not None
    for own, before in zip(passes, given, strict=True):
        assert own.operators == before.operators
        assert own.dependencies == before.dependencies
    streams = {graph.stream_of(i): op.pass_ for i, op in enumerate(graph.operators) if isinstance(op, CollectiveOp)}
    assert streams == {STREAMS[0]: "fwd", STREAMS[1]: "dgrad"}


def test_weight_gradients_wait_for_the_next_exchange() -> None:
    context = pair()
    graph = arranged("expert_pair", context, {"delay_wgrad": True})
    _, backward = parted(graph) or pytest.fail("no pair")
    # Those of the experts' second matrix stand behind the exchange of the input's gradient.
    names = [(op.name, op.pass_, isinstance(op, CollectiveOp)) for op in backward.operators]
    assert names.index(("moe.dispatch", "dgrad", True)) < names.index(("moe.fc2", "wgrad", False))
    assert PAIR.extra_memory_bytes(context, {"delay_wgrad": True}) > 0


def test_a_searched_order_is_no_slower_than_either() -> None:
    context = pair()
    fixed = min(
        run("expert_pair", context, {"delay_wgrad": delay}, contention=True).duration_s for delay in (False, True)
    )
    result = order_operators(context)
    assert result.bound_s <= result.seconds <= fixed < result.given_s


def test_other_graphs_are_refused() -> None:
    book = pair().prices
    for graph in (training_layers(pipeline=False), expert_layers()["forward"], expert_layers()["backward"]):
        answer = PAIR.applies_to(Context(graph, book))
        assert not answer.applies and "interleaved_pairs" in answer.reasons[0]
    assert PAIR.applies_to(Context(expert_layers(1)["pair"], book)).cause == "little_to_hide"


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        (Setting(pp=4, vpp=1), "virtual stages"),
        (Setting(recompute="full"), "full recomputation"),
        (Setting(recompute="moe"), "expert layers"),
        (Setting(num_queues=1), "more than one hardware queue"),
        (Setting(ep=1), "ep of at least 2"),
    ],
)
def test_needs_of_megatrons_overlap(setting: Setting, word: str) -> None:
    assert any(word in reason for reason in check_compatible((PAIR,), setting))


# Steps


def inputs_of(*arranging: Chosen, schedule: str = "interleaved_pairs", **more) -> StepInputs:
    layout = Layout.parse("ep=4,pp=4,vpp=2,dp=4")
    cluster = load_cluster("h100-sxm8").with_nodes(2)
    return StepInputs(
        QWEN, cluster, layout, Job(4096, global_batch=64), schedule=schedule, composition=Composition(arranging), **more
    )


@pytest.mark.parametrize("schedule", ["interleaved_pairs", "dualpipev"])
def test_the_order_inside_pairs_is_the_best_of_those_switched_on(schedule: str) -> None:
    times = [
        simulate_step(inputs_of(*chosen, schedule=schedule), ranges=False).step_time_s
        for chosen in ((), (DELAYED,), (SEARCHED,), (DELAYED, SEARCHED))
    ]
    assert times[1] <= times[0]
    assert times[2] < times[0]
    assert times[3] <= min(times[1:3]) * (1 + 1e-9)


def test_a_pair_is_never_slower_than_both_passes_one_after_the_other() -> None:
    inputs = inputs_of(DELAYED, SEARCHED)
    pieces = StagePieces(inputs, step_prices(inputs), step_schedule(inputs))
    layer = QWEN.layers[0]
    apart = sum(pieces._alone(layer, which).duration_s for which in ("forward", "backward"))
    assert pieces._pair(layer, layer).duration_s < apart


def test_a_schedule_without_pairs_has_no_use_for_it() -> None:
    with pytest.raises(StrategyError, match="expert_pair is switched on for the step and no part of it takes it"):
        simulate_step(inputs_of(DELAYED, schedule="interleaved"), ranges=False)


def test_memory_and_exclusion_rules_hold_with_pairs() -> None:
    with pytest.raises(StrategyError, match="full recomputation"):
        simulate_step(inputs_of(DELAYED, recompute=Recompute.parse("full")), ranges=False)
    model = load_model("deepseek-moe-16b")[0]
    shared = replace(inputs_of(Chosen(load_strategy("shared_expert"))), model=replace(model, layers=model.layers[1:9]))
    with pytest.raises(StrategyError, match="shared_expert cannot be combined with pairs"):
        simulate_step(shared, ranges=False)

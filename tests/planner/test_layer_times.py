"""Least times of layers: closed forms on small graphs, streams that wait, halves that make up a layer."""

from __future__ import annotations

import pytest

from overlapsim.planner.layer_times import GROUPS, PASSES, STRATEGY_GEMM, LayerTimes, Times, times_of
from overlapsim.step.pieces import graph_builder
from overlapsim.step.simulate import step_prices
from overlapsim.workload.operators import CollectiveOp, GemmOp, OperatorGraph
from tests.step.steps import GPT, MODELS, MOE, ask

FC1 = GemmOp(8, 8, 8, name="mlp.fc1")
FC2 = GemmOp(8, 8, 8, name="mlp.fc2")
SUM = CollectiveOp("reduce_scatter", 8.0, 2, name="mlp.fc2", group="tp")
TOKENS = CollectiveOp("all_to_all", 8.0, 2, name="moe.dispatch", group="ep")
SECONDS = {"gemm": 3.0, "tp": 2.0, "ep": 5.0}


def found(operators: tuple[object, ...], edges: tuple[tuple[int, int], ...], streams: tuple[str, ...] = ()) -> Times:
    """Times of a graph where a GEMM takes 3 s, a tensor-parallel collective 2 s (1 s of wire), an exchange 5 s."""
    graph = OperatorGraph(operators, edges, streams)  # type: ignore[arg-type]
    return times_of(
        graph,
        lambda op: SECONDS[op.group] if isinstance(op, CollectiveOp) else SECONDS["gemm"],
        lambda op: 1.0,
        PASSES["forward"],
    )


def test_one_stream_takes_the_sum() -> None:
    """A GEMM, its reduce-scatter, an exchange."""
    times = found((FC2, SUM, TOKENS), ((0, 1), (1, 2)))
    assert times.chain == 3 + 2 + 5
    assert times.computing == 3
    assert times.free == pytest.approx(3 * STRATEGY_GEMM + 5)
    assert times.wires == tuple({"tp": 1.0, "ep": 1.0}.get(group, 0.0) for group in GROUPS)
    assert times.at_least("pairs") == pytest.approx(3 * STRATEGY_GEMM + 5)
    assert times.at_least("all") == pytest.approx(3 * STRATEGY_GEMM)


def test_another_stream_hides_what_is_not_waited_for() -> None:
    """An exchange beside two GEMMs costs nothing until one of them needs it."""
    streams = ("ep", "compute", "compute")
    assert found((TOKENS, FC1, FC2), (), streams).chain == 6
    assert found((TOKENS, FC1, FC2), ((0, 2),), streams).chain == 5 + 3


def test_wires_bound_what_strategies_hide() -> None:
    """Nothing computes while eight reduce-scatters pass: no strategy beats their bytes."""
    times = found((FC2, *[SUM] * 8), tuple((i, i + 1) for i in range(8)))
    assert times.at_least("pairs") == times.at_least("all") == 8
    assert times.at_least("nothing") == times.chain
    assert times.chain == 3 + 8 * 2


def test_passes_that_are_left_out_count_nothing() -> None:
    """A backward graph holds both kinds of gradients; each alone is less than both."""
    back = GemmOp(8, 8, 8, name="mlp.fc1", pass_="wgrad")
    assert found((FC1, back), ()).chain == 3


@pytest.mark.parametrize(("model", "layout"), [(GPT, "tp=2,dp=2"), (MOE, "ep=2,etp=1,tp=2,dp=2"), (GPT, "cp=2,dp=2")])
def test_a_layer_in_the_engine_takes_no_less(model: object, layout: str) -> None:
    """Both halves, forward and backward; serial streams within 1 %."""
    from overlapsim.step.pieces import StagePieces
    from overlapsim.step.simulate import step_schedule

    inputs = ask(model, layout)  # type: ignore[arg-type]
    prices = step_prices(inputs, MODELS)
    pieces = StagePieces(inputs, prices, step_schedule(inputs))
    layer = inputs.model.layers[0]
    times = LayerTimes().layer(layer, graph_builder(inputs), prices)
    for name, which in (("forward", "forward"), ("backward", "backward")):
        simulated = pieces.layer(layer, which).duration_s  # type: ignore[arg-type]
        assert 0.85 * simulated <= times[name].chain <= simulated * (1 + 1e-6)
        assert times[name].computing <= times[name].chain
        assert times[name].at_least("all") <= times[name].at_least("pairs") <= times[name].chain


def test_halves_are_priced_once_for_all_that_share_them() -> None:
    """Replicas and ZeRO change no layer: the same object comes back."""
    times = LayerTimes()
    halves = []
    for layout in ("tp=2,dp=2", "tp=2,dp=4,zero=1"):
        inputs = ask(GPT, layout)
        builder, prices = graph_builder(inputs), step_prices(inputs, MODELS)
        times.layer(inputs.model.layers[0], builder, prices)
        halves.append(len(times._known))
    assert halves[0] == halves[1] == 2

"""Layers of a stage that are ordered together: groups of two, what is over alone, and no slower than one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapsim.hardware.loading import load_cluster
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import StagePieces
from overlapsim.step.simulate import simulate_step, step_prices, step_schedule
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.adjacent import adjacent
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.presets import load_model
from overlapsim.workload.recompute import Recompute

ORDER = load_strategy("operator_order")
MODEL = load_model("megascale-deepseekmoe")[0]


def inputs_of(num_layers: int, **parameters) -> StepInputs:
    composition = Composition((Chosen(ORDER, {"beam": 16, **parameters}),)) if parameters else Composition()
    return StepInputs(
        replace(MODEL, layers=MODEL.layers[:num_layers]),
        load_cluster("h800-sxm8"),
        Layout.parse("sp=8,ep=8"),
        Job(8192, global_batch=4),
        recompute=Recompute.parse("sar"),
        composition=composition,
    )


def pieces_of(inputs: StepInputs) -> StagePieces:
    return StagePieces(inputs, step_prices(inputs), step_schedule(inputs))


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5])
def test_twos_and_what_is_over(num_layers: int) -> None:
    pieces = pieces_of(inputs_of(num_layers, layers=2))
    layer = MODEL.layers[0]
    two, one = (pieces.layer(layer, "backward", together=count) for count in (2, 1))
    found = pieces._layers(pieces.layers[0], "backward", num_layers)
    assert found.duration_s == pytest.approx(num_layers // 2 * two.duration_s + num_layers % 2 * one.duration_s)
    assert sum(found.kinds_s.values()) == pytest.approx(found.duration_s, rel=1e-9)


def test_two_layers_hold_the_work_of_both() -> None:
    pieces = pieces_of(inputs_of(4, layers=2))
    layer = MODEL.layers[0]
    for which in ("forward", "backward"):
        two, one = (pieces.layer(layer, which, together=count) for count in (2, 1))
        assert two.demands == pytest.approx({name: 2 * amount for name, amount in one.demands.items()})


def test_each_step_of_the_search_is_faster() -> None:
    """In line; ordered on times; in the engine; two layers together."""
    settings = ({}, {"search": "times"}, {"search": "engine"}, {"search": "engine", "layers": 2})
    times = [simulate_step(inputs_of(4, **chosen), ranges=False).step_time_s for chosen in settings]
    assert times[0] > times[1] >= times[2] > times[3] * 0.995
    assert times[3] < 0.9 * times[0]


def test_an_order_costs_memory() -> None:
    pieces = pieces_of(inputs_of(2))
    graph = pieces.builder.layer(MODEL.layers[0], "backward")
    context = Context(graph, pieces.prices)
    both = Context(adjacent([graph] * 2), pieces.prices)
    assert ORDER.extra_memory_bytes(context, {"beam": 0}) == 0
    one = ORDER.extra_memory_bytes(context, {"beam": 16})
    assert one > 0
    assert ORDER.extra_memory_bytes(both, {"beam": 16, "layers": 2}) > 0


def test_sharded_steps_are_ordered_in_the_engine_too() -> None:
    """ZeRO 3 runs forward and backward of its layers as one graph: the order is searched for all of it."""
    plain = replace(inputs_of(2), layout=Layout.parse("ep=8,dp=8,zero=3"), job=Job(4096, global_batch=8))
    groups = {"layers_per_group": 1, "depth": 2, "rate_limit": True, "reshard_after_forward": True, "keep_last": False}
    chosen = (Chosen(load_strategy("fsdp_prefetch"), groups), Chosen(ORDER, {"beam": 16, "search": "engine"}))
    times = [
        simulate_step(replace(plain, composition=Composition(chosen[:count])), ranges=False).step_time_s
        for count in (1, 2)
    ]
    assert times[1] < times[0]

"""One layer's forward and backward pass, against the published times of a layer."""

from __future__ import annotations

from overlapsim.accuracy.steps_data import LayerTime, layer_times
from overlapsim.accuracy.steps_inputs import layer_inputs
from overlapsim.accuracy.suite import Row
from overlapsim.cost.prices import PriceBook
from overlapsim.step.blocks import simulate_piece
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import graph_builder
from overlapsim.step.simulate import ENDS, FAMILIES, step_prices
from overlapsim.strategy.base import Context
from overlapsim.workload.build import Which

GROUP = "korthikanti-layer"


def layer_rows() -> list[Row]:
    """Forward and backward of each published variant; times in ms."""
    return [row for entry in layer_times() for row in _rows(entry)]


def _rows(entry: LayerTime) -> list[Row]:
    inputs = layer_inputs(entry.recompute, entry.split)
    prices = step_prices(inputs)
    rows = []
    passes: tuple[tuple[Which, float], ...] = (("forward", entry.forward_ms), ("backward", entry.backward_ms))
    for which, measured_ms in passes:
        seconds = _seconds(inputs, prices, which)
        low = high = 0.0
        for family in FAMILIES:
            for end in ENDS:
                shifted = _seconds(inputs, prices.at(family, end), which) - seconds
                low, high = low + min(0.0, shifted) ** 2, high + max(0.0, shifted) ** 2
        ends = 1e3 * (seconds - low**0.5), 1e3 * (seconds + high**0.5)
        rows.append(Row(f"{GROUP}-{entry.variant}-{which}", GROUP, measured_ms, 1e3 * seconds, *ends, "ms", False))
    return rows


def _seconds(inputs: StepInputs, prices: PriceBook, which: Which) -> float:
    """Time of the pass behind another layer's, whose host has run ahead."""
    graph = graph_builder(inputs).layer(inputs.model.layers[0], which)
    return simulate_piece(Context(graph, prices), inputs.composition, contention=inputs.contention).duration_s

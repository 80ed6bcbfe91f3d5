"""What modelled effects add to steps of several nodes: each is switched off, or exchanged, and steps run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from overlapsim.accuracy.progress import counted
from overlapsim.accuracy.steps_data import Measured
from overlapsim.accuracy.steps_inputs import vtrain_inputs
from overlapsim.cost.prices import PriceBook
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import step_prices, step_seconds
from overlapsim.workload.recompute import Recompute
from overlapsim.workload.state_precision import state_precision

_HALF: Final = state_precision("fp16", gradient="fp16")


def _places(*kinds: str) -> Callable[[PriceBook], PriceBook]:
    """Groups of these kinds move bytes in no time; latencies stay."""

    def change(prices: PriceBook) -> PriceBook:
        free = {kind: replace(prices.groups[kind], slower=0.0) for kind in kinds if kind in prices.groups}
        return replace(prices, groups={**prices.groups, **free})

    return change


def _recipe(**changes: object) -> Callable[[StepInputs], StepInputs]:
    return lambda inputs: replace(inputs, recipe=replace(inputs.recipe, **changes))  # type: ignore[arg-type]


def _same(inputs: StepInputs) -> StepInputs:
    return inputs


def _as_priced(prices: PriceBook) -> PriceBook:
    return prices


ABLATIONS: Final[Mapping[str, tuple[Callable[[StepInputs], StepInputs], Callable[[PriceBook], PriceBook]]]] = {
    "no recompute": (lambda inputs: replace(inputs, recompute=Recompute()), _as_priced),
    "tensor-parallel bytes free": (_same, _places("tp")),
    "data-parallel bytes free": (_same, _places("dp", "dp_cp")),
    "pipeline bytes free": (_same, _places("pp", "pair")),
    "transfers not scattered": (lambda inputs: replace(inputs, scatter_gather=False), _as_priced),
    "transfers overlapped": (lambda inputs: replace(inputs, p2p="overlapped"), _as_priced),
    "fp16 gradients": (lambda inputs: replace(inputs, precision=_HALF), _as_priced),
    "mirrored rings": (lambda inputs: replace(inputs, rings="mirrored"), _as_priced),
    "attention in one kernel": (_recipe(attention="flash"), _as_priced),
    "softmax not fused": (_recipe(fused_softmax=False), _as_priced),
    "no dropout": (_recipe(dropout=False), _as_priced),
    "gradients added by their GEMM": (_recipe(accumulation="fused"), _as_priced),
    "loss in one kernel": (_recipe(loss="fused"), _as_priced),
    "optimizer in one kernel": (_recipe(optimizer="adam"), _as_priced),
    "no host": (lambda inputs: replace(inputs, stack="graph"), _as_priced),
}  # fmt: skip
"""What is switched off or exchanged, by name: change of the question, and of the prices."""


def ablations(
    rows: Sequence[Measured], predicted_s: Mapping[str, float], models: dict[object, object]
) -> dict[str, float]:
    """Median change of the predicted time by each of `ABLATIONS`, a fraction."""
    found = {}
    for name, (question, price) in ABLATIONS.items():
        changes = []
        for row in counted(f"ablation {name}", rows):
            inputs = question(vtrain_inputs(row))
            changes.append(step_seconds(inputs, price(step_prices(inputs, models))) / predicted_s[row.id] - 1)
        found[name] = round(float(np.median(changes)), 4)
    return found

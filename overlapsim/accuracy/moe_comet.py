"""COMET's end-to-end forward latencies on one node, predicted: a model's layers one after another, launched eagerly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from overlapsim.accuracy.moe_fused import EXPERTS, fused_pairs
from overlapsim.accuracy.moe_rows import Predicted, Shift, check_keys
from overlapsim.accuracy.moe_systems import STACK
from overlapsim.accuracy.value_file import Figure
from overlapsim.cost.launch import launch_stack
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import Finding
from overlapsim.step.blocks import simulate_piece
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import graph_builder
from overlapsim.step.simulate import step_prices
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Composition
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.model import ModelSpec, MoE
from overlapsim.workload.presets import load_model
from overlapsim.workload.recipe import Recipe

CLUSTER: Final = "h800-sxm8"
GPUS: Final = 8
_MEGATRON: Final = Recipe(rope="torch", router="chain", permutation="torch", experts="looped")
RECIPES: Final[Mapping[str, Recipe]] = {
    "megatron-te": _MEGATRON,
    "megatron-cutlass": replace(_MEGATRON, experts="grouped"),
    "comet": replace(_MEGATRON, router="gate_chain", permutation="fused", experts="grouped"),
}
"""Kernels of each system; all but the experts' and the permutation's are those of Megatron-LM, as in the paper."""
SYSTEMS: Final = (*RECIPES, "tutel", "fastermoe")
FINDINGS: Final = (
    Finding(
        "comet_rows_assumed",
        "COMET's rows: M tokens are one sequence of each data-parallel replica (8 / TP of them), layers alone without "
        "embedding and logits, at the clock of short runs",
    ),
    Finding("columns_not_predicted", "COMET's columns Tutel and FasterMoE have no strategy here: they are left out"),
)


@dataclass
class Forwards:
    """Predictions of rows of ``comet-e2e``.

    Attributes
    ----------
    ranges : False leaves 90 % intervals out
    """

    ranges: bool = True
    _seconds: dict[tuple[str, ...], Predicted] = field(default_factory=dict)

    def predict(self, row: Figure) -> Predicted:
        """Latency of a row; NaN for systems that have no strategy.

        Raises
        ------
        CalibrationError
            If the row's keys, metric or unit are not those of the group.
        """
        needed = {"m": (), "tp": ("1", "2", "4", "8"), "ep": ("1", "2", "4", "8"), "model": ("mixtral", "qwen2", "phi")}
        check_keys(row, {**needed, "system": SYSTEMS}, {"latency": ("ms", "s")})
        keys = row.keys
        key = (keys["m"], keys["tp"], keys["ep"], keys["model"], keys["system"])
        if key not in self._seconds:
            self._seconds[key] = self._predict(*key)
        return self._seconds[key]

    def _predict(self, m: str, tp: str, ep: str, model: str, system: str) -> Predicted:
        if system not in RECIPES:
            return Predicted(float("nan"), float("nan"), float("nan"))
        inputs = forward_inputs(int(m), int(tp), int(ep), model, system)
        pairs = {("moe.fc1", "fwd"): EXPERTS, ("moe.fc2", "fwd"): EXPERTS}
        chosen = fused_pairs(inputs, pairs) if system == "comet" else {}
        prices, graph = step_prices(inputs), graph_builder(inputs).layer(inputs.model.layers[-1], "forward")

        def value(shift: Shift) -> float:
            stack = launch_stack(inputs.stack, inputs.cluster.device)
            host_s = stack.host_s
            moved = prices
            if shift is not None:
                family, end = shift
                host_s *= getattr(stack.spread, end) if family == "launch" else 1.0
                moved = prices.at(family, end)
            context = Context(graph, moved)
            piece = simulate_piece(context, Composition(pairs=chosen), launch_s=host_s, hosts=stack)
            return piece.duration_s * inputs.model.num_layers

        return Predicted.of(value, ranges=self.ranges)


def forward_inputs(tokens: int, tp: int, ep: int, model: str, system: str) -> StepInputs:
    """Settings of one row; only the forward pass of its layers is looked at."""
    layout = Layout.parse(f"tp={tp},ep={ep}", GPUS)
    job = Job(tokens, 1, layout.dp)
    return StepInputs(comet_model(model), load_cluster(CLUSTER), layout, job, recipe=RECIPES[system], stack=STACK)


def comet_model(name: str) -> ModelSpec:
    """A model of COMET's evaluation; Qwen2 with the 64 experts, top-4 and without shared experts, as listed there."""
    if name == "mixtral":
        return load_model("mixtral-8x7b")[0]
    if name == "phi":
        return load_model("megascale-phi-3.5-moe")[0]
    spec, _ = load_model("qwen1.5-moe-a2.7b")
    first = spec.layers[0]
    assert isinstance(first.mlp, MoE)
    mlp = replace(first.mlp, num_experts=64, num_shared_experts=0, shared=None, shared_gate=False)
    return replace(spec, name="qwen2-moe-comet", layers=(replace(first, mlp=mlp),) * spec.num_layers)

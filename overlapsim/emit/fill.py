"""The userbuffer file of one layer from its sizes: each GEMM is planned with what Transformer Engine has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from overlapsim.emit.base import comment
from overlapsim.emit.rules import Version
from overlapsim.emit.transformer_engine import beside
from overlapsim.emit.userbuffers import CGA_SIZE, COLUMNS, GATHERS, GEMMS, SCATTERS, userbuffers, yaml_text
from overlapsim.errors import LayoutError, UsageError
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import Finding, OperatorSettings
from overlapsim.planner.operator import Candidate, OperatorResult, plan_operator, time_s
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import graph_builder
from overlapsim.step.simulate import step_prices
from overlapsim.strategy.base import Context, Parameters
from overlapsim.strategy.registry import load_strategies
from overlapsim.units import dtype_bytes, format_time
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.model import Attention, Layer, Mlp, ModelSpec
from overlapsim.workload.operators import CollectiveKind, GemmOp, OperatorGraph, gemm_and_collective, independent_pair

WHAT: Final = ("serial", "ring_exchange", "pipelined_rs", "bulk")
"""Strategies that Transformer Engine has."""


@dataclass(frozen=True)
class FilledGemm:
    """One GEMM: what it takes (None where nothing can overlap it), and its time one after the other."""

    best: Candidate | None
    serial_s: float


@dataclass(frozen=True)
class Filled:
    """The answer.

    Attributes
    ----------
    text : of the file
    gemms : what was planned, by GEMM of Transformer Engine
    unexpressed, findings : as in `Emitted`
    """

    text: str
    gemms: Mapping[str, FilledGemm]
    unexpressed: tuple[str, ...]
    findings: tuple[Finding, ...]


def one_layer(
    hidden: int, ffn: int | None = None, heads: int | None = None, kv_heads: int | None = None, *, gated: bool = False
) -> ModelSpec:
    """Return a model of one dense layer; what is left out is as in GPT-3: ``ffn = 4 x hidden``, heads of 128.

    Raises
    ------
    WorkloadError, UsageError
        If a size is none, or heads are left out and do not divide the width.
    """
    if heads is None and hidden % 128:
        raise UsageError(f"hidden is {hidden}, no multiple of 128; expected heads as well: they are of 128 by default")
    heads = heads or hidden // 128
    if hidden % heads:
        raise UsageError(f"hidden is {hidden} with {heads} heads; expected a divisor")
    attention = Attention(heads, kv_heads or heads, hidden // heads)
    layer = Layer(attention, Mlp(ffn or 4 * hidden, gated=gated, activation="silu" if gated else "gelu"))
    return ModelSpec("one layer", hidden, (layer,), vocabulary=1, max_positions=1)


def fill(model: ModelSpec, cluster: Cluster, tp: int, micro_batch: int, seq_len: int, version: Version) -> Filled:
    """Plan the GEMMs of a layer.

    Parameters
    ----------
    model : whose first dense layer is looked at
    cluster : the machine; ranks of the tensor-parallel group fill one node after another
    tp, micro_batch, seq_len : tensor-parallel degree with the sequence split, sequences of a micro-batch, their tokens
    version : of Transformer Engine

    Notes
    -----
    Input gradients of column-split layers take the bulk form, as all published settings do; scattering with dgrad
    itself is left to `plan`, which sees what follows.

    Raises
    ------
    LayoutError, UsageError
        If the layer cannot be split so, or has no dense block.
    """
    if tp < 2:
        raise UsageError(f"tp is {tp}; expected at least 2: nothing is communicated inside a layer")
    inputs = _inputs(model, cluster, tp, micro_batch, seq_len)
    builder, prices = graph_builder(inputs), step_prices(inputs)
    layer = next((layer for layer in inputs.model.layers if isinstance(layer.mlp, Mlp)), None)
    if layer is None:
        raise UsageError(f"{model.name} has no dense layer; expected one: userbuffers take attention and dense blocks")
    gemms = {
        (op.name, op.pass_): op
        for which in ("forward", "backward")
        for op in builder.layer(layer, which).of_type(GemmOp)
    }
    size_bytes = float(seq_len * micro_batch * model.hidden * dtype_bytes(model.dtype))
    strategies = load_strategies(WHAT)
    filled: dict[str, FilledGemm] = {}
    operators: list[OperatorSettings] = []
    findings: dict[str, Finding] = {}
    for (name, pass_), gemm_name in GEMMS.items():
        context = Context(_pair(gemms[name, pass_], gemm_name, tp, size_bytes), replace(prices, ranks=tp))
        result = plan_operator(context, strategies)
        best = min(_accepted(result, context), key=lambda entry: entry.predicted_s, default=None)
        assert result.serial.best is not None
        filled[gemm_name] = FilledGemm(best, result.serial.best.predicted_s)
        findings |= {f.code: f for f in result.findings}
        if best is not None:
            settings = best.strategy.settings(context, best.parameters)
            operators.append(OperatorSettings(name, pass_, best.strategy.name, best.parameters, settings))
            findings |= {f.code: f for f in best.strategy.findings(context, best.parameters)}
    given = userbuffers(operators, inputs.layout, version)
    head = (
        f"userbuffers of one layer for Transformer Engine {version} on {cluster.name}: hidden {model.hidden}, "
        f"ffn {layer.mlp.ffn if isinstance(layer.mlp, Mlp) else 0}, tp {tp}, micro-batch {micro_batch}, "
        f"{seq_len} tokens",
        *beside(given),
        "GEMM and its collective, predicted (one after the other):",
        *_predicted(filled),
    )
    return Filled(comment(head) + yaml_text(given.gemms), filled, given.unexpressed, tuple(findings.values()))


def _inputs(model: ModelSpec, cluster: Cluster, tp: int, micro_batch: int, seq_len: int) -> StepInputs:
    nodes = -(-tp // cluster.node.num_devices)
    job = Job(seq_len, micro_batch, micro_batch, tp)
    try:
        return StepInputs(model, cluster.with_nodes(nodes), Layout(tp=tp), job)
    except LayoutError as error:
        raise LayoutError(f"the layer cannot be split so: {error}") from None


def _pair(gemm: GemmOp, name: str, tp: int, size_bytes: float) -> OperatorGraph:
    """The GEMM with the collective that stands beside it in the library."""
    if name in SCATTERS:
        return gemm_and_collective(gemm, "reduce_scatter", tp)
    if name in GATHERS:
        return gemm_and_collective(gemm, "all_gather", tp)
    kind: CollectiveKind = "all_gather" if name.endswith("dgrad") else "reduce_scatter"
    assert name.split("_")[0] in COLUMNS
    return independent_pair(gemm, kind, tp, size_bytes)


def _accepted(result: OperatorResult, context: Context) -> Iterator[Candidate]:
    """The fastest of each strategy that overlaps, with parameters the library takes, even where it does not pay.

    What the file leaves out, the library overlaps in its own way. Where the best parameters are refused, all that the
    strategy proposes and the library takes are run.
    """
    for entry in result.results:
        if entry.best is None or not entry.strategy.overlaps:
            continue
        if not refused(context, entry.best.parameters):
            yield entry.best
            continue
        space = entry.strategy.parameters(context)
        for point in space.points():
            if not refused(context, point):
                yield Candidate(entry.strategy, point, time_s(entry.strategy, context, point))


def refused(context: Context, parameters: Parameters) -> bool:
    """Whether the library would lose rows (splits that do not divide them) or SMs (kernels run in clusters of two)."""
    rows = context.pair().gemm.m
    return bool(rows % parameters.get("num_splits", 1) or parameters.get("comm_sms", 0) % CGA_SIZE)


def _predicted(filled: Mapping[str, FilledGemm]) -> Iterator[str]:
    for name, entry in filled.items():
        if entry.best is None:
            yield f"{name}: one after the other ({format_time(entry.serial_s)})"
        else:
            best = entry.best
            yield f"{name}: {best.strategy.name} {format_time(best.predicted_s)} ({format_time(entry.serial_s)})"

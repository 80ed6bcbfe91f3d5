"""Layers whose parameters are sharded (ZeRO 3, FSDP, HSDP): gathered before use, gradients scattered behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from overlapsim.plan import Finding
from overlapsim.step.inputs import StepInputs
from overlapsim.step.traffic import precision_of
from overlapsim.workload.build import GraphBuilder, Which
from overlapsim.workload.model import Layer
from overlapsim.workload.operators import CollectiveOp, Operator, OperatorGraph
from overlapsim.workload.stage_weights import LocalParameters, layer_parameters_local
from overlapsim.workload.vocabulary import padded_vocabulary

Unit = Literal["layer", "embed", "logits"]
GATHERING: Final = ("forward", "backward", "input_grad")
SCATTERING: Final = ("backward", "weight_grad")
"""Passes that need whole parameters, and those that make gradients."""
EXPERTS: Final = ("moe.fc1", "moe.fc2")


@dataclass(frozen=True)
class Entry:
    """One pass of one unit of parameters.

    Attributes
    ----------
    unit, which : what is run
    layer : of a unit ``layer``
    rebuilt : whether full recompute runs it again in its backward
    """

    unit: Unit
    which: Which
    layer: Layer | None = None
    rebuilt: bool = True


def sharded_graph(inputs: StepInputs, builder: GraphBuilder, entries: Sequence[Entry]) -> OperatorGraph:
    """Operators of several units one after another, with their parameters' gathers and gradients' scatters.

    A gather stands right before the operators of its unit and needs nothing; the first and the last operator that use
    the parameters need it. All stand on the compute stream: a strategy that arranges graphs may gather ahead.

    Parameters
    ----------
    entries : in the order they run

    Returns
    -------
    OperatorGraph
        Gathers are named ``param.layer``, ``param.experts``, ``param.embed`` and ``param.logits``, scatters ``grad.``
        likewise.
    """
    operators: list[Operator] = []
    streams: list[str] = []
    edges: set[tuple[int, int]] = set()
    last = -1
    for entry in entries:
        graph = _graph(builder, entry)
        shards = list(_shards(inputs, entry))
        # The gradient of a lookup needs no table.
        looked_up = entry.unit == "embed" and entry.which != "forward"
        gathers = shards if entry.which in GATHERING and not looked_up else []
        own = len(operators) + len(gathers)
        for number, (name, local, ranks, group) in enumerate(gathers):
            first_use, last_use = _uses(graph, name)
            size = float(local * precision_of(inputs).gathered_bytes)
            pass_ = "fwd" if entry.which == "forward" else "dgrad"
            dtype = builder.model.dtype
            operators.append(CollectiveOp("all_gather", size, ranks, dtype, f"param.{name}", pass_, group=group))
            streams.append("compute")
            edges |= {(own - len(gathers) + number, own + use) for use in (first_use, last_use)}
        operators += graph.operators
        streams += [graph.stream_of(i) for i in range(len(graph.operators))]
        edges |= {(own + a, own + b) for a, b in graph.dependencies}
        if last >= 0:
            fed = {b for _, b in graph.dependencies}
            edges |= {(last, own + start) for start in range(len(graph.operators)) if start not in fed}
        last = len(operators) - 1
        if entry.which in SCATTERING:
            for name, local, ranks, group in shards:
                size = float(local * precision_of(inputs).gradient_bytes)
                scatter = CollectiveOp("reduce_scatter", size, ranks, "fp32", f"grad.{name}", "wgrad", group=group)
                operators.append(scatter)
                streams.append("compute")
                edges.add((last, len(operators) - 1))
    return OperatorGraph(tuple(operators), tuple(sorted(edges)), tuple(streams))


def _graph(builder: GraphBuilder, entry: Entry) -> OperatorGraph:
    if entry.unit == "embed":
        return builder.embedding(entry.which)
    if entry.unit == "logits":
        return builder.head(entry.which)
    assert entry.layer is not None
    return builder.layer(entry.layer, entry.which, rebuilt=entry.rebuilt)


def _shards(inputs: StepInputs, entry: Entry) -> Iterator[tuple[str, int, int, str]]:
    """Name, parameters of one rank, ranks and group of what is sharded of a unit."""
    layout, local = inputs.layout, unit_parameters(inputs, entry)
    if local.dense and layout.dense_shards > 1:
        yield entry.unit, local.dense, layout.dense_shards, "shard"
    if local.expert and layout.expert_shards > 1:
        yield "experts", local.expert, layout.expert_shards, "expert_shard"


def unit_parameters(inputs: StepInputs, entry: Entry) -> LocalParameters:
    """Parameters of a unit on one rank; norms beside embedding and logits left out."""
    model, layout = inputs.model, inputs.layout
    if entry.layer is not None:
        return layer_parameters_local(model, entry.layer, layout, whole_shared=inputs.recipe.shared == "whole")
    rows = padded_vocabulary(model.vocabulary, layout.tp) // layout.tp if model.vocabulary else 0
    positions = model.max_positions if entry.unit == "embed" and model.positions == "learned" else 0
    return LocalParameters((rows + positions) * model.hidden)


def _uses(graph: OperatorGraph, name: str) -> tuple[int, int]:
    """Positions of the first and the last operator of a unit that use its parameters."""
    own = [i for i, op in enumerate(graph.operators) if name != "experts" or op.name in EXPERTS]
    return own[0], own[-1]


def stage_entries(layers: Sequence[tuple[Layer, bool]], which: Which, *, first: bool, last: bool) -> tuple[Entry, ...]:
    """Entries of one pass of a stage: the embedding on the first, norm, logits and loss on the last.

    Parameters
    ----------
    layers : with whether each is rebuilt, in the order of the model
    """
    units = [Entry("layer", which, layer, rebuilt) for layer, rebuilt in layers]
    units = [Entry("embed", which)] * first + units + [Entry("logits", which)] * last
    if which != "forward":
        units.reverse()
    return tuple(entry for entry in units if not (entry.unit == "embed" and which == "input_grad"))


def turned(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The backward of forward entries."""
    return tuple(replace(entry, which="backward") for entry in reversed(entries))


def sharded_findings(inputs: StepInputs) -> tuple[Finding, ...]:
    """Say where parameters could be gathered ahead and no strategy does."""
    if not inputs.sharded or inputs.composition.arranging:
        return ()
    message = (
        "parameters are gathered right before each layer and nothing hides them: choose a strategy that prefetches"
    )
    return (Finding("gathers_serial", message),)

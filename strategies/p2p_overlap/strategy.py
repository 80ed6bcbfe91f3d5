"""Pipeline parallelism: activations and their gradients move between stages beside the compute of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta

from overlapsim.strategy.arrange import assemble, collectives, consumers, slots_of
from overlapsim.strategy.base import YES, Applicability, Context, Parameters, ParameterSpace, StrategyInfo
from overlapsim.strategy.compose import ArrangingStrategy
from overlapsim.workload.operators import COMPUTE, CollectiveOp, OperatorGraph

RECEIVE, SEND = "pipe.recv", "pipe.send"
STREAMS: Final = {RECEIVE: "pp_recv", SEND: "pp_send"}
"""Both directions of a link are used at once, so each has a stream."""


@dataclass(frozen=True)
class P2pOverlapParameters:
    """How transfers are issued.

    Attributes
    ----------
    batched : sends and receives of one turn are one blocking call, as in schedules without interleaving
    early : receives posted ahead of the one that is waited for
    """

    batched: bool
    early: Annotated[int, Meta(ge=1, le=64)]


class P2pOverlap(ArrangingStrategy):
    """A send runs under what is computed next; a receive is posted before the compute that precedes its use.

    A receive takes the time of the transfer from when it is posted: the
    neighbour's own delay is the pipeline schedule's to tell.
    """

    name = "p2p_overlap"
    parameter_type = P2pOverlapParameters
    traits = frozenset({"pipeline_p2p"})
    needs = ("pipeline", "interleaved")
    info = StrategyInfo(
        summary="pipeline sends and receives on streams of their own, receives posted early",
        granularity="micro-batch and model chunk",
        hides="activations and gradients between stages under the compute of other chunks",
        cost="SMs of two point-to-point channels, a buffer a posted receive",
        frameworks=("Megatron-LM (default with virtual stages; overlap-p2p-communication-warmup-flush)",),
        references=("Narayanan et al., SC'21, arXiv 2104.04473",),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse a graph without transfers between stages."""
        if _transfers(context.graph):
            return YES
        reason = "nothing goes between stages: the graph has no send_recv named pipe.*"
        return Applicability(False, (reason,))

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open how early receives are posted."""
        return ParameterSpace({"batched": (False,), "early": (1, 2)})

    def degenerate(self, context: Context) -> Parameters:
        """Blocking transfers."""
        return {"batched": True, "early": 1}

    def extra_memory_bytes(self, context: Context, parameters: Parameters) -> float:
        """A buffer for each receive that is posted early."""
        if parameters["batched"]:
            return 0.0
        sizes = [_size(context.graph, i) for i in _transfers(context.graph) if _name(context.graph, i) == RECEIVE]
        return float(parameters["early"] * max(sizes, default=0.0))

    def arrange(self, context: Context, parameters: Parameters) -> OperatorGraph:
        """Put transfers on their streams; a receive waits until a buffer is free."""
        graph, early = context.graph, parameters["early"]
        slots = slots_of(graph)
        moving = _transfers(graph)
        for i in moving:
            slots[i].stream = COMPUTE if parameters["batched"] else STREAMS[_name(graph, i)]
        if parameters["batched"]:
            return assemble(graph, slots)
        used = consumers(graph)
        receives = [i for i in moving if _name(graph, i) == RECEIVE and used.get(i)]
        for number, i in enumerate(receives):
            if number:
                before = receives[max(0, number - early)]
                issued = used[before][0] - 0.5 if number >= early else before
                slots[i].at = min(i, max(issued, *(p + 0.25 for p in graph.producers(i)), -1.0))
            if number > early:
                slots[i].after.append(slots[used[receives[number - early - 1]][0]])
        return assemble(graph, slots)

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return how transfers are issued."""
        first = _transfers(context.graph)[0]
        return {
            "batched_p2p": parameters["batched"],
            "overlap_p2p": not parameters["batched"],
            "receives_posted_early": 0 if parameters["batched"] else parameters["early"],
            "message_bytes": _size(context.graph, first),
        }


def _transfers(graph: OperatorGraph) -> list[int]:
    return [i for i in collectives(graph, "pipe.", ("send_recv",)) if _name(graph, i) in STREAMS]


def _name(graph: OperatorGraph, position: int) -> str:
    return graph.operators[position].name


def _size(graph: OperatorGraph, position: int) -> float:
    op = graph.operators[position]
    assert isinstance(op, CollectiveOp)
    return op.size_bytes


STRATEGY = P2pOverlap()

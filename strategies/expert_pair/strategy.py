"""The forward of one micro-batch with the backward of another, each one's exchanges under the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlapsim.strategy.base import YES, Applicability, Context, Parameters, ParameterSpace, StrategyInfo
from overlapsim.strategy.compose import ArrangingStrategy
from overlapsim.strategy.liveness import peak_live_bytes
from overlapsim.strategy.pairing import paired, parted
from overlapsim.workload.operators import STEP_PREFIXES, CollectiveOp, OperatorGraph


@dataclass(frozen=True)
class ExpertPairParameters:
    """Whether weight gradients wait until an exchange of the backward is under way."""

    delay_wgrad: bool = False


class ExpertPair(ArrangingStrategy):
    """Orders an F&B pair: both passes in their own order, merged by progress, exchanges beside computation.

    Which passes run as pairs is for the schedule to say.
    """

    name = "expert_pair"
    parameter_type = ExpertPairParameters
    traits = frozenset({"expert_pair"})
    needs = ("expert_parallel", "interleaved_if_pipelined", "no_full_recompute", "no_moe_recompute", "many_queues")
    excludes = frozenset({"shared_expert", "two_batch"})
    per_block = True
    info = StrategyInfo(
        summary="forward of one micro-batch and backward of another merged, exchanges of each under the other",
        granularity="micro-batch pair, op",
        hides="dispatch and combine under the attention and experts of the other pass",
        cost="activations of one micro-batch more, SMs of the dispatcher's kernels",
        frameworks=("Megatron-LM (overlap-moe-expert-parallel-comm)", "DualPipe", "torchtitan (DualPipeV)"),
        references=("Megatron-Core MoE, arXiv 2603.07685", "DeepSeek-V3, arXiv 2412.19437"),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse all but a forward and a backward that need nothing of one another, and exchange something."""
        if parted(context.graph) is None:
            reason = (
                "no forward and backward of different micro-batches run together here; expected a schedule with pairs: "
                "interleaved_pairs, dualpipe or dualpipev"
            )
            return Applicability(False, (reason,))
        if not any(op.ranks > 1 for op in context.graph.of_type(CollectiveOp)):
            return Applicability(False, ("nothing is exchanged, so there is nothing to hide",), "little_to_hide")
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open whether weight gradients wait for an exchange."""
        return ParameterSpace({"delay_wgrad": (False, True)})

    def extra_memory_bytes(self, context: Context, parameters: Parameters) -> float:
        """Results that both passes hold at once, beyond those of one after the other."""
        arranged = self.arrange(context, parameters)
        return max(0.0, peak_live_bytes(arranged) - peak_live_bytes(context.graph))

    def arrange(self, context: Context, parameters: Parameters) -> OperatorGraph:
        """Merge both passes."""
        passes = parted(context.graph)
        assert passes is not None, "applies_to was asked"
        forward, backward = passes
        if parameters.get("delay_wgrad"):
            backward = behind_exchanges(backward)
        return paired(forward, backward, context.prices.operator_s)

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return what is merged and what waits."""
        return {"pair_forward_backward": True, "delay_weight_gradients": bool(parameters.get("delay_wgrad"))}


def behind_exchanges(graph: OperatorGraph) -> OperatorGraph:
    """A backward whose weight gradients are issued once the next exchange is; those that are left, at its end."""
    waited_for = {src for src, dst in graph.dependencies if graph.operators[dst].pass_ != "wgrad"}
    order: list[int] = []
    pending: list[int] = []
    for position, op in enumerate(graph.operators):
        inside = not op.name.startswith(STEP_PREFIXES)
        if op.pass_ == "wgrad" and inside and position not in waited_for:
            pending.append(position)
            continue
        if not inside and any(producer in pending for producer in graph.producers(position)):
            # A gradient's reduction keeps its place behind it.
            pending.append(position)
            continue
        order.append(position)
        if isinstance(op, CollectiveOp) and op.ranks > 1 and inside:
            order += pending
            pending = []
    return graph.reordered((*order, *pending))


STRATEGY = ExpertPair()

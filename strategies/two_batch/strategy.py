"""Two halves of a batch in turn: one computes while the other communicates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from overlapsim.strategies.two_batch.turns import halves, in_turn, is_exchange

from overlapsim.errors import StrategyError
from overlapsim.plan import Finding
from overlapsim.strategy.base import YES, Applicability, Context, Parameters, ParameterSpace, StrategyInfo
from overlapsim.strategy.compose import ArrangingStrategy
from overlapsim.workload.operators import CollectiveOp, OperatorGraph


@dataclass(frozen=True)
class TwoBatchParameters:
    """Batches in turn; 1 leaves the batch whole."""

    batches: Literal[1, 2] = 2


class TwoBatch(ArrangingStrategy):
    """Cuts every operator of a graph in two halves of its batch, which take turns at each exchange.

    Halves cost what kernels of their size cost: weights are read twice, and
    tiles that half the rows do not fill are padded twice.
    """

    name = "two_batch"
    parameter_type = TwoBatchParameters
    traits = frozenset({"two_batch"})
    needs = ("expert_parallel", "direct_dispatch")
    excludes = frozenset({"expert_pair", "operator_order"})
    info = StrategyInfo(
        summary="two halves of the batch in turn, one computing while the other's tokens are exchanged",
        granularity="half batch",
        hides="dispatch, combine and sums of one half under the other half's computation",
        cost="weights read twice, half-filled tiles, SMs of the dispatcher's kernels, a second set of its buffers",
        frameworks=("SGLang (enable-two-batch-overlap)", "vLLM (enable-dbo)"),
        references=("DeepSeek-V3, arXiv 2412.19437", "DeepEP pull request 390"),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse a graph without exchanges, one that cannot be cut, and halves that repeat more than can be hidden."""
        graph, prices = context.graph, context.prices
        exchanges_s = sum(prices.operator_s(op) for op in graph.operators if is_exchange(op))
        if not exchanges_s:
            return Applicability(False, ("layers without experts exchange nothing",), "little_to_hide")
        try:
            extra_s = _extra_s(context)
        except StrategyError as error:
            return Applicability(False, (str(error),))
        if extra_s >= exchanges_s:
            reason = (
                f"kernels of both halves take {extra_s * 1e6:.3g} us more than those of the whole batch, and exchanges "
                f"take {exchanges_s * 1e6:.3g} us: rows are too few to be halved"
            )
            return Applicability(False, (reason,), "kernel_slower")
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave nothing open but whether."""
        return ParameterSpace({"batches": (2,)})

    def degenerate(self, context: Context) -> Parameters:
        """One batch."""
        return {"batches": 1}

    def hides(self, context: Context, parameters: Parameters) -> bool:
        """Only two batches overlap."""
        return bool(parameters.get("batches", 2) == 2)

    def extra_memory_bytes(self, context: Context, parameters: Parameters) -> float:
        """The largest exchange of the second half: both are under way at once."""
        if parameters.get("batches", 2) == 1:
            return 0.0
        sizes = (op.size_bytes for op in context.graph.of_type(CollectiveOp) if is_exchange(op))
        return max(sizes, default=0.0) / 2

    def arrange(self, context: Context, parameters: Parameters) -> OperatorGraph:
        """Cut the graph and let the halves take turns."""
        return in_turn(context.graph) if parameters.get("batches", 2) == 2 else context.graph

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return how many batches take turns."""
        return {"two_batch_overlap": parameters.get("batches", 2) == 2, "batches": parameters.get("batches", 2)}

    def findings(self, context: Context, parameters: Parameters) -> tuple[Finding, ...]:
        """Say what the cut assumes of routing."""
        if parameters.get("batches", 2) == 1:
            return ()
        message = "each expert gets half its tokens from either half of the batch; routing of a half spreads more"
        return (Finding("halves_routed_alike", message),)


def _extra_s(context: Context) -> float:
    """Time of computation in halves over that of the whole."""
    prices = context.prices
    whole, cut = 0.0, 0.0
    for op, parts in zip(context.graph.operators, halves(context.graph), strict=True):
        if not isinstance(op, CollectiveOp):
            whole += prices.operator_s(op)
            cut += sum(prices.operator_s(part) for part in parts)
    return cut - whole


STRATEGY = TwoBatch()

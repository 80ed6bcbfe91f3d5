"""Operators of a layer in the order that hides most communication; collectives on streams of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta

from overlapsim.strategy.base import YES, Applicability, Context, Parameters, ParameterSpace, StrategyInfo
from overlapsim.strategy.compose import ArrangingStrategy
from overlapsim.strategy.ordering import MOST_OPERATORS, arrange_by, best_order, lines_of, stream_of
from overlapsim.workload.operators import CollectiveOp, OperatorGraph

BEAMS: Final = (16, 1)


@dataclass(frozen=True)
class OperatorOrderParameters:
    """Partial orders kept by the search (0: the order given), and SMs each collective is limited to (0: no limit)."""

    beam: Annotated[int, Meta(ge=0, le=1024)]
    sms: Annotated[int, Meta(ge=0, le=1024)]


class OperatorOrder(ArrangingStrategy):
    """Searches the order of a graph's operators with its collectives beside computation."""

    name = "operator_order"
    parameter_type = OperatorOrderParameters
    traits = frozenset({"operator_order"})
    excludes = frozenset({"wgrad_delay"})
    info = StrategyInfo(
        summary="operators issued in the order that hides most communication, found by search",
        granularity="op",
        hides="collectives of a layer under whatever does not need them",
        cost="SMs of the collectives, operands of what is moved kept alive",
        frameworks=("MegaScale-MoE (by hand)", "Lancet", "Centauri"),
        references=("MegaScale-MoE, EuroSys'26, arXiv 2505.11432", "Jiang et al., MLSys'24 (Lancet), arXiv 2404.19429"),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse a graph in which nothing can move: no collective in line with computation."""
        graph = context.graph
        if len(graph.operators) > MOST_OPERATORS:
            reason = f"{len(graph.operators)} operators are more than are ordered at once ({MOST_OPERATORS})"
            return Applicability(False, (reason,))
        if not any(stream_of(graph, i) != graph.stream_of(i) for i in range(len(graph.operators))):
            reason = "no collective stands in line with computation, so there is nothing to order"
            return Applicability(False, (reason,), "little_to_hide")
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open how widely to search; fewer SMs are for whoever asks the engine (`planner.order`)."""
        return ParameterSpace({"beam": BEAMS, "sms": (0,)})

    def degenerate(self, context: Context) -> Parameters:
        """The order given, in line with computation."""
        return {"beam": 0, "sms": 0}

    def arrange(self, context: Context, parameters: Parameters) -> OperatorGraph:
        """Issue the operators in the order found."""
        graph = context.graph
        if not parameters["beam"]:
            return graph
        order = best_order(lines_of(graph, context.prices), parameters["beam"])
        return arrange_by(graph, order.positions, parameters["sms"])

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return the order by name and pass, and which collectives run beside computation."""
        arranged = self.arrange(context, parameters)
        return {
            "order": [f"{op.name} {op.pass_}" for op in arranged.operators],
            "beside": [
                f"{op.name} {op.pass_}"
                for i, op in enumerate(arranged.operators)
                if isinstance(op, CollectiveOp) and arranged.stream_of(i).startswith("ordered")
            ],
            "comm_sms": parameters["sms"],
        }


STRATEGY = OperatorOrder()

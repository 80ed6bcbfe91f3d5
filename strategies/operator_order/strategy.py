"""Operators of a layer in the order that hides most communication; collectives on streams of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from overlapsim.errors import StrategyError
from overlapsim.strategy.base import YES, Applicability, Context, Parameters, ParameterSpace, StrategyInfo
from overlapsim.strategy.compose import ArrangingStrategy, find_pieces
from overlapsim.strategy.liveness import peak_live_bytes
from overlapsim.strategy.order_search import search_order, taken_by
from overlapsim.strategy.ordering import BESIDE, MOST_OPERATORS, arrange_by, best_order, lines_of, stream_of
from overlapsim.workload.operators import CollectiveOp, OperatorGraph

BEAMS: Final = (16, 1)


@dataclass(frozen=True)
class OperatorOrderParameters:
    """How the order is searched.

    Attributes
    ----------
    beam : partial orders kept (0: the order given)
    sms : SMs each collective is limited to (0: the library's); only with a search on times
    search : ``times``: on times of operators alone; ``engine``: orders, and SMs of each collective, run in the engine
    layers : layers of a kind that follow each other and are ordered together, where there are as many
    """

    beam: Annotated[int, Meta(ge=0, le=1024)] = 16
    sms: Annotated[int, Meta(ge=0, le=1024)] = 0
    search: Literal["times", "engine"] = "times"
    layers: Annotated[int, Meta(ge=1, le=2)] = 1


class OperatorOrder(ArrangingStrategy):
    """Searches the order of a graph's operators with its collectives beside computation."""

    name = "operator_order"
    parameter_type = OperatorOrderParameters
    traits = frozenset({"operator_order"})
    excludes = frozenset({"wgrad_delay"})
    per_block = True
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

    def adjacent_layers(self, parameters: Parameters) -> int:
        """Layers that are ordered together: the backward of one with that of the one below."""
        return int(parameters.get("layers", 1)) if parameters.get("beam", 16) else 1

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open how widely to search on times; the engine needs somebody who runs it."""
        searches = ("times",) if context.seconds_of is None else ("times", "engine")
        return ParameterSpace({"beam": BEAMS, "sms": (0,), "search": searches, "layers": (1,)})

    def degenerate(self, context: Context) -> Parameters:
        """The order given, in line with computation."""
        return {"beam": 0, "sms": 0}

    def extra_memory_bytes(self, context: Context, parameters: Parameters) -> float:
        """What lives longer than in the order given: rebuilt tensors, and operands of weight gradients."""
        arranged = self.arrange(context, parameters)
        return max(0.0, peak_live_bytes(arranged) - peak_live_bytes(context.graph))

    def arrange(self, context: Context, parameters: Parameters) -> OperatorGraph:
        """Issue the operators in the order found."""
        graph = context.graph
        if not parameters.get("beam", 16):
            return graph
        # One order for all ends of spreads and all ranks: that of a plan. It is asked for many times.
        prices = replace(context.prices, ends={}, factors={})
        where: tuple[object, ...] = (
            str(sorted(prices.groups.items())),
            prices.no_latency,
            prices.collective_sms,
            prices.overlap,
        )
        where += tuple((key, c.strategy.name, repr(c.parameters)) for key, c in sorted(context.pairs.items()))
        known = prices.models.setdefault(("operator_order", *sorted(parameters.items()), *where), {})
        if graph not in known:
            known[graph] = self._arranged(replace(context, prices=prices), parameters)
        found: OperatorGraph = known[graph]
        return found

    def _arranged(self, context: Context, parameters: Parameters) -> OperatorGraph:
        graph = context.graph
        taken = taken_by(graph, tuple(find_pieces(graph, context.pairs)))
        if parameters.get("search") == "engine":
            if context.seconds_of is None:
                raise StrategyError(
                    "operator_order with search=engine runs orders in the engine, and nothing runs them here; expected "
                    "a step, or search=times"
                )
            found = search_order(context)
            arranged = arrange_by(graph, found.order, found.sms, taken)
            return arranged if found.seconds < context.seconds_of(context) else graph
        order = best_order(lines_of(graph, context.prices, taken), parameters.get("beam", 16))
        return arrange_by(graph, order.positions, parameters.get("sms", 0), taken)

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return the order by name and pass, and which collectives run beside computation."""
        arranged = self.arrange(context, parameters)
        beside = {
            f"{op.name} {op.pass_}": op.sms
            for i, op in enumerate(arranged.operators)
            if isinstance(op, CollectiveOp) and arranged.stream_of(i).startswith(BESIDE)
        }
        return {
            "order": [f"{op.name} {op.pass_}" for op in arranged.operators],
            "beside": list(beside),
            "comm_sms": beside,
            "layers": self.adjacent_layers(parameters),
        }


STRATEGY = OperatorOrder()

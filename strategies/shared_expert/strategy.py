"""Experts that all tokens take, on a stream of their own beside dispatch and combine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from overlapsim.strategy.arrange import Slot, assemble, slots_of
from overlapsim.strategy.base import YES, Applicability, Context, Parameters, ParameterSpace, StrategyInfo
from overlapsim.strategy.compose import ArrangingStrategy
from overlapsim.workload.operators import COMPUTE, CollectiveOp, OperatorGraph

STREAM: Final = "compute shared"
SHARED: Final = "moe.shared."
SECOND: Final[Mapping[str, str]] = {"fwd": "moe.shared.fc2", "dgrad": "moe.shared.fc1", "wgrad": "moe.shared.fc1"}
"""Matrix of each pass that runs beside the second exchange; what stands before it runs beside the first."""
ROUTED: Final[Mapping[str, tuple[str, str]]] = {
    "fwd": ("moe.dispatch", "moe.combine"),
    "dgrad": ("moe.combine", "moe.dispatch"),
    "wgrad": ("moe.combine", "moe.dispatch"),
}
"""First and second exchange of each pass."""


@dataclass(frozen=True)
class SharedExpertParameters:
    """Whether shared experts run beside the exchanges, or in line with the routed ones."""

    beside: bool = True


class SharedExpert(ArrangingStrategy):
    """The first matrix of the shared experts starts with the dispatch, the second one with the combine.

    Backward it is the other way round.  Routed experts, their exchanges and
    what adds both results stay in line.
    """

    name = "shared_expert"
    parameter_type = SharedExpertParameters
    traits = frozenset({"shared_expert"})
    needs = ("expert_parallel", "exchanged_tokens")
    excludes = frozenset({"expert_pair", "two_batch"})
    per_block = True
    info = StrategyInfo(
        summary="shared experts on a stream of their own, beside the exchanges of the routed ones",
        granularity="op",
        hides="dispatch and combine under the experts that all tokens take",
        cost="SMs shared with the dispatcher's kernels and with routed experts",
        frameworks=("Megatron-LM (moe-shared-expert-overlap)", "SGLang (single-batch overlap)"),
        references=("Rajbhandari et al., arXiv 2201.05596 (DeepSpeed-MoE)", "Megatron-Core MoE, arXiv 2603.07685"),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse layers without shared experts, and without exchanges to run them beside."""
        graph = context.graph
        if not any(op.name.startswith(SHARED) for op in graph.operators):
            return Applicability(False, ("no layer here has experts that all tokens take",))
        if not any(_exchanges(graph, name, pass_) for name, pass_ in _KINDS):
            reason = "tokens stay on their rank, so there is no exchange to run shared experts beside"
            return Applicability(False, (reason,), "little_to_hide")
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave nothing open but whether."""
        return ParameterSpace({"beside": (True,)})

    def degenerate(self, context: Context) -> Parameters:
        """In line with the routed experts."""
        return {"beside": False}

    def hides(self, context: Context, parameters: Parameters) -> bool:
        """Only what runs beside."""
        return bool(parameters.get("beside", True))

    def arrange(self, context: Context, parameters: Parameters) -> OperatorGraph:
        """Move shared experts to their stream, each half to the exchange that it runs beside."""
        graph = context.graph
        if not parameters.get("beside", True):
            return graph
        slots = slots_of(graph)
        for i, op in enumerate(graph.operators):
            if not op.name.startswith(SHARED) or op.pass_ not in ROUTED or _adds_routed(graph, i):
                continue
            name = ROUTED[op.pass_][_half(graph, i)]
            exchange = _nearest(graph, i, name, "fwd" if op.pass_ == "fwd" else "dgrad")
            if exchange < 0:
                continue
            # Both start when what the exchange sends is there, the exchange first: else it would wait for SMs.
            slots[i].at = exchange + 0.5
            if slots[i].stream == COMPUTE:
                slots[i].stream = STREAM
            slots[i].after += _sent_by(graph, exchange, slots)
        return assemble(graph, slots)

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return whether shared experts have a stream of their own."""
        return {"shared_expert_overlap": parameters.get("beside", True)}


_KINDS: Final = frozenset({(name, pass_) for name in ("moe.dispatch", "moe.combine") for pass_ in ("fwd", "dgrad")})


def _exchanges(graph: OperatorGraph, name: str, pass_: str) -> list[int]:
    return [
        i
        for i, op in enumerate(graph.operators)
        if isinstance(op, CollectiveOp) and op.ranks > 1 and (op.name, op.pass_) == (name, pass_)
    ]


def _nearest(graph: OperatorGraph, position: int, name: str, pass_: str) -> int:
    """The exchange of the same layer: graphs name shared experts behind the routed ones forward, before them backward.

    Of several steps of one exchange it is the first; -1 without one.
    """
    found = _exchanges(graph, name, pass_)
    if pass_ == "fwd":
        before = [i for i in found if i < position]
        return _first_of_run(before) if before else -1
    return next((i for i in found if i > position), -1)


def _first_of_run(positions: list[int]) -> int:
    """First of the steps that the last exchange consists of, which follow each other."""
    first = positions[-1]
    while first - 1 in positions:
        first -= 1
    return first


def _half(graph: OperatorGraph, position: int) -> int:
    """0 beside the first exchange, 1 beside the second: from the second matrix on."""
    op = graph.operators[position]
    return int(op.name == SECOND[op.pass_])


def _adds_routed(graph: OperatorGraph, position: int) -> bool:
    """Whether an operator reads what routed experts give, or what was gathered for them."""
    names = (graph.operators[producer].name for producer in graph.producers(position))
    return any(name.startswith("moe.") and not name.startswith(SHARED) for name in names)


def _sent_by(graph: OperatorGraph, exchange: int, slots: list[Slot]) -> list[Slot]:
    return [slots[producer] for producer in graph.producers(exchange)]


STRATEGY = SharedExpert()

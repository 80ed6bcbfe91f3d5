"""Weight gradients computed later, under collectives of the backward that nothing else could hide."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from msgspec import Meta

from overlapsim.plan import Finding
from overlapsim.strategy.arrange import assemble, slots_of
from overlapsim.strategy.base import YES, Applicability, Context, Parameters, ParameterSpace, StrategyInfo
from overlapsim.strategy.compose import ArrangingStrategy
from overlapsim.workload.operators import COMPUTE, STEP_PREFIXES, CollectiveOp, GemmOp, KernelOp, OperatorGraph

STREAM: Final = "backward_comm"
BACKWARD: Final = ("dgrad", "wgrad")
PENDING: Final = (1, 2, 4, 8)


@dataclass(frozen=True)
class WgradDelayParameters:
    """Most weight gradients that may be put off at once; each keeps its input and output gradient alive."""

    pending: Annotated[int, Meta(ge=0, le=65536)]


class WgradDelay(ArrangingStrategy):
    """Nothing in the backward needs a weight gradient but its bucket: it runs where compute would wait otherwise.

    In issue order, a weight gradient is put off until compute comes to an
    operator that waits for a collective; then as many run as fill the
    collective's time.  What needs one is its deadline: a bucket on its way
    is never held up.  A gradient's own collective that still stands in line
    with compute moves along with it.
    """

    name = "wgrad_delay"
    parameter_type = WgradDelayParameters
    traits = frozenset({"wgrad_delay"})
    needs = ("weight_gradients",)
    info = StrategyInfo(
        summary="weight gradients put off in issue order, under collectives of the backward",
        granularity="op",
        hides="tensor- and expert-parallel collectives of the backward under weight gradients",
        cost="inputs and output gradients of the postponed kept alive; SMs of the collective",
        frameworks=("Megatron-LM (delay-wgrad-compute)", "Lancet"),
        references=("Jiang et al., MLSys'24 (Lancet), arXiv 2404.19429",),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse a graph without weight gradients, or without a collective that they could hide."""
        graph = context.graph
        if not any(_is_wgrad(graph, i) for i in range(len(graph.operators))):
            return Applicability(False, ("the graph computes no weight gradients",))
        if not any(_to_hide(graph, i) for i in range(len(graph.operators))):
            reason = "no layer communicates in the backward, so there is nothing to hide"
            return Applicability(False, (reason,), "little_to_hide")
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open how many may be put off."""
        return ParameterSpace({"pending": PENDING})

    def degenerate(self, context: Context) -> Parameters:
        """None put off: the graph stays as it is."""
        return {"pending": 0}

    def extra_memory_bytes(self, context: Context, parameters: Parameters) -> float:
        """Operands of the postponed, at their most."""
        return _issue(context, parameters["pending"]).most_bytes if parameters["pending"] else 0.0

    def arrange(self, context: Context, parameters: Parameters) -> OperatorGraph:
        """Issue operators in the new order, the backward's collectives beside compute."""
        graph = context.graph
        if parameters["pending"] == 0:
            return graph
        slots = slots_of(graph)
        for number, i in enumerate(_issue(context, parameters["pending"]).order):
            slots[i].at = number
            if _to_hide(graph, i) and slots[i].stream == COMPUTE:
                slots[i].stream = STREAM
        return assemble(graph, slots)

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return how many are put off."""
        issue = _issue(context, parameters["pending"])
        return {
            "delay_weight_gradients": parameters["pending"] > 0,
            "most_pending": parameters["pending"],
            "num_delayed": issue.num_delayed if parameters["pending"] else 0,
        }

    def findings(self, context: Context, parameters: Parameters) -> tuple[Finding, ...]:
        """Say where no deadline is known."""
        graph = context.graph
        if not parameters["pending"] or not any(_in_line(graph, i) for i in range(len(graph.operators))):
            return ()
        message = (
            "gradient collectives stand in line with compute and move along with their weight gradients; arrange "
            "buckets first to have their deadlines kept"
        )
        return (Finding("no_deadlines", message),)


@dataclass
class _Issue:
    """The issue order under construction.

    Attributes
    ----------
    order : old positions as issued
    pending : weight gradients put off, oldest first
    uncovered_s : for each collective on its way, its time less that of compute issued since
    along : gradient collectives that go with a postponed weight gradient
    """

    context: Context
    order: list[int] = field(default_factory=list)
    pending: deque[int] = field(default_factory=deque)
    uncovered_s: dict[int, float] = field(default_factory=dict)
    along: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    num_delayed: int = 0
    most_bytes: float = 0.0

    def put_off(self, i: int, limit: int) -> None:
        self.pending.append(i)
        while len(self.pending) > limit:
            self.release()
        self.most_bytes = max(self.most_bytes, sum(_operand_bytes(self.context.graph, p) for p in self.pending))

    def release(self) -> None:
        i = self.pending.popleft()
        self.num_delayed += bool(self.order) and i < max(self.order)
        self.issue(i)
        for follower in self.along.pop(i, ()):
            self.issue(follower)

    def issue(self, i: int) -> None:
        graph = self.context.graph
        self.order.append(i)
        seconds = self.context.prices.operator_s(graph.operators[i])
        if _to_hide(graph, i):
            self.uncovered_s[i] = seconds
        elif graph.stream_of(i) == COMPUTE:
            self.uncovered_s = {p: left - seconds for p, left in self.uncovered_s.items() if left > seconds}


def _issue(context: Context, limit: int) -> _Issue:
    """Walk the graph in its order and put weight gradients off."""
    graph = context.graph
    issue = _Issue(context)
    for i in range(len(graph.operators)):
        if _is_wgrad(graph, i):
            issue.put_off(i, limit)
            continue
        producers = graph.producers(i)
        if len(producers) == 1 and producers[0] in issue.pending and _in_line(graph, i):
            issue.along[producers[0]].append(i)
            continue
        while any(p in issue.pending for p in producers):
            issue.release()
        if graph.stream_of(i) == COMPUTE and not _to_hide(graph, i):
            while issue.pending and any(p in issue.uncovered_s for p in producers):
                issue.release()
        issue.issue(i)
    while issue.pending:
        issue.release()
    return issue


def _is_wgrad(graph: OperatorGraph, i: int) -> bool:
    op = graph.operators[i]
    return isinstance(op, GemmOp | KernelOp) and op.pass_ == "wgrad" and graph.stream_of(i) == COMPUTE


def _to_hide(graph: OperatorGraph, i: int) -> bool:
    """A collective inside a layer's backward, in line with compute or already beside it."""
    op = graph.operators[i]
    if not isinstance(op, CollectiveOp) or op.ranks < 2:
        return False
    return op.pass_ in BACKWARD and not op.name.startswith(STEP_PREFIXES)


def _in_line(graph: OperatorGraph, i: int) -> bool:
    """A gradient's collective that nobody has put on a stream of its own."""
    op = graph.operators[i]
    return isinstance(op, CollectiveOp) and op.name.startswith("grad.") and graph.stream_of(i) == COMPUTE


def _operand_bytes(graph: OperatorGraph, i: int) -> float:
    op = graph.operators[i]
    return float(op.operand_bytes) if isinstance(op, GemmOp) else 0.0


STRATEGY = WgradDelay()

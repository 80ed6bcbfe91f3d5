"""The order that is found against the one that MegaScale-MoE's authors made by hand, in one simulation: six models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from overlapsim.accuracy.moe_hand_order import hand_made
from overlapsim.cost.prices import PriceBook
from overlapsim.engine.timeline import Timeline
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.order import OrderResult, order_operators
from overlapsim.step.run_graph import run_graph
from overlapsim.strategy.base import Context
from overlapsim.strategy.ordering import BESIDE
from overlapsim.workload.adjacent import adjacent
from overlapsim.workload.build import GraphBuilder
from overlapsim.workload.layout import Layout
from overlapsim.workload.operators import CollectiveOp, OperatorGraph
from overlapsim.workload.presets import load_model
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recompute import Recompute

MODELS: Final[Mapping[str, str]] = {
    "M1": "internal-352b",
    "M2": "megascale-mixtral-8x7b",
    "M3": "megascale-mixtral-8x22b",
    "M4": "megascale-hunyuan-large",
    "M5": "megascale-phi-3.5-moe",
    "M6": "megascale-deepseekmoe",
}
"""Models of Table 2 of arXiv 2505.11432."""
PASSES: Final = ("forward", "backward")
SEQUENCE: Final = 8192
HAND_SHARES: Final = (1.0, 0.75, 0.5, 0.25)
"""Of the library's SMs: the authors chose numbers by hand, so their order takes the best of these for all exchanges."""
WIDTH: Final = 64
"""Characters of a printed timeline."""


@dataclass(frozen=True, eq=False)
class OrderComparison:
    """One pass of one model's layer (or of adjacent layers) on one node of eight H800, attention and experts over it.

    Attributes
    ----------
    model, which, layers : short name, ``forward`` or ``backward``, and layers in the graph
    found : the automatic order, with the time of the order given (all in line) and a bound that none is below
    hand, hand_graph, hand_sms : the hand-made order at its best number of SMs for all exchanges
    """

    model: str
    which: str
    layers: int
    found: OrderResult
    hand: Timeline
    hand_graph: OperatorGraph
    hand_sms: int

    @property
    def gain(self) -> float:
        """Time of the hand-made order over that of the one found."""
        return self.hand.duration_s / self.found.seconds

    def to_dict(self) -> dict[str, Any]:
        """Figures of the comparison, times in seconds."""
        return {
            "model": self.model,
            "pass": self.which,
            "layers": self.layers,
            "in_line_s": self.found.given_s,
            "hand_s": self.hand.duration_s,
            "automatic_s": self.found.seconds,
            "bound_s": self.found.bound_s,
            "automatic_over_bound": self.found.over_bound,
            "hand_over_automatic": self.gain,
        }

    def text(self) -> str:
        """Both timelines, to read."""
        head = f"{self.model} {self.which}, {self.layers} layer(s)"
        return "\n".join(
            (
                f"{head}: by hand, {self.hand.duration_s * 1e3:.3f} ms",
                timeline_text(self.hand_graph, self.hand),
                f"{head}: found, {self.found.seconds * 1e3:.3f} ms (no order below {self.found.bound_s * 1e3:.3f} ms)",
                timeline_text(self.found.graph, self.found.timeline),
            )
        )


def layer_context(model: str, which: str, layers: int = 1, *, dispatcher: str = "all_to_all") -> Context:
    """A pass with selective activation rematerialisation, micro-batches of one sequence of 8192 tokens.

    Parameters
    ----------
    model, which, layers : as in `OrderComparison`
    dispatcher : ``all_to_all``, or ``all_gather`` as the authors draw it
    """
    spec, _ = load_model(MODELS[model])
    recipe = Recipe(dispatcher=dispatcher)  # type: ignore[arg-type]
    builder = GraphBuilder(spec, Layout(sp=8, ep=8), recipe, 1, SEQUENCE, Recompute.parse("sar"))
    graph = builder.layer(spec.layers[-1], which)  # type: ignore[arg-type]
    return Context(adjacent([graph] * layers), PriceBook(load_cluster("h800-sxm8"), 8))


def compare_order(model: str, which: str, layers: int = 1, *, dispatcher: str = "all_to_all") -> OrderComparison:
    """Search one order and run the hand-made one beside it.

    Examples
    --------
    >>> compare_order("M6", "backward").gain > 1
    True
    """
    context = layer_context(model, which, layers, dispatcher=dispatcher)
    found = order_operators(context)
    most = max((context.prices.held_sms(op) for op in context.graph.of_type(CollectiveOp)), default=0)
    tried = []
    for share in HAND_SHARES:
        sms = 0 if share == 1 else max(1, round(share * most))
        graph = hand_made(context.graph, layers=layers, sms=sms)
        tried.append((run_graph(replace(context, graph=graph)), graph, sms))
    hand, graph, sms = min(tried, key=lambda entry: entry[0].duration_s)
    return OrderComparison(model, which, layers, found, hand, graph, sms)


def compare_orders(models: Iterable[str] = MODELS, layers: int = 1) -> Iterator[OrderComparison]:
    """Compare every pass of every model."""
    for model in models:
        for which in PASSES:
            yield compare_order(model, which, layers)


def timeline_text(graph: OperatorGraph, timeline: Timeline) -> str:
    """A line for each operator as issued: start and end in microseconds, SMs of an exchange, and where it lies.

    Computation is drawn with ``#``, exchanges with ``=``.
    """
    total = max(1, timeline.end_ps)
    lines = []
    for position, op in enumerate(graph.operators):
        start, end = int(timeline.t_start[position]), int(timeline.t_end[position])
        first = min(WIDTH - 1, start * WIDTH // total)
        size = max(1, round((end - start) * WIDTH / total))
        beside = graph.stream_of(position).startswith(BESIDE)
        bar = (" " * first + ("=" if beside else "#") * min(size, WIDTH - first)).ljust(WIDTH)
        sms = getattr(op, "sms", 0)
        name = f"{op.name} {op.pass_}" + (f" ({sms} SMs)" if sms else "")
        lines.append(f"{start / 1e6:9.1f} {end / 1e6:9.1f} |{bar}| {name}")
    return "\n".join(lines)

"""Shared experts beside dispatch and combine: closed form, what starts with what, and who has none."""

from __future__ import annotations

import pytest

from overlapsim.cost.prices import PriceBook
from overlapsim.hardware.loading import load_cluster
from overlapsim.strategy.base import Context
from overlapsim.strategy.compatibility import Setting, check_compatible
from overlapsim.strategy.registry import load_strategies, load_strategy
from overlapsim.testing.expert_layers import expert_layers
from overlapsim.workload.adjacent import adjacent
from overlapsim.workload.build import GraphBuilder
from overlapsim.workload.layout import Layout
from overlapsim.workload.operators import CollectiveOp, GemmOp, OperatorGraph
from overlapsim.workload.presets import load_model
from overlapsim.workload.recipe import Recipe
from tests.strategy.steps import MIB, arranged, collective, graph_of, kernel, prices, run

SHARED = load_strategy("shared_expert")


def forward(up_s: float, down_s: float, routed_s: float, mib: float) -> OperatorGraph:
    """Routed experts between dispatch and combine, shared ones behind them as graphs of layers have it."""
    return graph_of(
        [
            kernel(1e-4, "mlp.norm", "fwd"),
            collective("all_to_all", mib, "moe.dispatch", "fwd"),
            kernel(routed_s, "moe.fc1", "fwd"),
            collective("all_to_all", mib, "moe.combine", "fwd"),
            kernel(up_s, "moe.shared.fc1", "fwd"),
            kernel(down_s, "moe.shared.fc2", "fwd"),
            kernel(1e-5, "moe.shared.fc2", "fwd"),
        ],
        *((0, 1), (1, 2), (2, 3), (0, 4), (4, 5), (3, 6), (5, 6)),
    )


@pytest.mark.parametrize(("up_s", "down_s"), [(1e-4, 5e-5), (2e-4, 1e-4)])
def test_exchanges_hide_what_fits_under_them(up_s: float, down_s: float) -> None:
    """norm + dispatch + routed + combine + sum: shared experts shorter than the exchanges cost nothing."""
    book = prices().without_latency()
    sent_s = book.collective(CollectiveOp("all_to_all", 128 * MIB, 8)).duration_s
    assert sent_s > 2e-4
    context = Context(forward(up_s, down_s, 1e-3, 128), book)
    timeline = run("shared_expert", context, {"beside": True})
    assert timeline.duration_s == pytest.approx(1e-4 + sent_s + 1e-3 + sent_s + 1e-5, rel=1e-9)
    serial = run("shared_expert", context, {"beside": False})
    assert serial.duration_s == pytest.approx(timeline.duration_s + up_s + down_s, rel=1e-9)


def test_what_does_not_fit_is_computed_all_the_same() -> None:
    """Computation of both kinds together is a bound: SMs are shared, not doubled."""
    book = prices().without_latency()
    context = Context(forward(2e-3, 1e-3, 1e-3, 16), book)
    seconds = run("shared_expert", context, {"beside": True}).duration_s
    assert 1e-4 + 4e-3 + 1e-5 <= seconds <= book.serial_s(context.graph)


@pytest.mark.parametrize(
    ("which", "pass_", "first", "second", "exchanges"),
    [
        ("forward", "fwd", "moe.shared.fc1", "moe.shared.fc2", ("moe.dispatch", "moe.combine")),
        ("backward", "dgrad", "moe.shared.fc2", "moe.shared.fc1", ("moe.combine", "moe.dispatch")),
    ],
)
def test_each_matrix_starts_with_its_exchange(which: str, pass_: str, first: str, second: str, exchanges) -> None:
    context = Context(expert_layers()[which], PriceBook(load_cluster("h100-sxm8"), 4))
    graph = arranged("shared_expert", context, {"beside": True})
    timeline = run("shared_expert", context, {"beside": True}, contention=True)

    def at(name: str, kind: type) -> int:
        return next(
            i for i, op in enumerate(graph.operators) if isinstance(op, kind) and (op.name, op.pass_) == (name, pass_)
        )

    for matrix, exchange in zip((first, second), exchanges, strict=True):
        own, sent = at(matrix, GemmOp), at(exchange, CollectiveOp)
        assert graph.stream_of(own) == "compute shared"
        assert graph.stream_of(sent) == "compute"
        assert timeline.t_start[own] >= max(timeline.t_end[p] for p in graph.producers(sent))
    # The sum of shared and routed results waits for both, in line.
    if which == "forward":
        added = max(i for i, op in enumerate(graph.operators) if op.name == "moe.shared.fc2")
        assert graph.stream_of(added) == "compute" and len(graph.producers(added)) == 2
    serial = run("shared_expert", context, {"beside": False}, contention=True)
    assert timeline.duration_s < serial.duration_s


def test_layers_one_after_another_keep_to_their_own_exchanges() -> None:
    book = PriceBook(load_cluster("h100-sxm8"), 4)
    for which in ("forward", "backward"):
        one = Context(expert_layers()[which], book)
        two = Context(adjacent([one.graph] * 2), book)
        alone, both = (run("shared_expert", c, {"beside": True}).duration_s for c in (one, two))
        assert both == pytest.approx(2 * alone, rel=0.01)


def test_who_has_none_is_refused() -> None:
    book = PriceBook(load_cluster("h100-sxm8"), 4)
    model = load_model("qwen3-30b-a3b")[0]
    plain = GraphBuilder(model, Layout(dp=4, ep=4), Recipe(), 1, 1024).layer(model.layers[0], "forward")
    assert "all tokens take" in SHARED.applies_to(Context(plain, book)).reasons[0]
    alone = expert_layers(1)["forward"]
    answer = SHARED.applies_to(Context(alone, book))
    assert answer.cause == "little_to_hide" and "stay on their rank" in answer.reasons[0]


def test_not_with_pairs_nor_with_a_dispatcher_that_gathers() -> None:
    """Megatron-LM refuses shared experts on their own stream together with overlapped exchanges of two passes."""
    (reason,) = check_compatible(load_strategies(("shared_expert", "expert_pair")), Setting(ep=8))
    assert "cannot be combined" in reason
    (reason,) = check_compatible((SHARED,), Setting(ep=8, dispatcher="allgather"))
    assert "exchanges tokens" in reason
    assert check_compatible((SHARED, load_strategy("operator_order")), Setting(ep=8, dispatcher="alltoall")) == ()

"""MegaScale-MoE's layers: the order found against the authors' own, and against a proven bound."""

from __future__ import annotations

from functools import cache

import pytest

from overlapsim.accuracy.moe_hand_order import hand_made
from overlapsim.accuracy.moe_order import MODELS, PASSES, OrderComparison, compare_order, layer_context
from overlapsim.workload.operators import CollectiveOp, OperatorGraph
from tests.planner.order_oracle import none_within

CLOSE = 1.03
EFFORT = 20.0
"""Of the exact solver, where the bound of heads and tails is not close enough."""


@cache
def compared(model: str, which: str, layers: int = 1) -> OrderComparison:
    return compare_order(model, which, layers)


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("model", MODELS)
def test_no_slower_than_by_hand_and_close_to_a_bound(model: str, which: str) -> None:
    result = compared(model, which)
    found = result.found
    assert found.seconds <= result.hand.duration_s
    assert found.seconds <= found.given_s
    assert found.bound_s <= found.seconds * (1 + 1e-6)
    if found.over_bound > CLOSE:
        # No proof can exist for what an order reaches.
        assert not none_within(layer_context(model, which), found.seconds, EFFORT / 4)
        assert none_within(layer_context(model, which), found.seconds / CLOSE, EFFORT)


@pytest.mark.parametrize("model", ["M2", "M6"])
def test_two_layers_together_are_no_slower_than_each_alone(model: str) -> None:
    """What the lower layer rebuilds runs under the last exchanges of the upper one, in both orders."""
    one, two = compared(model, "backward"), compared(model, "backward", 2)
    assert two.found.seconds < 2 * one.found.seconds
    assert two.hand.duration_s < 2 * one.hand.duration_s * 1.001
    assert two.found.seconds <= two.hand.duration_s
    half = len(two.found.order) // 2
    crossed = [position for position in two.found.order[:half] if position >= half]
    assert crossed, "work of the lower layer moves up"


# The order made by hand


def at(graph: OperatorGraph, name: str, pass_: str, *, exchange: bool) -> int:
    return next(
        i
        for i, op in enumerate(graph.operators)
        if (op.name, op.pass_, isinstance(op, CollectiveOp)) == (name, pass_, exchange)
    )


@pytest.mark.parametrize("dispatcher", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("model", MODELS)
def test_the_printed_order(model: str, dispatcher: str) -> None:
    """Fig. 8b: norm and activation are rebuilt before the gathered gradient is used, then tokens dispatched again."""
    graph = layer_context(model, "backward", dispatcher=dispatcher).graph
    ordered = hand_made(graph)
    assert sorted(map(repr, ordered.operators)) == sorted(map(repr, graph.operators))
    combine = at(ordered, "moe.combine", "dgrad", exchange=True)
    again = at(ordered, "moe.dispatch", "recompute", exchange=True)
    fc2 = [at(ordered, "moe.fc2", pass_, exchange=False) for pass_ in ("dgrad", "wgrad")]
    norm, act = (at(ordered, name, "recompute", exchange=False) for name in ("mlp.norm", "moe.act"))
    assert combine < again < min(fc2)
    assert max(norm, act) < min(fc2)
    # Reconstructed: weight gradients under exchanges that need nothing of them.
    sent = at(ordered, "moe.dispatch", "dgrad", exchange=True)
    assert sent < at(ordered, "moe.fc1", "wgrad", exchange=False) < at(ordered, "mlp.norm", "dgrad", exchange=False)
    inner = at(ordered, "attn.core", "dgrad", exchange=True)
    assert inner < at(ordered, "attn.out", "wgrad", exchange=False)
    assert {ordered.stream_of(i) for i, op in enumerate(ordered.operators) if isinstance(op, CollectiveOp)} == {
        "ordered comm"
    }


def test_below_the_last_exchange_the_next_layer_is_rebuilt() -> None:
    graph = layer_context("M2", "backward", 2).graph
    ordered = hand_made(graph, layers=2)
    names = [(op.name, op.pass_, isinstance(op, CollectiveOp)) for op in ordered.operators]
    last = names.index(("attn.out", "dgrad", True))
    end = names.index(("attn.norm", "dgrad", False))
    assert {("mlp.norm", "recompute", False), ("moe.act", "recompute", False)} <= set(names[last:end])


# As text


def test_both_timelines_are_printed() -> None:
    for which in PASSES:
        result = compared("M6", which)
        text = result.text()
        assert "by hand" in text and "found" in text
        assert text.count("moe.combine") == 2
        assert len(text.splitlines()) == 2 + 2 * len(result.found.order)
        assert all(len(line) < 120 for line in text.splitlines())
        assert result.to_dict()["hand_over_automatic"] == result.gain >= 1

"""Weight gradients put off: under the collective that compute waits for, never past the bucket that needs them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategy
from overlapsim.testing.layers import training_layers
from overlapsim.workload.operators import CollectiveOp, OperatorGraph
from tests.strategy.steps import MIB, arranged, collective, graph_of, kernel, labels, prices, run


def backward(dgrad_s: float, wgrad_s: float, mib: float, layers: int, *, late: bool = False) -> OperatorGraph:
    """Layers of input gradient, scatter over the tensor-parallel group and weight gradient, in either order."""
    operators, edges, head = [], [], None
    for _ in range(layers):
        at = len(operators)
        scatter = collective("reduce_scatter", mib, "mlp.fc1", "dgrad")
        wgrad = kernel(wgrad_s, "mlp.fc1", "wgrad")
        operators += [kernel(dgrad_s, "mlp.fc1", "dgrad"), *((scatter, wgrad) if late else (wgrad, scatter))]
        edges.append((at, at + (1 if late else 2)))
        if head is not None:
            edges += [(head, at), (head, at + (2 if late else 1))]
        head = at + (1 if late else 2)
    return graph_of(operators, *edges)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("wgrad_s", [5e-5, 2e-4, 8e-4])
def test_each_layer_takes_its_input_gradient_and_the_longer_of_scatter_and_weight_gradient(wgrad_s, late) -> None:
    """L (d + max(r, w)): a weight gradient under the scatter of its own layer, whichever the graph names first."""
    dgrad_s, mib, layers = 1e-4, 64, 5
    book = prices().without_latency()
    context = Context(backward(dgrad_s, wgrad_s, mib, layers, late=late), book)
    sent_s = book.collective(CollectiveOp("reduce_scatter", mib * MIB, 8)).duration_s
    timeline = run("wgrad_delay", context, {"pending": 1})
    assert timeline.duration_s == pytest.approx(layers * (dgrad_s + max(sent_s, wgrad_s)), rel=1e-9)
    serial = run("wgrad_delay", context, {"pending": 0})
    assert serial.duration_s == pytest.approx(layers * (dgrad_s + sent_s + wgrad_s), rel=1e-9)


def test_several_pending_fill_a_long_collective() -> None:
    """Three layers without a collective save their weight gradients for one that has a long one."""
    book = prices().without_latency()
    operators = []
    for _ in range(3):
        operators += [kernel(1e-4, "attn.out", "dgrad"), kernel(1e-4, "attn.out", "wgrad")]
    operators += [collective("all_to_all", 256, "moe.dispatch", "dgrad"), kernel(1e-4, "attn.norm", "dgrad")]
    context = Context(graph_of(operators, (4, 6), (6, 7)), book)
    sent_s = book.collective(CollectiveOp("all_to_all", 256 * MIB, 8)).duration_s
    assert sent_s > 3e-4
    for pending in (1, 2, 3):
        # One that makes room for another behind the last input gradient runs under the collective as well.
        hidden_s = min(3, pending + 1) * 1e-4
        timeline = run("wgrad_delay", context, {"pending": pending})
        assert timeline.duration_s == pytest.approx(7e-4 + sent_s - hidden_s, rel=1e-9)


def test_a_bucket_is_the_deadline() -> None:
    """With buckets arranged first, each keeps its place among the input gradients."""
    context = Context(training_layers(4, tp=4, dp=2, pipeline=False), prices())
    bucketed = arranged("grad_buckets", context, {"bucket_bytes": 16 * MIB, "overlap": True})
    for pending in (1, 3, 100):
        delayed = arranged("wgrad_delay", Context(bucketed, context.prices), {"pending": pending})
        assert _places(delayed) == _places(bucketed)
        assert delayed.operators != bucketed.operators
    (finding,) = load_strategy("wgrad_delay").findings(context, {"pending": 2})
    assert finding.code == "no_deadlines"
    assert not load_strategy("wgrad_delay").findings(Context(bucketed, context.prices), {"pending": 2})


def _places(graph: OperatorGraph) -> list[int]:
    """For each bucket, how many operators other than weight gradients are issued before it."""
    names = labels(graph)
    others = np.cumsum([not name.endswith("wgrad") for name in names])
    return [int(others[i]) for i, name in enumerate(names) if name.startswith("grad.bucket")]


def test_buckets_of_whole_layers_leave_no_room_for_later() -> None:
    """One bucket at the end lets all be delayed; a bucket per gradient lets none pass it."""
    context = Context(training_layers(3, tp=4, dp=2, pipeline=False), prices())
    small = arranged("grad_buckets", context, {"bucket_bytes": 1.0, "overlap": True})
    delayed = arranged("wgrad_delay", Context(small, context.prices), {"pending": 8})
    for i, op in enumerate(delayed.operators):
        if op.name.startswith("grad."):
            (producer,) = delayed.producers(i)
            assert all(other.pass_ == "wgrad" for other in delayed.operators[producer + 1 : i])


@settings(deadline=None, max_examples=30)
@given(
    layers=st.integers(1, 3),
    tp=st.sampled_from([2, 4]),
    pending=st.integers(1, 12),
    bucket=st.floats(1, 64),
    first=st.booleans(),
)
def test_only_weight_gradients_move_and_only_back(layers, tp, pending, bucket, first) -> None:
    context = Context(training_layers(layers, tp=tp, dp=2), prices())
    graph = context.graph
    if first:
        graph = arranged("grad_buckets", context, {"bucket_bytes": bucket * MIB, "overlap": True})
    delayed = arranged("wgrad_delay", Context(graph, context.prices), {"pending": pending})
    assert sorted(map(repr, delayed.operators)) == sorted(map(repr, graph.operators))
    # A gradient's own collective moves along with it.
    still = [[name for name in labels(g) if "wgrad" not in name] for g in (graph, delayed)]
    assert still[0] == still[1]
    if first:
        assert _places(delayed) == _places(graph)
    strategy = load_strategy("wgrad_delay")
    here = Context(graph, context.prices)
    assert strategy.extra_memory_bytes(here, {"pending": pending}) <= strategy.extra_memory_bytes(here, {"pending": 12})
    assert run("wgrad_delay", here, {"pending": pending}).complete


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (graph_of([kernel(1e-4, "mlp.fc1", "fwd")]), "no weight gradients"),
        (training_layers(tp=1), "nothing to hide"),
    ],
)
def test_refusals(graph: OperatorGraph, reason: str) -> None:
    answer = load_strategy("wgrad_delay").applies_to(Context(graph, prices()))
    assert not answer.applies
    assert reason in answer.reasons[0]
    assert answer.cause == ("little_to_hide" if reason == "nothing to hide" else "none")

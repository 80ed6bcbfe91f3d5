"""Sharded parameters: first gather, the longer of compute and next gather, last scatter; memory bounded by depth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapsim.strategies.fsdp_prefetch.groups import gather_groups

from overlapsim.engine.memory import peak_bytes
from overlapsim.errors import StrategyError
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Chosen, Composition, compose
from overlapsim.strategy.registry import load_strategy
from overlapsim.strategy.tasks import Site
from overlapsim.testing.layers import LayerShape, training_layers
from overlapsim.workload.operators import CollectiveOp, OperatorGraph
from tests.strategy.steps import MIB, arranged, collective, graph_of, kernel, labels, prices, run

POINT = {
    "layers_per_group": 1,
    "depth": 2,
    "rate_limit": True,
    "reshard_after_forward": True,
    "keep_last": True,
}


def step(forward_s, backward_s, sizes_mib, micro_batches: int = 1) -> OperatorGraph:
    """Layers of one operator: gathered, computed; in reverse gathered, both gradients computed, scattered."""
    operators, edges = [], []

    def add(op, *producers: int) -> int:
        operators.append(op)
        edges.extend((producer, len(operators) - 1) for producer in producers)
        return len(operators) - 1

    for number in range(micro_batches):
        for seconds, mib in zip(forward_s, sizes_mib, strict=True):
            weight = add(collective("all_gather", mib, "param.mlp.fc1", "fwd"))
            add(kernel(seconds, "mlp.fc1", "fwd"), weight)
        for seconds, mib in reversed(list(zip(backward_s, sizes_mib, strict=True))):
            weight = add(collective("all_gather", mib, "param.mlp.fc1", "dgrad"))
            add(kernel(seconds / 2, "mlp.fc1", "dgrad"), weight)
            wgrad = add(kernel(seconds / 2, "mlp.fc1", "wgrad"))
            if number == micro_batches - 1:
                add(collective("reduce_scatter", 2 * mib, "grad.mlp.fc1", "wgrad"), wgrad)
    return graph_of(operators, *edges)


def seconds_of(book, kind, mib: float) -> float:
    return book.collective(CollectiveOp(kind, mib * MIB, 8)).duration_s


@pytest.mark.parametrize("mib", [8, 32, 400])
def test_first_gather_then_the_longer_side_of_each_group_then_last_scatter(mib: float) -> None:
    """T = g + sum of max(compute, next gather) + last scatter: compute-bound, near balance, link-bound."""
    book = prices().without_latency()
    layers, forward_s, backward_s = 4, 2e-4, 4e-4
    graph = step([forward_s] * layers, [backward_s] * layers, [mib] * layers)
    timeline = run("fsdp_prefetch", Context(graph, book), {**POINT, "keep_last": False})
    gather_s, scatter_s = seconds_of(book, "all_gather", mib), seconds_of(book, "reduce_scatter", 2 * mib)
    expected_s = gather_s + layers * max(forward_s, gather_s)
    before = []
    for number in range(layers):
        last = number == layers - 1
        before.append(expected_s + backward_s)
        expected_s += backward_s if last else max(backward_s, gather_s)
    # Scatters queue behind one another; only if they are longer than a group does more than the last show.
    end_s = 0.0
    for ready_s in before:
        end_s = max(end_s, ready_s) + scatter_s
    assert timeline.duration_s == pytest.approx(end_s, rel=1e-9)
    if scatter_s < backward_s and gather_s < forward_s:
        assert end_s == pytest.approx(gather_s + layers * (forward_s + backward_s) + scatter_s, rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(
    layers=st.lists(st.tuples(st.floats(1e-5, 5e-4), st.floats(1e-5, 9e-4), st.floats(1, 300)), min_size=1, max_size=6),
    depth=st.integers(2, 4),
    rate_limit=st.booleans(),
    keep_last=st.booleans(),
    reshard=st.booleans(),
)
def test_equals_the_recurrence_and_holds_no_more_than_depth_groups(
    layers, depth, rate_limit, keep_last, reshard
) -> None:
    """Gather j waits for the gather before it and for group j - depth; compute waits for its own gather."""
    forward_s, backward_s, sizes = zip(*layers, strict=True)
    book = prices().without_latency()
    point = {
        "layers_per_group": 1,
        "depth": depth,
        "rate_limit": rate_limit,
        "keep_last": keep_last,
        "reshard_after_forward": reshard,
    }
    timeline = run("fsdp_prefetch", Context(step(forward_s, backward_s, sizes), book), point)
    count = len(layers)
    order = [*range(count), *reversed(range(count))]
    kept = set(range(count)) if not reshard else ({count - 1} if keep_last else set())
    there: dict[int, float] = {}
    gathered, freed = [], []
    link_s = now = scattered = 0.0
    for position, layer in enumerate(order):
        backward = position >= count
        if not (backward and layer in kept):
            number = len(gathered)
            opens = freed[number - depth] if rate_limit and number >= depth else 0.0
            link_s = max(link_s, opens) + seconds_of(book, "all_gather", sizes[layer])
            gathered.append(layer)
            freed.append(0.0)
            there[layer] = link_s
        now = max(now, there[layer]) + (backward_s if backward else forward_s)[layer]
        if reshard or not backward:
            # A kept group is freed by its last use in the backward; weight gradients need no parameters.
            used_s = now - backward_s[layer] / 2 if backward else now
            freed[len(gathered) - 1 if not backward or layer not in kept else gathered.index(layer)] = used_s
        if backward:
            scattered = max(scattered, now) + seconds_of(book, "reduce_scatter", 2 * sizes[layer])
    assert timeline.duration_s == pytest.approx(max(now, scattered), rel=1e-7)
    names = [
        op.name for op in arranged("fsdp_prefetch", Context(step(*zip(*layers, strict=True)), book), point).operators
    ]
    assert names.count("param.mlp.fc1") == len(gathered)


@pytest.mark.parametrize("depth", [2, 3])
def test_depth_bounds_memory_and_no_limit_does_not(depth: int) -> None:
    """Fast link, slow compute: what is gathered ahead waits for room."""
    layers, mib = 6, 16
    graph = step([1e-3] * layers, [2e-3] * layers, [mib] * layers)
    context = Context(graph, prices())
    grads = 2 * 2 * mib * MIB  # one is computed while the one before is scattered, 2 bytes to 1
    bounded = peak_bytes(run("fsdp_prefetch", context, {**POINT, "depth": depth}))
    assert depth * mib * MIB <= bounded <= depth * mib * MIB + grads
    free = run("fsdp_prefetch", context, {**POINT, "depth": depth, "rate_limit": False})
    assert peak_bytes(free) >= layers * mib * MIB
    kept = run("fsdp_prefetch", context, {**POINT, "depth": depth, "reshard_after_forward": False})
    assert peak_bytes(kept) >= layers * mib * MIB
    # Everything that was allocated is freed.
    for timeline in (free, kept):
        p = timeline.program
        assert p.mem_start.sum() == pytest.approx(p.mem_end.sum())
    strategy = load_strategy("fsdp_prefetch")
    assert strategy.extra_memory_bytes(context, {**POINT, "depth": depth}) == (depth - 1) * mib * MIB
    assert [f.code for f in strategy.findings(context, {**POINT, "rate_limit": False})] == ["parameters_unbounded"]


def test_gathers_repeat_every_micro_batch_unless_parameters_stay() -> None:
    graph = step([1e-4] * 3, [2e-4] * 3, [8] * 3, micro_batches=2)
    context = Context(graph, prices())

    def gathers(**point) -> int:
        return sum(
            label.startswith("param.") for label in labels(arranged("fsdp_prefetch", context, {**POINT, **point}))
        )

    assert gathers(keep_last=False) == 12
    assert gathers() == 10
    assert gathers(reshard_after_forward=False) == 6
    assert run("fsdp_prefetch", context, POINT).complete


def test_groups_of_layers_never_cross_a_pass() -> None:
    graph = training_layers(3, tp=1, pipeline=False)
    groups = gather_groups(graph, 2, reshard=True, keep_last=False)
    names = [[f"{graph.operators[i].name} {graph.operators[i].pass_}" for i in group.members] for group in groups]
    assert [len(members) for members in names] == [8, 4, 8, 4]
    assert all(len({name.split()[1] for name in members}) == 1 for members in names)


def test_nothing_ahead_is_serial() -> None:
    context = Context(training_layers(), prices().without_latency())
    timeline = run("fsdp_prefetch", context, load_strategy("fsdp_prefetch").degenerate(context))
    assert timeline.duration_s == pytest.approx(context.prices.serial_s(context.graph), rel=1e-6)


def test_a_gather_without_a_use_is_refused() -> None:
    graph = graph_of([collective("all_gather", 8, "param.mlp.fc1", "fwd"), kernel(1e-4, "mlp.fc1", "fwd")])
    with pytest.raises(StrategyError, match="no operator depends on it"):
        arranged("fsdp_prefetch", Context(graph, prices()), POINT)


def test_whole_parameters_are_refused() -> None:
    answer = load_strategy("fsdp_prefetch").applies_to(Context(training_layers(zero=1), prices()))
    assert not answer.applies
    assert "not sharded" in answer.reasons[0]


def test_one_queue_is_refused_in_a_composition_and_costs_time_where_it_is_not_asked() -> None:
    """Many operators a layer: beside each collective one kernel runs, and the rest waits."""
    context = Context(training_layers(4, LayerShape(4096, 2048, 8192), tp=1, dp=8, pipeline=False), prices())
    chosen = Composition((Chosen(load_strategy("fsdp_prefetch"), POINT),))
    with pytest.raises(StrategyError, match="more than one hardware queue"):
        compose(context, chosen, Site(ProgramBuilder(), context.prices, num_queues=1))
    free = run("fsdp_prefetch", context, POINT).duration_s
    assert run("fsdp_prefetch", context, POINT, num_queues=1).duration_s > 1.05 * free
    assert np.isclose(run("fsdp_prefetch", context, POINT, num_queues=8).duration_s, free)

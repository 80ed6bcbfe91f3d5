"""Gradient buckets: the exposed tail, latency against tail, the distributed optimizer, one hardware queue."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapsim.strategies.grad_buckets.strategy import buckets, exposed_tail_s

from overlapsim.schedule.program import FLOW
from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategy
from overlapsim.testing.layers import training_layers
from overlapsim.workload.operators import CollectiveOp, OperatorGraph
from tests.strategy.steps import MIB, arranged, collective, graph_of, kernel, prices, run


def backward(times_s, sizes_mib, kind="all_reduce") -> OperatorGraph:
    """Weight gradients one after the other, each with its collective."""
    operators = []
    for seconds, mib in zip(times_s, sizes_mib, strict=True):
        operators += [kernel(seconds, "mlp.fc1", "wgrad"), collective(kind, mib, "grad.mlp.fc1", "wgrad")]
    return graph_of(operators, *((2 * i, 2 * i + 1) for i in range(len(times_s))))


@pytest.mark.parametrize("bucket_mib", [1, 64, 100, 10_000])
def test_step_ends_with_the_tail_of_the_last_bucket(bucket_mib: float) -> None:
    """end[j] = max(end[j-1], ready[j] + wait) + t[j]; the step is the last of them."""
    times_s, sizes = [4e-4, 1e-4, 3e-4, 2e-4, 1e-4], [64, 64, 32, 128, 16]
    book = prices()
    context = Context(backward(times_s, sizes), book)
    cut, held = [], 0.0
    for i, size in enumerate(sizes):
        held += size
        if held >= bucket_mib or i == len(sizes) - 1:
            cut.append((i, held))
            held = 0.0
    ready, end_s = list(itertools.accumulate(times_s)), 0.0
    for last, size in cut:
        seconds = book.collective(CollectiveOp("all_reduce", size * MIB, 8)).duration_s
        end_s = max(end_s, ready[last] + book.signal_wait_s) + seconds
    timeline = run("grad_buckets", context, {"bucket_bytes": bucket_mib * MIB, "overlap": True})
    assert timeline.duration_s == pytest.approx(max(end_s, ready[-1]), rel=1e-9)
    without_wait = Context(context.graph, book.without_latency())
    tail_s = exposed_tail_s(without_wait, bucket_mib * MIB)
    assert tail_s > 0
    shown = run("grad_buckets", without_wait, {"bucket_bytes": bucket_mib * MIB, "overlap": True})
    assert shown.duration_s == pytest.approx(ready[-1] + tail_s, rel=1e-9)


def test_small_buckets_pay_latency_and_large_ones_the_tail() -> None:
    """Many small gradients: the best size lies inside, and both ends lose."""
    context = Context(backward([2e-5] * 64, [2] * 64), prices())
    sizes = [1.0, 8.0, 16.0, 32.0, 128.0]
    seconds = [run("grad_buckets", context, {"bucket_bytes": size * MIB, "overlap": True}).duration_s for size in sizes]
    best = int(np.argmin(seconds))
    assert 0 < best < len(sizes) - 1
    assert seconds[0] > 1.02 * seconds[best]
    assert seconds[-1] > 1.02 * seconds[best]


def test_a_bucket_starts_after_its_last_gradient_and_in_order() -> None:
    context = Context(backward([1e-4] * 6, [16] * 6, "reduce_scatter"), prices())
    timeline = run("grad_buckets", context, {"bucket_bytes": 32 * MIB, "overlap": True})
    p = timeline.program
    flows = np.flatnonzero(p.kind == FLOW)
    assert [p.tag[i] for i in flows] == ["wgrad reduce_scatter"] * 3
    work = np.flatnonzero(p.kind != FLOW)
    for number, flow in enumerate(flows):
        assert timeline.t_start[flow] >= timeline.t_end[work[2 * number + 1]]
        assert timeline.t_start[flow] < timeline.t_end[work[min(2 * number + 2, 5)]] or number == 2


def test_parameters_of_a_distributed_optimizer_are_gathered_under_the_forward() -> None:
    """First gather, then each layer when its parameters are there: s[i] = max(e[i-1], gathered[i])."""
    book = prices()
    sizes, times_s = [64, 32, 128, 16], [3e-4, 1e-4, 5e-5, 2e-4]
    operators, edges = [], []
    for i, (mib, seconds) in enumerate(zip(sizes, times_s, strict=True)):
        operators += [collective("all_gather", mib, "param.mlp.fc1", "fwd"), kernel(seconds, "mlp.fc1", "fwd")]
        edges.append((2 * i, 2 * i + 1))
    operators += [kernel(1e-4, "mlp.fc1", "wgrad"), collective("reduce_scatter", 16, "grad.mlp.fc1", "wgrad")]
    context = Context(graph_of(operators, *edges, (8, 9)), book)
    gathered = itertools.accumulate(
        book.collective(CollectiveOp("all_gather", mib * MIB, 8)).duration_s for mib in sizes
    )
    end_s = 0.0
    for there, seconds in zip(gathered, times_s, strict=True):
        end_s = max(end_s, there) + seconds
    scattered = book.collective(CollectiveOp("reduce_scatter", 16 * MIB, 8)).duration_s
    # The last gather may still hold the one stream of the group; here it does not.
    expected = end_s + 1e-4 + book.signal_wait_s + scattered
    timeline = run("grad_buckets", context, {"bucket_bytes": 1.0, "overlap": True})
    assert timeline.duration_s == pytest.approx(expected, rel=1e-9)
    issued = [op.name for op in arranged("grad_buckets", context, {"bucket_bytes": 1.0, "overlap": True}).operators]
    # Each gather is launched before the layer in front of its own.
    assert issued[:4] == ["param.mlp.fc1", "param.mlp.fc1", "mlp.fc1", "param.mlp.fc1"]


def test_without_overlap_buckets_come_after_all_compute() -> None:
    context = Context(training_layers(zero=1), prices().without_latency())
    point = load_strategy("grad_buckets").degenerate(context)
    timeline = run("grad_buckets", context, point)
    assert timeline.duration_s == pytest.approx(context.prices.serial_s(context.graph), rel=1e-6)


@settings(deadline=None, max_examples=80)
@given(
    sizes=st.lists(st.floats(0.5, 300), min_size=1, max_size=30),
    kinds=st.lists(st.sampled_from(["all_reduce", "reduce_scatter"]), min_size=30, max_size=30),
    ranks=st.lists(st.sampled_from([2, 8]), min_size=30, max_size=30),
    limit=st.floats(0.1, 1000),
)
def test_buckets_keep_every_gradient_once_and_never_mix(sizes, kinds, ranks, limit) -> None:
    operators = [
        collective(kind, size, "grad.mlp.fc1", "wgrad", count)
        for size, kind, count in zip(sizes, kinds, ranks, strict=False)
    ]
    graph = graph_of(operators)
    cut = list(buckets(graph, range(len(operators)), limit * MIB))
    assert sorted(i for bucket in cut for i in bucket) == list(range(len(operators)))
    for bucket in cut:
        assert len({(operators[i].kind, operators[i].ranks) for i in bucket}) == 1
        assert bucket == sorted(bucket)
        # Full with its last gradient and not before.
        assert sum(operators[i].size_bytes for i in bucket[:-1]) < limit * MIB
    merged = arranged("grad_buckets", Context(graph, prices()), {"bucket_bytes": limit * MIB, "overlap": True})
    assert sum(op.size_bytes for op in merged.of_type(CollectiveOp)) == pytest.approx(
        sum(op.size_bytes for op in operators)
    )


def test_one_queue_lets_a_bucket_run_beside_one_kernel_only() -> None:
    """Unset: hidden but for the tail. One queue: after the kernel launched right behind it, compute waits."""
    kernel_s, sent_mib = 1e-4, 256
    context = Context(backward([kernel_s] * 12, [sent_mib / 4] * 12), prices())
    parameters = {"bucket_bytes": sent_mib * MIB, "overlap": True}
    sent_s = context.prices.collective(CollectiveOp("all_reduce", sent_mib * MIB, 8)).duration_s
    assert 3 * kernel_s < sent_s + kernel_s  # else there is nothing to block
    free = run("grad_buckets", context, parameters)
    one = run("grad_buckets", context, parameters, num_queues=1)
    wait_s = context.prices.signal_wait_s
    end_s = 0.0
    for ready_s in (4 * kernel_s, 8 * kernel_s, 12 * kernel_s):
        end_s = max(end_s, ready_s + wait_s) + sent_s
    assert free.duration_s == pytest.approx(end_s, rel=1e-9)
    # Four kernels, then twice: a bucket beside one kernel and three kernels behind; at last a bucket alone.
    beside = max(sent_s + wait_s, kernel_s)
    assert one.duration_s == pytest.approx(4 * kernel_s + 2 * (beside + 3 * kernel_s) + wait_s + sent_s, rel=1e-6)
    # Two queues for two streams are as good as none shared.
    assert run("grad_buckets", context, parameters, num_queues=2).same_instants(free)


def test_a_graph_without_gradients_is_refused() -> None:
    answer = load_strategy("grad_buckets").applies_to(Context(training_layers(dp=1), prices()))
    assert not answer.applies
    assert "grad.*" in answer.reasons[0]

"""Pipeline transfers: hidden behind the compute of the micro-batch before, blocking where they are batched."""

from __future__ import annotations

import pytest

from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategy
from overlapsim.testing.layers import training_layers
from overlapsim.workload.operators import CollectiveOp, OperatorGraph
from tests.strategy.steps import MIB, arranged, collective, graph_of, kernel, labels, prices, run


def forwards(times_s, mib: float) -> OperatorGraph:
    """Micro-batches that come in, are computed and go out."""
    operators, edges = [], []
    for i, seconds in enumerate(times_s):
        operators += [
            collective("send_recv", mib, "pipe.recv", "fwd", 2),
            kernel(seconds, "mlp.fc1", "fwd"),
            collective("send_recv", mib, "pipe.send", "fwd", 2),
        ]
        edges += [(3 * i, 3 * i + 1), (3 * i + 1, 3 * i + 2)]
    return graph_of(operators, *edges)


def transfer_s(book, mib: float) -> float:
    return book.collective(CollectiveOp("send_recv", mib * MIB, 2)).duration_s


@pytest.mark.parametrize("mib", [4, 64, 256])
def test_a_receive_runs_under_the_micro_batch_before(mib: float) -> None:
    """T = receive + sum of max(compute, next receive) + last send, sends in the other direction at the same time."""
    times_s = [4e-4, 2e-4, 6e-4, 3e-4]
    book = prices().without_latency()
    context = Context(forwards(times_s, mib), book)
    moved_s = transfer_s(book, mib)
    received, computed, sent = moved_s, [], 0.0
    for i, seconds in enumerate(times_s):
        start_s = max(received, computed[-1] if computed else 0.0)
        # Two buffers: the one after next is received once the one in use is free.
        received = max(received, computed[-1] if i else 0.0) + moved_s
        computed.append(start_s + seconds)
        sent = max(sent, computed[-1]) + moved_s
    timeline = run("p2p_overlap", context, {"batched": False, "early": 1})
    assert timeline.duration_s == pytest.approx(sent, rel=1e-9)
    if moved_s < min(times_s):
        assert sent == pytest.approx(moved_s + sum(times_s) + moved_s, rel=1e-9)
    blocked = run("p2p_overlap", context, {"batched": True, "early": 1})
    assert blocked.duration_s == pytest.approx(sum(times_s) + 2 * len(times_s) * moved_s, rel=1e-9)


def test_more_receives_posted_early_help_where_times_differ() -> None:
    """A long micro-batch gives time for two receives, if both have a buffer."""
    book = prices().without_latency()
    mib = 128
    moved_s = transfer_s(book, mib)
    context = Context(forwards([2 * moved_s, 0.1 * moved_s, 0.1 * moved_s, 2 * moved_s], mib), book)
    one, two = (run("p2p_overlap", context, {"batched": False, "early": early}) for early in (1, 2))
    assert two.duration_s < one.duration_s
    strategy = load_strategy("p2p_overlap")
    assert strategy.extra_memory_bytes(context, {"batched": False, "early": 2}) == 2 * mib * MIB


def test_receives_are_issued_before_the_compute_in_front_of_their_use() -> None:
    context = Context(forwards([1e-4] * 3, 8), prices())
    issued = labels(arranged("p2p_overlap", context, {"batched": False, "early": 1}))
    assert issued == [
        *("pipe.recv fwd", "pipe.recv fwd", "mlp.fc1 fwd", "pipe.send fwd"),
        *("pipe.recv fwd", "mlp.fc1 fwd", "pipe.send fwd", "mlp.fc1 fwd", "pipe.send fwd"),
    ]


def test_blocking_transfers_are_serial() -> None:
    context = Context(training_layers(micro_batches=2), prices().without_latency())
    timeline = run("p2p_overlap", context, load_strategy("p2p_overlap").degenerate(context))
    assert timeline.duration_s == pytest.approx(context.prices.serial_s(context.graph), rel=1e-6)


def test_one_queue_holds_sends_up() -> None:
    """A send behind its kernel runs beside the next one only; with several kernels a micro-batch it blocks."""
    operators, edges = [], []
    for i in range(4):
        operators += [collective("send_recv", 256, "pipe.recv", "fwd", 2)]
        operators += [kernel(1e-4, name, "fwd") for name in ("mlp.norm", "mlp.fc1", "mlp.act", "mlp.fc2")]
        operators += [collective("send_recv", 256, "pipe.send", "fwd", 2)]
        edges += [(6 * i, 6 * i + 1), (6 * i + 4, 6 * i + 5)]
    context = Context(graph_of(operators, *edges), prices())
    point = {"batched": False, "early": 1}
    assert (
        run("p2p_overlap", context, point, num_queues=1).duration_s
        > 1.2 * run("p2p_overlap", context, point).duration_s
    )


def test_a_single_stage_is_refused() -> None:
    answer = load_strategy("p2p_overlap").applies_to(Context(training_layers(pipeline=False), prices()))
    assert not answer.applies
    assert "pipe.*" in answer.reasons[0]

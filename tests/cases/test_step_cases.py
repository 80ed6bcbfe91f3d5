"""Questions that users asked in public about whole steps, answered from graphs of operators."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest

from overlapsim.cost.prices import PriceBook
from overlapsim.engine import compiled
from overlapsim.engine.timeline import Timeline
from overlapsim.hardware.loading import load_cluster
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import BLOCKS, FLOW
from overlapsim.strategy.base import Context
from overlapsim.strategy.compatibility import Setting
from overlapsim.strategy.compose import Chosen, Composition, compose
from overlapsim.strategy.registry import load_strategy
from overlapsim.strategy.tasks import Site
from overlapsim.testing.layers import GRAD_BYTES, LayerShape, training_layers

# 8B: 32 layers, hidden 4096, 14336 wide with a gate, 32 heads, 8 of keys and values (Llama 3 8B).
MODEL = LayerShape(tokens=8192, hidden=4096, ffn=14336, heads=32, kv_heads=8, gated=True)
LAYERS, RANKS = 32, 64
BUCKET_ELEMENTS = max(40_000_000, 1_000_000 * RANKS)
"""Megatron's default size of a bucket."""


@dataclass(frozen=True)
class Step:
    """Times of one step, seconds: its whole, of one operator after another, communication and what compute hides."""

    whole_s: float
    serial_s: float
    communication_s: float
    hidden_s: float
    findings: tuple[str, ...]

    @property
    def hidden(self) -> float:
        """Share of communication that runs while something is computed."""
        return self.hidden_s / self.communication_s


def spans(timeline: Timeline, kind: int) -> list[tuple[int, int]]:
    """When tasks of one kind run, joined where they touch."""
    mine = np.flatnonzero(timeline.program.kind == kind)
    joined: list[tuple[int, int]] = []
    for start, end in sorted(zip(timeline.t_start[mine].tolist(), timeline.t_end[mine].tolist(), strict=True)):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


@lru_cache
def megatron_1468(num_queues: int | None, zero: int) -> Step:
    """8B model, TP = PP = CP = 1, DP 64 on eight nodes of eight H100, buckets of the default size."""
    cluster = load_cluster("h100-sxm8").with_nodes(8)
    graph = training_layers(LAYERS, MODEL, tp=1, dp=RANKS, zero=zero, pipeline=False)
    prices = PriceBook(cluster, RANKS)
    chosen = Chosen(
        load_strategy("grad_buckets"), {"bucket_bytes": float(BUCKET_ELEMENTS * GRAD_BYTES), "overlap": True}
    )
    builder = ProgramBuilder()
    composition = Composition((chosen,), setting=Setting(tp=1, cp=1, pp=1, dp=RANKS, framework="megatron"))
    out = compose(Context(graph, prices), composition, Site(builder, prices, num_queues=num_queues))
    timeline = compiled.run(builder.freeze())
    assert timeline.complete
    computing, sending = spans(timeline, BLOCKS), spans(timeline, FLOW)
    hidden = sum(max(0, min(b, d) - max(a, c)) for a, b in sending for c, d in computing)
    return Step(
        timeline.duration_s,
        prices.serial_s(graph),
        sum(end - start for start, end in sending) / 1e12,
        hidden / 1e12,
        tuple(f.code for f in out.findings),
    )


@pytest.mark.parametrize("zero", [0, 1])
def test_megatron_1468_no_overlap_with_one_queue(zero: int) -> None:
    """C01: gradients (and, with a distributed optimizer, parameters) do not overlap at one queue, and do when unset."""
    one, unset = megatron_1468(1, zero), megatron_1468(None, zero)
    assert one.hidden < 0.25
    assert unset.hidden > 0.95
    assert one.whole_s > 1.1 * unset.whole_s
    # The setting is pointed out, and only where it hurts.
    assert one.findings == ("one_queue_serialises", "shared_queues_assumed")
    assert unset.findings == ()


@pytest.mark.parametrize("zero", [0, 1])
def test_megatron_1468_timelines_add_up(zero: int) -> None:
    """Unset, the step is compute and a tail; CUDA's default of eight queues is as good for two streams."""
    unset = megatron_1468(None, zero)
    assert megatron_1468(8, zero).whole_s == unset.whole_s
    for step in (megatron_1468(1, zero), unset):
        assert 0 <= step.hidden_s <= step.communication_s
        assert step.whole_s < step.serial_s

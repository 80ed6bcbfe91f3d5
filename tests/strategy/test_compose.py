"""Several strategies in one graph: arranged, handed out by pairs, joined by dependencies; both engines agree."""

from __future__ import annotations

import numpy as np
import pytest

from overlapsim.cost.prices import PriceBook
from overlapsim.engine import compiled, reference
from overlapsim.engine.deadlock import raise_if_deadlocked
from overlapsim.errors import StrategyError
from overlapsim.hardware.loading import load_cluster
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import Program
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Chosen, Composed, Composition, compose
from overlapsim.strategy.registry import load_strategy
from overlapsim.strategy.tasks import Site
from overlapsim.testing.layers import LayerShape, training_layers
from overlapsim.workload.operators import CollectiveOp, GemmOp
from tests.strategy.steps import MIB

SHAPE = LayerShape(tokens=2048, hidden=4096, ffn=8192, heads=32, kv_heads=8)
BUCKETS = Chosen(load_strategy("grad_buckets"), {"bucket_bytes": 64 * MIB, "overlap": True})
CHUNKED = Chosen(load_strategy("chunked"), {"chunks": 2})


def context_of(**more) -> Context:
    graph = training_layers(2, SHAPE, tp=2, dp=4, **{"zero": 1, "pipeline": False, **more})
    return Context(graph, PriceBook(load_cluster("h100-sxm8"), 8))


def wave_group(context: Context) -> Chosen:
    """Two groups of mlp.fc2's own kernel."""
    (fc2, *_) = [op for op in context.graph.of_type(GemmOp) if (op.name, op.pass_) == ("mlp.fc2", "fwd")]
    kernel = context.prices.kernel_gemm(fc2, "wave_group")
    tiles = kernel.grid.num_tiles
    parameters = {"tile": kernel.tile, "swizzle": 4, "sms": "steal", "group_tiles": (tiles // 2, tiles - tiles // 2)}
    return Chosen(load_strategy("wave_group"), parameters)


def composed(context: Context, composition: Composition, **site) -> tuple[Composed, Program]:
    builder = ProgramBuilder()
    out = compose(context, composition, Site(builder, context.prices, **site))
    return out, builder.freeze()


def test_wave_groups_chunks_and_buckets_in_two_layers() -> None:
    context = context_of()
    pairs = {("mlp.fc2", "fwd"): wave_group(context), ("mlp.fc1", "fwd"): CHUNKED}
    out, program = composed(context, Composition((BUCKETS,), pairs))
    timeline = compiled.run(program)
    raise_if_deadlocked(timeline)
    assert timeline.same_instants(reference.run(program))
    # Both layers are overlapped, by both strategies.
    tags = [tag.removesuffix(" [tp]") for tag in program.tag]
    for label in (
        "fwd all_gather chunk 1/2",
        "fwd gemm chunk 2/2",
        "fwd reduce_scatter group 2/2",
        "wait for group 1/2",
    ):
        assert tags.count(label) == 2, label
    # Buckets hide the same collectives whatever becomes of the pairs.
    serial, buckets, pieces = (
        compiled.run(composed(context, choice)[1]).duration_s
        for choice in (Composition(), Composition((BUCKETS,)), Composition((), pairs))
    )
    assert serial - buckets > 0.15 * serial
    assert pieces - timeline.duration_s == pytest.approx(serial - buckets, rel=0.15)
    assert set(out.placement.entries) == set(range(len(out.graph.operators)))


def test_every_dependency_holds_in_the_timeline() -> None:
    context = context_of()
    pairs = {("mlp.fc2", "fwd"): wave_group(context), ("mlp.fc1", "fwd"): CHUNKED}
    delay = Chosen(load_strategy("wgrad_delay"), {"pending": 3})
    out, program = composed(context, Composition((BUCKETS, delay), pairs))
    timeline = compiled.run(program)
    raise_if_deadlocked(timeline)
    inside = {("mlp.fc2", "fwd"), ("mlp.fc1", "fwd")}
    held = 0
    for a, b in out.graph.dependencies:
        first, second = out.graph.operators[a], out.graph.operators[b]
        if (first.name, first.pass_) == (second.name, second.pass_) and (first.name, first.pass_) in inside:
            continue  # one piece: its strategy lets parts of it overlap
        ended = max(timeline.t_end[task] for task in out.placement.exits[a])
        assert min(timeline.t_start[task] for task in out.placement.entries[b]) >= ended
        held += 1
    assert held > len(out.graph.operators) / 2


@pytest.mark.parametrize("more", [{}, {"zero": 3}, {"zero": 0, "pipeline": True}])
def test_nothing_switched_on_is_serial(more) -> None:
    context = context_of(**more)
    _, program = composed(context, Composition())
    timeline = compiled.run(program, contention=False)
    # Each unit of each task is rounded to a picosecond.
    assert timeline.duration_s == pytest.approx(context.prices.serial_s(context.graph), rel=1e-6)


@pytest.mark.parametrize("num_queues", [1, 2, 8])
def test_shared_queues_never_deadlock_and_never_gain(num_queues: int) -> None:
    context = context_of(pipeline=True)
    pairs = {("mlp.fc2", "fwd"): wave_group(context), ("mlp.fc1", "fwd"): CHUNKED}
    transfers = Chosen(load_strategy("p2p_overlap"), {"batched": False, "early": 1})
    choice = Composition((BUCKETS, transfers, Chosen(load_strategy("wgrad_delay"), {"pending": 2})), pairs)
    _, program = composed(context, choice, num_queues=num_queues)
    timeline = compiled.run(program, contention=False)
    raise_if_deadlocked(timeline)
    _, free = composed(context, choice)
    # One queue costs; as many queues as streams cost nothing.
    apart = compiled.run(free, contention=False)
    assert timeline.duration_s >= apart.duration_s * (1 - 1e-3)
    if num_queues >= len(set(free.stream_name)):
        assert timeline.same_instants(apart)
    if num_queues == 1:
        assert timeline.duration_s > 1.02 * apart.duration_s


def test_gradients_and_parameters_are_nobodys_pair() -> None:
    """mlp.fc1 has two gathers before it: of its rows and of its parameters; the pair is the rows."""
    context = context_of(zero=3)
    out, program = composed(context, Composition((), {("mlp.fc1", "fwd"): CHUNKED}))
    chunks = [i for i, tag in enumerate(program.tag) if tag.startswith("fwd all_gather chunk")]
    assert len(chunks) == 4
    assert sum(op.name == "param.mlp.fc1" for op in out.graph.of_type(CollectiveOp)) == 4
    wgrad = Composition((), {("mlp.fc1", "wgrad"): wave_group(context)})
    with pytest.raises(StrategyError, match="no collective standing after"):
        composed(context, wgrad)


def test_memory_of_operators_becomes_memory_of_tasks() -> None:
    context = context_of(zero=3)
    point = {"layers_per_group": 1, "depth": 2, "rate_limit": True, "reshard_after_forward": True, "keep_last": True}
    choice = Composition((Chosen(load_strategy("fsdp_prefetch"), point),), {("mlp.fc1", "fwd"): CHUNKED})
    out, program = composed(context, choice)
    assert program.mem_start.sum() == sum(start for start, _ in out.graph.memory) > 0
    assert np.isclose(program.mem_start.sum(), program.mem_end.sum())


def test_a_strategy_for_pairs_is_not_switched_on_for_all() -> None:
    with pytest.raises(StrategyError, match="takes single pairs"):
        composed(context_of(), Composition((CHUNKED,)))


def test_a_gemm_that_is_not_there_is_named() -> None:
    with pytest.raises(StrategyError, match=r"moe.fc1 fwd; the graph has no such GEMM"):
        composed(context_of(), Composition((), {("moe.fc1", "fwd"): CHUNKED}))

"""ring_exchange against its closed forms in both engines, rows conserved, tails that co-run, published relations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapsim.strategies.ring_exchange.steps import gather_s, scatter_s, steps_of

from overlapsim.cost.prices import PriceBook
from overlapsim.engine import compiled, reference
from overlapsim.errors import StrategyError
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.operator import build, simulate
from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import CollectiveOp, GemmOp, KernelOp, gemm_and_collective

ENGINES = {"reference": reference, "compiled": compiled}
CLUSTERS = {name: load_cluster(name) for name in ("a800-sxm8", "a100-sxm8", "h100-sxm8")}
RING = load_strategy("ring_exchange")


def context_of(cluster: str, gemm: GemmOp, kind="all_gather", ranks: int = 8) -> Context:
    prices = PriceBook(CLUSTERS[cluster], ranks, gemm=gemm, kind=kind)
    return Context(gemm_and_collective(gemm, kind, ranks), prices)


def point_of(form: str = "unidirectional", transport: str = "copy_engine", streams: int = 1) -> dict:
    return {"form": form, "transport": transport, "compute_streams": streams}


def prices_of(context: Context, rows: int, engine: str = "copy_engine") -> tuple[float, float, float]:
    """GEMM, transfer and add of so many rows, each alone."""
    pair, prices = context.pair(), context.prices
    g = prices.vendor_gemm(replace(pair.gemm, m=rows)).duration_s
    size = pair.collective.size_bytes * rows / pair.gemm.m
    x = prices.flow(CollectiveOp("send_recv", size, pair.collective.ranks, engine=engine))[0]
    return g, x, prices.kernel(KernelOp(MemoryOp("add", rows, pair.gemm.n), "gemm")).duration_s


SHAPES = st.tuples(
    st.sampled_from(sorted(CLUSTERS)),
    st.integers(2, 8),
    st.integers(1, 4).map(lambda blocks: blocks * 128),
    st.sampled_from([2048, 4096]),
    st.sampled_from([512, 2048, 8192]),
)


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, engine=st.sampled_from(sorted(ENGINES)))
def test_all_gather_on_one_stream(shape, engine: str) -> None:
    """T = g + sum over TP - 1 steps of max(gap + g, x)."""
    cluster, ranks, rows, n, k = shape
    context = context_of(cluster, GemmOp(rows * ranks, n, k), "all_gather", ranks)
    g, x, _ = prices_of(context, rows)
    program = build(RING, context, point_of())
    seconds = ENGINES[engine].run(program, contention=False).duration_s
    gap = context.prices.step_gap_s
    assert seconds == pytest.approx(g + (ranks - 1) * max(gap + g, x), rel=1e-6)


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, engine=st.sampled_from(sorted(ENGINES)))
def test_reduce_scatter_on_one_stream(shape, engine: str) -> None:
    """T = g + sum over TP - 1 steps of max(gap + g, wait + x) + a: a partial sum travels and each rank adds to it."""
    cluster, ranks, rows, n, k = shape
    context = context_of(cluster, GemmOp(rows * ranks, n, k), "reduce_scatter", ranks)
    g, x, a = prices_of(context, rows)
    program = build(RING, context, point_of())
    seconds = ENGINES[engine].run(program, contention=False).duration_s
    gap, wait = context.prices.step_gap_s, context.prices.signal_wait_s
    expected = g + (ranks - 1) * (max(gap + g, wait + x) + a)
    assert seconds == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("k", [512, 8192])
def test_two_shards_a_step(k: int, engine: str) -> None:
    """Bidirectional: g1 + 3 steps of two shards + one of one; aggregate: x1, then 4 GEMMs and 3 transfers of two."""
    context = context_of("h100-sxm8", GemmOp(8 * 512, 4096, k))
    (g1, x1, _), (g2, x2, _) = prices_of(context, 512), prices_of(context, 1024)
    run = ENGINES[engine].run
    seconds = run(build(RING, context, point_of("bidirectional")), contention=False).duration_s
    # GEMMs and transfers of unequal steps: the recurrence, written out.
    gap, computed, moved = context.prices.step_gap_s, g1, 0.0
    for g, x in [(g2, x2)] * 3 + [(g1, x1)]:
        moved += x
        computed = max(computed + gap, moved) + g
    assert seconds == pytest.approx(computed, rel=1e-6)
    seconds = run(build(RING, context, point_of("aggregate")), contention=False).duration_s
    assert seconds == pytest.approx(x1 + g2 + 3 * max(gap + g2, x2), rel=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    m=st.integers(8, 6000),
    k=st.sampled_from([512, 4096]),
    kind=st.sampled_from(["all_gather", "reduce_scatter"]),
    form=st.sampled_from(["unidirectional", "bidirectional"]),
    transport=st.sampled_from(["copy_engine", "kernel"]),
    streams=st.integers(1, 3),
    ranks=st.integers(2, 8),
)
def test_rows_are_conserved_and_bounds_hold(m, k, kind, form, transport, streams, ranks) -> None:
    context = context_of("h100-sxm8", GemmOp(m, 4096, k), kind, ranks)
    pair = context.pair()
    steps = steps_of(pair, form)
    assert sum(step.rows for step in steps) == m
    # All but one shard goes over the wire; shards differ by a row.
    shard = m / ranks
    assert m - shard - 1 <= sum(step.moved_rows for step in steps) <= m - shard + 1
    timeline = simulate(RING, context, point_of(form, transport, streams), contention=False)
    per_step = [prices_of(context, step.rows)[0] for step in steps]
    alone = max(per_step) if streams > 1 else sum(per_step)
    assert timeline.duration_s >= alone * (1 - 1e-6)


def test_the_screen_is_the_engine_on_one_stream() -> None:
    for kind in ("all_gather", "reduce_scatter"):
        context = context_of("a100-sxm8", GemmOp(4096, 8192, 2048), kind)
        space = RING.parameters(context)
        for form in ("unidirectional", "bidirectional", *(("aggregate",) if kind == "all_gather" else ())):
            point = point_of(form)
            seconds = simulate(RING, context, point, contention=False).duration_s
            assert space.screen(point) == pytest.approx(seconds, rel=1e-6)


def test_tails_of_consecutive_shards_run_together() -> None:
    """A shard of 256 x 4096 leaves SMs idle; on two streams its neighbour takes them, on one it waits."""
    context = context_of("a100-sxm8", GemmOp(2048, 4096, 2048))
    cost = context.prices.vendor_gemm(GemmOp(256, 4096, 2048))
    tiles, waves = cost.grid.num_tiles * cost.split_k, math.ceil(cost.grid.num_tiles * cost.split_k / 108)
    one, two = (simulate(RING, context, point_of(streams=n), contention=False) for n in (1, 2))
    gap = context.prices.step_gap_s
    assert one.duration_s == pytest.approx(8 * cost.duration_s + 7 * gap, rel=1e-6)
    assert two.duration_s < one.duration_s - 7 * gap + 1e-9
    # No better than all tiles packed on all SMs.
    assert two.duration_s >= cost.duration_s / waves * math.ceil(8 * tiles / 108) * (1 - 1e-6)


def test_buffers_hold_the_ring_back() -> None:
    """With GEMMs much longer than transfers a third transfer waits for the first received shard to be multiplied."""
    context = context_of("h100-sxm8", GemmOp(8192, 8192, 8192))
    timeline = simulate(RING, context, point_of(), contention=False)
    flows = [i for i, tag in enumerate(timeline.program.tag) if "receive" in tag]
    gemms = [i for i, tag in enumerate(timeline.program.tag) if "gemm" in tag]
    assert timeline.t_start[flows[2]] == timeline.t_end[gemms[1]]
    assert timeline.t_start[flows[1]] == timeline.t_end[flows[0]]


def test_kernels_on_sms_slow_the_gemm_and_copy_engines_do_not() -> None:
    context = context_of("h100-sxm8", GemmOp(8192, 8192, 2048))
    engines, kernel = (build(RING, context, point_of(transport=t)) for t in ("copy_engine", "kernel"))
    flows = [i for i, tag in enumerate(kernel.tag) if "receive" in tag]
    assert {int(kernel.sm[i]) for i in flows} == {context.prices.comm_sms("send_recv")}
    assert len({int(engines.pool[i]) for i in flows} & {int(engines.pool[0 if 0 not in flows else 1])}) == 0


def test_closed_forms_of_equal_steps() -> None:
    assert gather_s([3.0] * 4, [0.0] + [2.0] * 3) == 12.0
    assert gather_s([2.0] * 4, [0.0] + [3.0] * 3) == 11.0
    assert gather_s([2.0] * 4, [0.0] + [1.0] * 3, 0.5) == 9.5
    # An aggregate's first transfer is exposed.
    assert gather_s([4.0] * 4, [1.0] + [2.0] * 3) == 17.0
    assert scatter_s([2.0] * 4, [0.0] + [3.0] * 3, [0.0] + [0.5] * 3) == 12.5
    # With a second stream the GEMMs run ahead: only transfers and adds follow the first.
    assert scatter_s([2.0] * 4, [0.0] + [3.0] * 3, [0.0] + [0.5] * 3, streams=2) == 2 + 3 * 3.5
    assert scatter_s([2.0] * 4, [0.0] + [1.0] * 3, [0.0] + [0.5] * 3, streams=2) == 8.5


def test_refusals() -> None:
    def answer(cluster: str, gemm: GemmOp, kind, ranks: int = 8):
        prices = PriceBook(load_cluster(cluster), ranks)
        return RING.applies_to(Context(gemm_and_collective(gemm, kind, ranks), prices))

    large = GemmOp(8192, 8192, 1024)
    assert answer("h100-sxm8", large, "all_gather").applies
    assert "all_reduce" in answer("h100-sxm8", large, "all_reduce").reasons[0]
    assert "peer" in answer("rtx4090-pcie8", large, "all_gather").reasons[0]
    assert "links of its own" in answer("mi300x8", large, "all_gather").reasons[0]
    assert answer("h100-sxm8", GemmOp(64, 7168, 8192), "all_gather").cause == "under_one_wave"
    assert answer("h100-sxm8", GemmOp(4, 10**6, 512), "all_gather").cause == "few_tiles"
    assert answer("h100-sxm8", large, "all_gather", 1).cause == "little_to_hide"
    with pytest.raises(StrategyError, match="even number of ranks"):
        build(RING, context_of("h100-sxm8", large, "reduce_scatter"), point_of("aggregate"))


@pytest.mark.parametrize(
    ("rows", "n", "k", "library_us", "decomposed_us"),
    [
        # 8 H100, rows a rank (SOURCES.md, DECOMPOSED-STEP): what the time of a step was taken from ...
        (256, 6656, 4096, 273.0, 309.9),
        (256, 6656, 8192, 499.4, 548.5),
        (512, 6656, 4096, 514.5, 455.8),
        (512, 6656, 8192, 912.4, 837.8),
        (512, 6656, 16384, 1810.4, 1633.3),
        # ... and github.com/pytorch/pytorch pull request 143160, which it was not.
        (256, 3584, 8192, 301.0, 354.0),
    ],
)
def test_decomposed_over_serial_as_published(rows, n, k, library_us, decomposed_us) -> None:
    context = context_of("h100-sxm8", GemmOp(8 * rows, n, k))
    serial = simulate(load_strategy("serial"), context, {}).duration_s
    ratio = simulate(RING, context, point_of()).duration_s / serial
    assert ratio == pytest.approx(decomposed_us / library_us, rel=0.15)
    assert (ratio > 1) == (decomposed_us > library_us)


def test_small_pieces_are_a_finding() -> None:
    small, large = context_of("h100-sxm8", GemmOp(2048, 3584, 8192)), context_of("h100-sxm8", GemmOp(65536, 8192, 8192))
    found = [[f.code for f in RING.findings(context, point_of())] for context in (small, large)]
    assert found == [["transfer_price_assumed", "few_tiles"], ["transfer_price_assumed"]]
    assert RING.extra_memory_bytes(small, point_of()) == 0
    scatter = context_of("h100-sxm8", GemmOp(2048, 3584, 8192), "reduce_scatter")
    assert RING.extra_memory_bytes(scatter, point_of()) == 2 * 256 * 3584 * 2

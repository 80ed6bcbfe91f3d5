"""async_tp: its three ways by rows, each against its closed form in both engines, and published relations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.prices import PriceBook
from overlapsim.engine import compiled, reference
from overlapsim.errors import StrategyError
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.operator import build, simulate
from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.operators import CollectiveOp, GemmOp, gemm_and_collective

ENGINES = {"reference": reference, "compiled": compiled}
CLUSTERS = {name: load_cluster(name) for name in ("a800-sxm8", "a100-sxm8", "h100-sxm8")}
ASYNC = load_strategy("async_tp")
PIECES = {"method": "decomposed", "co_run": False}


def context_of(cluster: str, gemm: GemmOp, kind="all_gather", ranks: int = 8) -> Context:
    prices = PriceBook(CLUSTERS[cluster], ranks, gemm=gemm, kind=kind)
    return Context(gemm_and_collective(gemm, kind, ranks), prices)


def ways_of(cluster: str, m: int, ranks: int = 8) -> tuple[str, ...]:
    return ASYNC.parameters(context_of(cluster, GemmOp(m, 8192, 8192), ranks=ranks)).grid["method"]


@pytest.mark.parametrize(
    ("cluster", "m", "ways"),
    [
        ("h100-sxm8", 1024, ("nvls_gather",)),
        ("h100-sxm8", 2048, ("nvls_gather",)),
        ("h100-sxm8", 2112, ("decomposed", "flag_gemm")),
        ("h100-sxm8", 4096, ("decomposed", "flag_gemm")),
        ("h100-sxm8", 4104, ("decomposed",)),
        # 2056 rows are 257 a rank, which no 8 parts divide.
        ("h100-sxm8", 2056, ("decomposed",)),
        # No switch that reduces.
        ("a100-sxm8", 2048, ("decomposed",)),
    ],
)
def test_rows_choose_the_way(cluster: str, m: int, ways: tuple[str, ...]) -> None:
    assert ways_of(cluster, m) == ways


SHAPES = st.tuples(
    st.sampled_from(sorted(CLUSTERS)),
    st.integers(2, 8),
    st.integers(1, 4).map(lambda blocks: blocks * 128),
    st.sampled_from([2048, 4096]),
    st.sampled_from([512, 2048, 8192]),
)


def parts_of(context: Context) -> tuple[float, float, float, float]:
    """GEMM of a shard, pull, barrier and gap."""
    pair, prices = context.pair(), context.prices
    ranks = pair.collective.ranks
    g = prices.vendor_gemm(replace(pair.gemm, m=pair.gemm.m // ranks)).duration_s
    whole = CollectiveOp("all_gather", pair.collective.size_bytes, ranks, engine="copy_engine")
    return g, prices.copies(whole, ranks - 1)[0], prices.barrier_s, prices.step_gap_s


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, engine=st.sampled_from(sorted(ENGINES)))
def test_gather_in_pieces(shape, engine: str) -> None:
    """Barrier, copy, barrier, then T = g + sum over TP - 1 steps of max(gap + g, pull), but for a pull that waits.

    Pull s shares a stream with the GEMM two steps before it.
    """
    cluster, ranks, rows, n, k = shape
    context = context_of(cluster, GemmOp(rows * ranks, n, k), "all_gather", ranks)
    if not ASYNC.applies_to(context).applies:
        return
    g, x, barrier, gap = parts_of(context)
    copied = context.prices.hbm_pass(2 * context.pair().collective.size_bytes / ranks)[0]
    begin = barrier + copied + barrier
    seconds = ENGINES[engine].run(build(ASYNC, context, PIECES), contention=False).duration_s
    if x <= gap + g:
        expected = begin + max(g + gap, x) + (ranks - 2) * (g + gap) + g + barrier
    else:
        expected = begin + (ranks - 1) * x + g + barrier
    assert seconds == pytest.approx(expected, rel=1e-5)


@settings(deadline=None, max_examples=40)
@given(shape=SHAPES, kind=st.sampled_from(["all_gather", "reduce_scatter"]), engine=st.sampled_from(sorted(ENGINES)))
def test_the_screen_is_the_engine_without_contention(shape, kind, engine: str) -> None:
    cluster, ranks, rows, n, k = shape
    context = context_of(cluster, GemmOp(rows * ranks, n, k), kind, ranks)
    if not ASYNC.applies_to(context).applies:
        return
    space = ASYNC.parameters(context)
    for point in ({"method": method, "co_run": False} for method in space.grid["method"] if method != "flag_gemm"):
        seconds = ENGINES[engine].run(build(ASYNC, context, point), contention=False).duration_s
        assert seconds == pytest.approx(space.screen(point), rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("k", [512, 8192])
def test_scatter_in_pieces(k: int, engine: str) -> None:
    """Four ranks, written out: products on two streams, a barrier on either side of each pull, own rows and the sum."""
    context = context_of("h100-sxm8", GemmOp(4 * 1024, 4096, k), "reduce_scatter", 4)
    g, x, b, gap = parts_of(context)
    total = context.prices.hbm_pass(context.pair().collective.size_bytes * 1.25)[0]
    g1 = b + g
    p1 = g1 + b + x
    g2 = g1 + gap + g
    p2 = max(g2 + b, p1) + x
    g3 = max(g2 + gap, p1 + b) + g
    p3 = max(g3 + b, p2) + x
    own = max(g3 + gap, p2 + b) + g
    expected = max(own, p3 + b) + b + total
    seconds = ENGINES[engine].run(build(ASYNC, context, PIECES), contention=False).duration_s
    assert seconds == pytest.approx(expected, rel=1e-6)


def test_the_switch_gathers_and_nothing_overlaps() -> None:
    context = context_of("h100-sxm8", GemmOp(2048, 3584, 8192))
    pair, prices = context.pair(), context.prices
    point = {"method": "nvls_gather", "co_run": False}
    seconds = simulate(ASYNC, context, point, contention=False).duration_s
    switched = prices.without_latency().flow(replace(pair.collective, engine="nvls"))[0] + 2 * prices.barrier_s
    assert seconds == pytest.approx(switched + prices.vendor_gemm(pair.gemm).duration_s, rel=1e-6)
    assert [f.code for f in ASYNC.findings(context, point)] == ["nothing_overlaps"]


@pytest.mark.parametrize("engine", ENGINES)
def test_tiles_wait_for_their_flag(engine: str) -> None:
    """The GEMM under flags ends no sooner than its own time or a wave behind the last pull, and starts at once."""
    context = context_of("h100-sxm8", GemmOp(4096, 4096, 1024))
    pair, prices = context.pair(), context.prices
    timeline = ENGINES[engine].run(build(ASYNC, context, {"method": "flag_gemm", "co_run": False}), contention=False)
    gemm = next(i for i, tag in enumerate(timeline.program.tag) if "gemm" in tag)
    last = max(i for i, tag in enumerate(timeline.program.tag) if "pull" in tag)
    kernel = prices.kernel_gemm(pair.gemm, "async_tp", slowdown=1.0)
    begin_s = timeline.t_start[gemm] / 1e12
    assert begin_s == pytest.approx(2 * prices.barrier_s + prices.hbm_pass(2 * 512 * 1024 * 2)[0], rel=1e-6)
    assert timeline.t_end[gemm] >= timeline.t_end[last] + kernel.tile_time_s * 1e12 - 1
    assert (timeline.t_end[gemm] - timeline.t_start[gemm]) / 1e12 >= kernel.duration_s * (1 - 1e-6)


def test_streams_that_compute_at_once_gain_where_sms_are_idle() -> None:
    context = context_of("a100-sxm8", GemmOp(2048, 4096, 2048))
    apart, together = (simulate(ASYNC, context, {**PIECES, "co_run": c}, contention=False) for c in (False, True))
    assert together.duration_s < apart.duration_s


def test_decomposed_over_serial_as_published() -> None:
    """8 H100, 2048 x 3584 x 8192 (pytorch pull request 143160): 301 us serial, 354 in pieces, 277 by multicast."""
    context = context_of("h100-sxm8", GemmOp(2048, 3584, 8192))
    serial = simulate(load_strategy("serial"), context, {}).duration_s
    pieces, switch = (
        simulate(ASYNC, context, {"method": method, "co_run": False}).duration_s / serial
        for method in ("decomposed", "nvls_gather")
    )
    assert pieces == pytest.approx(354 / 301, rel=0.15)
    assert switch == pytest.approx(277 / 301, rel=0.15)
    assert switch < 1 < pieces


def test_refusals() -> None:
    def answer(cluster: str, gemm: GemmOp, kind, ranks: int = 8):
        prices = PriceBook(load_cluster(cluster), ranks)
        return ASYNC.applies_to(Context(gemm_and_collective(gemm, kind, ranks), prices))

    large, small = GemmOp(8192, 8192, 1024), GemmOp(64, 7168, 8192)
    assert "all_reduce" in answer("h100-sxm8", large, "all_reduce").reasons[0]
    assert "peer" in answer("rtx4090-pcie8", large, "all_gather").reasons[0]
    assert "links of its own" in answer("mi300x8", large, "all_gather").reasons[0]
    # One wave is no matter to a switch that gathers before it.
    assert answer("h100-sxm8", small, "all_gather").applies
    assert answer("a100-sxm8", small, "all_gather").cause == "under_one_wave"
    assert answer("h100-sxm8", small, "reduce_scatter").cause == "under_one_wave"
    with pytest.raises(StrategyError, match="no switch that reduces"):
        build(ASYNC, context_of("a100-sxm8", large), {"method": "nvls_gather", "co_run": False})
    with pytest.raises(StrategyError, match="takes method decomposed"):
        build(ASYNC, context_of("h100-sxm8", large, "reduce_scatter"), {"method": "flag_gemm", "co_run": False})

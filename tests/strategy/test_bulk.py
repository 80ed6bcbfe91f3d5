"""bulk against ``T = max(gemm(S - n), comm(n))`` in both engines, its 1-D search, and published settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.prices import PriceBook
from overlapsim.engine import compiled, reference
from overlapsim.errors import StrategyError
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.candidates import propose
from overlapsim.planner.operator import build, simulate
from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.operators import GemmOp, gemm_and_collective, independent_pair

ENGINES = {"reference": reference, "compiled": compiled}
CLUSTERS = {name: load_cluster(name) for name in ("a100-sxm8", "h100-sxm8", "rtx4090-pcie8")}
BULK = load_strategy("bulk")


def context_of(cluster: str, gemm: GemmOp, kind, size_bytes: float, ranks: int = 8, **given) -> Context:
    prices = PriceBook(CLUSTERS[cluster], ranks, gemm=gemm, kind=kind, **given)
    return Context(independent_pair(gemm, kind, ranks, size_bytes), prices)


@settings(deadline=None, max_examples=40)
@given(
    cluster=st.sampled_from(sorted(CLUSTERS)),
    m=st.integers(256, 4096),
    n=st.integers(256, 4096),
    k=st.sampled_from([512, 2048]),
    kind=st.sampled_from(["all_gather", "reduce_scatter"]),
    size_bytes=st.floats(1e5, 3e8),
    sms=st.integers(1, 28),
)
def test_with_a_margin_the_slower_side_decides(cluster, m, n, k, kind, size_bytes, sms) -> None:
    context = context_of(cluster, GemmOp(m, n, k), kind, size_bytes)
    prices, pair = context.prices, context.pair()
    gemm, num_sms = prices.vendor_gemm(pair.gemm), prices.cluster.device.num_sms
    ctas = gemm.grid.num_tiles * gemm.split_k
    gemm_s = gemm.duration_s / -(-ctas // num_sms) * -(-ctas // (num_sms - sms))
    comm_s = prices.flow(pair.collective)[0] * prices.sm_slowdown(pair.collective, sms)
    program = build(BULK, context, {"comm_sms": sms, "sm_margin": True})
    for engine in ENGINES.values():
        assert engine.run(program, contention=False).duration_s == pytest.approx(max(gemm_s, comm_s), rel=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    m=st.integers(1024, 8192),
    size_bytes=st.floats(1e6, 3e8),
    point=st.fixed_dictionaries({"comm_sms": st.integers(1, 24), "sm_margin": st.booleans()}),
)
def test_the_screen_is_the_engine_without_contention(m: int, size_bytes: float, point) -> None:
    context = context_of("h100-sxm8", GemmOp(m, 4096, 2048), "all_gather", size_bytes)
    screened = BULK.parameters(context).screen(point)
    seconds = simulate(BULK, context, point, contention=False).duration_s
    # Without a margin the collective may end inside a wave; its SMs then start CTAs before the wave is over.
    wave_s = context.prices.vendor_gemm(context.pair().gemm).tile_time_s
    assert seconds == pytest.approx(screened, rel=1e-6) if point["sm_margin"] else abs(seconds - screened) <= wave_s


def test_the_search_finds_the_least_of_all_sms() -> None:
    """Between the ends: one SM leaves communication exposed, all of them cost the GEMM a wave."""
    context = context_of("h100-sxm8", GemmOp(8192, 8192, 1024), "all_gather", 2.0**26)
    times = {
        sms: simulate(BULK, context, {"comm_sms": sms, "sm_margin": True}, contention=False).duration_s
        for sms in range(1, 25)
    }
    margin = [p.parameters for p in propose(BULK.parameters(context)) if p.parameters["sm_margin"]]
    assert times[margin[0]["comm_sms"]] == min(times.values())
    assert min(times, key=times.__getitem__) not in (1, 24)


def test_stealing_is_no_slower_than_a_margin() -> None:
    context = context_of("a100-sxm8", GemmOp(8192, 8192, 4096), "reduce_scatter", 2.0**25)
    steal, margin = (
        simulate(BULK, context, {"comm_sms": 8, "sm_margin": m}, contention=False).duration_s for m in (False, True)
    )
    assert steal <= margin


def test_published_sms_are_of_the_order_that_hides_the_collective() -> None:
    """Published H100 settings (SOURCES.md, NEMO-TP) give 2 to 8 SMs to the gather below a long dgrad of fc1.

    Llama 3 70B, TP 4, 8192 tokens: dgrad of fc1 is 8192 x 8192 x 14336 and gathers 8192 x 8192 in bf16.
    """
    gemm = GemmOp(8192, 8192, 14336, pass_="dgrad", name="mlp.fc1")
    context = context_of("h100-sxm8", gemm, "all_gather", 2.0 * 8192 * 8192, ranks=4)
    pair, prices = context.pair(), context.prices
    gemm_s, comm_s = prices.vendor_gemm(gemm).duration_s, prices.flow(pair.collective)[0]
    hides = [n for n in range(1, 25) if comm_s * prices.sm_slowdown(pair.collective, n) <= gemm_s]
    assert 1 <= min(hides) <= 8
    serial = simulate(load_strategy("serial"), context, {}).duration_s
    assert simulate(BULK, context, {"comm_sms": min(hides), "sm_margin": False}).duration_s < serial


def test_published_gain_beside_a_gather() -> None:
    """8 H100, 8192^3 in fp16, a gather of 64 MiB a rank: 2.96 ms in series, 2.02 side by side, 1.77 by copies.

    github.com/pytorch/pytorch pull request 172714; that the size is of one rank is read from the time in series.
    """
    context = context_of("h100-sxm8", GemmOp(8192, 8192, 8192, "fp16"), "all_gather", 2.0**29)
    gather, gemm = context.graph.operators
    copied = Context(replace(context.graph, operators=(replace(gather, engine="copy_engine"), gemm)), context.prices)
    serial = simulate(load_strategy("serial"), context, {}).duration_s
    assert serial == pytest.approx(2.96e-3, rel=0.1)
    beside = simulate(BULK, context, {"comm_sms": 24, "sm_margin": False}).duration_s / serial
    by_copies = simulate(BULK, copied, {"comm_sms": 0, "sm_margin": False}).duration_s / serial
    assert beside == pytest.approx(2.02 / 2.96, rel=0.1)
    # What copies cost the GEMM in HBM and L2 is not known well enough to be charged beyond HBM's bytes.
    assert by_copies == pytest.approx(1.77 / 2.96, rel=0.2)
    assert by_copies < beside < 1


def test_copy_engines_leave_all_sms_to_the_gemm() -> None:
    context = context_of("h100-sxm8", GemmOp(8192, 8192, 1024), "all_gather", 2.0**26)
    graph = independent_pair(context.pair().gemm, "all_gather", 8, 2.0**26)
    moved = replace(graph.operators[0], engine="copy_engine")
    context = Context(replace(graph, operators=(moved, graph.operators[1])), context.prices)
    points = list(propose(BULK.parameters(context)))
    assert {p.parameters["comm_sms"] for p in points} == {0}
    gemm_s = context.prices.vendor_gemm(context.pair().gemm).duration_s
    seconds = simulate(BULK, context, points[0].parameters, contention=False).duration_s
    assert seconds == pytest.approx(max(gemm_s, context.prices.flow(moved)[0]), rel=1e-6)


def test_refusals() -> None:
    gemm = GemmOp(4096, 4096, 1024)
    prices = PriceBook(CLUSTERS["h100-sxm8"], 8, gemm=gemm)
    answer = BULK.applies_to(Context(gemm_and_collective(gemm, "reduce_scatter", 8), prices))
    assert not answer.applies and "independent" in answer.reasons[0]
    alone = BULK.applies_to(Context(independent_pair(gemm, "all_gather", 1, 1e6), prices))
    assert (alone.applies, alone.cause) == (False, "little_to_hide")
    context = Context(independent_pair(gemm, "all_gather", 8, 1e6), prices)
    with pytest.raises(StrategyError, match="leave some"):
        build(BULK, context, {"comm_sms": 132, "sm_margin": False})

"""Serial execution: the engine takes exactly what the prices say, whatever kernel the vendor would pick."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from overlapsim.cost.prices import PriceBook
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.operator import simulate
from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.operators import GemmOp, gemm_and_collective

CLUSTERS = {name: load_cluster(name) for name in ("a800-sxm8", "a100-sxm8", "h100-sxm8", "b200-sxm8", "rtx4090-pcie8")}


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(sorted(CLUSTERS)),
    st.integers(1, 20000),
    st.integers(1, 20000),
    st.integers(1, 40000),
    st.sampled_from([2, 3, 8]),
    st.sampled_from(["all_reduce", "reduce_scatter", "all_to_all"]),
)
@example("a800-sxm8", 256, 8192, 16384, 2, "all_reduce")  # the vendor splits k, over more CTAs than there are SMs
def test_engine_time_is_the_sum_of_the_prices(cluster, m, n, k, ranks, kind) -> None:
    gemm = GemmOp(m, n, k, "fp16")
    context = Context(gemm_and_collective(gemm, kind, ranks), PriceBook(CLUSTERS[cluster], ranks, gemm=gemm, kind=kind))
    seconds = simulate(load_strategy("serial"), context, {}).duration_s
    # A wave is rounded to a picosecond, and there are at most some thousands of them.
    assert seconds == pytest.approx(context.prices.serial_s(context.graph), rel=1e-6, abs=1e-8)

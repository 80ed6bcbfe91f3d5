"""Collectives on fewer SMs against published pairs of SMs and rates, and as a price: monotone, whole where it was."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.prices import PriceBook
from overlapsim.cost.sm_feed import fewer_sms_s, sm_bytes_per_s
from overlapsim.errors import UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.workload.operators import CollectiveOp

CLUSTERS = {name: load_cluster(name) for name in ("a800-sxm8", "h100-sxm8", "b200-sxm8", "rtx4090-pcie8")}


@pytest.mark.parametrize(
    ("device", "full", "full_rate", "sms", "rate"),
    [
        # Expert dispatch and combine over NVLink of eight SM100 GPUs, 64 against 24 SMs (SOURCES.md, DEEPEP).
        ("b200-sxm8", 64, 726e9, 24, 643e9),
        ("b200-sxm8", 64, 740e9, 24, 675e9),
        # A channel's worth of SMs for each of the H800's: 20 SMs reach what its links carry (153 of about 160 GB/s).
        ("h100-sxm8", 64, 160e9, 20, 153e9),
    ],
)
def test_published_rates_on_fewer_sms(device: str, full: int, full_rate: float, sms: int, rate: float) -> None:
    fed = sm_bytes_per_s(CLUSTERS[device].device).typical
    seconds = 1.0 + fewer_sms_s(1.0, full_rate, sms, full, fed)
    assert full_rate / seconds == pytest.approx(rate, rel=0.15)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(CLUSTERS)),
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]),
    st.floats(1.0, 2.0**31),
    st.sampled_from([2, 4, 8]),
)
def test_price_falls_with_sms_and_is_whole_on_its_own(cluster: str, kind, size: float, ranks: int) -> None:
    prices = PriceBook(CLUSTERS[cluster], ranks)
    op = CollectiveOp(kind, size, ranks)
    full = prices.comm_sms(kind)
    factors = [prices.sm_slowdown(op, sms) for sms in range(1, full + 2)]
    assert factors == sorted(factors, reverse=True)
    assert factors[full - 1] == factors[full] == 1.0
    # One SM of all does no worse than its share.
    assert factors[0] <= full * (1 + 1e-9)


def test_latency_is_no_matter_of_sms() -> None:
    prices = PriceBook(CLUSTERS["h100-sxm8"], 8)
    assert prices.sm_slowdown(CollectiveOp("all_gather", 8.0, 8), 1) == pytest.approx(1, abs=1e-3)
    assert prices.sm_slowdown(CollectiveOp("all_gather", 2.0**28, 8), 1) > 5


def test_what_holds_no_sm_gains_none() -> None:
    prices = PriceBook(CLUSTERS["h100-sxm8"], 8)
    assert prices.sm_slowdown(CollectiveOp("all_gather", 2.0**28, 8, engine="copy_engine"), 1) == 1.0
    assert prices.sm_slowdown(CollectiveOp("all_gather", 2.0**28, 1), 1) == 1.0
    with pytest.raises(UsageError, match="at least 1"):
        fewer_sms_s(1.0, 1e9, 0, 8, 1e9)

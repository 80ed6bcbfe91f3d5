"""SMs that only communicate: links and SMs together, never faster than either."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.cost.comm_ctas import PER_SM, comm_ctas_s
from overlapsim.errors import UsageError


@given(st.floats(1e-6, 1e-2), st.floats(1e5, 1e10), st.integers(1, 200), st.sampled_from(["tma", "registers"]))
def test_never_faster_than_links_or_sms_and_never_slower_than_both(link_s, sent, sms, how) -> None:
    seconds, fed_s = comm_ctas_s(link_s, sent, sms, how), sent / (sms * PER_SM[how])
    assert max(link_s, fed_s) * (1 - 1e-12) <= seconds <= link_s + fed_s
    assert comm_ctas_s(link_s, sent, sms + 1, how) <= seconds


def test_rates_are_those_of_one_h100_sm() -> None:
    # 78 % of 450 GB/s by 15 SMs; plain loads and stores need five times as many.
    assert PER_SM["tma"] == pytest.approx(23.4e9) and PER_SM["tma"] / PER_SM["registers"] == pytest.approx(5.2)
    with pytest.raises(UsageError, match="at least 1"):
        comm_ctas_s(1.0, 1.0, 0, "tma")

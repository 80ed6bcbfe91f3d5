"""Questions that users asked: expected bandwidths, a cap behind them, dispatch and SMs, all-to-all or all-gather."""

from itertools import pairwise

import pytest

from overlapsim.cost.collective import CollectiveModel
from overlapsim.cost.expected import (
    common_cap,
    crossover_top_k,
    dispatch_seconds,
    expected_busbw,
    expected_dispatch,
    rail_bytes_per_s,
)
from overlapsim.errors import LayoutError, UsageError
from overlapsim.hardware.loading import load_cluster

POD = load_cluster("h100-sxm8").with_nodes(2)
GB = 1e9
REPORTED = {"all_reduce": 216 * GB, "send_recv": 13.1 * GB, "all_gather": 101 * GB, "all_to_all": 25 * GB}


def test_e01_expected_bandwidths_of_two_h100_nodes():
    """NVIDIA/nccl issue 2409: 8 x 400 Gb/s a node. All-reduce near 470; the others by the ring's and pairs' NICs."""
    size = 2.0**33
    found = {kind: expected_busbw(POD, kind, 16, size) for kind in REPORTED}
    assert found["all_reduce"].bytes_per_s / GB == pytest.approx(470, rel=0.05)
    assert found["send_recv"].bytes_per_s / GB == pytest.approx(47, rel=0.08)
    assert 320 < found["all_gather"].bytes_per_s / GB < 376
    assert found["all_to_all"].bytes_per_s / GB == pytest.approx(84, rel=0.05)
    assert (found["all_reduce"].binding, found["all_to_all"].binding) == ("nvlink", "nic")
    for kind, expected in found.items():
        assert expected.low < expected.bytes_per_s < expected.high
        assert REPORTED[kind] < 0.5 * expected.bytes_per_s


def test_e01_one_cap_on_every_connection_explains_all_four():
    rate, (finding,) = common_cap(POD, 16, REPORTED)
    assert rate / GB == pytest.approx(13, rel=0.03)
    assert finding.code == "common_cap" and "13.2 GB/s on each rail" in finding.message
    assert "per connection" in finding.message


def test_a_healthy_machine_has_no_cap_and_a_mixed_one_is_called_so():
    healthy = {kind: expected_busbw(POD, kind, 16, 2.0**33).bytes_per_s for kind in ("all_gather", "all_to_all")}
    assert common_cap(POD, 16, healthy)[1] == ()
    assert common_cap(POD, 16, {**healthy, "all_to_all": 20 * GB})[1][0].code == "no_common_cap"
    with pytest.raises(UsageError, match="two collectives"):
        common_cap(POD, 16, {"all_reduce": 1.0})


def test_per_rail_rates():
    assert rail_bytes_per_s(POD, "all_reduce", 16, 487 * GB) / GB == pytest.approx(32.5, rel=0.002)
    assert rail_bytes_per_s(POD, "all_to_all", 16, 25 * GB) / GB == pytest.approx(13.33, rel=0.01)
    with pytest.raises(LayoutError, match="cross no rail"):
        rail_bytes_per_s(POD, "all_reduce", 8, 1.0)


def test_d10_dispatch_should_reach_the_nic_and_neither_nvlink_nor_sms_bind():
    """deepseek-ai/DeepEP issue 155: 25.8 GB/s RDMA, 84 NVLink on 2 x 8 H100 with 24 SMs; plain puts reach 47."""
    expected = expected_dispatch(POD, 16, 24, put_bytes_per_s=47 * GB)
    assert expected.bytes_per_s / GB == pytest.approx(44, rel=0.03)
    assert expected.binding == "nic"
    assert expected.bounds["nvlink"] > 2 * expected.bytes_per_s and expected.bounds["sm"] > 2 * expected.bytes_per_s
    assert expected.low > 25.8 * GB
    # Published by its authors on H800: 43 GB/s at 16 ranks, NVLink close behind.
    h800 = expected_dispatch(load_cluster("h800-sxm8").with_nodes(2), 16, 24)
    assert h800.low < 43 * GB < h800.high
    # With few SMs they bind.
    assert expected_dispatch(POD, 16, 6).binding == "sm"
    with pytest.raises(LayoutError, match="needs ranks on two"):
        expected_dispatch(POD, 8, 24)


@pytest.mark.parametrize(
    ("combine", "sms", "measured_us"),
    [(False, 12, 1047), (False, 24, 885), (True, 12, 2904), (True, 24, 1847)],
)
def test_dispatch_and_combine_against_sms(combine, sms, measured_us):
    """2 x 8 B300, 8192 tokens of 7168, fp8 out and bf16 back: public sweep of the SM count."""
    nic_bytes = 8192 * 7168 * (2 if combine else 1)
    assert dispatch_seconds(nic_bytes, 96 * GB, sms, combine=combine) * 1e6 == pytest.approx(measured_us, rel=0.17)


def test_dispatch_falls_with_sms_and_rises_with_bytes():
    times = [dispatch_seconds(1e8, 50 * GB, sms) for sms in range(1, 64)]
    assert all(before > after for before, after in pairwise(times))
    assert times[-1] > 1e8 / (50 * GB)
    with pytest.raises(UsageError, match="at least 1"):
        dispatch_seconds(1e8, 50 * GB, 0)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("h100-sxm8", 7.3, 8.0), ("a100-sxm8", 7.9, 9.6), ("h800-sxm8", 5.6, 6.4)]
)
def test_crossover_of_all_to_all_and_all_gather(name, low, high):
    """Figure 7 of MegaScale-MoE: 5.97 on an H800 node, whose exchange is that figure's and gather its sister's fit."""
    cluster = load_cluster(name)
    gather, exchange = (CollectiveModel(cluster, kind, 8) for kind in ("all_gather", "all_to_all"))
    for mib in (28, 112):
        top = crossover_top_k(gather, exchange, mib * 2.0**20)
        assert low < top < high
        at = float(exchange.seconds(top * mib * 2.0**20 / 8))
        assert at == pytest.approx(float(gather.seconds(mib * 2.0**20)), rel=0.01)
    with pytest.raises(UsageError, match="expected the same"):
        crossover_top_k(gather, CollectiveModel(cluster, "all_to_all", 4), 1e6)

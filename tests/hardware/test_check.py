from __future__ import annotations

from dataclasses import replace

import pytest

from overlapsim.hardware.check import check_cluster, contradictions, gaps
from overlapsim.hardware.loading import list_profiles, load_cluster, load_device
from overlapsim.hardware.profile import Cluster, CurveKey, CurveTable, Fit, Source
from tests.hardware.variants import with_device, with_node

RATES = [(name, key) for name in list_profiles("device") for key in load_device(name).peak_flop_per_s]


@pytest.mark.parametrize(("name", "key"), RATES, ids=[f"{name}-{key}" for name, key in RATES])
def test_every_sparsity_peak_is_found(nvswitch: Cluster, name: str, key: str) -> None:
    cluster = with_node(nvswitch, device=load_device(name))
    peaks = dict(cluster.device.peak_flop_per_s)
    assert not [text for text in contradictions(cluster) if "with sparsity" in text]
    peaks[key] *= 2
    found = contradictions(with_device(cluster, peak_flop_per_s=peaks))
    assert len([text for text in found if f"peak_flop.{key} " in text and "with sparsity" in text]) == 1


def test_unknown_architecture_is_said(nvswitch: Cluster) -> None:
    assert "not checked for sparsity" in contradictions(with_device(nvswitch, architecture="rubin"))[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"nvlink_bandwidth_bytes_per_s": 3e12}, "nvlink_bandwidth of 3.00 TB/s is above HBM's 2.04 TB/s"),
        ({"nvlink_bandwidth_bytes_per_s": 1e9}, "nvlink_bandwidth is below pcie_bandwidth"),
        ({"pcie_bandwidth_bytes_per_s": 26e12}, "pcie_bandwidth of 26.0 TB/s is above HBM's"),
        ({"nic_bandwidth_bytes_per_s": 400e9}, "nic_bandwidth of 400 GB/s a NIC is above a GPU's own link"),
    ],
)
def test_rates_with_a_wrong_prefix(nvswitch: Cluster, changes: dict[str, float], expected: str) -> None:
    assert any(expected in text for text in contradictions(with_node(nvswitch, **changes)))


@pytest.mark.parametrize("rate", [2.039e9, 2.039e15])
def test_hbm_rate_out_of_balance(nvswitch: Cluster, rate: float) -> None:
    found = contradictions(with_device(nvswitch, hbm_bandwidth_bytes_per_s=rate))
    assert any("FLOP per HBM byte" in text for text in found)


def test_curves_faster_than_links(nvswitch: Cluster) -> None:
    source = Source("measured", "mine.csv")
    fast = CurveTable((1e3, 1e9), (1e-5, 4e-3), source)
    assert any(
        "curve all_reduce/2: 954 MiB in 4.00 ms is faster than its links allow (5.00 ms)" in text
        for text in contradictions(nvswitch.with_curve(CurveKey("all_reduce", 2), fast))
    )
    slow = CurveTable((1e3, 1e9), (1e-5, 6e-3), source)
    assert contradictions(nvswitch.with_curve(CurveKey("all_reduce", 2), slow)) == []
    # Sixteen ranks on two nodes are checked against two nodes though one is in use.
    assert contradictions(nvswitch.with_curve(CurveKey("all_gather", 16, 2), CurveTable((1e9,), (1e-3,), source)))
    assert "never used" in contradictions(nvswitch.with_curve(CurveKey("all_gather", 9), slow))[0]
    assert "not spread" in contradictions(nvswitch.with_curve(CurveKey("all_gather", 3, 2), slow))[0]
    alone = with_node(nvswitch, num_nics=0).with_curve(CurveKey("all_gather", 16, 2), slow)
    assert "curve all_gather/16/2 spans nodes that have no NIC" in contradictions(alone)[0]


def test_gaps_name_tables_and_weak_numbers(nvswitch: Cluster) -> None:
    found = gaps(nvswitch)
    assert "no measured curve of all_reduce at 4, 8 ranks: priced by latency and wire bytes" in found
    assert any(text.startswith("no measured curve of all_to_all") for text in found)
    assert any("device.kernels.signal_wait_s" in text and "net_latency_s" in text for text in found)
    assert check_cluster(nvswitch) == [*contradictions(nvswitch), *found]
    assert "no measured curve across nodes: priced by hop and wire bytes, which ranges mark as prior" in found
    assert not [text for text in gaps(load_cluster("h100-sxm8")) if "curve of" in text]


def test_gaps_say_what_a_missing_fit_disables(nvswitch: Cluster) -> None:
    bare = with_device(replace(nvswitch, fits={}), fits={})
    found = "\n".join(gaps(bare))
    assert "no gemm fit of bf16, fp16: priced by tiles and waves" in found
    for family in ("attention", "memory", "collective", "overlap"):
        assert f"no {family} fit: " in found
    source = Source("measured", "me")
    fits = {f"{fit.family}.{fit.key}": fit for fit in (Fit("gemm", "bf16", {"t0": 1e-6}, source, 90),)}
    fits["memory.rmsnorm"] = Fit("memory", "rmsnorm", {"t0": 1e-6}, Source("prior", "me"), 0)
    fits["attention.fa3"] = Fit("attention", "fa3", {"t0": 1e-6}, Source("derived", "published figures"), 40)
    fits["gemm.fp8"] = Fit("gemm", "fp8", {"t0": 1e-6}, Source("derived", "SISTER", "medium"), 90)
    found = "\n".join(gaps(with_device(bare, fits=fits)))
    assert "no gemm fit" not in found and "no memory fit" not in found
    assert "1 fits taken over from a sister or judged, ranges are wider: gemm.fp8" in found
    unused = "1 fits taken over from a sister or judged for models that `operator` does not use, ranges are wider: "
    assert f"{unused}memory.rmsnorm" in found
    assert "attention.fa3" not in found
    # A rate without a fit of its own is named alone.
    del fits["gemm.fp8"]
    rated = with_device(bare, fits=fits, peak_flop_per_s={"bf16": 312e12, "fp8": 624e12})
    assert "no gemm fit of fp8: " in "\n".join(gaps(rated))

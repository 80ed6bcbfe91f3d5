"""Measured curves and fits stay with the machine they were measured on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from overlapsim.errors import ProfileError
from overlapsim.hardware.loading import load_cluster, load_device
from overlapsim.hardware.profile import CurveKey

Write = Callable[[str, str], Path]


def derived(write: Write, node: str, rest: str = "", base: str = "h100-sxm8") -> str:
    return str(write("mine.yaml", f"kind: cluster\nextends: {base}\nnode: {{extends: {base}, {node}}}\n{rest}"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("nvlink_bandwidth: 225 GB/s", "nvlink_bandwidth is 225 GB/s, not 450 GB/s"),
        ("nvlink_bandwidth: 100 GB/s", "nvlink_bandwidth is 100 GB/s, not 450 GB/s"),
        ("nvlink_latency: 2 us", "nvlink_latency is 2.00 us, not 600 ns"),
        ("switch_reduction: false", "switch_reduction is false, not true"),
        ("scale_up: nvlink_mesh", "scale_up is nvlink_mesh, not nvswitch"),
        (
            f"num_devices: 16, pcie_groups: [{list(range(16))}], numa_groups: [{list(range(16))}]",
            "num_devices is 16, not 8",
        ),
    ],
)
def test_other_links_drop_curves_and_collective_fits(write: Write, change: str, told: str) -> None:
    cluster = load_cluster(derived(write, change))
    assert cluster.curves == {} and "collective.nccl" not in cluster.fits
    assert len(cluster.dropped) == 2
    assert all(f"of h100-sxm8 not taken over: {told}" in text for text in cluster.dropped)
    # The GPU is the same.
    assert cluster.device.fits.keys() == load_cluster("h100-sxm8").device.fits.keys()


@pytest.mark.parametrize(
    "same",
    [
        "nvlink_bandwidth: 3600 Gb/s",
        "pcie_bandwidth: 25 GB/s, root_port_bandwidth: 25 GB/s",
        "num_nics: 4, nic_bandwidth: 200 Gb/s",
        "host_memory_bandwidth: 100 GB/s",
    ],
)
def test_behind_a_switch_only_nvlink_counts(write: Write, same: str) -> None:
    cluster, base = load_cluster(derived(write, same)), load_cluster("h100-sxm8")
    assert cluster.curves == base.curves
    assert cluster.fits.keys() == base.fits.keys()
    assert cluster.dropped == ()


def test_part_of_a_switched_node_keeps_the_curves_of_its_ranks(write: Write) -> None:
    half = "num_devices: 4, pcie_groups: [[0, 1, 2, 3]], numa_groups: [[0, 1, 2, 3]]"
    cluster = load_cluster(derived(write, half))
    assert {key.ranks for key in cluster.curves} == {2, 4} and "collective.nccl" in cluster.fits
    assert len(cluster.dropped) == 1 and "all_reduce/8" in cluster.dropped[0]
    assert load_cluster(derived(write, half, base="l40s-pcie8")).curves == {}


@pytest.mark.parametrize(
    "change", ["pcie_bandwidth: 12 GB/s", "numa_bandwidth: 5 GB/s", "host_memory_bandwidth: 9 GB/s"]
)
def test_over_pcie_every_link_counts(write: Write, change: str) -> None:
    assert load_cluster("l40s-pcie8").curves
    assert load_cluster(derived(write, change, base="l40s-pcie8")).curves == {}
    assert load_cluster(derived(write, "num_nics: 2", base="l40s-pcie8")).curves


def test_restated_curves_and_fits_are_kept(write: Write) -> None:
    rest = "curves:\n  all_reduce/8: {file: h100-sxm8/all_reduce_8.csv}\nfits: [collective/h100-sxm8.yaml]\n"
    cluster = load_cluster(derived(write, "nvlink_latency: 2 us", rest))
    assert list(cluster.curves) == [CurveKey("all_reduce", 8)]
    assert "collective.nccl" in cluster.fits
    assert len(cluster.dropped) == 1 and "all_reduce/8" not in cluster.dropped[0]
    # What extends this one takes them over, and what was dropped stays away.
    path = write("next.yaml", "kind: cluster\nextends: mine\nnum_nodes: 2\n")
    assert list(load_cluster(str(path)).curves) == [CurveKey("all_reduce", 8)]
    assert load_cluster(str(path)).dropped == cluster.dropped


def test_two_spellings_of_one_node(write: Write) -> None:
    write("own.csv", "size_bytes,time_s\n1e6,1\n")
    path = write("one.yaml", "kind: cluster\nextends: h100-sxm8\ncurves:\n  all_reduce/8/1: {file: own.csv}\n")
    assert load_cluster(str(path)).curves[CurveKey("all_reduce", 8)].time_s == (1.0,)
    write("other.csv", "size_bytes,time_s\n1e6,2\n")
    path = write("two.yaml", "kind: cluster\nextends: one\ncurves:\n  all_reduce/8: {file: other.csv}\n")
    assert load_cluster(str(path)).curves[CurveKey("all_reduce", 8)].time_s == (2.0,)


def test_network_fits_and_curves_belong_to_their_network(write: Write) -> None:
    base = load_cluster("a100-sxm8")
    assert "collective.fabric" in base.fits
    for text in ("fabric: efa\n", "net_latency: 30 us\n", "fabric: {extends: ib-hdr, nic_efficiency: 0.5}\n"):
        path = write("net.yaml", f"kind: cluster\nextends: a100-sxm8\n{text}")
        cluster = load_cluster(str(path))
        assert "collective.fabric" not in cluster.fits and "collective.nccl" in cluster.fits
        assert cluster.curves == base.curves
        assert len(cluster.dropped) == 1
    write("wide.csv", "size_bytes,time_s\n1e6,1\n")
    write("wide.yaml", "kind: cluster\nextends: a100-sxm8\ncurves: {all_reduce/16/2: {file: wide.csv}}\n")
    path = write("nics.yaml", "kind: cluster\nextends: wide\nnode: {extends: a100-sxm8, num_nics: 4}\n")
    assert CurveKey("all_reduce", 16, 2) in load_cluster(str(path.parent / "wide.yaml")).curves
    assert load_cluster(str(path)).curves == base.curves


@pytest.mark.parametrize(
    ("name", "kept", "dropped"),
    [
        ("h100-sxm8-p5", {"collective.nccl", "collective.fabric"}, 0),
        ("a100-40gb-sxm8", {"collective.nccl", "collective.fabric"}, 0),
        ("a100-sxm8-p4de", {"collective.nccl"}, 1),
        ("b200-sxm8-p6", {"collective.nccl"}, 1),
    ],
)
def test_bundled_relatives_keep_what_they_share(name: str, kept: set[str], dropped: int) -> None:
    cluster = load_cluster(name)
    assert len(cluster.curves) == 12
    assert set(cluster.fits) == kept
    assert len(cluster.dropped) == dropped


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("num_sms: 114", "num_sms is 114, not 132"),
        ("boost_clock: 1.2 GHz", "boost_clock is 1.20 GHz, not 1.83 GHz"),
        ("hbm_bandwidth: 2 TB/s", "hbm_bandwidth is 2.00 TB/s, not 3.35 TB/s"),
        ("peak_flop: {bf16: 500 TFLOP/s}", "peak_flop.bf16 is 500 TFLOP/s, not 989 TFLOP/s"),
    ],
)
def test_another_gpu_drops_its_fits(write: Write, change: str, told: str) -> None:
    base = load_device("h100-sxm5-80gb")
    path = write("gpu.yaml", f"kind: device\nextends: h100-sxm5-80gb\n{change}\n")
    assert base.fits and load_device(str(path)).fits == {}
    cluster = load_cluster(derived(write, "device: gpu"))
    assert cluster.device.fits == {}
    # NVLink moves the same bytes.
    assert len(cluster.curves) == 12 and len(cluster.dropped) == 1
    assert told in cluster.dropped[0] and "gemm.bf16" in cluster.dropped[0]
    path = write("gpu.yaml", f"kind: device\nextends: h100-sxm5-80gb\n{change}\nfits: [gemm/h100-sxm5-80gb.yaml]\n")
    assert set(load_device(str(path)).fits) == {"gemm.bf16", "gemm.fp8"}


def test_harmless_changes_of_a_gpu_keep_its_fits(write: Write) -> None:
    text = "kind: device\nextends: h100-sxm5-80gb\nhbm_capacity: 64 GB\npeak_flop: {fp8: null}\n"
    assert load_device(str(write("gpu.yaml", text))).fits.keys() == load_device("h100-sxm5-80gb").fits.keys()


def test_overlap_fits_depend_on_the_gpu_too(write: Write) -> None:
    node = "device: {extends: a800-sxm4-80gb, num_sms: 100}"
    cluster = load_cluster(derived(write, node, base="a800-sxm8"))
    assert "overlap.signal" not in cluster.fits and "collective.nccl" in cluster.fits and cluster.curves


def test_base_sees_the_names_of_its_own_folder(write: Write) -> None:
    """A folder that gives a bundled node again under its name: the bundled cluster still means the bundled node."""
    write("nodes/h100-sxm8.yaml", "kind: node\nextends: h100-sxm8\nnvlink_bandwidth: 225 GB/s\n")
    path = write("clusters/h100-sxm8.yaml", "kind: cluster\nextends: h100-sxm8\n")
    cluster = load_cluster(str(path))
    assert cluster.node.nvlink_bandwidth_bytes_per_s == 225e9
    assert cluster.curves == {}


def test_curves_faster_than_the_links_are_refused(write: Write) -> None:
    write("fast.csv", "size_bytes,time_s\n1e9,1e-6\n")
    path = str(write("mine.yaml", "kind: cluster\nextends: a100-sxm8\ncurves: {all_reduce/2: {file: fast.csv}}\n"))
    with pytest.raises(ProfileError, match="profile mine contradicts itself") as caught:
        load_cluster(path)
    text = str(caught.value)
    assert "curve all_reduce/2: 954 MiB in 1.00 us is faster than its links allow (3.33 ms)" in text
    assert "check the units" in text and "curves: {all_reduce/2: null}" in text
    assert load_cluster(path, consistent=False).curves[CurveKey("all_reduce", 2)].time_s == (1e-6,)
    # Links in Gb/s where GB/s were meant, with a curve that was measured.
    rest = "curves:\n  all_reduce/8: {file: h100-sxm8/all_reduce_8.csv}\n"
    with pytest.raises(ProfileError, match="GB/s are eight times Gb/s"):
        load_cluster(derived(write, "nvlink_bandwidth: 450 Gb/s", rest))

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import yaml

from overlapsim.errors import ProfileError
from overlapsim.hardware.check import contradictions
from overlapsim.hardware.loading import load_cluster, nearest_cluster, parse_cluster
from overlapsim.hardware.profile import Cluster, CurveKey
from overlapsim.hardware.seed import profile_text, seed_profile
from overlapsim.hardware.topo_matrix import read_topo_matrix
from tests.hardware import topo_texts

PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


nearest = cache(nearest_cluster)


def seeded(text: str, device: str) -> tuple[Cluster, str]:
    profile, remarks = seed_profile(read_topo_matrix(text, "topo.txt"), nearest(device), "topo.txt")
    written = profile_text(profile, remarks)
    cluster = parse_cluster("mine", written)
    assert contradictions(cluster) == []
    return cluster, "\n".join(remarks)


def test_dgx_h100() -> None:
    cluster, remarks = seeded(topo_texts.dgx_h100(), "h100-sxm5-80gb")
    node, base = cluster.node, load_cluster("h100-sxm8")
    assert (node.scale_up, node.nvlink_bandwidth_bytes_per_s, node.switch_reduction) == ("nvswitch", 450e9, True)
    assert (node.num_nics, node.nic_groups) == (8, tuple((gpu,) for gpu in range(8)))
    assert node.numa_groups == HALVES
    # Each GPU shares its switch with a NIC and no other GPU.
    assert node.pcie_groups == tuple((gpu,) for gpu in range(8))
    assert "left out as no GPU's nearest: NIC2, NIC5" in remarks
    assert cluster.curves == base.curves
    assert cluster.net_latency_s == base.net_latency_s
    source = node.sources["numa_groups"]
    assert (source.layer, source.reference, source.trust) == ("override", "topo.txt", "high")
    assert node.sources["pcie_bandwidth_bytes_per_s"].reference == "AZ"
    assert "NICs and the network are those of h100-sxm8" in remarks


def test_dgx_a100() -> None:
    cluster, _ = seeded(topo_texts.dgx_a100(), "a100-sxm4-80gb")
    assert cluster.node.pcie_groups == cluster.node.numa_groups == PAIRS
    assert (cluster.node.num_nics, len(cluster.node.nic_groups)) == (8, 8)


def test_several_nics_a_gpu() -> None:
    cluster, _ = seeded(topo_texts.p5(), "h100-sxm5-80gb")
    assert (cluster.node.num_nics, len(cluster.node.nic_groups)) == (32, 8)


def test_hybrid_cube_mesh_of_an_old_driver() -> None:
    cluster, remarks = seeded(topo_texts.dgx1(), "v100-sxm2-32gb")
    bundled = load_cluster("v100-dgx1").node
    assert cluster.node.nvlink_pairs == bundled.nvlink_pairs
    assert cluster.node.nvlink_bandwidth_bytes_per_s == 150e9
    assert cluster.node.pcie_groups == bundled.pcie_groups == PAIRS
    assert cluster.node.nic_groups == PAIRS
    assert cluster.node.numa_groups == HALVES
    assert "left out: its links" in remarks


def test_full_mesh() -> None:
    cluster, remarks = seeded(topo_texts.polaris(), "a100-sxm4-40gb")
    assert (cluster.node.scale_up, cluster.node.nvlink_pairs) == ("nvlink_mesh", ())
    assert cluster.node.nvlink_bandwidth_bytes_per_s == 300e9
    assert not cluster.curves
    assert cluster.node.pcie_groups == ((0,), (1,), (2,), (3,))
    assert "hides PCIe switches" in remarks and "has no NIC" in remarks


def test_pcie_tree() -> None:
    cluster, remarks = seeded(topo_texts.pcie_switches(), "l40s")
    node = cluster.node
    assert (node.scale_up, node.nvlink_bandwidth_bytes_per_s, node.p2p) == ("pcie", 0.0, True)
    assert node.pcie_groups == node.numa_groups == HALVES
    assert (node.num_nics, node.nic_groups) == (1, (tuple(range(8)),))
    assert not cluster.curves and "topo -p2p" in remarks


def test_desktop_without_peers() -> None:
    cluster, _ = seeded(topo_texts.two_on_one_bridge(), "rtx-5090")
    assert (cluster.num_devices, cluster.node.p2p) == (2, False)
    assert cluster.node.pcie_groups == ((0,), (1,))
    assert cluster.node.numa_groups == ((0, 1),)


def test_part_of_a_machine_keeps_the_curves_it_can_use() -> None:
    cluster, remarks = seeded(topo_texts.virtual_machine(), "h200-sxm-141gb")
    assert (cluster.node.scale_up, cluster.num_devices) == ("nvswitch", 4)
    assert {key.ranks for key in cluster.curves} == {2, 4}
    assert CurveKey("all_gather", 4) in cluster.curves
    assert cluster.node.numa_groups == ((0, 1, 2, 3),)
    assert "h200-sxm8 has 8 GPUs a node; here are the 4 of this machine" in remarks


def test_the_file_is_plain_yaml_with_remarks_on_top() -> None:
    text = profile_text(*seed_profile(read_topo_matrix(topo_texts.p5(), "t"), load_cluster("h100-sxm8"), "t"))
    assert text.startswith("# rates of PCIe, host memory, NICs and the network are those of h100-sxm8")
    assert yaml.safe_load(text)["extends"] == "h100-sxm8"
    assert max(map(len, text.splitlines())) <= 160


def test_nvlinks_on_a_device_without() -> None:
    with pytest.raises(ProfileError, match=r"l40s \(ada\) has none; give the device that is built in"):
        seeded(topo_texts.polaris(), "l40s")


def test_tabs_blanks_and_carriage_returns_read_alike() -> None:
    text = topo_texts.dgx_h100()
    read = read_topo_matrix(text, "t")
    assert read_topo_matrix(text.replace("\t", "     "), "t") == read
    assert read_topo_matrix(text.replace("\n", "\r\n"), "t") == read
    # The peer-to-peer matrix may follow behind the legend.
    assert read_topo_matrix(text + "\n \tGPU0\tGPU1\t\n GPU0\tX\tGNS\t\n GPU1\tGNS\tX\t\n", "t") == read


H100 = topo_texts.dgx_h100()
ROWS = H100.splitlines(keepends=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "has no topology matrix"),
        ("GPU  0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n", "has no topology matrix"),
        ("============ ROCm System Management Interface ============\n       GPU0   GPU1\nGPU0   0   15\n", "row GPU0"),
        ("".join(ROWS[:6]), "no row for GPU4, GPU5, GPU6, GPU7, the file is cut off"),
        (H100[: H100.index("\nGPU5") + 20], "of 18 cells, the file is cut off"),
        (H100.replace("NV18", "OK", 1), "line 3: row GPU0 has cell 'OK'"),
        (H100.replace("NV18", "NV0", 1), "row GPU0 has cell 'NV0'"),
        (H100.replace("NV18", "NV12", 1), "GPU0 and GPU1 read NV12 one way and NV18 the other"),
        (H100.replace("NV18", "X", 1), "GPU0 and GPU1 read X one way"),
        ("".join(ROWS[:10]) + ROWS[2], "row GPU0 appears twice"),
    ],
)
def test_cut_off_and_foreign_files(text: str, expected: str) -> None:
    with pytest.raises(ProfileError) as caught:
        read_topo_matrix(text, "topo.txt")
    assert expected in str(caught.value)
    assert str(caught.value).startswith("topo.txt")
    assert len(str(caught.value).splitlines()) == 1


def test_any_prefix_of_a_file_is_read_whole_or_refused(tmp_path: Path) -> None:
    """A cut anywhere before the last GPU's row ends is seen."""
    whole = read_topo_matrix(H100, "t")
    end = H100.index("\nNIC0\t")
    for cut in range(0, len(H100), 7):
        try:
            read = read_topo_matrix(H100[:cut], "t")
        except ProfileError:
            assert cut < end
        else:
            assert (read.gpus, read.nics, read.nic_distances) == (whole.gpus, whole.nics, whole.nic_distances)

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from overlapsim.errors import ProfileError
from overlapsim.hardware.catalogue import bundled
from overlapsim.hardware.loading import list_profiles, load_cluster, load_device, load_node
from overlapsim.hardware.profile import CurveKey

Write = Callable[[str, str], Path]


def test_extends_replaces_one_number_and_says_who_did(write: Write) -> None:
    path = write("fast.yaml", "kind: device\nextends: a100-sxm4-80gb\nhbm_bandwidth: 2.2 TB/s\n")
    device, base = load_device(str(path)), load_device("a100-sxm4-80gb")
    assert device.name == "fast"
    assert device.hbm_bandwidth_bytes_per_s == 2.2e12
    assert device.num_sms == base.num_sms
    source = device.sources["hbm_bandwidth_bytes_per_s"]
    assert (source.layer, source.reference, source.trust) == ("override", "fast.yaml", "medium")
    assert device.sources["num_sms"] == base.sources["num_sms"]


def test_extends_merges_sections_and_chains(write: Write) -> None:
    write("one.yaml", "kind: device\nextends: h100-sxm5-80gb\nkernels:\n  signal_wait: 5 us\npeak_flop:\n  fp8: null\n")
    path = write("two.yaml", "kind: device\nextends: one\nkernels: {template_slowdown: 1.2}\n")
    device, base = load_device(str(path)), load_device("h100-sxm5-80gb")
    assert device.kernels.signal_wait_s == pytest.approx(5e-6)
    assert device.kernels.template_slowdown == 1.2
    assert device.kernels.gemm_tiles == base.kernels.gemm_tiles
    assert "fp8" not in device.peak_flop_per_s
    assert device.sources["kernels.signal_wait_s"].reference == "one.yaml"
    assert device.sources["kernels.template_slowdown"].reference == "two.yaml"


def test_a_quantity_is_replaced_whole(write: Write) -> None:
    path = write("d.yaml", "kind: device\nextends: a100-sxm4-80gb\nnum_sms: {value: 98}\n")
    source = load_device(str(path)).sources["num_sms"]
    assert (source.layer, source.reference) == ("override", "d.yaml")
    path = write("e.yaml", "kind: device\nextends: a100-sxm4-80gb\nnum_sms: {trust: low}\n")
    with pytest.raises(ProfileError, match="num_sms has no value"):
        load_device(str(path))


def test_flat_folder_with_parts_of_one_name(write: Write, tmp_path: Path) -> None:
    """Cluster `mine`, node and table lie side by side; the device is bundled."""
    write("mine.yaml", "kind: cluster\nextends: a800-sxm8\nnode: box\ncurves:\n  all_to_all/4: {file: ar.csv}\n")
    write("box.yaml", "kind: node\nextends: a800-sxm8\nnvlink_bandwidth: 100 GB/s\n")
    write("ar.csv", "size_bytes,time_s\n1048576,1e-4\n")
    for target in (tmp_path, tmp_path / "mine.yaml"):
        cluster = load_cluster(str(target))
        assert cluster.name == "mine"
        assert cluster.node.nvlink_bandwidth_bytes_per_s == 100e9
        assert cluster.device == load_device("a800-sxm4-80gb")
        # Those of the base were measured over twice the NVLink.
        assert set(cluster.curves) == {CurveKey("all_to_all", 4)}
        assert cluster.curves[CurveKey("all_to_all", 4)].source.reference == "mine.yaml"


def test_folder_laid_out_like_the_bundled(write: Write, tmp_path: Path) -> None:
    path = write("clusters/a800-sxm8.yaml", "kind: cluster\nextends: a800-sxm8\nnet_latency: 3 us\nnum_nodes: 4\n")
    cluster = load_cluster(str(path))
    assert cluster.net_latency_s == pytest.approx(3e-6)
    assert cluster.num_nodes == 4
    assert load_cluster(str(tmp_path)) == cluster
    assert load_cluster("a800-sxm8", search=[tmp_path]) == cluster
    assert load_cluster("a800-sxm8").num_nodes == 1


def test_search_folders_are_listed_and_found(write: Write, tmp_path: Path) -> None:
    write("lab/nodes/box.yaml", "kind: node\nextends: h100-sxm8\n")
    write("lab/flat.yaml", "kind: cluster\nextends: h100-sxm8\nnode: box\n")
    write("lab/broken.yaml", "kind: [\n")
    assert "flat" in list_profiles("cluster", search=[tmp_path / "lab"])
    assert "box" in list_profiles("node", search=[tmp_path / "lab"])
    assert load_cluster("flat", search=[tmp_path / "lab"]).node.name == "box"
    assert load_node("box", search=[tmp_path / "lab"]).num_devices == 8


def test_same_name_beside_for_another_kind_is_passed_over(write: Write) -> None:
    path = write("rtx4090-pcie8.yaml", "kind: cluster\nextends: rtx4090-pcie8\ncalibrated: true\n")
    cluster = load_cluster(str(path))
    assert cluster.calibrated
    assert cluster.node == load_node("rtx4090-pcie8")


def test_digest_follows_content_and_not_place(write: Write, tmp_path: Path) -> None:
    text = "kind: cluster\nextends: a800-sxm8\nnet_latency: 3 us\n"
    here, there = write("a/c.yaml", text), write("b/clusters/c.yaml", text)
    digest = load_cluster(str(here)).digest
    assert digest == load_cluster(str(there)).digest != load_cluster("a800-sxm8").digest
    write("a/c.yaml", text.replace("3 us", "4 us"))
    assert load_cluster(str(here)).digest != digest

    copy = tmp_path / "copy"
    shutil.copytree(str(bundled()), copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    library = [copy]
    assert load_cluster("a800-sxm8", search=library).digest == load_cluster("a800-sxm8").digest
    table = copy / "tables/a800-sxm8/all_reduce_2.csv"
    table.write_text(table.read_text() + "1e9,1\n")
    assert load_cluster("a800-sxm8", search=library).digest != load_cluster("a800-sxm8").digest


def test_with_curve_and_with_nodes(write: Write) -> None:
    cluster = load_cluster("h20-sxm8").with_nodes(4)
    assert cluster.num_devices == 32
    with pytest.raises(ProfileError, match="at least 1"):
        cluster.with_nodes(0)
    table = load_cluster("a800-sxm8").curves[CurveKey("all_reduce", 2)]
    assert cluster.with_curve(CurveKey("all_reduce", 2), table).curves == {CurveKey("all_reduce", 2): table}
    assert not cluster.curves

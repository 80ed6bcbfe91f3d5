from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlapsim.hardware.build import Builder
from overlapsim.hardware.catalogue import Library, bundled
from overlapsim.hardware.check import contradictions
from overlapsim.hardware.documents import KINDS, is_leaf
from overlapsim.hardware.loading import list_profiles, load_cluster, load_device, load_node
from overlapsim.hardware.profile import CurveKey
from overlapsim.hardware.quantity import LAYERS, TRUSTS
from overlapsim.hardware.wire import COLLECTIVES, bottleneck, ring_wire_bytes
from overlapsim.workload import operators

ROOT = Path(str(bundled()))
FILES = sorted(path for kind in KINDS for path in ROOT.glob(f"{kind}s/*.yaml"))
SOURCES = (ROOT / "SOURCES.md").read_text()
CLUSTERS = list_profiles("cluster")


def leaves(data: Any, path: str = "") -> list[tuple[str, Any]]:
    """Everything below a mapping that is not a section."""
    if not isinstance(data, dict) or is_leaf(data):
        return [(path, data)]
    return [leaf for key, value in data.items() for leaf in leaves(value, f"{path}.{key}")]


def test_first_machines_are_there() -> None:
    assert set(CLUSTERS) >= {"a800-sxm8", "a100-sxm8", "h100-sxm8", "h800-sxm8", "rtx4090-pcie8"}


@pytest.mark.parametrize("name", CLUSTERS)
def test_cluster_loads_and_is_consistent(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert contradictions(cluster) == []
    assert load_node(cluster.node.name) == cluster.node
    assert load_device(cluster.device.name) == cluster.device


def test_every_profile_is_used_by_some_cluster() -> None:
    clusters = [load_cluster(name) for name in CLUSTERS]
    assert {cluster.node.name for cluster in clusters} == set(list_profiles("node"))
    assert {cluster.device.name for cluster in clusters} == set(list_profiles("device"))
    assert {cluster.fabric.name for cluster in clusters if cluster.fabric} <= set(list_profiles("fabric"))
    # Tables of suites lie in folders of their own.
    tables = {
        path.relative_to(ROOT / "tables").as_posix() for name in CLUSTERS for path in ROOT.glob(f"tables/{name}/*")
    }
    documents = [yaml.safe_load(path.read_text()) for path in FILES]
    listed = {entry["file"] for data in documents for _, entry in leaves(data) if is_leaf(entry) and "file" in entry}
    assert tables == listed


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_number_has_a_source_that_is_explained(path: Path) -> None:
    words = {"kind", "notes", "extends", "architecture", "device", "node", "fabric", "scale_up", "p2p"}
    words |= {"switch_reduction", "technology", "rail_optimised"}
    for name, leaf in leaves(yaml.safe_load(path.read_text())):
        # null takes away what a base has.
        if name.removeprefix(".") in words or leaf is None:
            continue
        assert isinstance(leaf, dict), name
        assert leaf["layer"] in LAYERS and leaf["layer"] != "override", name
        assert leaf["trust"] in TRUSTS, name
        assert "file" in leaf or leaf["unit"], name
        assert re.search(rf"^\| {re.escape(leaf['source'])} \|", SOURCES, re.MULTILINE), f"{name}: {leaf['source']}"


def test_every_fit_belongs_to_a_profile_and_is_explained() -> None:
    known = {*CLUSTERS, *list_profiles("device")}
    unexplained = set()
    for path in ROOT.glob("fits/*/*.yaml"):
        data = yaml.safe_load(path.read_text())
        assert path.stem in known and (data["of"], data["family"]) == (path.stem, path.parent.name), path
        # A fit taken over from a sister says so before the sister's code.
        unexplained |= {code for fit in data["fits"].values() for code in fit["source"].split()}
    unexplained -= set(re.findall(r"^\| (\S+) \|", SOURCES, re.MULTILINE))
    # A bundled table explains itself.
    assert {code for code in unexplained if not (ROOT / "tables" / code).is_file()} == set()


@pytest.mark.parametrize("name", CLUSTERS)
def test_sources_reach_the_specs(name: str) -> None:
    cluster = load_cluster(name)
    assert {"net_latency_s", "collectives.base_s", "collectives.sms"} <= set(cluster.sources)
    assert "nvlink_bandwidth_bytes_per_s" in cluster.node.sources
    device = cluster.device.sources
    assert {"num_sms", "hbm_bandwidth_bytes_per_s", "kernels.gemm_efficiency", "kernels.gemm_tiles"} <= set(device)
    assert {f"peak_flop_per_s.{key}" for key in cluster.device.peak_flop_per_s} <= set(device)


def test_figures_of_the_sheets() -> None:
    a800 = load_cluster("a800-sxm8")
    assert (a800.device.num_sms, a800.device.peak("bf16")) == (108, 312e12)
    assert a800.node.nvlink_bandwidth_bytes_per_s == 200e9
    h100 = load_cluster("h100-sxm8")
    assert (h100.device.peak("fp8"), h100.node.nvlink_bandwidth_bytes_per_s) == (1978.9e12, 450e9)
    assert h100.node.nic_bandwidth_bytes_per_s == 50e9
    assert load_device("a100-sxm4-80gb").hbm_bandwidth_bytes_per_s == 2039e9


def test_consumer_accumulate_rule() -> None:
    rtx = load_device("rtx-4090")
    assert rtx.peak("fp16") == rtx.peak("fp16", "fp32") == 165.2e12
    assert rtx.peak("fp16", "fp16") == 330.3e12
    assert rtx.peak("bf16", "fp16") == rtx.peak("bf16") == 165.2e12
    a100 = load_device("a100-sxm4-80gb")
    assert a100.peak("fp16", "fp16") == a100.peak("fp16", "fp32") == 312e12


def test_curves_hold_the_published_points() -> None:
    curve = load_cluster("a800-sxm8").curves[CurveKey("all_reduce", 2)]
    assert len(curve.size_bytes) == 127
    assert (curve.size_bytes[0], curve.size_bytes[-1]) == (2 * 1048576, 2 * 133169152)
    assert (curve.time_s[0], curve.time_s[-1]) == pytest.approx((61.875e-6, 2074.612e-6))
    h100 = load_cluster("h100-sxm8").curves
    assert len(h100) == 12
    assert h100[CurveKey("all_reduce", 8)].time_s[0] == pytest.approx(15.6e-6, rel=0.05)
    assert all(curve.source.reference == "AIC-H100" for curve in h100.values())


@pytest.mark.parametrize("name", ["a100-sxm8", "h100-sxm8"])
def test_measured_rings_are_slower_than_their_wire(name: str) -> None:
    """The ring's own bound holds for ring collectives; an all-reduce on NVSwitch may use NVLS instead."""
    cluster = load_cluster(name)
    for key, curve in cluster.curves.items():
        bound = bottleneck(cluster, ring_wire_bytes(cluster, key.ranks, key.collective, curve.size_bytes[-1])).time_s
        assert curve.time_s[-1] > bound, key


def test_digest_is_stable_and_differs() -> None:
    digests = {name: load_cluster(name).digest for name in CLUSTERS}
    assert digests == {name: load_cluster(name).digest for name in CLUSTERS}
    assert len(set(digests.values())) == len(CLUSTERS)
    assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in digests.values())


def test_profiles_read_from_an_archive(tmp_path: Path) -> None:
    """An installed package may be a zip: nothing may rely on real paths."""
    archive = tmp_path / "profiles.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in ROOT.rglob("*"):
            if path.suffix in (".yaml", ".csv"):
                file.write(path, f"hw/{path.relative_to(ROOT).as_posix()}")
    library = Library((zipfile.Path(archive, "hw/"),))
    assert library.names("cluster") == CLUSTERS
    builder = Builder(library)
    assert builder.cluster(library.get("cluster", "h100-sxm8")) is not None
    assert builder.problems == []
    assert builder.hexdigest() == load_cluster("h100-sxm8").digest


def test_one_word_per_collective() -> None:
    assert set(COLLECTIVES) == set(operators.COLLECTIVES)
    assert len(KINDS) == 4

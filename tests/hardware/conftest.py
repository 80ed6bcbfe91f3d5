from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import Cluster, CurveKey
from tests.hardware.variants import with_node


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a file below the test's folder and return its path."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.fixture(scope="session")
def nvswitch() -> Cluster:
    """Eight GPUs on an NVSwitch, eight NICs on one network switch, one curve."""
    a800 = load_cluster("a800-sxm8")
    key = CurveKey("all_reduce", 2)
    return replace(a800, fabric=None, curves={key: a800.curves[key]})


@pytest.fixture(scope="session")
def rails() -> Cluster:
    """The same GPUs on a rail-optimised network: two nodes below each leaf, half of their rate on to the spine."""
    a800 = load_cluster("a800-sxm8")
    assert a800.fabric is not None
    return replace(a800, fabric=replace(a800.fabric, nodes_per_leaf=2, spine_oversubscription=2.0))


@pytest.fixture(scope="session")
def host_staged() -> Cluster:
    """Eight GPUs without peer-to-peer, two below each root port."""
    return with_node(load_cluster("rtx4090-pcie8"), pcie_groups=((0, 1), (2, 3), (4, 5), (6, 7)))


@pytest.fixture(scope="session")
def p2p_pcie(host_staged: Cluster) -> Cluster:
    return with_node(host_staged, p2p=True)


@pytest.fixture(scope="session")
def mesh(nvswitch: Cluster) -> Cluster:
    """Four GPUs, each pair joined by a third of a GPU's NVLink."""
    groups = ((0, 1), (2, 3))
    return with_node(
        nvswitch, num_devices=4, scale_up="nvlink_mesh", pcie_groups=groups, numa_groups=groups, num_nics=4
    )

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import Cluster
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
    return load_cluster("a800-sxm8")


@pytest.fixture(scope="session")
def host_staged() -> Cluster:
    return load_cluster("rtx4090-pcie8")


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

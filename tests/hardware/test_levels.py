from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from overlapsim.hardware.levels import levels
from overlapsim.hardware.loading import list_profiles, load_cluster
from overlapsim.hardware.profile import Cluster
from overlapsim.hardware.topology import links
from tests.hardware.variants import with_node


def shape(cluster: Cluster) -> list[tuple[str, int, float]]:
    return [(level.name, level.ranks, level.bandwidth_bytes_per_s / 1e9) for level in levels(cluster)]


def test_nvlink_rail_and_spine(rails: Cluster) -> None:
    assert shape(rails) == [("nvlink", 8, 200.0)]
    assert shape(rails.with_nodes(2)) == [("nvlink", 8, 200.0), ("rail", 16, 25.0)]
    assert shape(rails.with_nodes(6)) == [("nvlink", 8, 200.0), ("rail", 16, 25.0), ("spine", 48, 12.5)]
    assert [level.latency_s for level in levels(rails.with_nodes(6))] == pytest.approx([0.6e-6, 8e-6, 8e-6])
    assert rails.fabric is not None
    plain = replace(rails, fabric=replace(rails.fabric, rail_optimised=False))
    assert [level.name for level in levels(plain.with_nodes(3))] == ["nvlink", "leaf", "spine"]


def test_one_switch_for_all(nvswitch: Cluster) -> None:
    assert shape(nvswitch.with_nodes(3)) == [("nvlink", 8, 200.0), ("network", 24, 25.0)]
    assert levels(nvswitch.with_nodes(3))[1].links == ("nic_out", "nic_in")


def test_host_staged_tree(host_staged: Cluster) -> None:
    """Below a socket two GPUs share a port of 26 GB/s; between sockets four share 41.6."""
    assert shape(host_staged) == [("socket", 4, 13.0), ("node", 8, pytest.approx(41.6 / 4))]
    assert "host_memory" in levels(host_staged)[0].links and "numa" in levels(host_staged)[1].links
    slow = with_node(host_staged, host_memory_bandwidth_bytes_per_s=80e9)
    # Four GPUs write and read again: an eighth of the memory's rate each.
    assert levels(slow)[0].bandwidth_bytes_per_s == 10e9


def test_peer_to_peer_tree(p2p_pcie: Cluster) -> None:
    assert shape(p2p_pcie) == [("pcie_switch", 2, 26.0), ("socket", 4, 13.0), ("node", 8, pytest.approx(41.6 / 4))]
    assert "host_memory" not in levels(p2p_pcie)[2].links


def test_bridged_pairs_and_racks() -> None:
    assert shape(load_cluster("h100-pcie8"))[:2] == [("nvlink", 2, 300.0), ("pcie_switch", 4, 51.0)]
    rack = load_cluster("gb200-nvl72").with_nodes(4)
    assert shape(rack) == [("nvlink", 72, 900.0), ("network", 288, 50.0)]


@pytest.mark.parametrize("name", list_profiles("cluster"))
def test_levels_nest_and_name_links(name: str) -> None:
    cluster = load_cluster(name)
    cluster = cluster.with_nodes(3 if cluster.node.num_nics else 1)
    found = levels(cluster)
    sizes = [level.ranks for level in found]
    assert sizes == sorted(set(sizes)) and sizes[-1] == cluster.num_devices
    assert all(outer % inner == 0 for inner, outer in pairwise(sizes))
    names = set(links(cluster))
    for level in found:
        assert level.bandwidth_bytes_per_s > 0
        for beginning in level.links:
            assert any(link.startswith(f"{beginning}[") for link in names), beginning

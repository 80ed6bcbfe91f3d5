from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.errors import LayoutError, ProfileError
from overlapsim.hardware.loading import list_profiles, load_cluster
from overlapsim.hardware.profile import Cluster
from overlapsim.hardware.topology import devices_of, egress, ingress, links, nic_of, num_nic_links, route
from tests.hardware.variants import with_node

CLUSTERS = [load_cluster(name).with_nodes(2) for name in list_profiles("cluster")]


def test_capacities(nvswitch: Cluster, host_staged: Cluster) -> None:
    capacity = links(nvswitch.with_nodes(2))
    assert capacity["hbm[15]"] == 2039e9
    assert capacity["nvlink_out[15]"] == capacity["nvlink_in[0]"] == 200e9
    assert capacity["nic_out[1.7]"] == 25e9
    assert "nvlink_out[16]" not in capacity and "nic_in[2.0]" not in capacity
    capacity = links(host_staged)
    assert capacity["root_up[3]"] == capacity["pcie_down[7]"] == 26e9
    assert capacity["host_memory[1]"] == 204.8e9
    assert not [name for name in capacity if name.startswith("nvlink")]


def test_routes_over_nvswitch_and_mesh(nvswitch: Cluster, mesh: Cluster) -> None:
    assert route(nvswitch, 1, 6) == ("nvlink_out[1]", "nvlink_in[6]")
    assert route(mesh, 1, 3) == ("nvlink[1>3]",)
    assert links(mesh)["nvlink[1>3]"] == pytest.approx(200e9 / 3)


def test_routes_through_host_memory(host_staged: Cluster) -> None:
    same_port = ("pcie_up[0]", "root_up[0]", "host_memory[0]", "host_memory[0]", "root_down[0]", "pcie_down[1]")
    assert route(host_staged, 0, 1) == same_port
    far = route(host_staged, 6, 1)
    assert far == (
        "pcie_up[6]",
        "root_up[3]",
        "host_memory[1]",
        "host_memory[1]",
        "numa[1>0]",
        "root_down[0]",
        "pcie_down[1]",
    )


def test_peer_to_peer_stays_below_the_common_switch(p2p_pcie: Cluster) -> None:
    assert route(p2p_pcie, 0, 1) == ("pcie_up[0]", "pcie_down[1]")
    assert route(p2p_pcie, 0, 2) == ("pcie_up[0]", "root_up[0]", "root_down[1]", "pcie_down[2]")
    assert "numa[0>1]" in route(p2p_pcie, 3, 4)


def test_routes_between_nodes_take_the_nearest_nic(nvswitch: Cluster) -> None:
    cluster = nvswitch.with_nodes(2)
    assert route(cluster, 3, 14) == ("pcie_up[3]", "nic_out[0.3]", "nic_in[1.6]", "pcie_down[14]")
    shared = with_node(cluster, num_nics=4)
    assert route(shared, 2, 8)[1] == "nic_out[0.1]"
    # The NIC sits beside device 2; device 3 is below the same switch.
    assert route(shared, 3, 8)[:2] == ("pcie_up[3]", "nic_out[0.1]")


def test_one_nic_for_all_is_reached_over_the_sockets(host_staged: Cluster, p2p_pcie: Cluster) -> None:
    assert egress(host_staged, 7) == (
        "pcie_up[7]",
        "root_up[3]",
        "host_memory[1]",
        "host_memory[1]",
        "numa[1>0]",
        "nic_out[0.0]",
    )
    assert ingress(p2p_pcie, 7) == ("nic_in[0.0]", "root_up[0]", "numa[0>1]", "root_down[3]", "pcie_down[7]")
    assert egress(p2p_pcie, 1) == ("pcie_up[1]", "nic_out[0.0]")


@pytest.mark.parametrize(("nics", "expected"), [(1, [0] * 8), (4, [0, 0, 1, 1, 2, 2, 3, 3]), (8, [*range(8)])])
def test_devices_are_dealt_to_nics(nvswitch: Cluster, nics: int, expected: Sequence[int]) -> None:
    node = replace(nvswitch.node, num_nics=nics)
    assert [nic_of(node, local) for local in range(8)] == expected


def test_several_nics_a_device_are_one_link(nvswitch: Cluster) -> None:
    """An AWS p5 node: 32 NICs of 100 Gb/s, four for each GPU."""
    cluster = with_node(nvswitch, num_nics=32, nic_bandwidth_bytes_per_s=12.5e9)
    assert num_nic_links(cluster.node) == 8
    assert links(cluster)["nic_out[0.7]"] == 50e9


def test_no_nic_no_second_node(nvswitch: Cluster) -> None:
    cluster = with_node(nvswitch, num_nics=0).with_nodes(2)
    assert route(cluster, 0, 7)
    with pytest.raises(ProfileError, match="has no NIC"):
        route(cluster, 0, 8)


def test_placement(nvswitch: Cluster) -> None:
    cluster = nvswitch.with_nodes(2)
    assert devices_of(cluster, 10) == tuple(range(10))
    assert devices_of(cluster, 4, nodes=2) == (0, 1, 8, 9)
    assert devices_of(cluster, 2, nodes=1) == (0, 1)
    for ranks, nodes in ((0, None), (17, None), (3, 2), (4, 3), (9, 1)):
        with pytest.raises(LayoutError):
            devices_of(cluster, ranks, nodes)


def test_devices_outside_are_refused(nvswitch: Cluster) -> None:
    for src, dst in ((0, 8), (-1, 0)):
        with pytest.raises(LayoutError, match="expected 0 to 7"):
            route(nvswitch, src, dst)


@settings(max_examples=200, deadline=None)
@given(
    cluster=st.sampled_from(CLUSTERS),
    src=st.integers(0, 15),
    dst=st.integers(0, 15),
    p2p=st.booleans(),
    nics=st.integers(1, 16),
)
def test_every_route_is_made_of_links_and_mirrors(cluster: Cluster, src: int, dst: int, p2p: bool, nics: int) -> None:
    cluster = with_node(cluster, p2p=p2p, num_nics=nics)
    there, back = route(cluster, src, dst), route(cluster, dst, src)
    assert set(there) <= set(links(cluster))
    assert len(there) == len(back)
    assert bool(there) == (src != dst)
    once = [name for name in there if not name.startswith("host_memory")]
    assert len(once) == len(set(once))

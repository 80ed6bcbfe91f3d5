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
JOINED = [cluster for cluster in CLUSTERS if cluster.node.num_nics]


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


@settings(max_examples=300, deadline=None)
@given(cluster=st.sampled_from(JOINED), data=st.data(), p2p=st.booleans(), nics=st.integers(1, 16))
def test_every_route_is_made_of_links_and_mirrors(cluster: Cluster, data: st.DataObject, p2p: bool, nics: int) -> None:
    cluster = with_node(cluster, p2p=p2p, num_nics=nics)
    devices = st.integers(0, cluster.num_devices - 1)
    src, dst = data.draw(devices), data.draw(devices)
    there, back = route(cluster, src, dst), route(cluster, dst, src)
    assert set(there) <= set(links(cluster))
    # Changing the rail on the sender's side is not symmetric where the GPU beside the NIC is one of the two.
    assert len(there) == len(back) or any(name.startswith("nic") for name in there)
    assert bool(there) == (src != dst)
    once = [name for name in there if not name.startswith("host_memory")]
    assert len(once) == len(set(once))


def test_rails_are_kept_over_nvlink(rails: Cluster) -> None:
    """The sender hands the bytes to the GPU beside the receiver's rail; below one leaf nothing climbs."""
    cluster = rails.with_nodes(5)
    assert route(cluster, 3, 11) == ("pcie_up[3]", "nic_out[0.3]", "nic_in[1.3]", "pcie_down[11]")
    handed = ("nvlink_out[3]", "nvlink_in[6]", "pcie_up[6]", "nic_out[0.6]", "nic_in[1.6]", "pcie_down[14]")
    assert route(cluster, 3, 14) == handed
    far = route(cluster, 3, 4 * 8 + 6)
    assert far == (*handed[:4], "leaf_up[0.6]", "leaf_down[2.6]", "nic_in[4.6]", "pcie_down[38]")


def test_leaf_uplinks_have_the_oversubscribed_rate(rails: Cluster) -> None:
    capacity = links(rails.with_nodes(5))
    # Two nodes of one 25 GB/s NIC a rail below each leaf, half of it upwards; three pods of eight rails.
    assert {name for name in capacity if name.startswith("leaf_up")} == {
        f"leaf_up[{pod}.{rail}]" for pod in range(3) for rail in range(8)
    }
    assert {rate for name, rate in capacity.items() if name.startswith("leaf")} == {2 * 25e9 / 2}
    assert rails.fabric is not None
    plain = replace(rails, fabric=replace(rails.fabric, rail_optimised=False)).with_nodes(5)
    assert links(plain)["leaf_down[2.0]"] == 2 * 8 * 25e9 / 2
    assert route(plain, 3, 14)[:2] == ("pcie_up[3]", "nic_out[0.3]")
    assert not [name for name in links(rails) if name.startswith("leaf")]


def test_without_nvlink_rails_meet_above_the_leaf(rails: Cluster) -> None:
    cluster = with_node(rails, scale_up="pcie", nvlink_bandwidth_bytes_per_s=0.0).with_nodes(2)
    assert route(cluster, 3, 14)[1:5] == ("nic_out[0.3]", "leaf_up[0.3]", "leaf_down[0.6]", "nic_in[1.6]")


def test_nics_may_be_given_by_name(nvswitch: Cluster) -> None:
    groups = ((0, 2), (1, 3), (4, 5, 6, 7))
    node = replace(nvswitch.node, num_nics=6, nic_groups=groups)
    assert [nic_of(node, local) for local in range(8)] == [0, 1, 0, 1, 2, 2, 2, 2]
    assert num_nic_links(node) == 3
    assert links(replace(nvswitch, node=node))["nic_out[0.2]"] == 2 * 25e9


def test_hybrid_cube_mesh() -> None:
    """Six links a GPU; the three that are not joined are reached through another."""
    cluster = load_cluster("v100-dgx1")
    capacity = links(cluster)
    out = {d: sum(rate for name, rate in capacity.items() if name.startswith(f"nvlink[{d}>")) for d in range(8)}
    assert set(out.values()) == {150e9}
    assert capacity["nvlink[0>3]"] == capacity["nvlink[4>0]"] == 50e9 == 2 * capacity["nvlink[0>1]"]
    assert route(cluster, 0, 7) == ("nvlink[0>3]", "nvlink[3>7]") or route(cluster, 0, 7) == (
        "nvlink[0>4]",
        "nvlink[4>7]",
    )
    assert route(cluster, 2, 6) == ("nvlink[2>6]",)


def test_bridged_pairs_go_over_pcie_otherwise() -> None:
    cluster = load_cluster("h100-pcie8")
    assert route(cluster, 4, 5) == ("nvlink[4>5]",)
    assert links(cluster)["nvlink[4>5]"] == 300e9
    assert route(cluster, 1, 2) == ("pcie_up[1]", "pcie_down[2]")


def test_a_rack_is_one_domain() -> None:
    rack = load_cluster("gb200-nvl72").with_nodes(2)
    assert rack.num_devices == 144
    assert route(rack, 0, 71) == ("nvlink_out[0]", "nvlink_in[71]")
    assert route(rack, 5, 72 + 5) == ("pcie_up[5]", "nic_out[0.5]", "nic_in[1.5]", "pcie_down[77]")

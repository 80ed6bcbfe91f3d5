from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.errors import LayoutError, ProfileError, UsageError
from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.fabric import keeps_rail
from overlapsim.hardware.loading import list_profiles, load_cluster
from overlapsim.hardware.profile import Cluster
from overlapsim.hardware.topology import links, nic_of, route
from overlapsim.hardware.wire import COLLECTIVES, bottleneck, hbm_bytes, ring_wire_bytes
from tests.hardware.variants import with_node

CLUSTERS = [load_cluster(name).with_nodes(3) for name in list_profiles("cluster") if name != "tpu-v5p-host4"]
FACTORS = {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0, "all_to_all": 1.0}
S = 1e6


def total(loads: Mapping[str, float], prefix: str) -> float:
    return sum(size for name, size in loads.items() if name.startswith(prefix))


@pytest.mark.parametrize("collective", FACTORS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_nvswitch_carries_the_bus_factor(nvswitch: Cluster, collective: str, ranks: int) -> None:
    loads = ring_wire_bytes(nvswitch, ranks, collective, S)
    per_rank = FACTORS[collective] * (ranks - 1) / ranks * S
    expected = {f"nvlink_{way}[{d}]": per_rank for way in ("out", "in") for d in range(ranks)}
    assert loads == pytest.approx(expected)


def test_host_staging_counts_memory_twice(host_staged: Cluster) -> None:
    loads = ring_wire_bytes(host_staged, 8, "all_reduce", S)
    per_rank = 2 * 7 / 8 * S
    for device in range(8):
        assert loads[f"pcie_up[{device}]"] == loads[f"pcie_down[{device}]"] == pytest.approx(per_rank)
    for port in range(4):
        assert loads[f"root_up[{port}]"] == loads[f"root_down[{port}]"] == pytest.approx(2 * per_rank)
    for socket in range(2):
        assert loads[f"host_memory[{socket}]"] == pytest.approx(2 * 4 * per_rank)
    # The ring goes over to the second socket once and comes back once.
    assert loads["numa[0>1]"] == loads["numa[1>0]"] == pytest.approx(per_rank)
    assert not [name for name in ring_wire_bytes(host_staged, 4, "all_reduce", S) if name.startswith("numa")]


def test_shared_port_halves_the_bus_rate(host_staged: Cluster) -> None:
    """Two GPUs below a 26 GB/s port: 13 GB/s of bus bandwidth at any rank count; apart they get all of it."""
    for ranks in (2, 4, 8):
        worst = bottleneck(host_staged, ring_wire_bytes(host_staged, ranks, "all_reduce", S))
        assert worst.link.startswith("root_")
        assert 2 * (ranks - 1) / ranks * S / worst.time_s == pytest.approx(13e9)
    apart = bottleneck(host_staged, ring_wire_bytes(host_staged, (0, 2), "all_reduce", S))
    assert S / apart.time_s == pytest.approx(26e9)


def test_peer_to_peer_ring_leaves_host_memory_alone(p2p_pcie: Cluster) -> None:
    loads = ring_wire_bytes(p2p_pcie, 8, "all_gather", S)
    per_rank = 7 / 8 * S
    assert total(loads, "host_memory") == 0
    assert loads["root_up[0]"] == pytest.approx(per_rank)
    assert loads["pcie_up[5]"] == pytest.approx(per_rank)


def test_mesh_spreads_each_hop_over_its_pairs(mesh: Cluster) -> None:
    loads = ring_wire_bytes(mesh, 4, "all_reduce", S)
    assert len(loads) == 12
    assert list(loads.values()) == pytest.approx([2 * 3 / 4 * S / 3] * 12)
    assert ring_wire_bytes(mesh, 2, "all_reduce", S) == {"nvlink[0>1]": S, "nvlink[1>0]": S}


@pytest.mark.parametrize("nics", [1, 2, 4, 8])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_ring_enters_and_leaves_each_node_once(nvswitch: Cluster, collective: str, nics: int) -> None:
    cluster = with_node(nvswitch, num_nics=nics).with_nodes(3)
    loads = ring_wire_bytes(cluster, 24, collective, S)
    crossing = FACTORS[collective] * 23 / 24 * S
    for node in range(3):
        for way in ("out", "in"):
            # All of it leaves each node once, in equal shares over the NICs.
            assert [loads[f"nic_{way}[{node}.{nic}]"] for nic in range(nics)] == pytest.approx([crossing / nics] * nics)
    assert total(loads, "nvlink_out") == pytest.approx((24 - 3) * crossing)
    assert total(loads, "pcie_up") == pytest.approx(3 * crossing)


def test_part_of_a_node_uses_its_own_nics(nvswitch: Cluster) -> None:
    loads = ring_wire_bytes(nvswitch.with_nodes(2), (0, 1, 8, 9), "all_gather", S)
    assert {name for name in loads if name.startswith("nic_out")} == {
        f"nic_out[{node}.{nic}]" for node in (0, 1) for nic in (0, 1)
    }


def test_all_to_all_between_nodes(nvswitch: Cluster) -> None:
    loads = ring_wire_bytes(nvswitch.with_nodes(2), 16, "all_to_all", S)
    for device in range(16):
        node, nic = divmod(device, 8)
        assert loads[f"nvlink_out[{device}]"] == pytest.approx(7 / 16 * S)
        assert loads[f"nic_out[{node}.{nic}]"] == loads[f"pcie_up[{device}]"] == pytest.approx(8 / 16 * S)


def test_broadcast_and_shift(nvswitch: Cluster) -> None:
    loads = ring_wire_bytes(nvswitch, 4, "broadcast", S)
    assert "nvlink_in[0]" not in loads and "nvlink_out[3]" not in loads
    assert total(loads, "nvlink_out") == 3 * S
    assert ring_wire_bytes(nvswitch, 2, "send_recv", S)["nvlink_out[0]"] == S


def test_one_rank_moves_nothing(nvswitch: Cluster) -> None:
    for collective in COLLECTIVES:
        assert ring_wire_bytes(nvswitch, 1, collective, S) == {}
        assert hbm_bytes(nvswitch, 1, collective, S) == {}
        assert wire_lower_bound_s(nvswitch, 1, collective, S) == 0.0
    assert bottleneck(nvswitch, {}) == ("", 0.0)


def test_hbm_traffic_per_wire_byte(nvswitch: Cluster) -> None:
    for collective, per_byte in (("reduce_scatter", 3), ("all_reduce", 2.5), ("all_gather", 2), ("all_to_all", 2)):
        wire = ring_wire_bytes(nvswitch, 8, collective, S)["nvlink_out[5]"]
        assert hbm_bytes(nvswitch, 8, collective, S)["hbm[5]"] == pytest.approx(per_byte * wire)


def test_refusals(nvswitch: Cluster) -> None:
    for call in (ring_wire_bytes, hbm_bytes, wire_lower_bound_s):
        with pytest.raises(UsageError, match="expected one of all_reduce"):
            call(nvswitch, 2, "alltoall", S)
        for ranks in ((0, 0), (), (0, 8), 9):
            with pytest.raises(LayoutError):
                call(nvswitch, ranks, "all_reduce", S)
    apart = with_node(nvswitch, num_nics=0).with_nodes(2)
    for call in (ring_wire_bytes, wire_lower_bound_s):
        with pytest.raises(ProfileError, match="has no NIC"):
            call(apart, 16, "all_reduce", S)


def device_sets(cluster: Cluster) -> st.SearchStrategy[list[int]]:
    found = st.sets(st.integers(0, cluster.num_devices - 1), min_size=1, max_size=24)
    return found.flatmap(lambda devices: st.permutations(sorted(devices)))


@settings(max_examples=200, deadline=None)
@given(cluster=st.sampled_from(CLUSTERS), data=st.data(), collective=st.sampled_from(COLLECTIVES))
def test_bytes_are_conserved(cluster: Cluster, data: st.DataObject, collective: str) -> None:
    """What leaves GPUs arrives at GPUs; all but what others pass on is ranks x the bytes of one rank."""
    devices = data.draw(device_sets(cluster))
    count = len(devices)
    loads = ring_wire_bytes(cluster, devices, collective, S)
    meshed = total(loads, "nvlink[")
    sent = total(loads, "nvlink_out") + total(loads, "pcie_up") + meshed
    received = total(loads, "nvlink_in") + total(loads, "pcie_down") + meshed
    per_rank = {"broadcast": (count - 1) / count * S, "send_recv": S if count > 1 else 0.0}
    expected = per_rank.get(collective, FACTORS.get(collective, 0) * (count - 1) / count * S)
    passes_on = keeps_rail(cluster) or cluster.node.nvlink_pairs
    assert sent >= count * expected * (1 - 1e-9) if passes_on else sent == pytest.approx(count * expected)
    assert received == pytest.approx(sent)
    assert total(loads, "nic_out") == pytest.approx(total(loads, "nic_in"))
    assert total(loads, "leaf_up") == pytest.approx(total(loads, "leaf_down"))
    assert set(loads) <= set(links(cluster))
    assert all(size > 0 for size in loads.values())


@settings(max_examples=60, deadline=None)
@given(
    cluster=st.sampled_from([cluster for cluster in CLUSTERS if not cluster.node.nvlink_pairs]),
    data=st.data(),
    nodes=st.permutations(range(3)),
    collective=st.sampled_from([name for name in COLLECTIVES if name != "broadcast"]),
)
def test_symmetric_ranks_may_be_swapped(
    cluster: Cluster, data: st.DataObject, nodes: list[int], collective: str
) -> None:
    """The order in which devices are named is nothing; which of equal nodes are used changes names only."""
    per_node = cluster.node.num_devices
    chosen = data.draw(st.permutations(range(per_node)))[:4]
    first, second = nodes[0] * per_node, nodes[1] * per_node
    here = ring_wire_bytes(cluster, [*chosen, *(per_node + d for d in chosen)], collective, S)
    moved = [*(first + d for d in reversed(chosen)), *(second + d for d in chosen)]
    there = ring_wire_bytes(cluster, moved, collective, S)
    assert sorted(there.values()) == pytest.approx(sorted(here.values()))
    assert bottleneck(cluster, there).time_s == pytest.approx(bottleneck(cluster, here).time_s)


@settings(max_examples=200, deadline=None)
@given(cluster=st.sampled_from(CLUSTERS), data=st.data(), collective=st.sampled_from(COLLECTIVES))
def test_no_ring_beats_the_lower_bound(cluster: Cluster, data: st.DataObject, collective: str) -> None:
    devices = data.draw(device_sets(cluster))
    ring = bottleneck(cluster, ring_wire_bytes(cluster, devices, collective, S)).time_s
    assert wire_lower_bound_s(cluster, devices, collective, S) <= ring * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    rail_optimised=st.booleans(),
    scale_up=st.sampled_from(["nvswitch", "pcie"]),
    per_leaf=st.integers(0, 3),
    nics=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_exchange_by_rail_equals_pair_by_pair(
    rails: Cluster, data: st.DataObject, rail_optimised: bool, scale_up: str, per_leaf: int, nics: int
) -> None:
    assert rails.fabric is not None
    fabric = replace(rails.fabric, rail_optimised=rail_optimised, nodes_per_leaf=per_leaf)
    rate = 200e9 if scale_up == "nvswitch" else 0.0
    cluster = with_node(rails, scale_up=scale_up, nvlink_bandwidth_bytes_per_s=rate, num_nics=nics).with_nodes(5)
    cluster = replace(cluster, fabric=fabric)
    devices = data.draw(device_sets(cluster))
    pairwise: dict[str, float] = defaultdict(float)
    for src, dst in permutations(devices, 2):
        for link in route(cluster, src, dst):
            pairwise[link] += S / len(devices)
    loads = ring_wire_bytes(cluster, devices, "all_to_all", S)
    assert loads == pytest.approx(dict(pairwise))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kept=st.booleans(), nics=st.sampled_from([2, 8]), collective=st.sampled_from(COLLECTIVES[:-1]))
def test_counted_rings_equal_walked_ones(
    rails: Cluster, nvswitch: Cluster, data: st.DataObject, kept: bool, nics: int, collective: str
) -> None:
    """Every ring hop by hop along `route`, each ring starting each node at the GPU beside another NIC."""
    cluster = with_node((rails if kept else nvswitch).with_nodes(3), num_nics=nics)
    devices = sorted(data.draw(device_sets(cluster)))
    if len(devices) == 1:
        return
    parts = [[d for d in devices if d // 8 == node] for node in range(3)]
    parts = [part for part in parts if part]
    nic = [nic_of(cluster.node, local) for local in range(8)]
    starts = [[i for i, d in enumerate(p) if not i or nic[d % 8] != nic[p[i - 1] % 8]] for p in parts]
    count = max(map(len, starts)) if len(parts) > 1 else 1
    walked: dict[str, float] = defaultdict(float)
    for ring in range(count):
        turns = [start[ring % len(start)] if count > 1 or len(parts) > 1 else 0 for start in starts]
        visited = [d for part, turn in zip(parts, turns, strict=True) for d in part[turn:] + part[:turn]]
        for src, dst in zip(visited, visited[1:] + visited[:1], strict=True):
            if collective == "broadcast" and dst == devices[0]:
                continue
            sent = FACTORS.get(collective, 0) * (len(devices) - 1) / len(devices) or 1.0
            for link in route(cluster, src, dst):
                walked[link] += sent * S / count
    assert ring_wire_bytes(cluster, devices, collective, S) == pytest.approx(dict(walked))


def test_rings_keep_their_rails(rails: Cluster) -> None:
    """Each ring crosses the spine once a pod, over its own rail; the GPU beside the NIC gets the bytes over NVLink."""
    cluster = rails.with_nodes(4)
    loads = ring_wire_bytes(cluster, 32, "all_gather", S)
    crossing = 31 / 32 * S
    for pod in range(2):
        for rail in range(8):
            assert loads[f"leaf_up[{pod}.{rail}]"] == loads[f"leaf_down[{pod}.{rail}]"] == pytest.approx(crossing / 8)
    assert total(loads, "nvlink_out") == pytest.approx(32 * crossing)
    # 16 nodes, all of them exchanging: a leaf sends for two nodes to the seven other pods.
    wide = ring_wire_bytes(rails.with_nodes(16), 128, "all_to_all", S)
    assert wide["leaf_up[3.5]"] == pytest.approx(16 * 14 * S / 128)
    assert bottleneck(rails.with_nodes(16), wide).link.startswith("leaf")


def test_a_mesh_that_joins_the_ranks_carries_the_ring() -> None:
    dgx1 = load_cluster("v100-dgx1")
    worst = bottleneck(dgx1, ring_wire_bytes(dgx1, 8, "all_reduce", S))
    # Six links of 25 GB/s, each hop spread over all.
    assert 2 * 7 / 8 * S / worst.time_s == pytest.approx(150e9)
    pairs = ring_wire_bytes(load_cluster("h100-pcie8"), 4, "all_gather", S)
    per_rank = 3 / 4 * S
    assert pairs["nvlink[0>1]"] == pairs["nvlink[2>3]"] == pairs["pcie_up[1]"] == pytest.approx(per_rank)
    assert "nvlink[1>0]" not in pairs


def test_lower_bound_allows_what_was_measured_beyond_the_ring() -> None:
    """8 x H100 reported 483 GB/s of all-reduce bus bandwidth on one node, 487 on two (SOURCES.md, NT-P5)."""
    h100 = load_cluster("h100-sxm8").with_nodes(2)
    size = 2.0**34
    for ranks, busbw in ((8, 483e9), (16, 487e9)):
        measured_s = 2 * (ranks - 1) / ranks * size / busbw
        assert bottleneck(h100, ring_wire_bytes(h100, ranks, "all_reduce", size)).time_s > measured_s
        assert wire_lower_bound_s(h100, ranks, "all_reduce", size) < measured_s


def test_lower_bound_closed_forms(nvswitch: Cluster, host_staged: Cluster) -> None:
    assert wire_lower_bound_s(nvswitch, 8, "all_reduce", 8e9) == pytest.approx(14e9 / 200e9)
    assert wire_lower_bound_s(nvswitch, 8, "all_gather", 8e9) == pytest.approx(7e9 / 200e9)
    assert wire_lower_bound_s(host_staged, 2, "reduce_scatter", 52e9) == pytest.approx(1.0)
    two = nvswitch.with_nodes(2)
    assert wire_lower_bound_s(two, 16, "all_to_all", 16e9) == pytest.approx(8 * 8e9 / (8 * 25e9))
    assert wire_lower_bound_s(two, 16, "all_reduce", 16e9) == pytest.approx(16e9 / (8 * 25e9))
    # Here a GPU's own edge is the narrower one: NVLink and its share of PCIe.
    assert wire_lower_bound_s(two, 16, "all_gather", 16e9) == pytest.approx(15e9 / (200e9 + 26e9))

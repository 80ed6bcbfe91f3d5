from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.errors import LayoutError, ProfileError, UsageError
from overlapsim.hardware.levels import levels
from overlapsim.hardware.loading import list_profiles, load_cluster
from overlapsim.hardware.nic_sharing import RINGS, Rings, nic_sharing
from overlapsim.hardware.profile import Cluster
from overlapsim.hardware.wire import ring_wire_bytes
from overlapsim.workload.layout import Layout
from overlapsim.workload.placement import placements
from overlapsim.workload.rank_map import RankMap
from tests.hardware.variants import with_node

CLUSTERS = [load_cluster(name) for name in list_profiles("cluster") if name != "tpu-v5p-host4"]


def data_parallel(tp: int, per_node: int = 8) -> list[tuple[int, ...]]:
    """Members in a node of the data-parallel groups beside tensor parallelism of `tp`."""
    return [tuple(range(first, per_node, tp)) for first in range(tp)]


@pytest.fixture(scope="module")
def four_nics() -> Cluster:
    """Eight A100 on an NVSwitch, two below each PCIe switch with one NIC of 25 GB/s: 100 GB/s a node."""
    return replace(with_node(load_cluster("a100-sxm8"), num_nics=4), fabric=None)


@pytest.mark.parametrize(("tp", "gbs"), [(1, 100), (2, 50), (4, 50), (8, 100)])
def test_groups_of_two_and_four_use_each_nic_in_one_direction(four_nics: Cluster, tp: int, gbs: float) -> None:
    """Step times of an A100 cluster with four NICs a node: right at TP 1 and 8, half the rate at TP 2 and 4."""
    one_way = nic_sharing(four_nics, data_parallel(tp), rings="one_way")
    assert one_way.bandwidth_bytes_per_s == pytest.approx(gbs * 1e9)
    assert one_way.group_bandwidth_bytes_per_s == pytest.approx(gbs * 1e9 / tp)
    assert one_way.nic_bandwidth_bytes_per_s == 100e9
    assert one_way.bottleneck.startswith("nic_")
    mirrored = nic_sharing(four_nics, data_parallel(tp), rings="mirrored")
    assert mirrored.bandwidth_bytes_per_s == pytest.approx(100e9)


def test_where_a_ring_enters_and_leaves(four_nics: Cluster) -> None:
    pairs = nic_sharing(four_nics, data_parallel(4), rings="one_way")
    # Groups (0, 4) and (1, 5) go in by NIC 0 and out by NIC 2, the others by NICs 1 and 3.
    expected = {"nic_in[0.0]": 0.5, "nic_out[0.2]": 0.5, "nic_in[0.1]": 0.5, "nic_out[0.3]": 0.5}
    assert pairs.nic_share == pytest.approx(expected)
    quarters = nic_sharing(four_nics, [(0, 2, 4, 6)], rings="one_way")
    expected = {"nic_in[0.0]": 0.5, "nic_out[0.1]": 0.5, "nic_in[0.2]": 0.5, "nic_out[0.3]": 0.5}
    assert quarters.nic_share == pytest.approx(expected)
    # Two GPUs beside each NIC: in at one, out at the other, by the same NIC.
    whole = nic_sharing(four_nics, [tuple(range(8))], rings="one_way")
    assert whole.nic_share == pytest.approx({f"nic_{way}[0.{nic}]": 0.25 for way in ("in", "out") for nic in range(4)})


def test_two_nics_below_one_switch_are_used_both_ways() -> None:
    dgx = load_cluster("a100-sxm8")
    assert nic_sharing(dgx, data_parallel(1), rings="one_way").bandwidth_bytes_per_s == pytest.approx(200e9)
    assert nic_sharing(dgx, data_parallel(2), rings="one_way").bandwidth_bytes_per_s == pytest.approx(100e9)


def test_an_odd_switch_is_not_left_out(four_nics: Cluster) -> None:
    three = nic_sharing(four_nics, [(0, 2, 4)], rings="one_way")
    assert sum(size for name, size in three.nic_share.items() if name.startswith("nic_in")) == pytest.approx(1)
    assert three.bandwidth_bytes_per_s == pytest.approx(50e9)


def test_from_a_layout_to_its_share(four_nics: Cluster) -> None:
    cluster = four_nics.with_nodes(64)
    for tp, gbs in ((2, 50), (8, 100)):
        place = placements(RankMap(Layout(tp=tp, pp=4, dp=128 // tp)), levels(cluster), 8)["dp"]
        assert place.node_groups == tp
        share = nic_sharing(cluster, place.node_members, rings="one_way")
        assert share.bandwidth_bytes_per_s == pytest.approx(gbs * 1e9)


def test_refusals(four_nics: Cluster) -> None:
    with pytest.raises(UsageError, match="expected one of one_way, mirrored"):
        nic_sharing(four_nics, [(0,)], rings="both")  # type: ignore[arg-type]
    for groups in ([], [()], [(0, 0)], [(0, 1), (1,)], [(8,)], [(-1,)]):
        with pytest.raises(LayoutError, match="no distinct GPUs of a node of 8"):
            nic_sharing(four_nics, groups, rings="mirrored")
    for kind in RINGS:
        with pytest.raises(ProfileError, match="has no NIC"):
            nic_sharing(with_node(four_nics, num_nics=0), [(0,)], rings=kind)


def node_groups(cluster: Cluster) -> st.SearchStrategy[list[list[int]]]:
    """Any partition of some of a node's GPUs into groups."""
    count = cluster.node.num_devices
    owner = st.lists(st.integers(-1, 5), min_size=count, max_size=count).filter(lambda owners: max(owners) >= 0)

    def split(owners: list[int]) -> list[list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for device, group in enumerate(owners):
            if group >= 0:
                found[group].append(device)
        return list(found.values())

    return owner.map(split)


@settings(max_examples=150, deadline=None)
@given(
    cluster=st.sampled_from([c for c in CLUSTERS if c.node.num_nics and c.node.num_devices <= 8]),
    data=st.data(),
    rings=st.sampled_from(RINGS),
)
def test_what_leaves_enters_and_fits_the_nics(cluster: Cluster, data: st.DataObject, rings: Rings) -> None:
    groups = data.draw(node_groups(cluster))
    share = nic_sharing(cluster, groups, rings=rings)
    for way in ("nic_out", "nic_in"):
        assert sum(size for name, size in share.nic_share.items() if name.startswith(way)) == pytest.approx(1)
    assert 0 < share.bandwidth_bytes_per_s <= share.nic_bandwidth_bytes_per_s * (1 + 1e-9)
    # The order in which groups and their members are named is nothing.
    mixed = [list(reversed(group)) for group in reversed(groups)]
    again = nic_sharing(cluster, mixed, rings=rings)
    assert again.bandwidth_bytes_per_s == pytest.approx(share.bandwidth_bytes_per_s)


@settings(max_examples=60, deadline=None)
@given(cluster=st.sampled_from([c for c in CLUSTERS if c.node.num_nics and c.node.num_devices <= 8]), data=st.data())
def test_mirrored_rings_are_those_of_the_wire_bytes(cluster: Cluster, data: st.DataObject) -> None:
    """An all-gather of one group over three nodes puts the same shares on a node's NICs."""
    (group, *_) = data.draw(node_groups(cluster))
    per_node = cluster.node.num_devices
    devices = [number * per_node + device for number in range(3) for device in group]
    size = len(devices) / (len(devices) - 1)
    loads = ring_wire_bytes(cluster.with_nodes(3), devices, "all_gather", size)
    share = nic_sharing(cluster, [group], rings="mirrored")
    assert share.nic_share == pytest.approx({name: loads[name] for name in share.nic_share})

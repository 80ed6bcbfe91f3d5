"""Collectives of a layout's groups: inside a node as measured, across nodes at the rate that NICs leave a group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.cost.base import Cost
from overlapsim.cost.collective import CollectiveModel
from overlapsim.cost.group_collective import GroupModel, GroupPlace, group_places
from overlapsim.cost.prices import PriceBook
from overlapsim.cost.structural import bus_factor
from overlapsim.hardware.levels import levels
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import Cluster
from overlapsim.workload.layout import Layout
from overlapsim.workload.operators import CollectiveOp
from overlapsim.workload.placement import placements
from overlapsim.workload.rank_map import RankMap

A100 = load_cluster("a100-sxm8").with_nodes(16)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
SIZES = np.array([2.0**power for power in range(10, 33)])


def places(layout: Layout, cluster: Cluster = A100, rings: str = "mirrored") -> dict[str, GroupPlace]:
    found = placements(RankMap(layout), levels(cluster), cluster.node.num_devices)
    return group_places(cluster, found, rings=rings)  # type: ignore[arg-type]


def large(model: GroupModel) -> float:
    """Bus bandwidth of large messages, bytes/s."""
    size = 2.0**40
    return size * bus_factor(model.kind, model.place.ranks) / float(model.seconds(size))


@pytest.mark.parametrize("kind", KINDS)
def test_inside_a_node_a_group_is_as_good_as_the_first_ranks(kind: str) -> None:
    """TP 8 of a job on 16 nodes: the curve of one node, whatever else the job does."""
    place = places(Layout(tp=8, dp=16))["tp"]
    assert (place.ranks, place.nodes) == (8, 1)
    own, alone = GroupModel(A100, kind, place), CollectiveModel(A100.with_nodes(1), kind, 8)
    assert own.seconds(SIZES) == pytest.approx(alone.seconds(SIZES), rel=0)
    assert own.cost(2.0**24) == alone.cost(2.0**24)
    assert own.bandwidth_seconds(SIZES) == pytest.approx(alone.bandwidth_seconds(SIZES), rel=0)


def test_one_rank_moves_nothing() -> None:
    model = GroupModel(A100, "all_reduce", places(Layout(tp=8))["dp"])
    cost: Cost = model.cost(2.0**24)
    assert (cost.duration_s, cost.sm, cost.demands) == (0.0, 0, ())
    assert not model.seconds(SIZES).any()


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("tp", "groups"), [(8, 8), (1, 1)])
def test_groups_share_the_nics_of_a_node(kind: str, tp: int, groups: int) -> None:
    """With TP 8 eight data-parallel groups leave a node, each at an eighth of its NICs: bytes / 8 take as long."""
    place = places(Layout(tp=tp, dp=128 // tp))["dp"]
    node = A100.node
    whole = node.num_nics * node.nic_bandwidth_bytes_per_s
    assert place.nodes == 16
    assert place.nic_bytes_per_s == pytest.approx(whole / groups)
    model = GroupModel(A100, kind, place)
    assert 0.5 * whole / groups < large(model) <= whole / groups


def test_the_cost_of_data_parallelism_does_not_depend_on_tensor_parallelism() -> None:
    """Fewer bytes a rank and more groups a node cancel: gradients of a stage take as long, TP 1 or 8."""
    gradients = 8e9
    seconds = [
        float(GroupModel(A100, "reduce_scatter", places(Layout(tp=tp, dp=128 // tp))["dp"]).seconds(gradients / tp))
        for tp in (1, 8)
    ]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.15)


def test_rings_that_use_each_nic_one_way_get_half() -> None:
    """Two ranks of a group in a node enter by one NIC and leave by another, unless rings are mirrored."""
    cluster = load_cluster("a100-sxm8").with_nodes(8)
    layout = Layout(tp=4, dp=16)
    mirrored, one_way = (places(layout, cluster, rings)["dp"] for rings in ("mirrored", "one_way"))
    assert one_way.nic_bytes_per_s <= mirrored.nic_bytes_per_s
    assert one_way.nic_load >= mirrored.nic_load >= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [Layout(tp=8, dp=16), Layout(dp=128), Layout(tp=4, pp=4, dp=8), Layout(tp=16, dp=8)])
def test_times_and_ends(kind: str, layout: Layout) -> None:
    """Times rise with size; the ends of the spread hold them; wires are not outrun; demands fit into the time."""
    for place in places(layout).values():
        model = GroupModel(A100, kind, place)
        seconds = model.seconds(SIZES)
        # Measured curves of one node are used as they are; the fabric's model rises.
        assert place.nodes == 1 or (np.diff(seconds) >= 0).all()
        assert (model.seconds_at(SIZES, "low") <= seconds).all()
        assert (seconds <= model.seconds_at(SIZES, "high")).all()
        for size in (2.0**12, 2.0**20, 2.0**28):
            duration = float(model.seconds(size))
            for demand in model.demands(size):
                assert 0 <= demand.amount <= demand.capacity * duration * (1 + 1e-9)


@given(st.sampled_from(KINDS), st.integers(1, 4), st.floats(2.0**10, 2.0**34))
def test_more_groups_beside_are_never_faster(kind: str, factor: int, size: float) -> None:
    place = places(Layout(dp=128))["dp"]
    crowded = GroupPlace(place.ranks, place.nodes, place.nic_bytes_per_s / factor, place.nic_load)
    alone, beside = (float(GroupModel(A100, kind, p).seconds(size)) for p in (place, crowded))
    assert beside >= alone


def test_what_was_not_measured_is_said() -> None:
    """No fit of a fabric: a prior, said for groups that leave a node; a measured node needs no words."""
    h100 = load_cluster("h800-sxm8").with_nodes(4)
    found = places(Layout(tp=8, dp=4), h100)
    across = GroupModel(h100, "all_reduce", found["dp"])
    assert [f.code for f in across.findings] == ["not_calibrated"]
    assert "4 ranks on 4 nodes of h800-sxm8" in across.findings[0].message
    cost = across.cost(2.0**26)
    assert (cost.spread.origin, cost.in_range, cost.source.layer) == ("prior", False, "prior")
    inside = GroupModel(A100, "all_reduce", places(Layout(tp=8, dp=16))["tp"])
    assert inside.findings == ()
    assert inside.cost(2.0**26).spread.origin == "residual"


def test_price_books_know_groups_by_name() -> None:
    """A collective of a placed group is priced where it lies, one without a group over the first ranks."""
    layout = Layout(tp=8, dp=16)
    book = PriceBook(A100, layout.world_size, groups=places(layout))
    placed = book.collective(CollectiveOp("all_reduce", 2.0**26, 16, group="dp"))
    first = book.collective(CollectiveOp("all_reduce", 2.0**26, 16))
    assert placed.duration_s > first.duration_s
    assert {demand.resource for demand in placed.demands} == {"nic_share_out[0]", "nic_share_in[0]", "hbm[0]"}
    # One of a group's name with other ranks is another collective.
    assert book.collective(CollectiveOp("all_reduce", 2.0**26, 8, group="dp")).duration_s < placed.duration_s

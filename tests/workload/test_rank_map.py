from __future__ import annotations

from collections import defaultdict
from itertools import permutations, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from overlapsim.errors import LayoutError
from overlapsim.hardware.levels import levels
from overlapsim.hardware.loading import load_cluster
from overlapsim.workload.layout import Layout
from overlapsim.workload.placement import placements
from overlapsim.workload.rank_map import GROUP_KINDS, ORDER, GroupKind, RankMap, read_order
from tests.workload.layouts import layouts

# Coordinates that the ranks of one group share; they differ in all others.
SHARED: dict[GroupKind, tuple[str, ...]] = {
    "tp": ("sp", "cp", "dp", "pp"),
    "sp": ("tp", "cp", "dp", "pp"),
    "cp": ("tp", "sp", "dp", "pp"),
    "dp": ("tp", "sp", "cp", "pp"),
    "dp_cp": ("tp", "pp"),
    "shard": ("tp", "pp", "replica"),
    "replica": ("tp", "sp", "cp", "pp", "place"),
    "pp": ("tp", "sp", "cp", "dp"),
    "etp": ("ep", "dp", "pp"),
    "ep": ("tp", "dp", "pp"),
    "etp_ep": ("dp", "pp"),
    "edp": ("tp", "ep", "pp"),
    "expert_shard": ("tp", "ep", "pp", "replica"),
    "expert_replica": ("tp", "ep", "pp", "place"),
}


def enumerated(layout: Layout, order: tuple[str, ...], kind: GroupKind) -> set[tuple[int, ...]]:
    """Groups by the definition: ranks counted out in order, those with equal coordinates collected."""
    expert = kind in ("etp", "ep", "etp_ep", "edp", "expert_shard", "expert_replica")
    at = layout
    dense_sizes = {"tp": at.tp, "sp": at.sp, "cp": at.cp, "ep": 1, "dp": at.dp, "pp": at.pp}
    sizes = {"tp": at.etp, "sp": 1, "cp": 1, "ep": at.ep, "dp": at.edp, "pp": at.pp} if expert else dense_sizes
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    slowest_first = [range(sizes[name]) for name in reversed(order)]
    for rank, digits in enumerate(product(*slowest_first)):
        at_rank = dict(zip(reversed(order), digits, strict=True))
        set_size = sizes["dp"] // layout.hsdp
        at_rank |= {"replica": at_rank["dp"] // set_size, "place": at_rank["dp"] % set_size}
        shared = SHARED["pp" if kind == "embedding" else kind]
        if kind != "embedding" or at_rank["pp"] in (0, layout.pp - 1):
            found[tuple(at_rank[name] for name in shared)].append(rank)
    return set(map(tuple, found.values()))


@settings(max_examples=150, deadline=None)
@given(layout=layouts(), order=st.sampled_from([*permutations(ORDER)][::7]), kind=st.sampled_from(GROUP_KINDS))
def test_groups_are_those_of_the_definition(layout: Layout, order: tuple[str, ...], kind: GroupKind) -> None:
    try:
        ranks = RankMap(layout, order)
    except LayoutError:
        assume(False)
    expected = enumerated(layout, order, kind)
    members = [rank for rank in range(layout.world_size) if ranks.holds(kind, rank)]
    assert {ranks.group(kind, rank) for rank in members} == expected
    assert len(expected) == ranks.count(kind) and {len(group) for group in expected} == {ranks.size(kind)}
    # Every rank is in exactly one group of each kind (an embedding group has the ends of a pipeline alone).
    assert sorted(rank for group in expected for rank in group) == members
    assert kind == "embedding" or len(members) == layout.world_size
    assert all(
        rank in ranks.group(kind, rank) and ranks.base(kind, rank) == ranks.group(kind, rank)[0] for rank in members
    )


def test_megatron_order() -> None:
    """16 ranks, TP 2, PP 4, DP 2 (the example of Megatron-LM's parallel_state): neighbours are tensor-parallel."""
    ranks = RankMap(Layout(tp=2, pp=4, dp=2))
    assert [ranks.group("tp", first) for first in (0, 2, 14)] == [(0, 1), (2, 3), (14, 15)]
    assert ranks.group("pp", 1) == (1, 5, 9, 13)
    assert ranks.group("dp", 4) == (4, 6)
    assert ranks.group("embedding", 6) == (2, 14)
    swapped = RankMap(Layout(tp=2, pp=4, dp=2), read_order("tp-cp-ep-pp-dp"))
    assert swapped.group("pp", 1) == (1, 3, 5, 7) and swapped.group("dp", 1) == (1, 9)


def test_ulysses_and_experts_share_a_node() -> None:
    ranks = RankMap(Layout.parse("sp=8,ep=8,pp=15,dp=2"))
    assert ranks.group("sp") == ranks.group("ep") == tuple(range(8))
    assert ranks.group("edp") == ranks.group("dp") == (0, 8)
    assert ranks.group("dp_cp") == tuple(range(16))
    assert ranks.group("pp")[:3] == (0, 16, 32)


def test_hsdp_splits_the_gradient_group() -> None:
    ranks = RankMap(Layout(tp=2, cp=2, dp=4, zero=3, hsdp=2))
    assert ranks.group("shard") == (0, 2, 4, 6)
    assert ranks.group("replica") == (0, 8)
    assert ranks.group("dp_cp") == (0, 2, 4, 6, 8, 10, 12, 14)


def test_refusals() -> None:
    with pytest.raises(LayoutError, match="expected pp last, or edp"):
        RankMap(Layout(cp=2, pp=2, dp=2), read_order("tp-cp-ep-pp-dp"))
    with pytest.raises(LayoutError, match="rank order is 'tp-cp-pp-dp'"):
        read_order("tp-cp-pp-dp")
    with pytest.raises(LayoutError, match="expected each of tp, sp, cp, ep, dp, pp once"):
        RankMap(Layout(), ("tp", "pp"))
    with pytest.raises(LayoutError, match="rank 2 is not in the layout; expected 0 to 1"):
        RankMap(Layout(dp=2)).group("dp", 2)
    with pytest.raises(LayoutError, match="group kind 'mp' is unknown"):
        RankMap(Layout()).group("mp")  # type: ignore[arg-type]
    small = load_cluster("h100-sxm8").with_nodes(2)
    with pytest.raises(LayoutError, match="has 32 ranks and the machine 16 GPUs"):
        placements(RankMap(Layout(dp=32)), levels(small), 8)


def test_twelve_thousand_gpus_by_representatives() -> None:
    """MegaScale 175B: tensor-parallel groups in a node, eight data-parallel groups share its NICs."""
    cluster = load_cluster("a100-sxm8").with_nodes(1536)
    found = placements(RankMap(Layout(tp=8, pp=8, vpp=6, dp=192)), levels(cluster), 8)
    assert (found["tp"].level, found["tp"].nodes, found["tp"].node_groups) == ("nvlink", 1, 0)
    dp = found["dp"]
    assert (dp.size, dp.count, dp.nodes, dp.node_ranks, dp.node_groups) == (192, 64, 192, 1, 8)
    assert dp.node_members == tuple((device,) for device in range(8))
    assert dp.level == found["pp"].level == "spine"
    assert found["pp"].ranks == tuple(range(0, 12288, 1536))
    assert found["embedding"].ranks == (0, 7 * 1536)


def test_level_of_each_group() -> None:
    cluster = load_cluster("h100-sxm8").with_nodes(64)
    found = placements(RankMap(Layout(tp=4, cp=4, dp=32)), levels(cluster), 8)
    assert [level.name for level in levels(cluster)] == ["nvlink", "rail", "spine"]
    assert {kind: found[kind].level for kind in ("tp", "cp", "dp", "pp")} == {
        "tp": "nvlink",
        "cp": "rail",
        "dp": "spine",
        "pp": "",
    }
    assert found["cp"].node_members == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_a_group_across_the_edge_of_a_node_stands_for_its_kind() -> None:
    """TP 6 on nodes of eight: the first group fits into a node, the second does not."""
    cluster = load_cluster("h100-sxm8").with_nodes(3)
    tp = placements(RankMap(Layout(tp=6, dp=4)), levels(cluster), 8)["tp"]
    assert tp.level != "nvlink" and tp.nodes == 2
    assert tp.ranks in ((6, 7, 8, 9, 10, 11), (12, 13, 14, 15, 16, 17))


@settings(max_examples=100, deadline=None)
@given(layout=layouts(), kind=st.sampled_from(GROUP_KINDS), per_node=st.sampled_from((2, 4, 8)))
def test_the_representative_crosses_what_any_group_crosses(layout: Layout, kind: GroupKind, per_node: int) -> None:
    cluster = load_cluster("gh200-quad4").with_nodes(400)
    machine = levels(cluster)
    place = placements(RankMap(layout), machine, per_node)[kind]
    groups = enumerated(layout, ORDER, kind)

    def level_of(group: tuple[int, ...]) -> str:
        whole = [level.name for level in machine if group[0] // level.ranks == group[-1] // level.ranks]
        return whole[0] if len(group) > 1 else ""

    names = ["", *(level.name for level in machine)]
    assert place.level == max(map(level_of, groups), key=names.index)
    assert place.ranks in groups and level_of(place.ranks) == place.level
    sharing = [
        tuple(rank % per_node for rank in group if rank // per_node == node)
        for node in {rank // per_node for rank in place.ranks}
        for group in sorted(groups)
        if len({rank // per_node for rank in group}) > 1 and any(rank // per_node == node for rank in group)
    ]
    assert set(place.node_members) <= set(sharing)
    assert (place.nodes > 1) <= (place.node_groups > 0)

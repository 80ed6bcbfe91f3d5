"""Prices of routed tokens: bytes on each link in closed form, published tables, properties of all ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.cost.dispatch import NIC_SHARE, NVLINK_SHARE, DispatchModel, carried
from overlapsim.cost.group_collective import GroupModel, GroupPlace
from overlapsim.cost.prices import PriceBook
from overlapsim.errors import LayoutError
from overlapsim.hardware.loading import load_cluster
from overlapsim.workload.operators import CollectiveOp
from overlapsim.workload.routes import DEFAULT_SMS, Route

H800, H100 = load_cluster("h800-sxm8"), load_cluster("h100-sxm8")
METHODS = tuple(DEFAULT_SMS)
MIB = 2.0**20


def model(method: str, nodes: int, *, top_k=8, limit=0, sms: int | None = None, cluster=H800) -> DispatchModel:
    route = Route(method, top_k, 256, limit, DEFAULT_SMS[method] if sms is None else sms)
    return DispatchModel(cluster.with_nodes(nodes), route, GroupPlace(8 * nodes, nodes))


def test_what_links_carry() -> None:
    """One expert a token: half of two nodes' tokens cross, 7/8 of all go on inside; a copy each in low latency."""
    one = carried(Route("deepep", 1, 256), 16, 2)
    assert (one.nic, one.nvlink) == (pytest.approx(1 / 2), pytest.approx(7 / 8))
    every = carried(Route("low_latency", 8, 256), 16, 2)
    assert (every.nic, every.nvlink) == (pytest.approx(1 / 2), pytest.approx(7 / 16))
    # All experts of two nodes: a token crosses once instead of eight times.
    assert carried(Route("deepep", 16, 16), 16, 2).nic == pytest.approx(1 / 16)


@pytest.mark.parametrize(("nodes", "binding"), [(2, "nvlink"), (4, "nic"), (8, "nic")])
def test_which_link_binds_on_h800(nodes: int, binding: str) -> None:
    """Two nodes of H800 are bound by NVLink: why DeepEP's table reads less there than on four."""
    found = model("deepep", nodes, limit=4)
    size = 1024 * MIB
    times = {
        "nic": found.carried.nic * size / (NIC_SHARE * 50e9),
        "nvlink": found.carried.nvlink * size / (NVLINK_SHARE * 200e9),
    }
    assert max(times, key=lambda name: times[name]) == binding
    assert float(found.bandwidth_seconds(size)) == pytest.approx(max(times.values()), rel=0.05)


@given(
    st.sampled_from(METHODS), st.integers(1, 8), st.integers(1, 8), st.floats(0, 2e9), st.floats(1, 4),
    st.integers(0, 8),
)  # fmt: skip
def test_time_grows_with_bytes_and_never_beats_the_links(
    method: str, nodes: int, top_k: int, size: float, more: float, limit: int
) -> None:
    found = model(method, nodes, top_k=top_k, limit=limit)
    seconds = float(found.seconds(size))
    assert seconds <= float(found.seconds(size * more)) * (1 + 1e-9)
    assert float(found.bandwidth_seconds(size)) <= seconds * (1 + 1e-9)
    low, high = (float(found.seconds_at(size, end)) for end in ("low", "high"))
    assert low <= seconds <= high
    # What no way of the tokens can save: their copies' share that leaves the node once, over the NIC.
    assert seconds >= found.carried.nic * size / 50e9 * (1 - 1e-9)
    for demand in found.demands(size):
        assert demand.amount <= demand.capacity * seconds * (1 + 1e-9)


@given(st.integers(2, 8), st.integers(1, 7))
def test_fewer_nodes_allowed_is_never_slower(nodes: int, limit: int) -> None:
    limited, free = (float(model("deepep", nodes, limit=m).seconds(512 * MIB)) for m in (limit, 0))
    assert limited <= free * (1 + 1e-9)


def test_fewer_sms_are_never_faster_and_bind_when_few() -> None:
    times = [float(model("deepep", 4, sms=sms).seconds(512 * MIB)) for sms in (2, 6, 12, 24)]
    assert times == sorted(times, reverse=True) and times[0] > 1.5 * times[-1]


def test_hierarchical_is_two_exchanges_and_pays_where_tokens_share_nodes() -> None:
    """Top-8 of two nodes: a token crosses once where the library sends four copies; top-1 gains nothing."""
    size = 512 * MIB
    library = GroupModel(H100.with_nodes(2), "all_to_all", GroupPlace(16, 2, 400e9))
    assert float(model("hierarchical", 2, cluster=H100).seconds(size)) < float(library.seconds(size))
    assert float(model("hierarchical", 2, top_k=1, cluster=H100).seconds(size)) > float(library.seconds(size))
    one_node = model("hierarchical", 1, top_k=1, cluster=H100)
    alone = GroupModel(H100, "all_to_all", GroupPlace(8))
    assert float(one_node.seconds(size)) == pytest.approx(float(alone.seconds(size)))


def test_an_exchange_is_not_held_up_by_rings_of_its_node() -> None:
    """Where a ring through the node gets half of the NICs, an exchange gets all."""
    place = GroupPlace(16, 2, 200e9, nic_load=2.0)
    free = GroupPlace(16, 2, 400e9)
    slow, fast = (float(GroupModel(H100.with_nodes(2), "all_to_all", p).seconds(2**30)) for p in (place, free))
    assert slow == fast
    slow, fast = (float(GroupModel(H100.with_nodes(2), "all_gather", p).seconds(2**30)) for p in (place, free))
    assert slow > 1.5 * fast


def test_price_book_knows_routes() -> None:
    book = PriceBook(H800.with_nodes(4), 32)
    plain = CollectiveOp("all_to_all", 256 * MIB, 32)
    routed = {method: CollectiveOp("all_to_all", 256 * MIB, 32, route=Route(method, 8, 256, 0, DEFAULT_SMS[method]))
              for method in METHODS}  # fmt: skip
    assert book.held_sms(routed["deepep"]) == 24 and book.held_sms(routed["low_latency"]) == 0
    assert book.held_sms(routed["hierarchical"]) == book.held_sms(plain) == book.comm_sms("all_to_all")
    for method, op in routed.items():
        assert book.collective(op).duration_s == book.flow(op)[0]
        assert book.best_collective_s(op) <= book.flow(op)[0]
        codes = [finding.code for finding in book.route_findings(op)]
        assert codes == ([] if method == "hierarchical" else ["dispatch_kernels_assumed"])
    assert book.flow(routed["deepep"])[0] < book.flow(plain)[0]
    assert not book.route_findings(plain)


def test_machines_that_cannot() -> None:
    with pytest.raises(LayoutError, match="write into peers' memory"):
        DispatchModel(load_cluster("rtx4090-pcie8"), Route("deepep", 2, 8), GroupPlace(8))
    # Bridges join pairs of PCIe cards: two GPUs can, a node cannot. The library's exchanges need no NVLink.
    bridges, pcie, deepep = load_cluster("a100-pcie8"), load_cluster("rtx4090-pcie8"), Route("deepep", 2, 8, sms=24)
    with pytest.raises(LayoutError, match="over NVLink"):
        DispatchModel(bridges, deepep, GroupPlace(8))
    assert float(DispatchModel(bridges, deepep, GroupPlace(2)).seconds(MIB)) > 0
    assert float(DispatchModel(pcie, Route("hierarchical", 2, 8), GroupPlace(8)).seconds(MIB)) > 0
    with pytest.raises(LayoutError, match="on 133 SMs"):
        DispatchModel(H800, Route("deepep", 2, 8, sms=133), GroupPlace(8))

"""Prices by fits: ranks that were not measured, nodes, neighbours, what is said of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.collective import CollectiveModel, busbw_bytes_per_s, collective_cost
from overlapsim.cost.collective_curves import between_ranks, knots_of
from overlapsim.cost.fabric import FabricModel, fabric_prior, nic_bus_bytes_per_s
from overlapsim.cost.fitted import fitted_price, one_node_model
from overlapsim.cost.structural import BRANCHES
from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.topology import links
from overlapsim.workload.operators import CollectiveOp

MIB = 2.0**20
quick = settings(deadline=None, max_examples=40)
FITTED = {name: load_cluster(name) for name in ("a100-sxm8", "h100-sxm8", "h200-sxm8", "b200-sxm8", "b300-sxm8")}
RINGS = ("all_reduce", "all_gather", "reduce_scatter")


@pytest.mark.parametrize("name", sorted(FITTED))
def test_unmeasured_rank_counts_are_priced_by_the_fit(name):
    cluster = FITTED[name]
    for kind in (*RINGS, "all_to_all"):
        model = CollectiveModel(cluster, kind, 6)
        assert model.basis == "fit" and model.curve is None
        four, six, eight = (float(CollectiveModel(cluster, kind, n).seconds(256 * MIB)) for n in (4, 6, 8))
        if kind != "all_reduce":
            assert 0.9 * four < six < 1.1 * eight
        assert [finding.code for finding in model.findings] == ["curve_fitted"]


def test_nvls_takes_over_at_six_ranks_on_h200():
    """8 GiB all-reduce of 8 H200: 363 GB/s by ring at 4 ranks, 436 at 6 and 473 at 8 by NVLS (public ramp)."""
    cluster = FITTED["h200-sxm8"]
    seen = []
    for ranks in (4, 6, 8):
        model = CollectiveModel(replace(cluster, curves={}), "all_reduce", ranks)
        seen.append(busbw_bytes_per_s("all_reduce", ranks, 2.0**33, float(model.seconds(2.0**33))) / 1e9)
        assert model.algorithm(2.0**33) == ("ring" if ranks == 4 else "nvls")
    assert seen[0] == pytest.approx(363, rel=0.05)
    assert seen[1] == pytest.approx(436, rel=0.08) and seen[2] == pytest.approx(473, rel=0.12)


def test_16_gib_all_reduce_beyond_every_table_of_p5():
    """The aic table ends at 512 MiB; p5's 16 GiB took 62.2 ms: its slope, not a constant bandwidth, goes on."""
    assert float(CollectiveModel(FITTED["h100-sxm8"], "all_reduce", 8).seconds(2.0**34)) == pytest.approx(
        62.2e-3, rel=0.05
    )


@quick
@given(st.sampled_from(sorted(FITTED)), st.sampled_from(RINGS), st.integers(2, 8), st.floats(1, 2.0**36))
def test_every_branch_rises_with_size_and_stays_above_the_wires(name, kind, ranks, size):
    cluster = FITTED[name]
    model = one_node_model(cluster)
    for branch in BRANCHES[:3]:
        low, high = model.branch_seconds(kind, ranks, np.array([size, 1.2 * size]), branch)
        assert low <= high
    seconds = float(CollectiveModel(replace(cluster, curves={}), kind, ranks).seconds(size))
    assert seconds >= wire_lower_bound_s(cluster, ranks, kind, size) * (1 - 1e-9)


@quick
@given(st.sampled_from((*RINGS, "all_to_all")), st.integers(2, 8), st.floats(1, 2.0**36), st.floats(0.05, 1))
def test_slower_links_never_make_a_branch_faster(kind, ranks, size, factor):
    cluster = FITTED["h100-sxm8"]
    node = replace(cluster.node, nvlink_bandwidth_bytes_per_s=450e9 * factor)
    fast, slow = one_node_model(cluster), one_node_model(replace(cluster, node=node))
    if kind == "all_to_all":
        assert slow.pair_seconds(kind, ranks, np.array([size])) >= fast.pair_seconds(kind, ranks, np.array([size]))
        return
    for branch in BRANCHES[:3]:
        before, after = (model.branch_seconds(kind, ranks, np.array([size]), branch) for model in (fast, slow))
        assert after >= before * (1 - 1e-12)


def test_knots_reproduce_the_price_and_its_steps():
    cluster = FITTED["b200-sxm8"]
    model = one_node_model(cluster)
    exact = np.linspace(1 * MIB, 64 * MIB, 997)
    lines = CollectiveModel(replace(cluster, curves={}), "all_gather", 4).seconds(exact)
    assert np.abs(lines / model.seconds("all_gather", 4, exact) - 1).max() < 3e-3
    step = knots_of(lambda sizes: np.where(sizes < 1000.5, 1e-6, 3e-6))
    assert np.interp([999.0, 1002.0], *step) == pytest.approx([1e-6, 3e-6])


def test_links_and_sms_are_those_of_the_algorithm_the_library_runs():
    large, small = (
        collective_cost(CollectiveOp("all_reduce", int(size), 8), FITTED["h100-sxm8"]) for size in (2**28, 2**16)
    )
    assert (large.sm, small.sm) == (16, 24)
    out = {d.resource: d for d in large.demands}["nvlink_out[0]"]
    assert out.amount == pytest.approx(2**28 * 1.125)
    for cost in (large, small):
        assert all(d.amount <= cost.duration_s * d.capacity * (1 + 1e-9) for d in cost.demands)


def test_two_nodes_by_the_fabrics_own_hop():
    """Smallest all-reduce of 16 H100: about 30 us on InfiniBand, 70 on EFA, 124 on TCPXO."""
    found = []
    for name in ("h100-sxm8", "h100-sxm8-p5", "h100-sxm8-a3-mega"):
        found.append(float(CollectiveModel(load_cluster(name).with_nodes(2), "all_reduce", 16).seconds(64)) * 1e6)
    assert found == pytest.approx([30, 70, 124], rel=0.12)


def test_two_node_all_reduce_beats_the_rings_nics():
    pod = load_cluster("h100-sxm8-p5").with_nodes(2)
    seconds = float(CollectiveModel(pod, "all_reduce", 16).seconds(2.0**34))
    assert busbw_bytes_per_s("all_reduce", 16, 2.0**34, seconds) / 1e9 == pytest.approx(487, rel=0.05)
    assert nic_bus_bytes_per_s("all_reduce", 16, 2, 400e9) == 750e9


@quick
@given(st.sampled_from([2, 3, 8, 64, 512]), st.sampled_from((*RINGS, "all_to_all", "broadcast")), st.floats(1, 2.0**36))
def test_fabric_time_rises_with_size_and_falls_with_nic_rate(nodes, kind, size):
    cluster = FITTED["h100-sxm8"]
    parameters = fabric_prior(cluster)
    slow, fast = (FabricModel(parameters, 5e-6, 1e-6, 8 * nodes, nodes, nic) for nic in (200e9, 400e9))
    at = np.array([size, 1.5 * size])
    assert slow.seconds(kind, at)[0] <= slow.seconds(kind, at)[1]
    assert (fast.seconds(kind, at) <= slow.seconds(kind, at) * (1 + 1e-12)).all()


def test_a_node_that_is_not_full_uses_the_nics_of_its_own_gpus():
    """All-to-all of 2 x 2 GPUs leaves each node by two NICs, not by eight."""
    cluster = load_cluster("h100-sxm8").with_nodes(2)
    few, all_ = (fitted_price(cluster, "all_to_all", ranks, 2).seconds(np.array([2.0**32]))[0] for ranks in (4, 16))
    assert few == pytest.approx(all_, rel=0.02)


def test_thousands_of_ranks():
    pod = load_cluster("h100-sxm8").with_nodes(256)
    model = CollectiveModel(pod, "all_reduce", 2048)
    seconds = model.seconds([1.0, 2.0**30, 2.0**34])
    assert (np.diff(seconds) > 0).all()
    # NIC-bound: 400 GB/s a node, trees of 256 nodes.
    busbw = busbw_bytes_per_s("all_reduce", 2048, 2.0**34, float(seconds[-1])) / 1e9
    assert 330 < busbw < 400


def test_pcie_ranks_between_two_tables():
    cluster = load_cluster("l40s-pcie8")
    model = CollectiveModel(cluster, "all_gather", 6)
    assert model.basis == "neighbours"
    four, six, eight = (float(CollectiveModel(cluster, "all_gather", n).seconds(64 * MIB)) for n in (4, 6, 8))
    assert four < six < eight
    assert [finding.code for finding in model.findings] == ["curve_between"]
    assert between_ranks(cluster, "all_gather", 16, 1) is None


def test_machines_without_data_say_so():
    model = CollectiveModel(load_cluster("mi355x8"), "all_gather", 8)
    assert model.basis == "prior" and not collective_cost(CollectiveOp("all_gather", 2**20, 8), model.cluster).in_range
    (finding,) = model.findings
    assert finding.code == "not_calibrated" and "not calibrated" in finding.message
    # A known node on a fabric that nobody measured.
    (finding,) = CollectiveModel(load_cluster("h100-sxm8").with_nodes(2), "all_reduce", 16).findings
    assert finding.code == "not_calibrated" and "collective.fabric" in finding.message


def test_a_site_floor_holds_from_below():
    model = CollectiveModel(FITTED["h100-sxm8"], "all_reduce", 8, floor_s=44e-6)
    plain = CollectiveModel(FITTED["h100-sxm8"], "all_reduce", 8)
    assert float(model.seconds(1024)) == 44e-6
    assert float(model.seconds(64 * MIB)) == float(plain.seconds(64 * MIB))


def test_a_slower_sister_is_slowed_at_the_links_rate_only():
    fast, slow = (load_cluster(name) for name in ("h100-sxm8", "h800-sxm8"))
    for size, least, most in ((4096, 0.99, 1.01), (512 * MIB, 1.9, 2.26)):
        ratio = float(
            fitted_price(slow, "all_gather", 8, 1).seconds(np.array([float(size)]))[0]
            / fitted_price(fast, "all_gather", 8, 1).seconds(np.array([float(size)]))[0]
        )
        assert least <= ratio <= most
    assert links(slow)["nvlink_out[0]"] == 200e9

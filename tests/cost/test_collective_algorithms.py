"""Wire bytes of every algorithm against closed forms, SMs, and where each can run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.algorithms import CATALOGUE, algorithms_for, checked_algorithm, wire_bytes
from overlapsim.errors import UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.wire import ring_wire_bytes

H100 = load_cluster("h100-sxm8")
PODS = {nodes: H100.with_nodes(nodes) for nodes in (1, 2, 4)}
S = 1e9
quick = settings(deadline=None, max_examples=60)
placed = st.sampled_from([(name, kind) for name, spec in CATALOGUE.items() for kind in sorted(spec.kinds)])


def sums(loads, prefix):
    return {link: amount for link, amount in loads.items() if link.startswith(prefix)}


@pytest.mark.parametrize(
    ("algorithm", "kind", "out", "into"),
    [
        ("tree", "all_reduce", 2 * 7 / 8, 2 * 7 / 8),
        ("nvls", "all_reduce", 1 + 1 / 8, 1 + 1 / 8),
        ("nvls", "all_gather", 1 / 8, 1),
        ("nvls", "reduce_scatter", 1, 1 / 8),
        ("one_shot", "all_reduce", 7, 7),
        ("two_shot", "all_reduce", 2 * 7 / 8, 2 * 7 / 8),
        ("copy_engine", "all_gather", 7 / 8, 7 / 8),
        ("pairwise", "all_to_all", 7 / 8, 7 / 8),
        ("ring", "all_reduce", 2 * 7 / 8, 2 * 7 / 8),
        ("ring", "all_gather", 7 / 8, 7 / 8),
    ],
)
def test_nvlink_bytes_of_one_node(algorithm, kind, out, into):
    loads = wire_bytes(PODS[1], 8, algorithm, kind, S)
    assert sums(loads, "nvlink_out").values() == pytest.approx([out * S] * 8)
    assert sums(loads, "nvlink_in").values() == pytest.approx([into * S] * 8)
    assert not sums(loads, "nic")


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize(
    ("algorithm", "kind", "nvlink", "nic"),
    [
        # By nodes k and ranks n = 8 k: bytes of one GPU over NVLink and over its NIC.
        ("tree", "all_reduce", lambda k, n: 2 * 7 / 8, lambda k, n: 2 * (k - 1) / k / 8),
        ("nvls_tree", "all_reduce", lambda k, n: 1 + 1 / 8, lambda k, n: 2 * (k - 1) / k / 8),
        ("collnet", "all_reduce", lambda k, n: 2 * 7 / 8, lambda k, n: 1 / 8),
        ("collnet", "all_gather", lambda k, n: 7 / 8, lambda k, n: 1 / 8),
        ("pairwise", "all_to_all", lambda k, n: 7 / n, lambda k, n: (n - 8) / n),
        ("two_level", "all_to_all", lambda k, n: 7 / n + (n - 8) / n * 7 / 8, lambda k, n: (n - 8) / n),
    ],
)
def test_bytes_across_nodes(algorithm, kind, nvlink, nic, nodes):
    ranks = 8 * nodes
    loads = wire_bytes(PODS[nodes], ranks, algorithm, kind, S)
    assert sums(loads, "nvlink_out").values() == pytest.approx([nvlink(nodes, ranks) * S] * ranks)
    assert sums(loads, "nic_out").values() == pytest.approx([nic(nodes, ranks) * S] * ranks)
    assert sums(loads, "nic_in").values() == pytest.approx([nic(nodes, ranks) * S] * ranks)


def test_pat_goes_over_the_nics_alone():
    pod = load_cluster("h100-sxm8").with_nodes(4)
    loads = wire_bytes(pod, (0, 8, 16, 24), "pat", "all_gather", S)
    assert set(sums(loads, "nic_out").values()) == {0.75 * S} and not sums(loads, "nvlink")


def test_two_level_sends_one_copy_a_node():
    once = wire_bytes(PODS[2], 16, "two_level", "all_to_all", S)
    folded = wire_bytes(PODS[2], 16, "two_level", "all_to_all", S, dedup=4.0)
    assert folded["nic_out[0.0]"] == pytest.approx(once["nic_out[0.0]"] / 4)
    assert folded["nvlink_out[0]"] == once["nvlink_out[0]"]


def test_ring_is_the_hardware_rooms_ring():
    assert wire_bytes(PODS[2], 16, "ring", "all_gather", S) == ring_wire_bytes(PODS[2], 16, "all_gather", S)


@quick
@given(placed, st.permutations(range(16)), st.integers(2, 16), st.floats(1.0, 1e10))
def test_order_of_ranks_changes_nothing(pair, order, count, size):
    algorithm, kind = pair
    devices = order[:count]
    try:
        first = wire_bytes(PODS[2], devices, algorithm, kind, size)
    except UsageError:
        return
    assert wire_bytes(PODS[2], list(reversed(devices)), algorithm, kind, size) == first


@quick
@given(placed, st.sampled_from([2, 4, 8, 16, 32]), st.floats(1.0, 1e10), st.floats(1.0, 8.0))
def test_bytes_are_proportional_to_size(pair, ranks, size, factor):
    algorithm, kind = pair
    try:
        small = wire_bytes(PODS[4], ranks, algorithm, kind, size)
    except UsageError:
        return
    large = wire_bytes(PODS[4], ranks, algorithm, kind, size * factor)
    assert large == pytest.approx({link: amount * factor for link, amount in small.items()})


def test_where_each_can_run():
    assert algorithms_for(PODS[1], "all_reduce", 8) == ("ring", "tree", "nvls", "one_shot", "two_shot")
    assert algorithms_for(PODS[2], "all_reduce", 16) == ("ring", "tree", "nvls_tree")
    assert algorithms_for(PODS[2], "all_to_all", 16) == ("pairwise", "two_level")
    # No NVLS on Ampere; no peer access on a 4090.
    assert "nvls" not in algorithms_for(load_cluster("a100-sxm8"), "all_reduce", 8)
    assert algorithms_for(load_cluster("rtx4090-pcie8"), "all_reduce", 4) == ("ring", "tree")


def test_sms():
    assert CATALOGUE["tree"].num_sms("hopper") == 32
    assert (CATALOGUE["nvls_tree"].num_sms("hopper"), CATALOGUE["nvls_tree"].num_sms("hopper", registered=True)) == (
        16,
        4,
    )
    assert (CATALOGUE["nvls"].num_sms("hopper"), CATALOGUE["nvls"].num_sms("blackwell")) == (16, 24)
    assert CATALOGUE["copy_engine"].num_sms("hopper") == 0


def test_refusals():
    with pytest.raises(UsageError, match="unknown; expected one of ring"):
        checked_algorithm("rings", "all_reduce")
    with pytest.raises(UsageError, match="NVLS does not run all_to_all; expected one of copy_engine"):
        wire_bytes(PODS[1], 8, "nvls", "all_to_all", S)
    with pytest.raises(UsageError, match="NVLSTree does not run on one node"):
        wire_bytes(PODS[1], 8, "nvls_tree", "all_reduce", S)
    with pytest.raises(UsageError, match="needs an NVSwitch"):
        wire_bytes(load_cluster("l40s-pcie8"), 8, "nvls", "all_reduce", S)
    assert wire_bytes(PODS[1], 1, "ring", "all_reduce", S) == {}

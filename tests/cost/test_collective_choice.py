"""The tuner's choice where measured curves jump, and the best algorithm in an objective."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.algorithms import algorithms_for
from overlapsim.cost.choice import OBJECTIVES, algorithm_seconds, choose
from overlapsim.cost.tuner import TunerMachine, available, estimate_s, latency_s, library_choice
from overlapsim.errors import UsageError
from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.loading import load_cluster

MIB = 2.0**20
quick = settings(deadline=None, max_examples=50)
CLUSTERS = {name: load_cluster(name) for name in ("a100-sxm8", "h100-sxm8", "b200-sxm8")}
PODS = {name: cluster.with_nodes(4) for name, cluster in CLUSTERS.items()}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
asked = st.tuples(st.sampled_from(sorted(PODS)), st.sampled_from(KINDS), st.sampled_from([2, 3, 4, 6, 8, 16, 32]))
sizes = st.floats(1.0, 2.0**34)


def machine(architecture, ranks, **changes):
    sheet = {"ampere": 300e9, "hopper": 450e9, "blackwell": 900e9}[architecture]
    reduces = architecture != "ampere"
    fields = {"switch_reduction": reduces, "nvls_channels": 24 if architecture == "blackwell" else 16, **changes}
    return TunerMachine(architecture, "nvlink", sheet, 200e9, ranks, **fields)


# Sizes (MiB) between which the measured all-gather or all-reduce jumps on one node: the tuner leaves LL, or LL128,
# there and nowhere below (tables of NCCL 2.27.3 and 2.29.2).
@pytest.mark.parametrize(
    ("architecture", "kind", "ranks", "before", "after"),
    [
        ("ampere", "all_gather", 2, 1, 2),
        ("ampere", "all_gather", 4, 1, 2),
        ("ampere", "all_reduce", 2, 0.5, 1),
        ("hopper", "all_gather", 4, 2, 4),
        ("blackwell", "all_gather", 4, 4, 8),
        ("blackwell", "all_gather", 8, 8, 16),
        ("blackwell", "all_reduce", 2, 2, 4),
        ("blackwell", "all_reduce", 4, 4, 8),
    ],
)
def test_the_tuner_switches_to_simple_where_curves_jump(architecture, kind, ranks, before, after):
    pairs, index = library_choice(machine(architecture, ranks), kind, np.array([before, after]) * MIB)
    assert pairs[index[0]] != ("ring", "simple") and pairs[index[1]] == ("ring", "simple")


def test_nvls_from_five_ranks_on_hopper_and_six_on_blackwell():
    for architecture, first in (("hopper", 5), ("blackwell", 6)):
        for ranks in range(2, 9):
            pairs, index = library_choice(machine(architecture, ranks), "all_reduce", [256 * MIB])
            assert (pairs[index[0]][0] == "nvls") is (ranks >= first)
    # Ring LL to 1 MiB and NVLS from 2 MiB on eight H200.
    pairs, index = library_choice(machine("hopper", 8), "all_reduce", [MIB, 2 * MIB])
    assert [pairs[i] for i in index] == [("ring", "ll"), ("nvls", "simple")]


def test_published_latencies():
    eight = machine("ampere", 8)
    assert latency_s(eight, "all_reduce", "ring", "ll") == pytest.approx((6.6 + 14 * 0.6) * 1e-6)
    assert latency_s(eight, "all_reduce", "tree", "simple") == pytest.approx((8.4 + 14 * 4.0) * 1e-6)
    two = machine("hopper", 16, nodes=2)
    assert latency_s(two, "all_reduce", "nvls_tree", "simple") == pytest.approx((25 + 2 * 20.9) * 1e-6)
    assert latency_s(two, "all_reduce", "tree", "ll") == pytest.approx((6.8 + 2 * (7 * 0.6 + 5)) * 1e-6)
    one_each = machine("hopper", 4, nodes=4)
    assert latency_s(one_each, "all_gather", "pat", "simple") == pytest.approx((8 + 2 * 14 / 3.5 + 2.8 * 4) * 1e-6)


def test_availability_rules():
    assert not available(machine("hopper", 8), "all_reduce", "nvls_tree", "simple")
    assert available(machine("hopper", 16, nodes=2), "all_reduce", "nvls_tree", "simple")
    assert not available(machine("hopper", 16, nodes=2), "all_reduce", "nvls", "simple")
    assert available(machine("hopper", 16, nodes=2, collnet=True), "all_reduce", "collnet_direct", "simple")
    assert available(machine("hopper", 4, nodes=4), "all_gather", "pat", "simple")
    assert not available(machine("hopper", 16, nodes=2), "all_gather", "pat", "simple")
    assert np.isinf(estimate_s(machine("ampere", 8), "all_reduce", "nvls", "simple", 1.0))
    with pytest.raises(UsageError, match="multiple of the nodes"):
        machine("hopper", 9, nodes=2)


@quick
@given(asked, sizes, st.sampled_from(OBJECTIVES))
def test_the_choice_is_never_worse_than_any_forced_algorithm(what, size, objective):
    name, kind, ranks = what
    best = choose(PODS[name], kind, size, ranks, objective).best
    for algorithm in algorithms_for(PODS[name], kind, ranks):
        forced = choose(PODS[name], kind, size, ranks, objective, forced=algorithm)
        assert best.objective_s <= forced.best.objective_s
        assert forced.best.algorithm == algorithm


@quick
@given(asked, st.lists(sizes, min_size=2, max_size=12))
def test_at_one_algorithm_time_never_falls_with_bytes_nor_below_the_wires(what, asked_sizes):
    name, kind, ranks = what
    ordered = np.sort(asked_sizes)
    for algorithm in algorithms_for(PODS[name], kind, ranks):
        times = algorithm_seconds(PODS[name], kind, ranks, algorithm, ordered)
        assert (np.diff(times) >= -1e-12 * times[1:]).all()
        bound = np.array([wire_lower_bound_s(PODS[name], ranks, kind, size) for size in ordered])
        assert (times >= bound * (1 - 1e-9)).all()


@quick
@given(asked, sizes, st.floats(0.1, 1.0))
def test_at_one_algorithm_time_never_falls_when_links_shrink(what, size, factor):
    name, kind, ranks = what
    wide = PODS[name]
    node = wide.node
    narrow = replace(
        wide,
        node=replace(
            node,
            nvlink_bandwidth_bytes_per_s=factor * node.nvlink_bandwidth_bytes_per_s,
            nic_bandwidth_bytes_per_s=factor * node.nic_bandwidth_bytes_per_s,
        ),
    )
    for algorithm in algorithms_for(wide, kind, ranks):
        before, after = (float(algorithm_seconds(pod, kind, ranks, algorithm, [size])[0]) for pod in (wide, narrow))
        assert after >= before * (1 - 1e-9)


def test_b06_nvls_tree_and_tree_are_equally_fast_and_differ_in_sms():
    """NVIDIA/nccl issue 1649: about 370 to 380 GB/s either way; 16 SMs (4 registered) against 32."""
    pod, size, ranks = load_cluster("h100-sxm8").with_nodes(16), 4 * 1024 * MIB, 128
    found = {one.algorithm: one for one in choose(pod, "all_reduce", size, ranks).alternatives}
    busbw = {name: size * 2 * (ranks - 1) / ranks / one.seconds / 1e9 for name, one in found.items()}
    assert busbw["tree"] == pytest.approx(375, rel=0.07) and busbw["nvls_tree"] == pytest.approx(375, rel=0.07)
    assert (found["nvls_tree"].sms, found["tree"].sms) == (16, 32)
    both = choose(pod, "all_reduce", size, ranks, "time_and_sms")
    assert both.best.algorithm == "nvls_tree" and both.library == "nvls_tree"
    # What a GEMM beside it loses: the share of 132 SMs times the time.
    tree = next(one for one in both.alternatives if one.algorithm == "tree")
    assert tree.objective_s == pytest.approx(tree.seconds * (1 + 32 / 132))
    registered = choose(pod, "all_reduce", size, ranks, "time_and_sms", registered=True).best
    assert registered.sms == 4 and registered.objective_s < both.best.objective_s


@pytest.mark.parametrize(
    ("cluster", "ranks", "algorithm", "size", "measured_us"),
    [
        # Custom all-reduce of two inference engines (TensorRT-LLM 1.3, vLLM 0.24 in a CUDA graph), bf16.
        ("h100-sxm8", 8, "one_shot", 1024, 3.2),
        ("h100-sxm8", 8, "one_shot", 2**17, 6.2),
        ("h100-sxm8", 8, "one_shot", 2**20, 26.0),
        ("h100-sxm8", 2, "one_shot", 2**20, 6.1),
        ("b200-sxm8", 8, "one_shot", 1024, 5.4),
        ("b200-sxm8", 8, "one_shot", 2**20, 17.8),
        ("h100-sxm8", 8, "two_shot", 2**24, 92.4),
        ("h100-sxm8", 4, "two_shot", 2**24, 98.8),
    ],
)
def test_custom_all_reduce_kernels(cluster, ranks, algorithm, size, measured_us):
    seconds = float(algorithm_seconds(CLUSTERS[cluster], "all_reduce", ranks, algorithm, [size])[0])
    assert seconds * 1e6 == pytest.approx(measured_us, rel=0.15)


def test_small_all_reduce_goes_to_one_shot_and_large_ones_to_the_switch():
    small, large = (choose(CLUSTERS["h100-sxm8"], "all_reduce", size, 8).best for size in (4096, 256 * MIB))
    assert (small.algorithm, large.algorithm) == ("one_shot", "nvls")
    assert small.seconds < 0.3 * choose(CLUSTERS["h100-sxm8"], "all_reduce", 4096, 8, forced="ring").best.seconds


def test_the_objective_can_change_the_answer():
    """Copy engines are slower than the ring's kernels for small gathers, and take no SM."""
    cluster = CLUSTERS["h100-sxm8"]
    fast, lean = (choose(cluster, "all_gather", 256 * MIB, 8, objective).best for objective in OBJECTIVES)
    assert lean.sms <= fast.sms
    assert (
        lean.objective_s <= choose(cluster, "all_gather", 256 * MIB, 8, "time_and_sms", forced="ring").best.objective_s
    )


def test_caps_and_refusals():
    cluster = CLUSTERS["h100-sxm8"]
    assert choose(cluster, "all_reduce", MIB, 8, sms=8, forced="ring").best.sms == 8
    with pytest.raises(UsageError, match="objective 'energy' is unknown"):
        choose(cluster, "all_reduce", MIB, 8, "energy")
    with pytest.raises(UsageError, match="does not run on several nodes"):
        choose(PODS["h100-sxm8"], "all_reduce", MIB, 16, forced="nvls")

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.base import hbm_rate
from overlapsim.cost.collective import (
    FALLBACK,
    CollectiveModel,
    algbw_bytes_per_s,
    busbw_bytes_per_s,
    busbw_factor,
    collective_cost,
    num_steps,
)
from overlapsim.cost.curve import Curve
from overlapsim.errors import LayoutError, UsageError
from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import CurveKey, CurveTable, Source
from overlapsim.hardware.topology import links
from overlapsim.hardware.wire import bottleneck, ring_wire_bytes
from overlapsim.workload.operators import COLLECTIVES, CollectiveOp
from tests.cost.machines import A100, nvlink_cluster

POD = nvlink_cluster()
kinds = st.sampled_from(COLLECTIVES)
ranks_of_pod = st.sampled_from([2, 3, 4, 5, 8, 16, 24, 32])
byte_sizes = st.floats(1, 2.0**36)
quick = settings(deadline=None, max_examples=100)

MIB = 2.0**20
TABLE = CurveTable((MIB, 2 * MIB, 4 * MIB), (20e-6, 30e-6, 50e-6), Source("measured", "nccl-tests log"))


# base 8 us, hop 1 us, 300 GB/s at 0.75: 225 GB/s of bus bandwidth inside a node.
@pytest.mark.parametrize(
    ("kind", "ranks", "latency_us", "bytes_per_size"),
    [
        ("all_reduce", 8, 8 + 14, 1.75),
        ("all_reduce", 2, 8 + 2, 1.0),
        ("all_gather", 8, 8 + 7, 0.875),
        ("reduce_scatter", 4, 8 + 3, 0.75),
        ("all_to_all", 8, 8 + 7, 0.875),
        ("broadcast", 8, 8 + 7, 1.0),
        ("send_recv", 2, 8 + 1, 1.0),
    ],
)
def test_latency_plus_wire_bytes_inside_a_node(kind, ranks, latency_us, bytes_per_size):
    size = 512 * MIB
    expected = latency_us * 1e-6 + size * bytes_per_size / 225e9
    assert collective_cost(CollectiveOp(kind, size, ranks), POD).duration_s == pytest.approx(expected)
    assert float(CollectiveModel(POD, kind, ranks).seconds(0)) == pytest.approx(latency_us * 1e-6)


@pytest.mark.parametrize(
    ("kind", "ranks", "latency_us", "bytes_per_size"),
    [
        # Two of the thirty steps of a sixteen-rank ring cross between nodes; eight NICs share its bytes.
        ("all_reduce", 16, 8 + 28 + 2 * 10, 2 * 15 / 16 / 8),
        ("all_gather", 32, 8 + 28 + 3 * 10, 31 / 32 / 8),
        ("broadcast", 16, 8 + 14 + 10, 1 / 8),
        # Half of what each GPU sends to its peers leaves the node, through its own NIC.
        ("all_to_all", 16, 8 + 14 + 10, 8 / 16),
    ],
)
def test_latency_and_nics_between_nodes(kind, ranks, latency_us, bytes_per_size):
    size = 1024 * MIB
    expected = latency_us * 1e-6 + size * bytes_per_size / (25e9 * 0.75)
    assert collective_cost(CollectiveOp(kind, size, ranks), POD).duration_s == pytest.approx(expected)


@quick
@given(kinds, ranks_of_pod, byte_sizes)
def test_fallback_is_never_below_wire_bytes_over_link_rate(kind, ranks, size):
    seconds = float(CollectiveModel(POD, kind, ranks).seconds(size))
    assert seconds > bottleneck(POD, ring_wire_bytes(POD, ranks, kind, size)).time_s
    assert seconds > wire_lower_bound_s(POD, ranks, kind, size)


@quick
@given(kinds, ranks_of_pod, st.lists(byte_sizes, min_size=2, max_size=20))
def test_fallback_never_falls_with_size(kind, ranks, sizes):
    assert (np.diff(CollectiveModel(POD, kind, ranks).seconds(np.sort(sizes))) >= 0).all()


@quick
@given(kinds, ranks_of_pod, byte_sizes)
def test_demands_are_the_wire_bytes_and_fit_in_the_duration(kind, ranks, size):
    cost = collective_cost(CollectiveOp(kind, size, ranks), POD)
    wire = ring_wire_bytes(POD, ranks, kind, size)
    on_links = {d.resource: d.amount for d in cost.demands if not d.resource.startswith("hbm")}
    assert on_links == pytest.approx({link: amount for link, amount in wire.items() if amount > 0})
    memory = [d for d in cost.demands if d.resource.startswith("hbm")]
    capacity = {d.resource: d.capacity for d in cost.demands}
    assert all(capacity[link] == pytest.approx(0.75 * links(POD)[link]) for link in on_links)
    assert len(memory) == ranks and {d.capacity for d in memory} == {hbm_rate(A100)}
    assert all(d.amount <= cost.duration_s * d.capacity * (1 + 1e-9) for d in cost.demands)


def test_hbm_traffic_is_two_to_three_bytes_a_wire_byte():
    for kind in COLLECTIVES:
        cost = collective_cost(CollectiveOp(kind, 64 * MIB, 8), POD)
        amounts = {d.resource: d.amount for d in cost.demands}
        assert 2 <= amounts["hbm[0]"] / (64 * MIB * busbw_factor(kind, 8)) <= 3


def test_fallback_is_marked_as_a_prior():
    cost = collective_cost(CollectiveOp("all_reduce", MIB, 8), POD)
    assert (cost.source.layer, cost.in_range, cost.spread) == ("prior", False, FALLBACK)
    assert (cost.sm, cost.family) == (16, "collective")


def test_one_rank_moves_nothing():
    cost = collective_cost(CollectiveOp("all_reduce", MIB, 1), POD)
    assert (cost.duration_s, cost.sm, cost.demands) == (0.0, 0, ())
    assert float(CollectiveModel(POD, "all_reduce", 1).seconds(MIB)) == 0.0


def test_a_measured_curve_replaces_the_model():
    measured = replace(POD, curves={CurveKey("all_reduce", 8, 1): TABLE})
    inside = collective_cost(CollectiveOp("all_reduce", 3 * MIB, 8), measured)
    assert inside.duration_s == pytest.approx(40e-6)
    assert inside.in_range and inside.source == TABLE.source
    assert inside.demands == collective_cost(CollectiveOp("all_reduce", 3 * MIB, 8), POD).demands
    for size in (0.5 * MIB, 5 * MIB):
        assert not collective_cost(CollectiveOp("all_reduce", size, 8), measured).in_range
    # Other ranks and kinds were not measured.
    for op in (CollectiveOp("all_reduce", 3 * MIB, 4), CollectiveOp("all_gather", 3 * MIB, 8)):
        assert collective_cost(op, measured) == collective_cost(op, POD)


def test_a_given_curve_comes_before_the_clusters():
    measured = replace(POD, curves={CurveKey("all_reduce", 8, 1): TABLE})
    slower = Curve(replace(TABLE, time_s=tuple(2 * t for t in TABLE.time_s)))
    op = CollectiveOp("all_reduce", 2 * MIB, 8)
    assert collective_cost(op, measured, curve=slower).duration_s == pytest.approx(60e-6)


def test_curves_belong_to_a_number_of_nodes():
    measured = replace(POD, curves={CurveKey("all_reduce", 16, 1): TABLE})
    assert collective_cost(CollectiveOp("all_reduce", MIB, 16), measured).source.layer == "prior"
    measured = replace(POD, curves={CurveKey("all_reduce", 16, 2): TABLE})
    assert collective_cost(CollectiveOp("all_reduce", MIB, 16), measured).source == TABLE.source


def test_bus_bandwidth_as_nccl_tests_prints_it():
    # 8 GPUs, all_reduce: one published line of 8 GiB in 31.07 ms reads algbw 276.5, busbw 483.8 GB/s.
    size, time_s = 8 * 2.0**30, 31.07e-3
    assert algbw_bytes_per_s(size, time_s) == pytest.approx(276.5e9, rel=1e-3)
    assert busbw_bytes_per_s("all_reduce", 8, size, time_s) == pytest.approx(483.8e9, rel=1e-3)
    assert busbw_factor("all_to_all", 4) == 0.75 and busbw_factor("send_recv", 2) == 1.0
    assert [num_steps(kind, 8) for kind in ("all_reduce", "all_gather", "send_recv")] == [14, 7, 1]


# Bus bandwidth anchors of one node, large messages, GB/s (hwprofiles/SOURCES.md, AIC-A100, AIC-H100).
@pytest.mark.parametrize(
    ("cluster", "kind", "low", "high"),
    [
        ("a100-sxm8", "all_reduce", 205, 232),
        ("a100-sxm8", "all_gather", 195, 215),
        ("a100-sxm8", "reduce_scatter", 200, 222),
        ("a100-sxm8", "all_to_all", 193, 213),
        ("h100-sxm8", "all_gather", 325, 357),
        ("h100-sxm8", "reduce_scatter", 325, 359),
        ("h100-sxm8", "all_reduce", 415, 483),
    ],
)
def test_bundled_curves_reach_the_published_bus_bandwidth(cluster, kind, low, high):
    size = 512 * MIB
    cost = collective_cost(CollectiveOp(kind, size, 8), load_cluster(cluster))
    assert cost.in_range
    assert low <= busbw_bytes_per_s(kind, 8, size, cost.duration_s) / 1e9 <= high


@pytest.mark.parametrize("name", ["a100-sxm8", "h100-sxm8"])
def test_fallback_spread_covers_the_bundled_tables(name):
    cluster = load_cluster(name)
    bare = replace(cluster, curves={}, fits={})
    ratios = []
    for key, table in cluster.curves.items():
        model = CollectiveModel(bare, key.collective, key.ranks)
        ratios.append(np.array(table.time_s) / model.seconds(table.size_bytes))
    inside = np.concatenate(ratios)
    covered = ((inside >= FALLBACK.low) & (inside <= FALLBACK.high)).mean()
    assert covered > 0.85


def test_ends_stay_above_the_wires():
    model = CollectiveModel(POD, "all_gather", 8)
    size = 4096 * MIB
    seconds, bound = float(model.seconds(size)), wire_lower_bound_s(POD, 8, "all_gather", size)
    assert bound <= float(model.seconds_at(size, "low")) < seconds < float(model.seconds_at(size, "high"))
    wide = nvlink_cluster(wire_efficiency=0.95)
    model = CollectiveModel(wide, "all_gather", 8)
    assert float(model.seconds_at(size, "low")) == pytest.approx(wire_lower_bound_s(wide, 8, "all_gather", size))


def test_without_latency_bytes_alone_count():
    size = np.array([0.0, MIB, 64 * MIB])
    model = CollectiveModel(POD, "all_reduce", 8)
    assert model.bandwidth_seconds(size) == pytest.approx(model.seconds(size) - 22e-6)
    measured = CollectiveModel(POD, "all_reduce", 8, Curve(TABLE))
    assert measured.bandwidth_seconds(size) == pytest.approx(size / MIB * 10e-6)


def test_errors():
    with pytest.raises(LayoutError, match="64 ranks"):
        collective_cost(CollectiveOp("all_reduce", MIB, 64), POD)
    with pytest.raises(UsageError, match=">= 0"):
        CollectiveModel(POD, "all_reduce", 8).seconds([-1.0])

"""Blocks: what a layer's program costs where it stands among others, and how blocks add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.cost.prices import PriceBook
from overlapsim.hardware.loading import load_cluster
from overlapsim.step.blocks import Piece, repeated, simulate_piece
from overlapsim.step.categories import KINDS
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import KernelOp, OperatorGraph, TimedWork
from overlapsim.workload.recorder import Recorder

PRICES = PriceBook(load_cluster("a100-sxm8"), 8)
PLAIN = Composition()


def layer(*, beside: bool = False, size_bytes: float = 2.0**26, k: int = 4096) -> OperatorGraph:
    """A GEMM with a sum over eight ranks, and a GEMM that does or does not need it."""
    r = Recorder("fwd")
    first = r.gemm("mlp.fc2", 8192, 4096, k)
    stream = "tp" if beside else "compute"
    r.collective("all_reduce", "mlp.fc2", size_bytes, 8, group="tp", stream=stream, needs=[first], main=not beside)
    r.gemm("attn.qkv", 8192, 4096, 4096)
    return r.graph()


def piece(graph: OperatorGraph, composition: Composition = PLAIN, **more) -> Piece:
    return simulate_piece(Context(graph, PRICES), composition, **more)


def test_operators_one_after_another_are_their_sum() -> None:
    graph = layer()
    found = piece(graph, contention=False)
    assert found.duration_s == pytest.approx(PRICES.serial_s(graph), rel=5e-3)
    assert found.kinds_s["exposed_tp"] == pytest.approx(PRICES.operator_s(graph.operators[1]), rel=1e-6)
    assert found.kinds_s["gemm"] > 0
    assert found.kinds_s["host"] == 0


def test_what_runs_beside_computation_is_not_exposed() -> None:
    apart, beside = piece(layer()), piece(layer(beside=True))
    assert beside.duration_s < apart.duration_s
    assert beside.kinds_s["exposed_tp"] < 0.1 * apart.kinds_s["exposed_tp"]
    # It takes SMs and HBM bandwidth all the same.
    assert beside.kinds_s["gemm"] > apart.kinds_s["gemm"]


@given(st.floats(0, 60e-6), st.floats(2.0**12, 2.0**28), st.booleans(), st.booleans(), st.booleans())
def test_kinds_add_up(launch_s: float, size: float, beside: bool, contention: bool, follows: bool) -> None:
    """Whatever the block: its kinds are its duration, and none is negative."""
    graph = layer(beside=beside, size_bytes=size)
    found = piece(graph, launch_s=launch_s, contention=contention, follows=follows)
    assert set(found.kinds_s) == set(KINDS)
    assert min(found.kinds_s.values()) >= 0
    assert sum(found.kinds_s.values()) == pytest.approx(found.duration_s, rel=1e-9)


def test_an_empty_graph_takes_no_time() -> None:
    assert piece(OperatorGraph(())) == Piece()


def test_demands_are_those_of_one_copy() -> None:
    """A block that follows others is run behind one; what it asks of memory and links is counted once."""
    graph = layer()
    alone, behind = piece(graph), piece(graph, launch_s=1e-9)
    assert behind.demands == pytest.approx(alone.demands)
    op = graph.operators[1]
    expected = sum(d.amount for d in PRICES.flow(op)[1] if d.resource == "nvlink_out[0]")
    assert alone.demands["nvlink_out[0]"] == pytest.approx(expected)
    assert set(alone.demands) <= set(alone.capacities)


# The host


def test_host_bound_blocks_take_the_time_of_their_launches() -> None:
    """Behind others of its kind a block costs its launches where these take longer, its kernels otherwise."""
    r = Recorder("fwd")
    for _ in range(20):
        r.kernel("mlp.norm", TimedWork(5e-6))
    graph = r.graph()
    slow, fast = (piece(graph, launch_s=launch_s) for launch_s in (40e-6, 1e-6))
    assert slow.duration_s == pytest.approx(20 * 40e-6, rel=0.02)
    assert slow.kinds_s["host"] == pytest.approx(20 * 35e-6, rel=0.03)
    assert fast.duration_s == pytest.approx(20 * 5e-6, rel=0.02)
    assert fast.kinds_s["host"] == pytest.approx(0, abs=1e-6)


def test_the_first_launch_is_waited_for_without_others_before() -> None:
    r = Recorder("fwd")
    r.kernel("mlp.norm", TimedWork(100e-6))
    alone, behind = (piece(r.graph(), launch_s=30e-6, follows=follows) for follows in (False, True))
    assert alone.duration_s == pytest.approx(130e-6, rel=1e-3)
    assert behind.duration_s == pytest.approx(100e-6, rel=1e-3)


def test_chains_of_kernels_are_launched_one_by_one() -> None:
    r = Recorder("fwd")
    r.kernel("loss", MemoryOp("cross_entropy", 8, 128))
    found = piece(r.graph(), launch_s=50e-6, follows=False)
    assert found.duration_s >= 8 * 50e-6


# Sums and repeats

numbers = st.floats(0, 10)
pieces = st.builds(
    Piece,
    numbers,
    st.dictionaries(st.sampled_from(KINDS), numbers, max_size=3),
    st.dictionaries(st.sampled_from(("hbm[0]", "nvlink_out[0]")), numbers),
)


@given(pieces, pieces, st.integers(0, 5))
def test_sums_are_sums(first: Piece, second: Piece, count: int) -> None:
    total = first + second.times(count)
    assert total.duration_s == pytest.approx(first.duration_s + count * second.duration_s)
    for name in (*KINDS, "hbm[0]"):
        for get in (lambda p: p.kinds_s, lambda p: p.demands):
            expected = get(first).get(name, 0) + count * get(second).get(name, 0)
            assert get(total).get(name, 0) == pytest.approx(expected)


@given(st.integers(1, 5))
def test_repeated_graphs_are_chains_of_copies(count: int) -> None:
    graph = layer(beside=True)
    many = repeated(graph, count)
    size = len(graph.operators)
    assert many.operators == graph.operators * count
    assert many.streams == graph.streams * count
    for copy in range(count):
        assert many.part(range(copy * size, (copy + 1) * size)).dependencies == graph.dependencies
    # Each begins when the last operator of the one before has ended.
    for copy in range(1, count):
        assert (copy * size - 1) in many.producers(copy * size)


# Strategies


def test_strategies_rewrite_a_block() -> None:
    chosen = Composition(pairs={("mlp.fc2", "fwd"): Chosen(load_strategy("chunked"), {"chunks": 4})})
    graph = layer(k=16384)
    plain, chunked = piece(graph), piece(graph, chosen)
    assert chunked.kinds_s["exposed_tp"] < plain.kinds_s["exposed_tp"]
    assert chunked.duration_s < plain.duration_s


def test_findings_of_strategies_come_with_the_block() -> None:
    """A kernel of a strategy's own that was not measured is said, once, however many blocks there are."""
    graph = layer()
    parameters = {"tile": (128, 256, 32), "swizzle": 1, "sms": "steal", "group_tiles": (256, 256, 512)}
    chosen = Composition(pairs={("mlp.fc2", "fwd"): Chosen(load_strategy("wave_group"), parameters)})
    found = piece(graph, chosen)
    assert "kernel_time_assumed" in {finding.code for finding in found.findings}
    twice = found.times(3) + found
    assert twice.findings == found.findings


def test_kernels_are_told_apart() -> None:
    """Each kind of work counts as its own."""
    r = Recorder("fwd")
    r.gemm("attn.qkv", 1024, 1024, 1024)
    r.add(KernelOp(MemoryOp("rmsnorm", 4096, 4096), "attn.norm"))
    found = piece(r.graph())
    assert found.kinds_s["gemm"] > 0
    assert found.kinds_s["other_compute"] > 0
    assert found.kinds_s["attention"] == 0

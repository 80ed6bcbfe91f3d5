"""Bytes that live between operators: closed forms of chains, and of what is rebuilt early or computed late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from overlapsim.strategy.liveness import peak_live_bytes, result_bytes
from overlapsim.testing.expert_layers import expert_layers
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import CollectiveOp, GemmOp, KernelOp, OperatorGraph


def gemm(m: int, pass_: str = "dgrad") -> GemmOp:
    return GemmOp(m, 64, 64, name="mlp.fc1", pass_=pass_)


def test_of_a_chain_two_results_live_at_once() -> None:
    """While one operator runs its input and its output live; the last output is read by nobody here."""
    sizes = (100, 300, 200, 50)
    graph = OperatorGraph(tuple(map(gemm, sizes)), tuple((i, i + 1) for i in range(3)))
    assert peak_live_bytes(graph) == (300 + 200) * 64 * 2


def test_what_is_rebuilt_at_the_start_lives_until_it_is_read() -> None:
    again = KernelOp(MemoryOp("rmsnorm", 1000, 64), "mlp.norm", "recompute")
    chain = [gemm(100) for _ in range(3)]
    early = OperatorGraph((again, *chain), ((0, 3), (1, 2), (2, 3)))
    late = OperatorGraph((*chain[:2], again, chain[2]), ((0, 1), (1, 3), (2, 3)))
    own = 1000 * 64 * 2
    assert result_bytes(again) == own
    # Early it lives beside two results of the chain, late beside one.
    assert peak_live_bytes(early) == own + 2 * 100 * 64 * 2
    assert peak_live_bytes(late) == own + 100 * 64 * 2


def test_a_weight_gradient_frees_its_input() -> None:
    """Put off behind an exchange it keeps its input (n x k) and the gradient it reads for longer."""
    wgrad, sent = gemm(64, "wgrad"), CollectiveOp("all_to_all", 5e6, 8, name="moe.dispatch", pass_="dgrad")
    first, last = gemm(64), gemm(64)
    now = OperatorGraph((first, wgrad, sent, last), ((0, 1), (0, 2), (2, 3)))
    put_off = OperatorGraph((first, sent, wgrad, last), ((0, 1), (0, 2), (1, 3)))
    kept = 64 * 64 * 2
    assert peak_live_bytes(put_off) - peak_live_bytes(now) == kept


@given(st.permutations(range(6)))
def test_order_of_what_needs_nothing_does_not_count(order: list[int]) -> None:
    graph = OperatorGraph(tuple(gemm(10 * (i + 1)) for i in range(6)))
    assert peak_live_bytes(graph.reordered(order)) == 0


def test_a_layer_holds_less_than_all_its_results() -> None:
    for graph in expert_layers().values():
        assert 0 < peak_live_bytes(graph) < sum(map(result_bytes, graph.operators))

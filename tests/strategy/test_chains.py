"""What a strategy takes together: GEMM, collective and kernels on the way, found in real layers."""

from __future__ import annotations

import pytest

from overlapsim.errors import StrategyError
from overlapsim.strategy.chains import read_chain
from overlapsim.strategy.compose import Chosen, find_pieces
from overlapsim.strategy.registry import load_strategy
from overlapsim.testing.cases import experts_graph
from overlapsim.workload.build import GraphBuilder
from overlapsim.workload.layout import Layout
from overlapsim.workload.operators import CollectiveOp, GemmOp, OperatorGraph, gemm_and_collective
from overlapsim.workload.presets import load_model
from overlapsim.workload.recipe import Recipe

EXPERTS, EXCHANGE, CHUNKED = map(load_strategy, ("fused_experts", "fused_exchange", "chunked"))


def layer(which: str, dispatcher: str = "all_to_all", layout: str = "sp=8,ep=8,etp=1") -> OperatorGraph:
    model, _ = load_model("megascale-mixtral-8x7b")
    builder = GraphBuilder(model, Layout.parse(layout, 8), Recipe(dispatcher=dispatcher), 1, 8192)
    return builder.layer(model.layers[0], which)


def taken(graph: OperatorGraph, strategy, name: str, pass_: str) -> list[str]:
    (piece,) = find_pieces(graph, {(name, pass_): Chosen(strategy, {})})
    return [f"{graph.operators[i].name} {type(graph.operators[i]).__name__}" for i in piece.operators]


@pytest.mark.parametrize(
    ("dispatcher", "name", "pass_", "expected"),
    [
        ("all_to_all", "moe.fc1", "fwd", ["moe.permute KernelOp", "moe.dispatch CollectiveOp", "moe.fc1 KernelOp"]),
        ("all_to_all", "moe.fc2", "fwd", ["moe.fc2 KernelOp", "moe.combine CollectiveOp", "moe.unpermute KernelOp"]),
        ("all_to_all", "moe.fc2", "dgrad", ["moe.combine CollectiveOp", "moe.fc2 KernelOp"]),
        ("all_to_all", "moe.fc1", "dgrad", ["moe.fc1 KernelOp", "moe.dispatch CollectiveOp", "moe.permute KernelOp"]),
        ("all_gather", "moe.fc1", "fwd", ["moe.dispatch CollectiveOp", "moe.permute KernelOp", "moe.fc1 KernelOp"]),
        ("all_gather", "moe.fc2", "fwd", ["moe.fc2 KernelOp", "moe.unpermute KernelOp", "moe.combine CollectiveOp"]),
        ("all_gather", "moe.fc2", "dgrad", ["moe.combine CollectiveOp", "moe.unpermute KernelOp", "moe.fc2 KernelOp"]),
    ],
)
def test_experts_take_their_collective_and_what_orders_tokens(dispatcher, name, pass_, expected) -> None:
    graph = layer("forward" if pass_ == "fwd" else "backward", dispatcher)
    assert taken(graph, EXPERTS, name, pass_) == expected


@pytest.mark.parametrize(
    ("name", "pass_", "expected"),
    [
        ("attn.qkv", "fwd", ["attn.qkv GemmOp", "attn.rope KernelOp", "attn.core CollectiveOp"]),
        ("attn.out", "fwd", ["attn.out CollectiveOp", "attn.out GemmOp"]),
        ("attn.out", "dgrad", ["attn.out GemmOp", "attn.core CollectiveOp"]),
        ("attn.qkv", "dgrad", ["attn.out CollectiveOp", "attn.rope KernelOp", "attn.qkv GemmOp"]),
    ],
)
def test_an_exchange_takes_what_stands_between(name, pass_, expected) -> None:
    assert taken(layer("forward" if pass_ == "fwd" else "backward"), EXCHANGE, name, pass_) == expected


def test_with_split_experts_the_collective_next_to_the_gemm_is_taken() -> None:
    graph = layer("forward", layout="tp=8,ep=2,etp=4")
    assert taken(graph, EXPERTS, "moe.fc1", "fwd") == ["moe.dispatch CollectiveOp", "moe.fc1 KernelOp"]
    (piece,) = find_pieces(graph, {("moe.fc1", "fwd"): Chosen(EXPERTS, {})})
    collective = read_chain(graph.part(piece.operators)).collective
    assert (collective.kind, collective.group, collective.ranks) == ("all_gather", "etp", 4)


def test_weight_gradients_are_left_alone() -> None:
    graph = layer("backward")
    for strategy, name in ((EXPERTS, "moe.fc2"), (EXCHANGE, "attn.qkv")):
        with pytest.raises(StrategyError, match="no collective standing"):
            list(find_pieces(graph, {(name, "wgrad"): Chosen(strategy, {})}))


def test_the_wrong_kind_of_gemm_is_named() -> None:
    graph = layer("forward")
    with pytest.raises(StrategyError, match="takes plain GEMMs"):
        list(find_pieces(graph, {("moe.fc1", "fwd"): Chosen(CHUNKED, {})}))
    with pytest.raises(StrategyError, match="takes grouped GEMMs"):
        list(find_pieces(graph, {("attn.qkv", "fwd"): Chosen(EXPERTS, {})}))


def test_read_chain_says_where_the_collective_stands() -> None:
    after = read_chain(experts_graph((64, 64), 256, 128, "all_to_all", "after"))
    before = read_chain(experts_graph((64, 64), 256, 128, "all_gather", "before"))
    assert (after.relation, after.near, after.far) == ("after", (), (2,))
    assert (before.relation, before.near, before.far) == ("before", (1,), ())
    gemm = GemmOp(64, 64, 64)
    pair = read_chain(gemm_and_collective(gemm, "reduce_scatter", 4))
    assert (pair.relation, pair.gemm_at, pair.collective_at, pair.near, pair.far) == ("after", 0, 1, (), ())
    apart = OperatorGraph((CollectiveOp("all_gather", 1e6, 4), gemm))
    assert read_chain(apart).relation == "independent"
    with pytest.raises(StrategyError, match="2 GEMMs"):
        read_chain(OperatorGraph((gemm, gemm)))

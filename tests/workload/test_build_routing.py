"""Routing's kernels, permutations behind a gather, shared experts that join, and gradients that add to fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from overlapsim.cost.gemm_prices import GemmPrices
from overlapsim.cost.grouped import grouped_gemm_cost
from overlapsim.cost.kernels import is_synced, num_kernels
from overlapsim.cost.prices import PriceBook
from overlapsim.hardware.loading import load_cluster, load_device
from overlapsim.step.blocks import simulate_piece
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Composition
from overlapsim.workload.build import GraphBuilder
from overlapsim.workload.layout import Layout
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import CollectiveOp, GemmOp, GroupedGemmOp, KernelOp, OperatorGraph
from overlapsim.workload.presets import load_model
from overlapsim.workload.recipe import Recipe

MODEL = load_model("internal-352b")[0]
TP, EP = Layout(tp=8), Layout(sp=8, ep=8)


def graph(which: Any = "forward", layout: Layout = TP, **recipe: Any) -> OperatorGraph:
    return GraphBuilder(MODEL, layout, Recipe(**recipe), 1, 8192).layer(MODEL.layers[0], which)


def works(found: OperatorGraph, name: str) -> list[Any]:
    return [op.work for op in found.operators if isinstance(op, KernelOp) and op.name == name]


def collectives(found: OperatorGraph, group: str = "") -> list[CollectiveOp]:
    return [op for op in found.of_type(CollectiveOp) if op.group == group or not group]


def test_a_framework_routes_with_a_chain_of_tiny_kernels_and_a_wait() -> None:
    gate, indices = works(graph(router="chain"), "moe.router")
    assert (num_kernels(gate), num_kernels(indices)) == (14, 32)
    assert is_synced(gate) and not is_synced(indices)
    (fused,) = works(graph(), "moe.router")
    assert num_kernels(fused) == 3 and not is_synced(fused)
    (alone,) = works(graph(router="gate_chain"), "moe.router")
    assert num_kernels(alone) == 14 and not is_synced(alone)


def test_behind_the_wait_an_idle_gpu_pays_for_every_launch() -> None:
    prices = PriceBook(load_cluster("h800-sxm8"), 8)
    context = Context(graph(layout=EP, router="chain"), prices)
    times = [simulate_piece(context, Composition(), launch_s=host).duration_s for host in (0.0, 100e-6)]
    # The 32 kernels of the indices at least; what is launched before the wait hides.
    assert times[1] - times[0] > 32 * 95e-6


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_copies_are_ordered_behind_a_gather_and_before_a_scatter(which: str) -> None:
    found = graph(which, dispatcher="all_gather")
    names = [(op.name, getattr(op, "kind", "")) for op in found.operators]
    first, last = ("moe.dispatch", "moe.combine") if which == "forward" else ("moe.combine", "moe.dispatch")
    near, far = ("moe.permute", "moe.unpermute") if which == "forward" else ("moe.unpermute", "moe.permute")
    assert names.index((first, "all_gather")) < names.index((near, ""))
    assert names.index((far, "")) < names.index((last, "reduce_scatter"))
    # Every rank of split experts orders the copies of all tokens.
    (ordered,) = works(found, "moe.permute")
    assert ordered.rows == 8192 * 3
    (exchanged,) = works(graph(which, EP), "moe.permute")
    assert exchanged.rows == 8192 * 3 // 8


def test_torch_orders_copies_twice() -> None:
    plain, torch = (graph(dispatcher="all_gather", permutation=kind) for kind in ("fused", "torch"))
    for name in ("moe.permute", "moe.unpermute"):
        (one,), (other,) = works(plain, name), works(torch, name)
        assert other.hbm_bytes > 1.9 * one.hbm_bytes and num_kernels(other) > num_kernels(one)


def test_joined_shared_experts_move_nothing_of_their_own() -> None:
    own, joined = (graph(dispatcher="all_gather", shared=kind) for kind in ("own", "joined"))
    assert len(collectives(own)) - len(collectives(joined)) == 2
    assert not [op for op in collectives(joined) if op.name.startswith("moe.shared.")]
    flop = [sum(op.flop for op in found.of_type(GemmOp)) for found in (own, joined)]
    assert flop[0] == flop[1]
    back = graph("backward", dispatcher="all_gather", shared="joined")
    assert not [op for op in collectives(back) if op.name.startswith("moe.shared.")]


def test_whole_shared_experts_take_a_ranks_own_tokens() -> None:
    split, whole = (
        next(op for op in graph(shared=kind).of_type(GemmOp) if op.name == "moe.shared.fc1")
        for kind in ("own", "whole")
    )
    assert (split.m, split.n) == (8192, 2 * 14336 // 8) and (whole.m, whole.n) == (1024, 2 * 14336)
    assert split.flop == whole.flop


def test_weight_gradients_add_where_accumulation_is_fused() -> None:
    for kind, adds in (("fused", True), ("separate", False)):
        found = graph("backward", EP, accumulation=kind)
        dense = [op for op in found.of_type(GemmOp) if op.pass_ == "wgrad"]
        experts = [op.work for op in found.operators if isinstance(op, KernelOp) and isinstance(op.work, GroupedGemmOp)]
        assert dense and all(op.adds is adds for op in dense)
        assert sum(work.adds for work in experts) == (2 if adds else 0)


def test_adding_to_fp32_costs_memory_where_experts_have_few_rows() -> None:
    device = load_device("h800-sxm5-80gb")
    plain, added = (grouped_gemm_cost((4096,) * 4, 14336, 768, device, adds=adds) for adds in (False, True))
    bytes_s = 8 * 4 * 4096 * 14336 / device.hbm_bandwidth_bytes_per_s
    assert bytes_s < added.duration_s and 1.2 * plain.duration_s < added.duration_s
    deep = [grouped_gemm_cost((4096,) * 4, 14336, 8192, device, adds=adds).duration_s for adds in (False, True)]
    assert deep[0] <= deep[1] < 1.05 * deep[0]
    prices: GemmPrices = PriceBook(load_cluster("h800-sxm8"), 8)
    op = GemmOp(4096, 14336, 1024, pass_="wgrad")
    once, more = prices.vendor_gemm(op).duration_s, prices.vendor_gemm(replace(op, adds=True)).duration_s
    assert 8 * op.m * op.n / device.hbm_bandwidth_bytes_per_s < more and once < more < 2 * once


def test_one_kernel_an_expert_is_many_launches() -> None:
    work = GroupedGemmOp((64,) * 32 + (0,) * 8, 512, 512, looped=True)
    assert num_kernels(work) == 8 and num_kernels(replace(work, looped=False)) == 1
    assert num_kernels(MemoryOp("torch_rope", 8, 8)) == 18

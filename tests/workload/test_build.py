"""Operator graphs of layers: FLOP as counted from weights, bytes as published, the same work in every split."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from overlapsim.errors import WorkloadError
from overlapsim.workload.attention import BACKWARD_PRODUCTS, AttentionOp, UnfusedAttention
from overlapsim.workload.build import GraphBuilder, modules_of
from overlapsim.workload.layout import Layout
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.model_count import flop_per_token, step_flop_per_token
from overlapsim.workload.operators import CollectiveOp, GemmOp, KernelOp, OperatorGraph
from overlapsim.workload.presets import list_presets, load_preset
from overlapsim.workload.recipe import RECIPES, Recipe
from overlapsim.workload.recompute import SAR, Recompute

INTERNAL = load_preset("internal-352b")
GPT = load_preset("gpt3-175b")
WHICH = ("forward", "backward")


def model_flop(graph: OperatorGraph) -> float:
    """FLOP of products; the fused backward of attention computes the scores again, which model FLOP do not count."""
    total = 0.0
    for op in graph.operators:
        if isinstance(op, GemmOp):
            total += 2.0 * op.m * op.n * op.k
        elif isinstance(op, KernelOp) and not isinstance(op.work, MemoryOp):
            again = isinstance(op.work, AttentionOp | UnfusedAttention) and op.pass_ == "dgrad"
            total += op.work.flop * (2 / BACKWARD_PRODUCTS if again else 1)
    return total


def flop_of(builder: GraphBuilder, which: str) -> float:
    layers = sum(times * model_flop(builder.layer(layer, which)) for layer, times in builder.model.kinds.items())
    return layers + model_flop(builder.embedding(which)) + model_flop(builder.head(which))


@pytest.mark.parametrize("name", list_presets())
def test_flop_of_graphs_is_that_of_the_weights(name: str) -> None:
    """Forward and step; what is left is the padding of the vocabulary and the diagonal of the causal mask."""
    model, micro_batch = load_preset(name), 2
    seq = 4096 if model.diffusion is not None else min(model.max_positions, 4096)
    builder = GraphBuilder(model, Layout(), Recipe(), micro_batch, seq)
    tokens = micro_batch * seq
    forward, backward = (flop_of(builder, which) for which in WHICH)
    assert forward / tokens == pytest.approx(flop_per_token(model, seq).forward("masked"), rel=5e-3)
    assert (forward + backward) / tokens == pytest.approx(step_flop_per_token(model, seq), rel=5e-3)


@pytest.mark.parametrize("name", ["internal-352b", "gpt3-175b", "llama3-70b", "deepseek-v3", "qwen3-30b-a3b"])
@pytest.mark.parametrize("split", [{"tp": 4}, {"sp": 4}, {"cp": 4}, {"tp": 2, "sp": 2}, {"sp": 2, "cp": 2}])
def test_ranks_share_the_work(name: str, split: dict) -> None:
    """Work of a rank times ranks of the model is the work of one rank alone, whatever splits it."""
    model = load_preset(name)
    alone = GraphBuilder(model, Layout(), Recipe(), 1, 4096)
    layout = Layout(**split)
    shared = GraphBuilder(model, layout, Recipe(), 1, 4096)
    for which in WHICH:
        for layer in model.kinds:
            whole, part = model_flop(alone.layer(layer, which)), model_flop(shared.layer(layer, which))
            # MLA's down-projections and the router are the same on every tensor-parallel rank.
            tolerance = 0.15 if name == "deepseek-v3" and layout.tp > 1 else 0.01
            assert part * layout.world_size == pytest.approx(whole, rel=tolerance)


@pytest.mark.parametrize("recompute", [Recompute(), Recompute("full"), Recompute("selective", frozenset({"moe"}))])
@pytest.mark.parametrize("name", ["gpt3-175b", "internal-352b"])
def test_halves_of_a_backward_are_the_whole(name: str, recompute: Recompute) -> None:
    """Input and weight gradients hold each operator of the backward pass once."""
    model = load_preset(name)
    builder = GraphBuilder(model, Layout(tp=8) if name == "gpt3-175b" else Layout(sp=8, ep=8), Recipe(), 1, 2048)
    for layer in model.kinds:
        whole = Counter(map(repr, builder.layer(layer, "backward").operators))
        halves = [builder.layer(layer, which) for which in ("input_grad", "weight_grad")]
        assert sum((Counter(map(repr, half.operators)) for half in halves), Counter()) == whole


# Bytes that collectives move (facts of MegaScale-MoE 1.3, counted from tensor shapes)


def elements(graph: OperatorGraph, name: str, kind: str) -> list[float]:
    """Elements that a rank sends in each collective of an operator, two bytes each."""
    found = [op for op in graph.operators if isinstance(op, CollectiveOp) and (op.name, op.kind) == (name, kind)]
    return [op.size_bytes / 2 * (op.ranks - 1) / op.ranks for op in found]


def test_bytes_of_ulysses_and_expert_exchanges() -> None:
    """A2A of q, k, v and of the output: (2 + 2/m) bsh (n-1)/n^2; dispatch and combine: 2 k bsh (n-1)/n^2."""
    b, s, h, n, m, k = 2, 8192, 4096, 8, 4, 3
    builder = GraphBuilder(INTERNAL, Layout(sp=n, ep=n), Recipe(), b, s)
    graph = builder.layer(INTERNAL.layers[0], "forward")
    unit = b * s * h * (n - 1) / n**2
    assert elements(graph, "attn.core", "all_to_all") == pytest.approx([(1 + 2 / m) * unit])
    assert elements(graph, "attn.out", "all_to_all") == pytest.approx([unit])
    assert elements(graph, "moe.dispatch", "all_to_all") == pytest.approx([k * unit])
    assert elements(graph, "moe.combine", "all_to_all") == pytest.approx([k * unit])


def test_bytes_of_tensor_parallelism() -> None:
    """Attention AG + RS and FFN AG + RS: 2 bsh (n-1)/n each, with sequence parallelism or an all_reduce instead."""
    b, s, h, n = 2, 2048, 12288, 8
    unit = b * s * h * (n - 1) / n
    graph = GraphBuilder(GPT, Layout(tp=n), Recipe(), b, s).layer(GPT.layers[0], "forward")
    for gathered, reduced in (("attn.qkv", "attn.out"), ("mlp.fc1", "mlp.fc2")):
        assert elements(graph, gathered, "all_gather") == pytest.approx([unit])
        assert elements(graph, reduced, "reduce_scatter") == pytest.approx([unit])
    whole = GraphBuilder(GPT, Layout(tp=n, sequence_parallel=False), Recipe(), b, s).layer(GPT.layers[0], "forward")
    assert elements(whole, "attn.out", "all_reduce") == pytest.approx([unit])
    assert not elements(whole, "attn.qkv", "all_gather")


def test_bytes_of_experts_by_gathers() -> None:
    """AG of all tokens and RS of all results: 2 bsh (n-1)/n, as tensor parallelism moves."""
    b, s, h, n = 1, 8192, 4096, 8
    builder = GraphBuilder(INTERNAL, Layout(sp=n, ep=n), Recipe(dispatcher="all_gather"), b, s)
    graph = builder.layer(INTERNAL.layers[0], "forward")
    unit = b * s * h * (n - 1) / n
    assert elements(graph, "moe.dispatch", "all_gather") == pytest.approx([unit])
    assert elements(graph, "moe.combine", "reduce_scatter") == pytest.approx([unit])


@pytest.mark.parametrize(("name", "layout"), [("gpt3-175b", Layout(tp=8)), ("internal-352b", Layout(sp=8, ep=8))])
def test_a_backward_mirrors_the_forward(name: str, layout: Layout) -> None:
    """As many bytes back as forward; sequence parallelism gathers the inputs of weight gradients once more."""
    model = load_preset(name)
    builder = GraphBuilder(model, layout, Recipe(), 1, 2048)
    moved = [
        sum(op.size_bytes for op in builder.layer(model.layers[0], which).of_type(CollectiveOp)) for which in WHICH
    ]
    assert moved[1] == pytest.approx(moved[0] * (1.5 if layout.tp > 1 else 1.0))


def test_context_parallel_rings_bring_the_other_keys() -> None:
    """A ring of n brings keys and values of n - 1 others; backward their gradients travel too."""
    model = load_preset("llama3-8b")
    s, n, columns = 8192, 4, 8 * (128 + 128)
    builder = GraphBuilder(model, Layout(cp=n), Recipe(), 1, s)
    forward, backward = (builder.layer(model.layers[0], which) for which in WHICH)
    (ring,), (back,) = forward.of_type(CollectiveOp), backward.of_type(CollectiveOp)
    assert ring.size_bytes == 2 * s / n * columns * (n - 1)
    assert back.size_bytes == 2 * ring.size_bytes
    assert {forward.stream_of(forward.operators.index(ring)), ring.kind} == {"cp", "send_recv"}
    gathered = GraphBuilder(model, Layout(cp=n, cp_kind="allgather"), Recipe(), 1, s)
    (op,) = gathered.layer(model.layers[0], "forward").of_type(CollectiveOp)
    assert (op.kind, op.size_bytes) == ("all_gather", 2 * s * columns)


# What else is in a graph


def test_recompute_runs_again_what_it_names() -> None:
    """Full recompute runs the forward pass first; selective the named modules; none nothing."""

    def again(recompute: Recompute) -> list[str]:
        graph = GraphBuilder(INTERNAL, Layout(sp=8, ep=8), Recipe(), 1, 8192, recompute).layer(
            INTERNAL.layers[0], "backward"
        )
        return [op.name for op in graph.operators if op.pass_ == "recompute"]

    forward = GraphBuilder(INTERNAL, Layout(sp=8, ep=8), Recipe(), 1, 8192).layer(INTERNAL.layers[0], "forward")
    assert again(Recompute()) == []
    assert again(Recompute("full")) == [op.name for op in forward.operators]
    rebuilt = ["attn.norm", "attn.out", "mlp.norm", "moe.permute", "moe.dispatch", "moe.act"]
    assert again(Recompute("selective", SAR)) == rebuilt
    # Nothing that selective recompute of attention alone names moves bytes.
    assert again(Recompute("selective", frozenset({"core_attn"}))) == ["attn.core"]


def test_layers_that_full_recompute_leaves_out_run_once() -> None:
    builder = GraphBuilder(GPT, Layout(tp=8), Recipe(), 1, 2048, Recompute("full"))
    graph = builder.layer(GPT.layers[0], "backward", rebuilt=False)
    assert not [op for op in graph.operators if op.pass_ == "recompute"]


def test_recipes_change_kernels_and_not_products() -> None:
    """Other kernels for the same model: GEMMs and bytes of collectives stay."""
    graphs = {
        name: GraphBuilder(GPT, Layout(tp=8), recipe, 1, 2048).layer(GPT.layers[0], "forward")
        for name, recipe in RECIPES.items()
    }
    gemms = {name: Counter(graph.of_type(GemmOp)) for name, graph in graphs.items()}
    moved = {name: Counter(graph.of_type(CollectiveOp)) for name, graph in graphs.items()}
    assert len(set(map(repr, (sorted(map(repr, counter)) for counter in gemms.values())))) == 1
    assert len(set(map(repr, (sorted(map(repr, counter)) for counter in moved.values())))) == 1
    kinds = {name: {type(op.work).__name__ for op in graph.of_type(KernelOp)} for name, graph in graphs.items()}
    assert "AttentionOp" in kinds["modern"]
    assert "UnfusedAttention" in kinds["megatron-2021"]


def test_sliding_windows_are_paid_for_what_they_see() -> None:
    """GPT-OSS: every second layer sees 128 keys; without fused attention all scores are computed."""
    model = load_preset("gpt-oss-120b")
    builder = GraphBuilder(model, Layout(), Recipe(), 1, 4096)
    flop = {
        layer.attention.window: sum(
            op.work.flop for op in builder.layer(layer, "forward").of_type(KernelOp) if isinstance(op.work, AttentionOp)
        )
        for layer in model.kinds
    }
    pairs = 4096 * 128 - 128**2 / 2
    assert flop[128] / flop[None] == pytest.approx(pairs / (4096**2 / 2), rel=0.01)
    unfused = GraphBuilder(model, Layout(), Recipe(attention="unfused"), 1, 4096)
    works = [
        op.work.op
        for layer in model.kinds
        for op in unfused.layer(layer, "forward").of_type(KernelOp)
        if isinstance(op.work, UnfusedAttention)
    ]
    assert {work.kv_len for work in works} == {4096}


def test_head_and_embedding() -> None:
    """Logits of the padded vocabulary; the embedding has no gradient of its input."""
    builder = GraphBuilder(GPT, Layout(tp=8), Recipe(), 1, 2048)
    (logits,) = builder.head("forward").of_type(GemmOp)
    assert (logits.m, logits.n, logits.k) == (2048, 51200 // 8, 12288)
    assert not builder.embedding("input_grad").operators
    assert [op.name for op in builder.embedding("backward").of_type(KernelOp)] == ["embed"]
    (step,) = [op for op in builder.optimizer(1e9).of_type(KernelOp) if op.name == "optim.step"]
    assert step.work == MemoryOp("adam", 10**9, 1, GPT.dtype)


def test_modules_of_operators() -> None:
    graph = GraphBuilder(INTERNAL, Layout(sp=8, ep=8), Recipe(), 1, 8192).layer(INTERNAL.layers[0], "forward")
    modules = {op.name: modules_of(op) for op in graph.operators}
    assert modules["attn.norm"] == {"layernorm"}
    assert modules["moe.act"] == {"moe_act", "moe"}
    assert modules["moe.dispatch"] == {"moe_dispatch", "moe"}
    assert modules["moe.shared.fc1"] == {"shared_experts"}


@pytest.mark.parametrize(("micro_batch", "seq"), [(0, 8), (1, 0), (-1, 8)])
def test_sizes_below_one_are_refused(micro_batch: int, seq: int) -> None:
    with pytest.raises(WorkloadError, match=re.escape(f"a micro-batch of {micro_batch} sequences of {seq} tokens")):
        GraphBuilder(GPT, Layout(), Recipe(), micro_batch, seq)

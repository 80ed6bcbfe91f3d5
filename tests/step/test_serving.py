"""Serving steps: what is computed, bounds, one fused call for prompts and decodes, caches, layouts, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.attention import attention_cost, attention_floor_s
from overlapsim.cost.kernels import work_cost
from overlapsim.errors import LayoutError, UsageError, WorkloadError
from overlapsim.hardware.loading import load_cluster
from overlapsim.step.serving import ForwardInputs, ForwardResult, simulate_forward
from overlapsim.units import dtype_bytes
from overlapsim.workload.attention import AttentionOp, FusedAttention
from overlapsim.workload.layout import Layout
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.model_count import parameters
from overlapsim.workload.operators import CollectiveOp, GemmOp, GroupedGemmOp, KernelOp, OperatorGraph
from overlapsim.workload.presets import load_model
from overlapsim.workload.recipe import RECIPES, Recipe
from overlapsim.workload.serving import ForwardBatch, Segment, ServingGraphs, kv_cache_bytes

LLAMA, LLAMA70 = load_model("llama3-8b")[0], load_model("llama3-70b")[0]
QWEN, DEEPSEEK = load_model("qwen3-30b-a3b")[0], load_model("deepseek-v3")[0]
PREFILL, DECODE = ForwardBatch.prefill, ForwardBatch.decode


def inputs_of(model: ModelSpec, layout: str, batch: ForwardBatch, cluster: str = "h200-sxm8", **more) -> ForwardInputs:
    nodes = more.pop("nodes", 1)
    return ForwardInputs(model, load_cluster(cluster).with_nodes(nodes), Layout.parse(layout), batch, **more)


def run(*args, ranges: bool = False, **more) -> ForwardResult:
    return simulate_forward(inputs_of(*args, **more), ranges=ranges)


def graph_of(model: ModelSpec, layout: str, batch: ForwardBatch, layer: int = -1) -> OperatorGraph:
    return ServingGraphs(model, Layout.parse(layout), Recipe(), batch).layer(model.layers[layer])


def seconds(*args, **more) -> float:
    return run(*args, **more).time_s


# What is computed


def test_phases() -> None:
    assert PREFILL(2, 512).phase == PREFILL(2, 512, past=512).phase == "prefill"
    assert DECODE(8, 100).phase == DECODE(8, 100, 4).phase == "decode"
    assert (PREFILL(1, 64) + DECODE(8, 100)).phase == "mixed"
    assert not Segment(1, 1, 0).decodes  # the first token of a prompt has no cache


@pytest.mark.parametrize("model", [LLAMA, LLAMA70])
@pytest.mark.parametrize("batch", [PREFILL(2, 1024), DECODE(32, 1000), PREFILL(1, 512) + DECODE(16, 2048)])
def test_gemm_flop_are_two_for_each_weight_and_token(model: ModelSpec, batch: ForwardBatch) -> None:
    layer = sum(op.flop for op in graph_of(model, "tp=1", batch).of_type(GemmOp))
    embeddings = 2 * model.vocabulary * model.hidden
    weights = (parameters(model).active - embeddings) / model.num_layers
    assert layer == pytest.approx(2 * weights * batch.tokens, rel=1e-3)


def test_logits_are_those_of_last_tokens() -> None:
    graphs = ServingGraphs(LLAMA, Layout(), Recipe(), PREFILL(4, 1024))
    (gemm,) = graphs.head().of_type(GemmOp)
    assert (gemm.m, gemm.n, gemm.k) == (4, LLAMA.vocabulary, LLAMA.hidden)


def test_a_chunk_sees_what_came_before() -> None:
    (op,) = (
        o.work for o in graph_of(LLAMA, "tp=1", PREFILL(1, 512, past=1536)).of_type(KernelOp) if o.name == "attn.core"
    )
    assert isinstance(op, AttentionOp) and (op.q_len, op.kv_len) == (512, 2048)


def test_decode_of_latent_attention_is_absorbed() -> None:
    (op,) = (o.work for o in graph_of(DEEPSEEK, "tp=1", DECODE(8, 4095)).of_type(KernelOp) if o.name == "attn.core")
    assert isinstance(op, AttentionOp)
    assert (op.kv_heads, op.head_dim, op.value_dim, op.shared_kv, op.kv_len) == (1, 576, 512, True, 4096)
    grouped = [o.work for o in graph_of(DEEPSEEK, "tp=1", DECODE(8, 4095), 0).of_type(KernelOp)]
    absorbed = [work for work in grouped if isinstance(work, GroupedGemmOp)]
    assert [(len(w.rows), w.rows[0], w.n, w.k) for w in absorbed] == [(128, 8, 512, 128), (128, 8, 128, 512)]
    # Prompts expand the latent, a chunk that of its cache too.
    names = [
        (o.m, o.k)
        for o in graph_of(DEEPSEEK, "tp=1", PREFILL(1, 512, past=512)).of_type(GemmOp)
        if o.name == "attn.qkv"
    ]
    assert (1024, 512) in names


@given(st.integers(1, 64), st.integers(1, 512))
@settings(max_examples=30, deadline=None)
def test_few_tokens_leave_experts_idle(sequences: int, context: int) -> None:
    rows = next(
        op.work.rows
        for op in graph_of(QWEN, "tp=1", DECODE(sequences, context)).of_type(KernelOp)
        if isinstance(op.work, GroupedGemmOp)
    )
    busy = sum(1 for count in rows if count)
    expected = 128 * (1 - (1 - 8 / 128) ** sequences)
    assert len(rows) == 128 and busy == pytest.approx(expected, abs=0.51)
    assert sum(rows) == pytest.approx(8 * sequences, abs=busy / 2 + 1)


# Bounds


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 128), st.integers(1, 8192))
def test_decode_reads_weights_and_cache(sequences: int, context: int) -> None:
    result = run(LLAMA, "tp=1", DECODE(sequences, context))
    bandwidth = load_cluster("h200-sxm8").device.hbm_bandwidth_bytes_per_s
    table = LLAMA.vocabulary * LLAMA.hidden * 2
    assert result.time_s > (result.memory.parameters - table + result.memory.kv_cache) / bandwidth
    assert sum(result.breakdown_s.values()) == pytest.approx(result.time_s, rel=1e-9)


@pytest.mark.parametrize("length", [512, 4096, 16384])
def test_prefill_computes_its_flop(length: int) -> None:
    time_s = seconds(LLAMA, "tp=1", PREFILL(1, length))
    weights = parameters(LLAMA).active - 2 * LLAMA.vocabulary * LLAMA.hidden
    assert time_s > 2 * weights * length / load_cluster("h200-sxm8").device.peak("bf16")
    assert time_s < 2.5 * 2 * weights * length / load_cluster("h200-sxm8").device.peak("bf16") + 5e-3


def test_chunks_cost_more_than_the_prompt_at_once() -> None:
    whole = seconds(LLAMA, "tp=1", PREFILL(1, 4096))
    chunks = sum(seconds(LLAMA, "tp=1", PREFILL(1, 512, past=512 * n)) for n in range(8))
    assert whole < chunks < 1.5 * whole


# One fused call (a mixed step is not a sum)

GRID = [(512, 4), (512, 16), (1024, 8), (2048, 4), (4096, 4), (4096, 16)]


@pytest.mark.parametrize(("length", "sequences"), GRID)
@pytest.mark.parametrize(("model", "layout"), [(LLAMA, "tp=1"), (QWEN, "tp=1"), (LLAMA70, "tp=8")])
def test_a_mixed_step_is_one_call_an_operator(model: ModelSpec, layout: str, length: int, sequences: int) -> None:
    prompt, decodes = PREFILL(1, length), DECODE(sequences - 1, length)
    mixed = graph_of(model, layout, prompt + decodes)
    assert [type(op) for op in mixed.operators] == [type(op) for op in graph_of(model, layout, prompt).operators]
    fused = seconds(model, layout, prompt + decodes)
    apart = [seconds(model, layout, prompt), seconds(model, layout, decodes)]
    assert max(apart) < fused < sum(apart)


@pytest.mark.parametrize("chunk", [16, 64, 128])
@pytest.mark.parametrize("sequences", [4, 16])
def test_a_small_chunk_rides_along(chunk: int, sequences: int) -> None:
    """Both phases read all weights; together they read them once: 33 to 69 % of the sum where memory is the limit."""
    prompt, decodes = PREFILL(1, chunk, past=512), DECODE(sequences - 1, 1024)
    share = seconds(LLAMA, "tp=1", prompt + decodes) / (
        seconds(LLAMA, "tp=1", prompt) + seconds(LLAMA, "tp=1", decodes)
    )
    assert 0.33 < share < 0.69


def test_a_fused_attention_pays_one_launch_and_all_work() -> None:
    device = load_cluster("h200-sxm8").device
    prompt, decode = AttentionOp(1, 2048, 2048, 32, 8, 128), AttentionOp(16, 1, 4096, 32, 8, 128)
    fused = work_cost(FusedAttention((prompt, decode)), device)
    parts = [attention_cost(op, device).duration_s for op in (prompt, decode)]
    floors = [attention_floor_s(op, device) for op in (prompt, decode)]
    assert fused.duration_s == pytest.approx(sum(parts) - min(floors))
    assert fused.duration_s >= max((prompt.flop + decode.flop) / device.peak("bf16"), *parts)
    assert work_cost(FusedAttention((decode,)), device).duration_s == pytest.approx(parts[1])
    with pytest.raises(WorkloadError, match="all forward"):
        FusedAttention((replace(prompt, pass_="bwd"),))


# Caches


@pytest.mark.parametrize(
    ("model", "layout", "per_token"),
    [
        (LLAMA, "tp=1", 32 * 2 * 8 * 128 * 2),
        (LLAMA70, "tp=8", 80 * 2 * 1 * 128 * 2),
        (LLAMA70, "tp=16", 80 * 2 * 1 * 128 * 2),  # keys and values are copied
        (DEEPSEEK, "tp=8", 61 * 576 * 2),
    ],
)
def test_bytes_of_a_token(model: ModelSpec, layout: str, per_token: int) -> None:
    graphs = ServingGraphs(model, Layout.parse(layout), Recipe(), DECODE(3, 99))
    assert kv_cache_bytes(graphs, model.layers) == 3 * 100 * per_token


def test_a_cache_in_fp8_is_half_and_faster_to_read() -> None:
    plain, small = (run(LLAMA, "tp=1", DECODE(64, 8192), kv_dtype=kind) for kind in ("", "fp8"))
    assert small.memory.kv_cache == plain.memory.kv_cache / 2 and small.time_s < plain.time_s
    assert small.cache_tokens == pytest.approx(2 * plain.cache_tokens)


def test_windows_bound_the_cache() -> None:
    model = load_model("gpt-oss-120b")[0]
    windows = [layer.attention.window for layer in model.layers]
    graphs = ServingGraphs(model, Layout(), Recipe(), DECODE(1, 99_999))
    each = 2 * model.layers[0].attention.num_kv_heads * model.layers[0].attention.head_dim * dtype_bytes("bf16")
    assert kv_cache_bytes(graphs, model.layers) == sum(
        each * (min(window, 100_000) if window else 100_000) for window in windows
    )


def test_memory_that_is_not_there_is_a_finding() -> None:
    codes = {finding.code for finding in run(LLAMA70, "tp=1", DECODE(1, 1024), "h100-sxm8").findings}
    assert "memory_exceeded" in codes
    assert "memory_exceeded" not in {f.code for f in run(LLAMA70, "tp=8", DECODE(1, 1024)).findings}


# Layouts


def test_tensor_parallel_ranks_share_and_sum() -> None:
    one, eight = run(LLAMA70, "tp=1", DECODE(16, 2048)), run(LLAMA70, "tp=8", DECODE(16, 2048))
    assert eight.memory.parameters == pytest.approx(one.memory.parameters / 8, rel=0.01)
    assert one.breakdown_s["exposed_tp"] == 0 < eight.breakdown_s["exposed_tp"]
    assert one.time_s / 8 < eight.time_s < one.time_s / 3
    kinds = {
        op.kind
        for op in inputs_of(LLAMA70, "tp=8", DECODE(16, 2048)).graphs.layer(LLAMA70.layers[0]).of_type(CollectiveOp)
    }
    assert kinds == {"all_reduce"}


def test_pipelines_take_as_long_and_do_more() -> None:
    one, two = run(LLAMA70, "tp=4", DECODE(16, 2048)), run(LLAMA70, "tp=4,pp=2", DECODE(16, 2048))
    assert two.time_s == pytest.approx(one.time_s + two.breakdown_s["exposed_pp"], rel=1e-6)
    assert 1.9 * one.tokens_per_s < two.tokens_per_s < 2 * one.tokens_per_s
    assert two.memory.kv_cache == one.memory.kv_cache / 2


def test_replicas_multiply_the_rate() -> None:
    one, two = run(LLAMA, "tp=1", DECODE(16, 2048)), run(LLAMA, "tp=1,dp=2", DECODE(16, 2048))
    assert (two.time_s, two.tokens_per_s) == (one.time_s, pytest.approx(2 * one.tokens_per_s))


def test_experts_over_replicas() -> None:
    result = run(DEEPSEEK, "dp=32,ep=32", DECODE(64, 4096), nodes=4, recipe=Recipe(fp8=True))
    assert result.breakdown_s["exposed_ep"] > 0 and result.breakdown_s["exposed_tp"] == 0
    uneven = run(DEEPSEEK, "dp=32,ep=32", DECODE(64, 4096), nodes=4, recipe=Recipe(fp8=True), imbalance=2.0)
    assert result.time_s < uneven.time_s


def test_slow_hosts_bound_decode() -> None:
    graph, eager = (run(LLAMA, "tp=8", DECODE(1, 128), stack=stack) for stack in ("graph", "megatron-2021"))
    assert eager.time_s > 2 * graph.time_s and eager.breakdown_s["host"] > graph.time_s


def test_ranges_hold_the_time_and_results_are_the_same_again() -> None:
    first, second = (run(LLAMA, "tp=2", PREFILL(1, 1024) + DECODE(7, 1024), ranges=True) for _ in range(2))
    assert first.low_s < first.time_s < first.high_s
    assert (first.low_s, first.time_s, first.high_s) == (second.low_s, second.time_s, second.high_s)


# Refusals


@pytest.mark.parametrize(
    ("model", "layout", "more", "error", "part"),
    [
        (LLAMA, "cp=2", {}, WorkloadError, "splits sequences"),
        (LLAMA, "tp=8,pp=2", {}, LayoutError, "more nodes"),
        (LLAMA, "tp=3", {}, LayoutError, "tensor-parallel ranks"),
        (LLAMA, "pp=2,vpp=2", {}, LayoutError, "nothing to interleave"),
        (LLAMA, "tp=1", {"stack": "none"}, UsageError, "launch stack"),
        (LLAMA, "tp=1", {"kv_dtype": "int3"}, UsageError, "int3"),
        (LLAMA, "tp=1", {"recipe": RECIPES["megatron-2021"]}, WorkloadError, "no cache to read"),
        (load_model("wan2.1-t2v-14b")[0], "tp=1", {}, WorkloadError, "diffusion"),
    ],
)
def test_what_cannot_be_served(model: ModelSpec, layout: str, more: dict, error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part):
        inputs_of(model, layout, DECODE(1, 16), **more)


def test_bad_batches() -> None:
    for make in (lambda: ForwardBatch(()), lambda: DECODE(1, 0), lambda: DECODE(1, 9, 17), lambda: PREFILL(0, 5)):
        with pytest.raises(WorkloadError):
            make()

"""One reader for each kind of published table: from its columns to an operator and the fit that prices it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from overlapsim.workload.attention import AttentionOp
from overlapsim.workload.memory_bound import MemoryOp

Columns = Mapping[str, str]
# Key heads of models whose tables do not say: those with fewer than query heads (grouped queries).
KV_HEADS: Final = {"70b": 8, "72b": 8, "llama-3-8b": 8, "meta-llama-3": 8, "codellama-34b": 8}
HEAD_DIM: Final = 128
# Half width of the tokens of an expert in the masked (decode) tables: at a mean of 1 half of the experts' weights are
# not read, at 2 all are, as when tokens are drawn between 0.7 and 1.3 of the mean and truncated.
MASKED_UNEVEN: Final = 0.3
UNFUSED: Final = "unfused_bf16"
"""Key of attention made of separate kernels, which has a model of its own and no fit from these tables."""


@dataclass(frozen=True)
class LinearOp:
    """``groups`` products of (m, n, k); see `overlapsim.cost.grouped_fit.GroupedShapes`."""

    groups: int
    m: float
    n: float
    k: float
    output_bytes: float = 2.0
    uneven: float = 0.0


@dataclass(frozen=True)
class Work:
    """What a row measured.

    Attributes
    ----------
    op : the operator
    key : fit that prices it, within the family of the op
    dtype : of the multiplied operands
    times : launches of the op in one measurement
    flop, elements : by which a published rate is turned into a time; 0 where the table publishes no rate
    part : name under which tables of several operators report them apart
    """

    op: AttentionOp | MemoryOp | LinearOp
    key: str
    dtype: str
    times: float = 1.0
    flop: float = 0.0
    elements: float = 0.0
    part: str = ""


def attention_prefill(table: str, columns: Columns) -> Work:
    """``aic_<device>_attention_prefill_<dtype>``: causal, all queries at once."""
    seq = int(columns["seq"])
    dtype = table.rsplit("_", 1)[1]
    op = AttentionOp(
        batch=int(columns["batch"]),
        q_len=seq,
        kv_len=seq,
        heads=int(columns["heads"]),
        kv_heads=int(columns["kv_heads"]),
        head_dim=int(columns["head_dim"]),
        dtype=dtype,
    )
    return Work(op, f"prefill_{dtype}", dtype, flop=op.flop, part="prefill")


def attention_decode(table: str, columns: Columns) -> Work:
    """``aic_<device>_attention_decode_<dtype>``: one query a sequence over ``seq`` keys."""
    dtype = table.rsplit("_", 1)[1]
    op = AttentionOp(
        batch=int(columns["batch"]),
        q_len=1,
        kv_len=int(columns["seq"]),
        heads=int(columns["heads"]),
        kv_heads=int(columns["kv_heads"]),
        head_dim=int(columns["head_dim"]),
        dtype=dtype,
    )
    return Work(op, f"decode_{dtype}", dtype, flop=op.flop, part="decode")


def infersim_attention(table: str, columns: Columns) -> Work:
    """``infersim_<device>_attention``: ``heads_kv_dim`` is heads-kv_heads-dim, for MLA heads-latent-rope."""
    first, second, third = (int(part) for part in columns["heads_kv_dim"].split("-"))
    length, batch, dtype = int(columns["seq_or_kv_len"]), int(columns["batch"]), columns["dtype"]
    prefill = columns["phase"] == "prefill"
    kv_dtype = columns.get("kv_dtype", "")
    q_len = length if prefill else 1
    if columns["kind"] == "mla":
        dim = second + third
        kv_heads, value_dim, shared = (first, second, False) if prefill else (1, second, True)
    else:
        dim, kv_heads, value_dim, shared = third, second, third, False
    op = AttentionOp(
        batch=batch,
        q_len=q_len,
        kv_len=length,
        heads=first,
        kv_heads=kv_heads,
        head_dim=dim,
        value_dim=value_dim,
        causal=prefill,
        dtype=dtype,
        kv_dtype=kv_dtype if kv_dtype != dtype else "",
        shared_kv=shared,
    )
    kind = "mla_" if columns["kind"] == "mla" else ""
    cache = f"_kv_{kv_dtype}" if kv_dtype not in ("", dtype) else ""
    part = f"{columns['phase']} {columns['kind']}" + (" fp8 cache" if cache else "")
    return Work(op, f"{columns['phase']}_{kind}{dtype}{cache}", dtype, flop=op.flop, part=part)


def flash_kernels(table: str, columns: Columns) -> Work:
    """``flashattention_<device>_forward``: non-causal kernels by library; "standard" is built from GEMMs."""
    seq, dim = int(columns["seq"]), int(columns["head_dim"])
    heads = int(columns["heads"])
    op = AttentionOp(int(columns["batch"]), seq, seq, heads, heads, dim, causal=False)
    kernel = columns["kernel"].lower().replace("triton-fa2-tutorial", "triton")
    key = UNFUSED if kernel == "standard" else f"{kernel}_bf16"
    return Work(op, key, "bf16", flop=op.flop, part=kernel)


def deepgemm_experts(table: str, columns: Columns) -> Work:
    """``infersim_<device>_grouped_gemm_<prefill|decode>``: gate and up together, or down, of local experts in fp8."""
    hidden, inner = int(columns["hidden_size"]), int(columns["intermediate_size"])
    decode = table.endswith("decode")
    n, k = (2 * inner, hidden) if columns["op"] == "up_proj" else (hidden, inner)
    op = LinearOp(
        groups=int(columns["num_local_experts"]),
        m=float(columns["tokens_per_expert"]),
        n=n,
        k=k,
        uneven=MASKED_UNEVEN if decode else 0.0,
    )
    return Work(op, f"deepgemm_{'masked' if decode else 'contiguous'}_fp8", "fp8", part=columns["op"])


def deepgemm(table: str, columns: Columns) -> Work:
    """``deepgemm_<device>_fp8_<version>``: plain, contiguous and masked GEMMs; m is of one group."""
    kind = columns["kind"].removeprefix("grouped_")
    op = LinearOp(*(int(columns[name]) for name in ("groups", "m", "n", "k")))
    flop = 2.0 * op.groups * op.m * op.n * op.k
    key = {"normal": "deepgemm_fp8"}.get(kind, f"deepgemm_{kind}_fp8")
    return Work(op, key, "fp8", flop=flop, part=kind)


def torch_grouped(table: str, columns: Columns) -> Work:
    """``torchao_<device>_grouped_mxfp8``, bf16 column: forward and two gradients; m is of all groups together."""
    groups, m = int(columns["groups"]), int(columns["m"])
    op = LinearOp(groups, m / groups, int(columns["n"]), int(columns["k"]))
    return Work(op, "simumax_grouped_bf16", "bf16", times=3.0, part="forward and backward")


def vidur(table: str, columns: Columns) -> Work:
    """``vidur_<device>_<model>_ops``: memory-bound operators and projections of a decoder layer in fp16."""
    tokens, hidden, ffn, tp = (int(columns[name]) for name in ("num_tokens", "hidden", "ffn", "tp"))
    model = table.split("_", 2)[2].lower()
    default = next((heads for name, heads in KV_HEADS.items() if name in model), hidden // HEAD_DIM)
    kv = int(columns.get("kv_heads", default)) * HEAD_DIM
    ffn_local = ffn // tp
    name = columns["op"]
    grids = {
        "input_layernorm": ("rmsnorm", hidden),
        "post_attention_layernorm": ("rmsnorm", hidden),
        "attn_rope": ("rope", (hidden + kv) // tp),
        "mlp_act": ("silu_mul", ffn_local),
        "add": ("add", hidden),
    }
    if name in grids:
        kind, width = grids[name]
        # Norm, rope and activation are an early serving library's kernels, far from the memory's rate.
        key = kind if kind == "add" else f"vidur_{kind}"
        return Work(MemoryOp(kind, tokens, width, "fp16"), key, "fp16", part=name)
    sizes = {
        "attn_pre_proj": ((hidden + 2 * kv) // tp, hidden),
        "attn_post_proj": (hidden, hidden // tp),
        "mlp_up_proj": (2 * ffn_local, hidden),
        "mlp_down_proj": (hidden, ffn_local),
    }
    if name not in sizes:
        raise ValueError(f"op is {name!r}; expected one of {', '.join((*grids, *sizes))}")
    n, k = sizes[name]
    return Work(LinearOp(1, tokens, n, k), "vidur_fp16", "fp16", part=name)


def simumax(table: str, columns: Columns) -> Work:
    """``simumax_<device>_op_efficiency``: GEMMs, grouped GEMMs and causal attention of training, as FLOP by time.

    FLOP are counted as that simulator does: attention in full, backward 2.5 times forward.
    """
    name = columns["op"]
    if name == "matmul":
        sizes = [int(columns[key]) for key in ("m", "n", "k")]
        adds = columns["accumulate"] == "True"
        op = LinearOp(1, *sizes)
        if adds:
            op = replace(op, output_bytes=8.0 if columns["out_dtype"] == "fp32" else 4.0)
        key = "simumax_wgrad_bf16" if columns["layout"] == "NT" else "simumax_bf16"
        return Work(op, key, "bf16", flop=2.0 * sizes[0] * sizes[1] * sizes[2], part=name)
    if name == "group_matmul":
        groups, m, n, k = (int(columns[key]) for key in ("ng", "M", "N", "K"))
        flop = 2.0 * groups * m * n * k
        stage = columns["stage"]
        if stage == "bwd_grad_w":
            op = LinearOp(groups, n, k, m, output_bytes=8.0 if columns["main_grad_dtype"] == "fp32" else 4.0)
            return Work(op, "simumax_grouped_wgrad_bf16", "bf16", flop=flop, part="group_matmul wgrad")
        op = LinearOp(groups, m, n, k) if stage == "fwd" else LinearOp(groups, m, k, n)
        return Work(op, "simumax_grouped_bf16", "bf16", flop=flop, part=name)
    backward = {"sdp_fwd": False, "sdp_bwd": True}.get(name)
    if backward is None:
        raise ValueError(f"op is {name!r}; expected matmul, group_matmul, sdp_fwd or sdp_bwd")
    seq, heads = int(columns["seq_len"]), int(columns["head_num"])
    qk, v = int(columns["qk_head_dim"]), int(columns["v_head_dim"])
    attention = AttentionOp(
        batch=int(columns["batch"]),
        q_len=seq,
        kv_len=seq,
        heads=heads,
        kv_heads=int(columns["kv_head_num"]),
        head_dim=qk,
        value_dim=v,
        pass_="bwd" if backward else "fwd",
    )
    full = 2.0 * attention.batch * heads * seq * seq * (qk + v) * (2.5 if backward else 1.0)
    phase = "backward" if backward else "simumax_prefill"
    return Work(attention, f"{phase}{'_mla' if qk != v else ''}_bf16", "bf16", flop=full, part=name)


def llmcompass(table: str, columns: Columns) -> Work:
    """``llmcompass_<device>_<softmax|layernorm|gelu>``: eager framework calls, as elements by time (fp16)."""
    kind = table.rsplit("_", 1)[1]
    rows, width = (int(columns["elements"]), 1) if kind == "gelu" else (int(columns["rows"]), int(columns["cols"]))
    op = MemoryOp(kind, rows, width, "fp16") if kind != "gelu" else MemoryOp(kind, 1, rows, "fp16")
    return Work(op, f"eager_{kind}", "fp16", elements=float(rows) * width, part=kind)


def quantize(table: str, columns: Columns) -> Work:
    """``torchao_<device>_quant_membound`` and ``torchao_<device>_mxfp8_kernels``: bf16 to fp8 or mxfp8."""
    kind = "quantize_mxfp8" if "mxfp8" in table else "quantize_fp8"
    return Work(MemoryOp(kind, int(columns["rows"]), int(columns["cols"])), kind, "bf16", part=kind)


READERS: Final[tuple[tuple[str, Callable[[str, Columns], Work]], ...]] = (
    (r"aic_.+_attention_prefill_\w+", attention_prefill),
    (r"aic_.+_attention_decode_\w+", attention_decode),
    (r"infersim_.+_attention", infersim_attention),
    (r"infersim_.+_grouped_gemm_(prefill|decode)", deepgemm_experts),
    (r"deepgemm_.+_fp8_.+", deepgemm),
    (r"flashattention_.+_forward", flash_kernels),
    (r"vidur_.+_ops", vidur),
    (r"simumax_.+_op_efficiency", simumax),
    (r"llmcompass_.+_(softmax|layernorm|gelu)", llmcompass),
    (r"torchao_.+_(quant_membound|mxfp8_kernels)", quantize),
    (r"torchao_.+_grouped_mxfp8", torch_grouped),
)
"""Pattern of a table's name, and its reader; the first that matches counts."""

"""Attention of one layer as operators: projections, positions, the core, and what the layout moves around it."""

from __future__ import annotations

from dataclasses import replace

from overlapsim.units import dtype_bytes
from overlapsim.workload.attention import AttentionOp, UnfusedAttention
from overlapsim.workload.build_linear import (
    Linear,
    column_backward,
    gather_gradient,
    gemm_backward,
    norm_backward,
    reduce_output,
    residual,
    residual_backward,
)
from overlapsim.workload.build_part import Part, local_sizes, norm_kind
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.model import Attention
from overlapsim.workload.recorder import Recorder
from overlapsim.workload.vocabulary import local_heads

# The largest sequence that the fused scale-mask-softmax kernel of 2021 takes, and what must divide by four.
FUSED_SOFTMAX_SEQUENCE = 2048


def core(part: Part, pass_: str) -> AttentionOp | UnfusedAttention:
    """Attention of one rank, all of its steps together (a ring's steps do equal work once the sequence is dealt so)."""
    attention, layout, tokens = part.layer.attention, part.layout, part.tokens
    heads = local_heads(attention, layout.tp, pad=True)
    q_heads = -(-heads.num_heads // layout.sp)
    kv_heads = max(1, heads.num_kv_heads // layout.sp)
    kv_heads = kv_heads if q_heads % kv_heads == 0 else q_heads
    queries = -(-tokens.sequence // layout.cp)
    op = AttentionOp(
        batch=tokens.batch,
        q_len=queries,
        kv_len=tokens.sequence,
        heads=q_heads,
        kv_heads=kv_heads,
        head_dim=attention.head_dim,
        value_dim=attention.v_dim,
        causal=attention.causal,
        dtype=part.model.dtype,
        pass_=pass_,
    )
    flash = part.recipe.attention == "flash"
    if flash and attention.window is not None and attention.window < tokens.sequence:
        op = _windowed(op, attention.window, tokens.sequence)
    elif attention.causal and layout.cp > 1:
        # Queries dealt from both ends see half of all keys on average, as a square of the same area does.
        op = replace(op, q_len=queries, kv_len=-(-tokens.sequence // 2) + queries // 2)
    if flash:
        return op
    # Kernels of their own compute all scores, whatever the window.
    fused = part.recipe.fused_softmax and fits_fused_softmax(op)
    return UnfusedAttention(op, fused_softmax=fused, dropout=part.recipe.dropout)


def _windowed(op: AttentionOp, window: int, sequence: int) -> AttentionOp:
    """A sliding window as pieces of its length that see as many keys: those before them too, but for the first."""
    pieces = max(1, round(op.q_len / window))
    keys = 1.5 * window - window**2 / (2 * sequence) if op.causal else window
    queries = min(window, op.q_len)
    return replace(op, batch=op.batch * pieces, q_len=queries, kv_len=max(queries, round(keys)))


def fits_fused_softmax(op: AttentionOp) -> bool:
    """Whether the fused scale-mask-softmax kernel takes a shape: two-byte types, 16 < keys <= 2048, fours."""
    whole = op.kv_len % 4 == 0 and (op.batch * op.heads) % 4 == 0
    return dtype_bytes(op.dtype) == 2 and 16 < op.kv_len <= FUSED_SOFTMAX_SEQUENCE and whole


def attention_forward(r: Recorder, part: Part) -> None:
    """Record the forward pass from the norm to the residual sum."""
    model, layout, t = part.model, part.layout, part.tokens
    attention, tp = part.layer.attention, layout.tp
    r.kernel("attn.norm", MemoryOp(norm_kind(model), t.local, model.hidden, model.dtype))
    if tp > 1 and layout.sequence_parallel:
        r.collective("all_gather", "attn.qkv", part.hidden_bytes, tp, group="tp")
    qkv_columns = 0
    for matrix in part.matrices("attn.qkv"):
        inputs, outputs = local_sizes(matrix, tp)
        rows = t.rows if matrix.rows == "token" else _context_rows(part)
        r.gemm("attn.qkv", rows, outputs, inputs, dtype=part.gemm_dtype)
        if matrix.bias:
            r.kernel("attn.qkv", MemoryOp("bias_add", rows, outputs, model.dtype))
        qkv_columns += outputs if matrix.rows == "token" else 0
    rotated = _rotated_columns(attention, tp)
    if model.positions == "rotary" and rotated:
        r.kernel("attn.rope", MemoryOp(part.rope_kind, t.rows, rotated, model.dtype))
    if part.recipe.attention == "unfused":
        r.kernel("attn.core", MemoryOp("transpose", t.rows, _context_columns(attention, tp), model.dtype))
    ring = _into_heads(r, part, r.pass_)
    r.kernel("attn.core", core(part, "fwd"))
    r.also(ring)
    _out_of_heads(r, part, r.pass_)
    if part.layer.cross is not None:
        r.kernel("attn.core", _cross(part, "fwd"))
    for matrix in part.matrices("attn.out"):
        inputs, outputs = local_sizes(matrix, tp)
        r.gemm("attn.out", t.rows, outputs, inputs, dtype=part.gemm_dtype)
    reduce_output(r, part, "attn.out")
    residual(r, part, "attn.out", bias=attention.out_bias)


def attention_backward(r: Recorder, part: Part, *, keep: frozenset[str]) -> None:
    """Record the backward pass, last operator first.

    Parameters
    ----------
    keep : passes to record: ``dgrad``, ``wgrad`` or both (zero-bubble schedules run them apart)
    """
    model, layout, t = part.model, part.layout, part.tokens
    attention, tp = part.layer.attention, layout.tp
    residual_backward(r, part, "attn.out", bias=attention.out_bias, keep=keep)
    if "dgrad" in keep:
        gather_gradient(r, part, "attn.out")
    for matrix in reversed(part.matrices("attn.out")):
        inputs, outputs = local_sizes(matrix, tp)
        gemm_backward(r, part, "attn.out", t.rows, inputs, outputs, keep)
    if "dgrad" in keep:
        if part.layer.cross is not None:
            r.kernel("attn.core", _cross(part, "bwd"), pass_="dgrad")
        ring = _into_heads(r, part, "dgrad", back=True)
        r.kernel("attn.core", core(part, "bwd"), pass_="dgrad")
        r.also(ring)
        _out_of_heads(r, part, "dgrad", back=True)
        if part.recipe.attention == "unfused":
            columns = _context_columns(attention, tp)
            r.kernel("attn.core", MemoryOp("transpose", 2 * t.rows, columns, model.dtype), pass_="dgrad")
        rotated = _rotated_columns(attention, tp)
        if model.positions == "rotary" and rotated:
            r.kernel("attn.rope", MemoryOp(part.rope_kind, t.rows, rotated, model.dtype, "bwd"), pass_="dgrad")
    linears = []
    for matrix in reversed(part.matrices("attn.qkv")):
        inputs, outputs = local_sizes(matrix, tp)
        rows = t.rows if matrix.rows == "token" else _context_rows(part)
        linears.append(Linear(rows, inputs, outputs, matrix.bias))
    column_backward(r, part, "attn.qkv", linears, keep)
    if "dgrad" in keep:
        norm_backward(r, part, "attn.norm")


# Inside attention


def _rotated_columns(attention: Attention, tp: int) -> int:
    heads = local_heads(attention, tp, pad=True)
    if attention.latent is not None:
        return (heads.num_heads + 1) * attention.latent.rope_head_dim
    return (heads.num_heads + heads.num_kv_heads) * attention.head_dim


def _context_columns(attention: Attention, tp: int) -> int:
    return local_heads(attention, tp, pad=True).num_heads * attention.v_dim


def _context_rows(part: Part) -> int:
    assert part.model.diffusion is not None
    return part.tokens.batch * part.model.diffusion.context_tokens


def _cross(part: Part, pass_: str) -> AttentionOp:
    cross = part.layer.cross
    assert cross is not None and part.model.diffusion is not None
    heads = local_heads(cross, part.layout.tp, pad=True)
    return AttentionOp(
        batch=part.tokens.batch,
        q_len=-(-part.tokens.rows // part.tokens.batch),
        kv_len=part.model.diffusion.context_tokens,
        heads=heads.num_heads,
        kv_heads=heads.num_kv_heads,
        head_dim=cross.head_dim,
        value_dim=cross.v_dim,
        causal=False,
        dtype=part.model.dtype,
        pass_=pass_,
    )


def _widths(part: Part) -> tuple[int, int]:
    """Columns of queries, keys and values together, and of the output, on one tensor-parallel rank."""
    attention = part.layer.attention
    heads = local_heads(attention, part.layout.tp, pad=True)
    keys = heads.num_kv_heads * (attention.head_dim + attention.v_dim)
    return heads.num_heads * attention.head_dim + keys, heads.num_heads * attention.v_dim


def _into_heads(r: Recorder, part: Part, pass_: str, *, back: bool = False) -> int:
    """Exchange sequence for heads (Ulysses), and let keys and values come round or together (context parallelism).

    Returns the position of the ring's transfers, which run beside attention; -1 without a ring.
    """
    inside, outside = _widths(part)
    columns = outside if back else inside
    size = float(part.tokens.rows * columns * part.element_bytes)
    r.collective("all_to_all", "attn.core", size, part.layout.sp, group="sp", pass_=pass_)
    return _context_exchange(r, part, pass_, gradients=back)


def _out_of_heads(r: Recorder, part: Part, pass_: str, *, back: bool = False) -> None:
    inside, outside = _widths(part)
    columns = inside if back else outside
    size = float(part.tokens.rows * columns * part.element_bytes)
    r.collective("all_to_all", "attn.out", size, part.layout.sp, group="sp", pass_=pass_)


def _context_exchange(r: Recorder, part: Part, pass_: str, *, gradients: bool) -> int:
    """Keys and values of the other context ranks: backward their gradients travel too."""
    layout, attention = part.layout, part.layer.attention
    if layout.cp < 2:
        return -1
    heads = local_heads(attention, layout.tp, pad=True)
    columns = -(-heads.num_kv_heads // layout.sp) * (attention.head_dim + attention.v_dim)
    # Rows of the whole Ulysses group: after its exchange a rank holds all of the group's tokens for its heads.
    own = float(part.tokens.rows * layout.sp * columns * part.element_bytes)
    times = 2 if gradients else 1
    if layout.cp_kind == "allgather":
        r.collective("all_gather", "attn.core", own * layout.cp, layout.cp, group="cp", pass_=pass_)
        if gradients:
            r.collective("reduce_scatter", "attn.core", own * layout.cp, layout.cp, group="cp", pass_=pass_)
        return -1
    return r.collective(
        "send_recv", "attn.core", own * times * (layout.cp - 1), layout.cp, group="cp", pass_=pass_, stream="cp",
        needs=[r.last], main=False,
    )  # fmt: skip

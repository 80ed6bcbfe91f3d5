"""Feed-forward blocks of one layer as operators: dense, routed experts and shared experts."""

from __future__ import annotations

from overlapsim.units import dtype_bytes
from overlapsim.workload.build_dispatch import dispatch, expert_rows
from overlapsim.workload.build_linear import (
    Linear,
    accumulate,
    column_backward,
    gather_gradient,
    gemm_backward,
    norm_backward,
    reduce_output,
    residual,
    residual_backward,
)
from overlapsim.workload.build_part import Part, local_sizes, norm_kind
from overlapsim.workload.build_routing import gate, gate_gradient, permute, unpermute
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.model import Mlp, MoE
from overlapsim.workload.operators import GroupedGemmOp
from overlapsim.workload.recipe import SharedExperts
from overlapsim.workload.recorder import Recorder


def mlp_forward(r: Recorder, part: Part) -> None:
    """Record the forward pass from the norm to the residual sum."""
    model, t, mlp = part.model, part.tokens, part.layer.mlp
    r.kernel("mlp.norm", MemoryOp(norm_kind(model), t.local, model.hidden, model.dtype))
    if isinstance(mlp, MoE):
        _experts_forward(r, part, mlp)
        residual(r, part, "mlp.fc2", bias=False)
        return
    _dense_forward(r, part, mlp, "mlp.")
    residual(r, part, "mlp.fc2", bias=mlp.bias)


def mlp_backward(r: Recorder, part: Part, *, keep: frozenset[str]) -> None:
    """Record the backward pass, last operator first; `keep` as in attention."""
    mlp = part.layer.mlp
    bias = isinstance(mlp, Mlp) and mlp.bias
    residual_backward(r, part, "mlp.fc2", bias=bias, keep=keep)
    if isinstance(mlp, MoE):
        _experts_backward(r, part, mlp, keep)
    else:
        _dense_backward(r, part, mlp, "mlp.", keep)
    if "dgrad" in keep:
        norm_backward(r, part, "mlp.norm")


def _activation(part: Part, mlp: Mlp, bias: bool) -> str:
    if mlp.gated:
        return "silu_mul"
    return "bias_gelu" if bias and part.recipe.fused_bias else "gelu"


def _dense_forward(r: Recorder, part: Part, mlp: Mlp, prefix: str, *, shared: SharedExperts = "own") -> None:
    """A dense block that gathers its rows and sums its output for itself, or as the recipe's shared experts do."""
    model, layout, t, own = part.model, part.layout, part.tokens, shared == "own"
    rows, tp = (t.local, 1) if shared == "whole" else (t.rows, layout.tp)
    if layout.tp > 1 and layout.sequence_parallel and own:
        r.collective("all_gather", f"{prefix}fc1", part.hidden_bytes, layout.tp, group="tp")
    (up,), (down,) = part.matrices(f"{prefix}fc1"), part.matrices(f"{prefix}fc2")
    inputs, outputs = local_sizes(up, tp)
    r.gemm(f"{prefix}fc1", rows, outputs, inputs, dtype=part.gemm_dtype)
    inner, _ = local_sizes(down, tp)
    kind = _activation(part, mlp, up.bias)
    if up.bias and kind != "bias_gelu":
        r.kernel(f"{prefix}fc1", MemoryOp("bias_add", rows, outputs, model.dtype))
    r.kernel(f"{prefix}act", MemoryOp(kind, rows, inner, model.dtype))
    r.gemm(f"{prefix}fc2", rows, down.outputs, inner, dtype=part.gemm_dtype)
    if own:
        reduce_output(r, part, f"{prefix}fc2")


def _dense_backward(
    r: Recorder, part: Part, mlp: Mlp, prefix: str, keep: frozenset[str], *, shared: SharedExperts = "own"
) -> None:
    model, layout, t, own = part.model, part.layout, part.tokens, shared == "own"
    rows, tp = (t.local, 1) if shared == "whole" else (t.rows, layout.tp)
    (up,), (down,) = part.matrices(f"{prefix}fc1"), part.matrices(f"{prefix}fc2")
    inner, _ = local_sizes(down, tp)
    inputs, outputs = local_sizes(up, tp)
    if "dgrad" in keep and own:
        gather_gradient(r, part, f"{prefix}fc2")
    gemm_backward(r, part, f"{prefix}fc2", rows, inner, down.outputs, keep)
    if "dgrad" in keep:
        kind = _activation(part, mlp, up.bias)
        r.kernel(f"{prefix}act", MemoryOp(kind, rows, inner, model.dtype, "bwd"), pass_="dgrad")
    if not own:
        gemm_backward(r, part, f"{prefix}fc1", rows, inputs, outputs, keep)
    else:
        column_backward(r, part, f"{prefix}fc1", [Linear(rows, inputs, outputs, up.bias)], keep)


def _shared(part: Part) -> SharedExperts:
    """How shared experts get their rows: ``joined`` needs rows gathered over the same ranks for the routed ones."""
    layout, recipe = part.layout, part.recipe
    same_ranks = layout.tp == layout.ep * layout.etp and layout.sequence_parallel and layout.tp > 1
    if recipe.shared == "joined" and not (recipe.dispatcher == "all_gather" and same_ranks):
        return "own"
    return recipe.shared


# Experts


def _experts_forward(r: Recorder, part: Part, moe: MoE) -> None:
    model, t, layout = part.model, part.tokens, part.layout
    start = r.last
    r.gemm("moe.router", t.local, moe.num_experts, model.hidden)
    gate(r, part, moe)
    rows = expert_rows(part, moe)
    gathers = part.recipe.dispatcher == "all_gather"
    copies = sum(rows) if gathers else t.local * moe.top_k
    if gathers:
        dispatch(r, part, moe, "moe.dispatch", r.pass_, back=False)
    gathered = r.last
    permute(r, part, moe, copies)
    if not gathers:
        dispatch(r, part, moe, "moe.dispatch", r.pass_, back=False)
    inner = -(-moe.expert.ffn // layout.etp)
    up = inner * (2 if moe.expert.gated else 1)
    dtype, looped = part.gemm_dtype, part.recipe.experts == "looped"
    r.kernel("moe.fc1", GroupedGemmOp(rows, up, model.hidden, dtype, looped=looped))
    kind = "silu_mul" if moe.expert.gated else "gelu"
    r.kernel("moe.act", MemoryOp(kind, sum(rows), inner, model.dtype))
    r.kernel("moe.fc2", GroupedGemmOp(rows, model.hidden, inner, dtype, looped=looped))
    if not gathers:
        dispatch(r, part, moe, "moe.combine", r.pass_, back=True)
    unpermute(r, part, moe, copies)
    shared = _shared(part)
    if moe.shared is not None and shared == "joined":
        routed, r.last = r.last, gathered
        _dense_forward(r, part, moe.shared, "moe.shared.", shared=shared)
        r.also(routed)
        r.kernel("moe.shared.fc2", MemoryOp("add", t.rows, model.hidden, model.dtype))
    if gathers:
        dispatch(r, part, moe, "moe.combine", r.pass_, back=True)
    if moe.shared is not None and shared != "joined":
        routed, r.last = r.last, start
        _dense_forward(r, part, moe.shared, "moe.shared.", shared=shared)
        r.also(routed)
        r.kernel("moe.shared.fc2", MemoryOp("add", t.local, model.hidden, model.dtype))


def _experts_backward(r: Recorder, part: Part, moe: MoE, keep: frozenset[str]) -> None:
    model, t, layout = part.model, part.tokens, part.layout
    rows = expert_rows(part, moe)
    inner = -(-moe.expert.ffn // layout.etp)
    up = inner * (2 if moe.expert.gated else 1)
    dtype = part.gemm_dtype
    dgrad = "dgrad" in keep
    given, beside = r.last, list[int]()
    gathers, joined = part.recipe.dispatcher == "all_gather", _shared(part) == "joined"
    copies = sum(rows) if gathers else t.local * moe.top_k
    if dgrad and joined:
        dispatch(r, part, moe, "moe.combine", "dgrad", back=False)
        given = r.last
    if moe.shared is not None:
        _dense_backward(r, part, moe.shared, "moe.shared.", keep, shared=_shared(part))
        # Routed experts need the same gradient, and nothing of the shared ones.
        beside, r.last = r.take(), given
    if dgrad and gathers and not joined:
        dispatch(r, part, moe, "moe.combine", "dgrad", back=False)
    if dgrad:
        unpermute(r, part, moe, copies, "bwd")
    if dgrad and not gathers:
        dispatch(r, part, moe, "moe.combine", "dgrad", back=False)
    _grouped_backward(r, part, "moe.fc2", rows, model.hidden, inner, dtype, keep)
    if dgrad:
        kind = "silu_mul" if moe.expert.gated else "gelu"
        r.kernel("moe.act", MemoryOp(kind, sum(rows), inner, model.dtype, "bwd"), pass_="dgrad")
    _grouped_backward(r, part, "moe.fc1", rows, up, model.hidden, dtype, keep)
    if dgrad and not gathers:
        dispatch(r, part, moe, "moe.dispatch", "dgrad", back=True)
    if dgrad:
        permute(r, part, moe, copies, "bwd")
    if dgrad and moe.shared is not None and joined:
        for position in beside:
            r.also(position)
        beside = []
        r.kernel("moe.shared.fc1", MemoryOp("add", t.rows, model.hidden, model.dtype), pass_="dgrad")
    if dgrad and gathers:
        dispatch(r, part, moe, "moe.dispatch", "dgrad", back=True)
    if dgrad:
        gate_gradient(r, part, moe)
    gemm_backward(r, part, "moe.router", t.local, model.hidden, moe.num_experts, keep)
    for position in beside:
        r.also(position)


def _grouped_backward(
    r: Recorder, part: Part, name: str, rows: tuple[int, ...], n: int, k: int, dtype: str, keep: frozenset[str]
) -> None:
    """Two grouped GEMMs; the weight gradient's products share a depth, the mean of the busy experts' rows.

    Rows are the slow axis of both its operands, so an odd number of them leaves no row unaligned: the depth is one of
    whole 16 bytes.
    """
    given, looped = r.last, part.recipe.experts == "looped"
    if "dgrad" in keep:
        r.kernel(name, GroupedGemmOp(rows, k, n, dtype, looped=looped), pass_="dgrad")
    if "wgrad" in keep:
        busy = sum(1 for count in rows if count)
        whole = round(16 / dtype_bytes(dtype))
        depth = max(1, round(sum(rows) / busy / whole)) * whole
        adds = part.recipe.accumulation == "fused"
        work = GroupedGemmOp((n,) * busy, k, depth, dtype, adds=adds, looped=looped)
        r.kernel(name, work, pass_="wgrad", needs=[given], main=False)
        accumulate(r, part, name, len(rows) * n * k)

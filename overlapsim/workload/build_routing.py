"""Routing of one layer's tokens to experts as operators: gate, order of copies by expert, and back."""

from __future__ import annotations

from typing import Literal

from overlapsim.workload.build_part import Part
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.model import MoE
from overlapsim.workload.recorder import Recorder


def gate(r: Recorder, part: Part, moe: MoE) -> None:
    """Record what chooses experts, behind the router's GEMM, and finds the place of each copy."""
    tokens, dtype = part.tokens.local, part.model.dtype
    if part.recipe.router == "fused":
        r.kernel("moe.router", MemoryOp("router", tokens, moe.num_experts, dtype))
        return
    alone = part.recipe.router == "gate_chain"
    r.kernel("moe.router", MemoryOp("gate" if alone else "gating", tokens, moe.num_experts, dtype))
    if alone:
        return
    indices = "routing_index" if part.recipe.router == "chain" else "routing_drop"
    r.kernel("moe.router", MemoryOp(indices, tokens * part.layout.etp, moe.top_k, dtype))


def gate_gradient(r: Recorder, part: Part, moe: MoE) -> None:
    """Record the gradient of the chosen scores, before the router's GEMMs."""
    kind = "router" if part.recipe.router == "fused" else "gating"
    work = MemoryOp(kind, part.tokens.local, moe.num_experts, part.model.dtype, "bwd")
    r.kernel("moe.router", work, pass_="dgrad")


def permute(r: Recorder, part: Part, moe: MoE, rows: int, pass_: Literal["fwd", "bwd"] = "fwd") -> None:
    """Record the ordering of `rows` copies by expert; ``bwd`` adds up their gradients."""
    kind = "moe_permute" if part.recipe.permutation == "fused" else "torch_permute"
    work = MemoryOp(kind, rows, part.model.hidden, part.model.dtype, pass_)
    r.kernel("moe.permute", work, pass_=r.pass_ if pass_ == "fwd" else "dgrad")


def unpermute(r: Recorder, part: Part, moe: MoE, rows: int, pass_: Literal["fwd", "bwd"] = "fwd") -> None:
    """Record the weighted sum of each token's copies, of which there are `rows`; ``bwd`` spreads its gradient."""
    model = part.model
    if part.recipe.permutation == "torch":
        work = MemoryOp("torch_unpermute", rows, model.hidden, model.dtype, pass_)
    else:
        tokens = max(1, round(rows / moe.top_k))
        work = MemoryOp("moe_unpermute", tokens, model.hidden, model.dtype, pass_, moe.top_k)
    r.kernel("moe.unpermute", work, pass_=r.pass_ if pass_ == "fwd" else "dgrad")

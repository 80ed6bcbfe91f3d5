"""A model as Megatron's arguments: sizes, kinds of blocks, and what they cannot describe."""

from __future__ import annotations

from itertools import groupby
from typing import Final

from overlapsim.emit.rules import Sheet
from overlapsim.workload.model import Attention, Layer, Mlp, ModelSpec, MoE

_POSITIONS: Final = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}


def put_model(sheet: Sheet, model: ModelSpec, seq_len: int) -> None:
    """Put the sizes of a model down.

    Parameters
    ----------
    sheet : of Megatron's options
    model : a language model; parts of others are named as not expressed
    seq_len : tokens of a sequence
    """
    first = model.layers[0]
    sheet.set("--num-layers", model.num_layers)
    sheet.set("--hidden-size", model.hidden)
    dense = next((layer.mlp for layer in model.layers if isinstance(layer.mlp, Mlp)), None)
    experts = next((layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)), None)
    widest = dense or (experts.expert if experts else None)
    assert widest is not None
    sheet.set("--ffn-hidden-size", widest.ffn)
    _attention(sheet, model, first.attention)
    sheet.set("--seq-length", seq_len)
    sheet.set("--max-position-embeddings", max(seq_len, model.max_positions))
    if model.vocabulary:
        sheet.set("--vocab-size", model.vocabulary)
    sheet.set("--position-embedding-type", _POSITIONS[model.positions])
    sheet.set("--normalization", "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm")
    if not model.tied_embeddings:
        sheet.set("--untie-embeddings-and-output-weights")
    _block(sheet, widest, first)
    if experts is not None:
        _experts(sheet, model, experts)
    if model.num_mtp_layers:
        sheet.set("--mtp-num-layers", model.num_mtp_layers)
    _others(sheet, model)


def _attention(sheet: Sheet, model: ModelSpec, attention: Attention) -> None:
    sheet.set("--num-attention-heads", attention.num_heads)
    latent = attention.latent
    if latent is not None:
        sheet.set("--multi-latent-attention")
        if latent.q_rank is not None:
            sheet.set("--q-lora-rank", latent.q_rank)
        sheet.set("--kv-lora-rank", latent.kv_rank)
        sheet.set("--qk-head-dim", latent.nope_head_dim)
        sheet.set("--qk-pos-emb-head-dim", latent.rope_head_dim)
        sheet.set("--v-head-dim", attention.v_dim)
        return
    if attention.kind == "gqa":
        sheet.set("--group-query-attention")
        sheet.set("--num-query-groups", attention.num_kv_heads)
    if attention.head_dim * attention.num_heads != model.hidden:
        sheet.set("--kv-channels", attention.head_dim)
    if attention.v_dim != attention.head_dim:
        sheet.unsaid(f"value heads of {attention.v_dim} beside query heads of {attention.head_dim}")


def _block(sheet: Sheet, mlp: Mlp, first: Layer) -> None:
    """Activation and biases."""
    if mlp.gated and mlp.activation == "silu":
        sheet.set("--swiglu")
    elif mlp.gated or mlp.activation != "gelu":
        sheet.unsaid(f"{'gated ' if mlp.gated else ''}{mlp.activation} as activation; GELU stands")
    attention = first.attention
    if not mlp.bias and not attention.out_bias:
        sheet.set("--disable-bias-linear")
        if attention.qkv_bias:
            sheet.set("--add-qkv-bias")
    elif not (mlp.bias and attention.out_bias and attention.qkv_bias):
        sheet.unsaid("biases of some linear layers only; all have one")
    if attention.qk_norm == "head":
        sheet.set("--qk-layernorm")
    elif attention.qk_norm == "all":
        sheet.unsaid("a norm of queries and keys over all heads together")
    if attention.sinks:
        sheet.set("--softmax-type", "learnable", why="attention sinks")


def _experts(sheet: Sheet, model: ModelSpec, moe: MoE) -> None:
    sheet.set("--num-experts", moe.num_experts)
    sheet.set("--moe-router-topk", moe.top_k)
    sheet.set("--moe-ffn-hidden-size", moe.expert.ffn)
    sheet.set("--moe-grouped-gemm")
    if moe.shared is not None:
        sheet.set("--moe-shared-expert-intermediate-size", moe.shared.ffn)
        if moe.shared_gate:
            sheet.set("--moe-shared-expert-gate", why="the shared experts' gate")
    if moe.router == "sigmoid":
        sheet.set("--moe-router-score-function", "sigmoid")
        if moe.router_bias:
            sheet.set("--moe-router-enable-expert-bias")
    elif moe.router_bias:
        sheet.unsaid("a bias of the router beside softmax scores")
    if moe.num_groups > 1:
        sheet.set("--moe-router-num-groups", moe.num_groups)
        sheet.set("--moe-router-group-topk", moe.top_groups)
    if moe.capacity_factor is not None:
        sheet.set("--moe-expert-capacity-factor", moe.capacity_factor)
    kinds = [layer.kind == "moe" for layer in model.layers]
    if not all(kinds):
        runs = [f"[{int(kind)}]*{len(list(run))}" for kind, run in groupby(kinds)]
        sheet.set("--moe-layer-freq", f"({'+'.join(runs)})")


def _others(sheet: Sheet, model: ModelSpec) -> None:
    """What Megatron's language models do not have, or have with one setting for all layers."""
    attentions = {layer.attention for layer in model.layers}
    if any(attention.window is not None for attention in attentions):
        sheet.unsaid("attention windows of some layers; every layer sees all tokens")
    if any(attention.shared_kv for attention in attentions):
        sheet.unsaid("keys and values shared between layers")
    if not all(attention.causal for attention in attentions) or model.diffusion is not None:
        sheet.unsaid(f"{model.name} is no causal language model: these sizes fit a model definition of your own")
    if model.logits_bias:
        sheet.unsaid("a bias of the logits")
    mlps = {layer.mlp for layer in model.layers}
    if len({mlp for mlp in mlps if isinstance(mlp, Mlp)}) > 1 or len({m for m in mlps if isinstance(m, MoE)}) > 1:
        sheet.unsaid("feed-forward blocks of several sizes; all are as the first")

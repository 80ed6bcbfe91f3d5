"""The model that Megatron's arguments describe, where they hold all its sizes."""

from __future__ import annotations

import re

from overlapsim.emit.megatron_read import Script
from overlapsim.workload.model import Attention, LatentAttention, Layer, Mlp, ModelSpec, MoE


def read_model(script: Script, name: str = "the model of the arguments") -> ModelSpec | None:
    """Return the model, or None where layers, width or heads are not written (checkpoints and YAML may hold them).

    Megatron's defaults fill in the rest: ``ffn = 4 x hidden`` (two thirds of it, in steps of 64, with SwiGLU), biases,
    learned positions, LayerNorm, tied embeddings, a vocabulary of 50257.

    Raises
    ------
    WorkloadError
        If the sizes contradict each other.
    """
    layers, hidden = script.number("--num-layers"), script.number("--hidden-size")
    heads = script.number("--num-attention-heads")
    if layers is None or hidden is None or heads is None:
        return None
    dense, moe = _mlp(script, hidden), _moe(script, hidden)
    attention = _attention(script, hidden, heads)
    kinds = [False] * layers if moe is None else _kinds(script, layers)
    blocks = {False: Layer(attention, dense), True: Layer(attention, moe or dense)}
    position = script.by_flag.get("--position-embedding-type")
    positions = "learned_absolute" if position is None else position.value
    norm = script.by_flag.get("--normalization")
    seq = script.number("--seq-length", 1) or 1
    return ModelSpec(
        name,
        hidden,
        tuple(blocks[kind] for kind in kinds),
        script.number("--vocab-size", 50257) or 50257,
        max(seq, script.number("--max-position-embeddings", seq) or seq),
        "learned" if positions == "learned_absolute" else "none" if positions == "none" else "rotary",
        "rmsnorm" if norm is not None and norm.value == "RMSNorm" else "layernorm",
        tied_embeddings=not script.has("--untie-embeddings-and-output-weights"),
        num_mtp_layers=script.number("--mtp-num-layers", 0) or 0,
        dtype="fp16" if script.has("--fp16") else "bf16",
    )


def _attention(script: Script, hidden: int, heads: int) -> Attention:
    biased = not script.has("--disable-bias-linear")
    qkv_bias = biased or script.has("--add-qkv-bias")
    if script.has("--multi-latent-attention"):
        nope, rope = script.number("--qk-head-dim", 128) or 128, script.number("--qk-pos-emb-head-dim", 64) or 64
        latent = LatentAttention(script.number("--q-lora-rank"), script.number("--kv-lora-rank", 32) or 32, nope, rope)
        value = script.number("--v-head-dim", 128)
        return Attention(heads, heads, nope + rope, value, latent, qkv_bias=qkv_bias, out_bias=biased)
    softmax = script.by_flag.get("--softmax-type")
    groups = script.number("--num-query-groups", 1) if script.has("--group-query-attention") else heads
    return Attention(
        heads,
        groups or heads,
        script.number("--kv-channels", hidden // heads) or hidden // heads,
        qkv_bias=qkv_bias,
        out_bias=biased,
        qk_norm="head" if script.has("--qk-layernorm") else "none",
        sinks=softmax is not None and softmax.value == "learnable",
    )


def _mlp(script: Script, hidden: int) -> Mlp:
    gated = script.has("--swiglu")
    default = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    ffn = script.number("--ffn-hidden-size", default) or default
    return Mlp(ffn, gated, "silu" if gated else "gelu", bias=not script.has("--disable-bias-linear"))


def _moe(script: Script, hidden: int) -> MoE | None:
    experts = script.number("--num-experts")
    if not experts:
        return None
    dense = _mlp(script, hidden)
    width = script.number("--moe-ffn-hidden-size", dense.ffn) or dense.ffn
    shared = script.number("--moe-shared-expert-intermediate-size")
    score = script.by_flag.get("--moe-router-score-function")
    capacity = script.by_flag.get("--moe-expert-capacity-factor")
    return MoE(
        experts,
        script.number("--moe-router-topk", 2) or 2,
        Mlp(width, dense.gated, dense.activation, dense.bias),
        num_shared_experts=0 if shared is None else max(1, shared // width),
        shared=None if shared is None else Mlp(shared, dense.gated, dense.activation, dense.bias),
        shared_gate=script.has("--moe-shared-expert-gate"),
        router="sigmoid" if score is not None and score.value == "sigmoid" else "softmax",
        router_bias=script.has("--moe-router-enable-expert-bias"),
        num_groups=script.number("--moe-router-num-groups", 1) or 1,
        top_groups=script.number("--moe-router-group-topk", 1) or 1,
        capacity_factor=None if capacity is None else float(capacity.value),
    )


def _kinds(script: Script, layers: int) -> list[bool]:
    """Which layers hold experts: ``--moe-layer-freq`` as a number or a list such as ``([0]*3+[1]*58)``."""
    argument = script.by_flag.get("--moe-layer-freq")
    if argument is None:
        return [True] * layers
    text = "".join(argument.values).strip("()")
    if text.isdecimal() and int(text):
        return [index % int(text) == 0 for index in range(layers)]
    found: list[bool] = []
    for bits, count in re.findall(r"\[([01,\s]*)\](?:\*(\d+))?", text):
        found += [bit == "1" for bit in re.findall(r"[01]", bits)] * int(count or 1)
    return found if len(found) == layers else [True] * layers

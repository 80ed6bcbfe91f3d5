"""How each family of Hugging Face models spells its layers in ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from overlapsim.errors import WorkloadError
from overlapsim.workload.hf_fields import Fields
from overlapsim.workload.model import (
    Activation,
    Attention,
    LatentAttention,
    Layer,
    Mlp,
    MoE,
    head_dim_of,
    shown,
)

ACTIVATIONS: Final[Mapping[str, Activation]] = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu"), "gelu"),
    "relu": "relu",
}
SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"


def dense_layers(fields: Fields) -> tuple[Layer, ...]:
    """Llama, Mistral, Qwen2, Qwen3: one kind of layer, but for windows."""
    mlp = _gated(fields, fields.size("intermediate_size"), bias=fields.flag("mlp_bias", default=False))
    return tuple(Layer(attention, mlp) for attention in _attentions(fields))


def mixtral_layers(fields: Fields) -> tuple[Layer, ...]:
    """Mixtral, Phi-3.5-MoE, GPT-OSS: routed experts in every layer, of the width of `intermediate_size`."""
    gpt_oss = fields.word("model_type", default="") == "gpt_oss"
    expert = _gated(fields, fields.size("intermediate_size"), bias=gpt_oss)
    moe = MoE(
        fields.size("num_local_experts", "num_experts"),
        fields.size("num_experts_per_tok", "experts_per_token"),
        expert,
        router_bias=gpt_oss,
    )
    return tuple(Layer(attention, moe) for attention in _attentions(fields))


def qwen_moe_layers(fields: Fields) -> tuple[Layer, ...]:
    """Qwen2-MoE (with a shared expert behind a gate) and Qwen3-MoE: every n-th layer has experts."""
    attentions = _attentions(fields)
    expert = _gated(fields, fields.size("moe_intermediate_size"))
    shared_ffn = fields.optional_size("shared_expert_intermediate_size")
    moe = MoE(
        fields.size("num_experts", "num_local_experts", "n_routed_experts"),
        fields.size("num_experts_per_tok"),
        expert,
        num_shared_experts=0 if shared_ffn is None else 1,
        shared=None if shared_ffn is None else _gated(fields, shared_ffn),
        shared_gate=shared_ffn is not None,
    )
    step, dense = fields.size("decoder_sparse_step", default=1), set(fields.numbers("mlp_only_layers"))
    sparse = [index not in dense and (index + 1) % step == 0 for index in range(len(attentions))]
    return _mixed(fields, attentions, sparse, moe)


def deepseek_layers(fields: Fields) -> tuple[Layer, ...]:
    """DeepSeek-MoE, V2 and V3: dense layers first, shared experts, latent attention from V2 on."""
    attentions = _latent_attentions(fields) if fields.has("kv_lora_rank") else _attentions(fields)
    width, num_shared = fields.size("moe_intermediate_size"), fields.size("n_shared_experts", default=0, low=0)
    score = fields.word("scoring_func", default="softmax")
    if score not in ("softmax", "sigmoid"):
        raise WorkloadError(f"scoring_func is {shown(score)}; expected softmax or sigmoid")
    moe = MoE(
        fields.size("n_routed_experts", "num_experts", "num_local_experts"),
        fields.size("num_experts_per_tok"),
        _gated(fields, width),
        num_shared_experts=num_shared,
        shared=_gated(fields, num_shared * width) if num_shared else None,
        router="sigmoid" if score == "sigmoid" else "softmax",
        router_bias=fields.word("topk_method", default="") == "noaux_tc",
        num_groups=fields.size("n_group", default=1),
        top_groups=fields.size("topk_group", default=1),
    )
    first, step = fields.size("first_k_dense_replace", default=0, low=0), fields.size("moe_layer_freq", default=1)
    sparse = [index >= first and index % step == 0 for index in range(len(attentions))]
    return _mixed(fields, attentions, sparse, moe)


def hunyuan_layers(fields: Fields) -> tuple[Layer, ...]:
    """Hunyuan-Large and its kin: a shared expert, keys and values shared by neighbouring layers, sizes per layer."""
    attentions = _attentions(fields)
    count = len(attentions)
    share = fields.size("cla_share_factor", default=1) if fields.flag("use_cla", default=False) else 1
    experts = fields.per_layer(count, "num_experts")
    top_k = fields.per_layer(count, "moe_topk", "num_experts_per_tok")
    widths = fields.per_layer(count, "moe_intermediate_size", default=fields.size("intermediate_size"))
    shared = fields.per_layer(count, "num_shared_expert", default=1)
    mixed = fields.flag("use_mixed_mlp_moe", default=False)
    layers = []
    for index, attention in enumerate(attentions):
        if experts[index] == 1:
            layers.append(Layer(replace(attention, shared_kv=index % share != 0), _gated(fields, widths[index])))
            continue
        num_shared = shared[index] if mixed else 0
        moe = MoE(
            experts[index],
            top_k[index],
            _gated(fields, widths[index]),
            num_shared_experts=num_shared,
            shared=_gated(fields, fields.size("intermediate_size") * num_shared) if num_shared else None,
        )
        layers.append(Layer(replace(attention, shared_kv=index % share != 0), moe))
    return tuple(layers)


def gpt2_layers(fields: Fields) -> tuple[Layer, ...]:
    """GPT-2 and models of its form: biases everywhere, a feed-forward block of four times the hidden width."""
    hidden, heads = fields.size("n_embd", "hidden_size"), fields.size("n_head", "num_attention_heads")
    attention = Attention(heads, heads, head_dim_of(hidden, heads), qkv_bias=True, out_bias=True)
    mlp = Mlp(
        fields.size("n_inner", "intermediate_size", default=4 * hidden),
        activation=_activation(fields, "activation_function", "gelu_new"),
        bias=True,
    )
    return (Layer(attention, mlp),) * fields.layers("n_layer", "num_hidden_layers")


FAMILIES: Final[Mapping[str, Callable[[Fields], tuple[Layer, ...]]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), dense_layers),
    **dict.fromkeys(("mixtral", "phimoe", "gpt_oss"), mixtral_layers),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), qwen_moe_layers),
    **dict.fromkeys(("deepseek", "deepseek_v2", "deepseek_v3", "kimi_k2"), deepseek_layers),
    **dict.fromkeys(("hunyuan", "hunyuan_v1_moe"), hunyuan_layers),
    "gpt2": gpt2_layers,
}
"""What is read, by `model_type`."""
QKV_BIAS_DEFAULT: Final = frozenset({"qwen2", "qwen2_moe", "gpt_oss"})
OUT_BIAS: Final = frozenset(
    {"llama", "qwen3", "qwen3_moe", "phimoe", "gpt_oss", "deepseek", "hunyuan", "hunyuan_v1_moe"}
)
"""Families whose `attention_bias` adds one to the output projection too."""


def _attentions(fields: Fields) -> list[Attention]:
    model_type = fields.word("model_type", default="")
    num_layers, heads = fields.layers("num_hidden_layers"), fields.size("num_attention_heads")
    hidden = fields.size("hidden_size")
    if not fields.has("num_key_value_heads"):
        fields.assume(
            "kv_heads_assumed", f"num_key_value_heads is missing; {heads}, one for each query head, are taken"
        )
    bias = fields.flag("attention_bias", default=model_type in QKV_BIAS_DEFAULT)
    normed = model_type in ("qwen3", "qwen3_moe") or fields.flag("use_qk_norm", default=False)
    head_dim = fields.optional_size("head_dim", "attention_head_dim")
    windows = _windows(fields, num_layers)
    return [
        Attention(
            heads,
            fields.size("num_key_value_heads", default=heads),
            head_dim_of(hidden, heads) if head_dim is None else head_dim,
            qkv_bias=bias,
            out_bias=bias and model_type in OUT_BIAS,
            qk_norm="head" if normed else "none",
            sinks=model_type == "gpt_oss",
            window=window,
        )
        for window in windows
    ]


def _latent_attentions(fields: Fields) -> list[Attention]:
    heads, bias = fields.size("num_attention_heads"), fields.flag("attention_bias", default=False)
    fields.raw("num_key_value_heads")
    latent = LatentAttention(
        fields.optional_size("q_lora_rank"),
        fields.size("kv_lora_rank"),
        fields.size("qk_nope_head_dim"),
        fields.size("qk_rope_head_dim"),
    )
    attention = Attention(
        heads,
        heads,
        latent.nope_head_dim + latent.rope_head_dim,
        fields.size("v_head_dim"),
        latent,
        qkv_bias=bias,
        out_bias=bias,
    )
    return [attention] * fields.layers("num_hidden_layers")


def _windows(fields: Fields, num_layers: int) -> list[int | None]:
    """Sliding window of each layer; one that no sequence exceeds is none."""
    model_type = fields.word("model_type", default="")
    window, types = fields.optional_size("sliding_window"), fields.raw("layer_types")
    # 28 is what the Qwen classes take where the file leaves it out.
    first_slid = fields.size("max_window_layers", default=28, low=0)
    used = fields.flag("use_sliding_window", default=not model_type.startswith("qwen"))
    longest = fields.optional_size("max_position_embeddings", "n_positions")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers or not set(map(str, types)) <= {SLIDING, FULL}:
            raise WorkloadError(
                f"layer_types is {shown(types)}; expected {SLIDING} or {FULL} for each of {num_layers} layers"
            )
    elif model_type == "gpt_oss":
        types = [FULL if index % 2 else SLIDING for index in range(num_layers)]
    elif model_type.startswith("qwen"):
        types = [SLIDING if index >= first_slid else FULL for index in range(num_layers)]
    else:
        types = [SLIDING] * num_layers
    if window is None and SLIDING in types and (model_type == "gpt_oss" or fields.has("layer_types")):
        raise WorkloadError(f"sliding_window is missing and layers are {SLIDING}; expected a whole number of tokens")
    if window is None or not used or (longest is not None and window >= longest):
        return [None] * num_layers
    return [window if kind == SLIDING else None for kind in types]


def _mixed(fields: Fields, attentions: list[Attention], sparse: list[bool], moe: MoE) -> tuple[Layer, ...]:
    """Layers with experts where `sparse`, and with a dense block elsewhere, whose width is then needed."""
    if all(sparse):
        fields.raw("intermediate_size")
        return tuple(Layer(attention, moe) for attention in attentions)
    mlp = _gated(fields, fields.size("intermediate_size"))
    return tuple(Layer(attention, moe if use else mlp) for attention, use in zip(attentions, sparse, strict=True))


def _gated(fields: Fields, ffn: int, *, bias: bool = False) -> Mlp:
    return Mlp(ffn, gated=True, activation=_activation(fields, "hidden_act", "silu"), bias=bias)


def _activation(fields: Fields, name: str, default: str) -> Activation:
    word: Any = fields.word(name, "hidden_act", default=default)
    if word not in ACTIVATIONS:
        raise WorkloadError(f"{name} is {shown(word)}; expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[word]

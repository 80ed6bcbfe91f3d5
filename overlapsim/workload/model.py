"""ModelSpec: what a transformer is made of, layer by layer, before any layout; sizes checked once, here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Final, Literal, get_args

from overlapsim.errors import WorkloadError
from overlapsim.units import DTYPE_BYTES
from overlapsim.workload.operators import MAX_DIMENSION

AttentionKind = Literal["mha", "gqa", "mla"]
LayerKind = Literal["dense", "moe"]
Activation = Literal["gelu", "relu", "silu"]
NormKind = Literal["layernorm", "rmsnorm"]
Positions = Literal["learned", "rotary", "none"]
QkNorm = Literal["none", "head", "all"]
RouterScore = Literal["softmax", "sigmoid"]

MAX_LAYERS: Final = 4096
"""Far above the deepest published model (128 layers); a larger number is a slip."""


@dataclass(frozen=True)
class LatentAttention:
    """Low-rank dimensions of multi-head latent attention (MLA).

    Attributes
    ----------
    q_rank : width queries are squeezed to, or None where they are projected in one step
    kv_rank : width keys and values are squeezed to
    nope_head_dim, rope_head_dim : parts of a query or key head without and with rotary positions;
        the rotary part of a key is one for all heads
    """

    q_rank: int | None
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int

    def __post_init__(self) -> None:
        if self.q_rank is not None:
            check_size("q_rank", self.q_rank)
        for name in ("kv_rank", "nope_head_dim", "rope_head_dim"):
            check_size(name, getattr(self, name))


@dataclass(frozen=True)
class Attention:
    """One attention block.

    Attributes
    ----------
    num_heads, num_kv_heads : query heads, and key and value heads (all the same for MLA)
    head_dim : width of a query or key head
    value_head_dim : width of a value head; None: as `head_dim`
    latent : MLA's dimensions, or None
    qkv_bias, out_bias : whether the projections add a bias
    qk_norm : norm of queries and keys: none, within each head, or over all heads together
    shared_kv : keys and values are an earlier layer's: there is no projection of them (cross-layer attention)
    sinks : one learned logit a head beside the scores
    window : tokens that a token sees, itself included; None: all
    causal : whether a token sees only those before it
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    latent: LatentAttention | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QkNorm = "none"
    shared_kv: bool = False
    sinks: bool = False
    window: int | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            check_size(name, getattr(self, name))
        for name in ("value_head_dim", "window"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        check_flags(self, "qkv_bias", "out_bias", "shared_kv", "sinks", "causal")
        check_choice("qk_norm", self.qk_norm, get_args(QkNorm))
        if self.num_heads % self.num_kv_heads:
            raise WorkloadError(
                f"num_heads is {self.num_heads} and num_kv_heads is {self.num_kv_heads}; "
                "expected query heads in equal groups, one for each key and value head"
            )
        latent = self.latent
        if latent is not None and latent.nope_head_dim + latent.rope_head_dim != self.head_dim:
            raise WorkloadError(
                f"head_dim is {self.head_dim} with latent parts of {latent.nope_head_dim} and {latent.rope_head_dim}; "
                "expected their sum"
            )
        if latent is not None and self.num_kv_heads != self.num_heads:
            raise WorkloadError(
                f"num_kv_heads is {self.num_kv_heads} of {self.num_heads} heads with latent attention; "
                "expected all heads, since each has keys of its own after the up-projection"
            )

    @property
    def kind(self) -> AttentionKind:
        """Return ``mla``, ``gqa`` (fewer key and value heads, down to one) or ``mha``."""
        if self.latent is not None:
            return "mla"
        return "mha" if self.num_kv_heads == self.num_heads else "gqa"

    @property
    def v_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim


@dataclass(frozen=True)
class Mlp:
    """A feed-forward block.

    Attributes
    ----------
    ffn : inner width
    gated : whether a second up-projection multiplies the activation (three matrices instead of two)
    activation : ``gelu``, ``relu`` or ``silu`` (gated SiLU is SwiGLU)
    bias : whether the projections add a bias
    """

    ffn: int
    gated: bool = False
    activation: Activation = "gelu"
    bias: bool = False

    def __post_init__(self) -> None:
        check_size("ffn", self.ffn)
        check_flags(self, "gated", "bias")
        check_choice("activation", self.activation, get_args(Activation))


@dataclass(frozen=True)
class MoE:
    """A block of routed experts, with or without experts that every token takes.

    Attributes
    ----------
    num_experts, top_k : routed experts, and how many of them a token takes
    expert : one routed expert
    num_shared_experts : experts that every token takes
    shared : those run as one block of their summed width, or None
    shared_gate : whether a learned gate scales the shared experts' output
    router : score of the router
    router_bias : whether the router adds a learned or balancing bias for each expert
    num_groups, top_groups : experts stand in groups, and a token takes experts of at most so many of them
    capacity_factor : tokens an expert takes at most, over its even share; None: nothing is dropped
    """

    num_experts: int
    top_k: int
    expert: Mlp
    num_shared_experts: int = 0
    shared: Mlp | None = None
    shared_gate: bool = False
    router: RouterScore = "softmax"
    router_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "num_groups", "top_groups"):
            check_size(name, getattr(self, name))
        check_size("num_shared_experts", self.num_shared_experts, low=0)
        check_flags(self, "shared_gate", "router_bias")
        check_choice("router", self.router, get_args(RouterScore))
        if self.top_k > self.num_experts:
            raise WorkloadError(f"top_k is {self.top_k} of {self.num_experts} experts; expected at most all of them")
        if (self.num_shared_experts > 0) != (self.shared is not None):
            raise WorkloadError(
                f"num_shared_experts is {self.num_shared_experts} and their block is "
                f"{'missing' if self.shared is None else 'given'}; expected both or neither"
            )
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise WorkloadError(
                f"{self.num_experts} experts stand in {self.num_groups} groups of which {self.top_groups} are taken; "
                "expected equal groups, at most all of them taken"
            )
        if self.capacity_factor is not None:
            check_positive("capacity_factor", self.capacity_factor)


@dataclass(frozen=True)
class Layer:
    """One transformer layer: norm, attention, norm, feed-forward, with residuals.

    Attributes
    ----------
    attention : self-attention
    mlp : feed-forward block, dense or of experts
    cross : attention of the tokens to a context (text of a text-to-video model), or None
    modulation : vectors of the hidden width that shift, scale and gate the norms by a condition (adaptive norm);
        then the norms around attention and feed-forward have no parameters of their own
    """

    attention: Attention
    mlp: Mlp | MoE
    cross: Attention | None = None
    modulation: int = 0

    def __post_init__(self) -> None:
        check_size("modulation", self.modulation, low=0)

    @property
    def kind(self) -> LayerKind:
        """Return ``moe`` or ``dense``."""
        return "moe" if isinstance(self.mlp, MoE) else "dense"


@dataclass(frozen=True)
class Diffusion:
    """What a diffusion transformer has instead of a vocabulary: patches in and out, a context, a time step.

    Attributes
    ----------
    patch_inputs, patch_outputs : numbers of one token's patch, going in and coming out
    context_width, context_tokens : width and number of the context's tokens (the text encoder's output)
    time_width : width of the time step's features
    """

    patch_inputs: int
    patch_outputs: int
    context_width: int
    context_tokens: int
    time_width: int

    def __post_init__(self) -> None:
        for name in ("patch_inputs", "patch_outputs", "context_width", "context_tokens", "time_width"):
            check_size(name, getattr(self, name))


@dataclass(frozen=True)
class ModelSpec:
    """A transformer before any layout: layers, widths, vocabulary.

    Attributes
    ----------
    name : short name
    hidden : width of a token between layers, elements
    layers : every layer in order; equal layers compare equal, so that one stands for all of its kind
    vocabulary : tokens of the vocabulary, unpadded; 0 for a diffusion model
    max_positions : longest sequence the model was made for, tokens
    positions : learned (a table of `max_positions` rows), rotary or none
    norm : layernorm (with a bias) or rmsnorm
    tied_embeddings : whether logits use the embedding's table
    logits_bias : whether logits add a bias
    num_mtp_layers : extra layers, like the last one, that predict further tokens in training (multi-token prediction);
        embedding and logits are the model's
    diffusion : patches and context of a diffusion model, or None
    dtype : of weights and activations in training
    source : where the values are from, and which of them are not certain; two equal models may have other sources

    Examples
    --------
    >>> layer = Layer(Attention(12, 12, 64, qkv_bias=True, out_bias=True), Mlp(3072, bias=True))
    >>> model = ModelSpec("small", 768, (layer,) * 12, 50257, 1024, "learned", "layernorm", tied_embeddings=True)
    >>> model.num_layers, model.kinds == {layer: 12}
    (12, True)
    """

    name: str
    hidden: int
    layers: tuple[Layer, ...]
    vocabulary: int
    max_positions: int
    positions: Positions = "rotary"
    norm: NormKind = "rmsnorm"
    tied_embeddings: bool = False
    logits_bias: bool = False
    num_mtp_layers: int = 0
    diffusion: Diffusion | None = None
    dtype: str = "bf16"
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_size("hidden", self.hidden)
        check_num_layers(len(self.layers))
        check_size("vocabulary", self.vocabulary, low=1 if self.diffusion is None else 0)
        check_size("max_positions", self.max_positions)
        check_size("num_mtp_layers", self.num_mtp_layers, low=0, high=MAX_LAYERS)
        check_flags(self, "tied_embeddings", "logits_bias")
        check_choice("positions", self.positions, get_args(Positions))
        check_choice("norm", self.norm, get_args(NormKind))
        check_choice("dtype", self.dtype, tuple(DTYPE_BYTES))
        if self.diffusion is not None and (self.vocabulary or self.num_mtp_layers or self.tied_embeddings):
            raise WorkloadError(
                f"vocabulary is {self.vocabulary}, num_mtp_layers {self.num_mtp_layers} in a diffusion model; "
                "expected 0 of both and no tied embeddings, since it has patches instead of tokens"
            )
        if self.diffusion is None and any(layer.cross is not None for layer in self.layers):
            raise WorkloadError("a layer attends to a context and the model has none; expected the section diffusion")

    @property
    def num_layers(self) -> int:
        """Layers, without those of multi-token prediction."""
        return len(self.layers)

    @cached_property
    def kinds(self) -> Mapping[Layer, int]:
        """Distinct layers in order of their first appearance, and how often each stands in the model."""
        counts: dict[Layer, int] = {}
        for layer in self.layers:
            counts[layer] = counts.get(layer, 0) + 1
        return MappingProxyType(counts)


def check_size(name: str, value: object, low: int = 1, high: int = MAX_DIMENSION) -> None:
    """Refuse what is not a whole number from `low` to `high`.

    Raises
    ------
    WorkloadError
        Naming the field, the value and the range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise WorkloadError(f"{name} is {shown(value)}; expected a whole number from {low} to {high}")


def check_num_layers(value: object, name: str = "num_layers") -> None:
    """Refuse a number of layers that no model has.

    Raises
    ------
    WorkloadError
        Naming the value and the range.
    """
    check_size(name, value, high=MAX_LAYERS)


def check_positive(name: str, value: object) -> None:
    """Refuse what is not a finite number above 0.

    Raises
    ------
    WorkloadError
        Naming the field and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise WorkloadError(f"{name} is {shown(value)}; expected a number above 0")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse what is not one of the words `allowed`.

    Raises
    ------
    WorkloadError
        Naming the field, the value and what is allowed.
    """
    if value not in allowed:
        raise WorkloadError(f"{name} is {shown(value)}; expected one of {', '.join(allowed)}")


def check_flags(spec: object, *names: str) -> None:
    """Refuse flags that are not true or false.

    Raises
    ------
    WorkloadError
        Naming the field and the value.
    """
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, bool):
            raise WorkloadError(f"{name} is {shown(value)}; expected true or false")


def shown(value: object) -> str:
    """Text of a given value for a message, cut where it is long.

    Examples
    --------
    >>> shown("4096")
    "'4096'"
    """
    text = f"a number of {value.bit_length()} bits" if isinstance(value, int) and abs(value) > 2**200 else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def head_dim_of(hidden: int, num_heads: int) -> int:
    """Width of a head where a configuration names none: hidden over heads.

    Raises
    ------
    WorkloadError
        If the heads do not divide the hidden width.

    Examples
    --------
    >>> head_dim_of(4096, 32)
    128
    """
    check_size("hidden", hidden)
    check_size("num_heads", num_heads)
    if hidden % num_heads:
        raise WorkloadError(
            f"hidden is {hidden} and num_heads is {num_heads}; expected heads that divide it, or a head_dim"
        )
    return hidden // num_heads

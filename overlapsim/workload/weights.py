"""The weights of a model: every matrix and vector once; parameters, FLOP and shards are all counted from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from overlapsim.workload.model import Attention, Diffusion, Layer, Mlp, ModelSpec, MoE

Rows = Literal["token", "context", "sequence"]


@dataclass(frozen=True)
class Matrix:
    """Weights that a GEMM multiplies: ``[inputs, outputs]``.

    Attributes
    ----------
    operator : fixed name of the operator they belong to
    part : which of that operator's matrices
    inputs, outputs : k and n of the forward GEMM
    bias : whether `outputs` biases are added
    copies : experts that have one each; 0: the parameters are another weight's (tied logits)
    used : copies that a token goes through
    rows : what the GEMM's rows are: tokens, tokens of the context, or one for a whole sequence
    """

    operator: str
    part: str
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    used: int = 1
    rows: Rows = "token"

    @property
    def parameters(self) -> int:
        """Parameters of all copies."""
        return self.copies * self._one

    @property
    def active_parameters(self) -> int:
        """Parameters of the copies that a token goes through; none where they are owned elsewhere (no copies)."""
        return min(self.used, self.copies) * self._one

    @property
    def flop_per_row(self) -> float:
        """FLOP of a row, forward: two for each weight that the row meets; biases are not counted."""
        return 2.0 * self.used * self.inputs * self.outputs

    @property
    def _one(self) -> int:
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


@dataclass(frozen=True)
class Vector:
    """Parameters that no GEMM multiplies: norms, sinks, tables that rows are looked up in."""

    operator: str
    part: str
    parameters: int

    @property
    def active_parameters(self) -> int:
        """All of them: a table is counted whole, as published totals do."""
        return self.parameters

    @property
    def flop_per_row(self) -> float:
        """None of the model's FLOP."""
        return 0.0


Weight = Matrix | Vector


def layer_weights(model: ModelSpec, layer: Layer) -> tuple[Weight, ...]:
    """Every weight of one layer of `model`.

    Parameters
    ----------
    model : for the hidden width and the kind of norm
    layer : one of its layers

    Returns
    -------
    tuple of Weight
        In the order of the forward pass.

    Examples
    --------
    >>> from overlapsim.workload.families import gpt
    >>> model = gpt(num_layers=1, hidden=8, num_heads=2, vocabulary=10, max_positions=4)
    >>> sum(weight.parameters for weight in layer_weights(model, model.layers[0])) == 12 * 8**2 + 13 * 8
    True
    """
    hidden = model.hidden
    norm = hidden * (2 if model.norm == "layernorm" else 1)
    weights: list[Weight] = []
    if layer.modulation:
        weights.append(Vector("attn.norm", "modulation", layer.modulation * hidden))
    else:
        weights.append(Vector("attn.norm", "norm", norm))
    weights += _attention(layer.attention, hidden)
    if layer.cross is not None:
        weights.append(Vector("attn.norm", "cross_norm", norm))
        weights += _cross_attention(layer.cross, hidden)
    if not layer.modulation:
        weights.append(Vector("mlp.norm", "norm", norm))
    weights += _moe(layer.mlp, hidden) if isinstance(layer.mlp, MoE) else _mlp(layer.mlp, hidden, "mlp.")
    return tuple(weights)


def model_weights(model: ModelSpec) -> tuple[Weight, ...]:
    """Every weight outside the layers: embedding, positions, last norm, logits; patches of a diffusion model.

    Returns
    -------
    tuple of Weight
        Tied embeddings are there once as parameters, under ``embed``, and once as a GEMM without any, under ``logits``.
    """
    if model.diffusion is not None:
        modulation = max(layer.modulation for layer in model.layers)
        return _diffusion(model.diffusion, model.hidden, modulation)
    hidden, norm = model.hidden, model.hidden * (2 if model.norm == "layernorm" else 1)
    weights: list[Weight] = [Vector("embed", "tokens", model.vocabulary * hidden)]
    if model.positions == "learned":
        weights.append(Vector("embed", "positions", model.max_positions * hidden))
    weights.append(Vector("logits", "norm", norm))
    copies = 0 if model.tied_embeddings else 1
    weights.append(Matrix("logits", "tokens", hidden, model.vocabulary, copies=copies))
    if model.logits_bias:
        weights.append(Vector("logits", "bias", model.vocabulary))
    return tuple(weights)


def mtp_weights(model: ModelSpec) -> tuple[Weight, ...]:
    """Every weight of one layer of multi-token prediction: two norms, their join, the layer, its last norm.

    Returns
    -------
    tuple of Weight
        Empty where the model has none. The logits GEMM stands among them without parameters: they are the model's.
    """
    if not model.num_mtp_layers:
        return ()
    hidden, norm = model.hidden, model.hidden * (2 if model.norm == "layernorm" else 1)
    return (
        Vector("embed", "mtp_norms", 2 * norm),
        Matrix("embed", "mtp_join", 2 * hidden, hidden),
        *layer_weights(model, model.layers[-1]),
        Vector("logits", "norm", norm),
        Matrix("logits", "tokens", hidden, model.vocabulary, copies=0),
    )


def _attention(attention: Attention, hidden: int) -> list[Weight]:
    heads, head_dim, bias = attention.num_heads, attention.head_dim, attention.qkv_bias
    q_width, kv_width = heads * head_dim, attention.num_kv_heads * (head_dim + attention.v_dim)
    weights: list[Weight] = []
    if attention.latent is not None:
        weights += _latent(attention, hidden)
    elif attention.shared_kv:
        weights.append(Matrix("attn.qkv", "q", hidden, q_width, bias))
    else:
        weights.append(Matrix("attn.qkv", "qkv", hidden, q_width + kv_width, bias))
    if attention.qk_norm != "none":
        weights.append(Vector("attn.qkv", "qk_norm", _qk_norm(attention)))
    if attention.sinks:
        weights.append(Vector("attn.core", "sinks", heads))
    weights.append(Matrix("attn.out", "out", heads * attention.v_dim, hidden, attention.out_bias))
    return weights


def _latent(attention: Attention, hidden: int) -> list[Weight]:
    latent, heads, bias = attention.latent, attention.num_heads, attention.qkv_bias
    assert latent is not None
    weights: list[Weight] = []
    if latent.q_rank is None:
        weights.append(Matrix("attn.qkv", "q", hidden, heads * attention.head_dim))
    else:
        weights.append(Matrix("attn.qkv", "q_down", hidden, latent.q_rank, bias))
        weights.append(Vector("attn.qkv", "q_norm", latent.q_rank))
        weights.append(Matrix("attn.qkv", "q_up", latent.q_rank, heads * attention.head_dim))
    if not attention.shared_kv:
        weights.append(Matrix("attn.qkv", "kv_down", hidden, latent.kv_rank + latent.rope_head_dim, bias))
        weights.append(Vector("attn.qkv", "kv_norm", latent.kv_rank))
        kv_width = heads * (latent.nope_head_dim + attention.v_dim)
        weights.append(Matrix("attn.qkv", "kv_up", latent.kv_rank, kv_width))
    return weights


def _cross_attention(cross: Attention, hidden: int) -> list[Weight]:
    q_width, kv_width = cross.num_heads * cross.head_dim, cross.num_kv_heads * (cross.head_dim + cross.v_dim)
    weights: list[Weight] = [
        Matrix("attn.qkv", "cross_q", hidden, q_width, cross.qkv_bias),
        Matrix("attn.qkv", "cross_kv", hidden, kv_width, cross.qkv_bias, rows="context"),
    ]
    if cross.qk_norm != "none":
        weights.append(Vector("attn.qkv", "cross_qk_norm", _qk_norm(cross)))
    weights.append(Matrix("attn.out", "cross_out", cross.num_heads * cross.v_dim, hidden, cross.out_bias))
    return weights


def _qk_norm(attention: Attention) -> int:
    if attention.qk_norm == "head":
        return 2 * attention.head_dim
    return (attention.num_heads + attention.num_kv_heads) * attention.head_dim


def _mlp(mlp: Mlp, hidden: int, prefix: str, copies: int = 1, used: int = 1) -> list[Weight]:
    up = mlp.ffn * (2 if mlp.gated else 1)
    return [
        Matrix(prefix + "fc1", "up", hidden, up, mlp.bias, copies, used),
        Matrix(prefix + "fc2", "down", mlp.ffn, hidden, mlp.bias, copies, used),
    ]


def _moe(moe: MoE, hidden: int) -> list[Weight]:
    weights: list[Weight] = [Matrix("moe.router", "scores", hidden, moe.num_experts)]
    if moe.router_bias:
        weights.append(Vector("moe.router", "bias", moe.num_experts))
    weights += _mlp(moe.expert, hidden, "moe.", moe.num_experts, moe.top_k)
    if moe.shared is not None:
        weights += _mlp(moe.shared, hidden, "moe.shared.")
    if moe.shared_gate:
        weights.append(Matrix("moe.shared.gate", "gate", hidden, 1))
    return weights


def _diffusion(diffusion: Diffusion, hidden: int, modulation: int) -> tuple[Weight, ...]:
    weights: list[Weight] = [
        Matrix("embed", "patches", diffusion.patch_inputs, hidden, True),
        Matrix("embed", "context_in", diffusion.context_width, hidden, True, rows="context"),
        Matrix("embed", "context_out", hidden, hidden, True, rows="context"),
        Matrix("embed", "time_in", diffusion.time_width, hidden, True, rows="sequence"),
        Matrix("embed", "time_out", hidden, hidden, True, rows="sequence"),
    ]
    if modulation:
        weights.append(Matrix("embed", "time_modulation", hidden, modulation * hidden, True, rows="sequence"))
        weights.append(Vector("logits", "modulation", 2 * hidden))
    weights.append(Matrix("logits", "patches", hidden, diffusion.patch_outputs, True))
    return tuple(weights)

"""Activations of one layer: every tensor of the forward pass on one rank, its bytes, and who can rebuild it.

The tensors are those of Korthikanti et al. (arXiv 2205.05198, section 4) and of MegaScale-MoE (arXiv 2505.11432,
figure 9): both papers' sums follow from this one list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from overlapsim.errors import WorkloadError
from overlapsim.units import dtype_bytes
from overlapsim.workload.layout import Layout
from overlapsim.workload.model import Attention, Layer, Mlp, ModelSpec, MoE, check_size
from overlapsim.workload.recipe import RECIPES, Recipe
from overlapsim.workload.recompute import Activation
from overlapsim.workload.vocabulary import local_heads

MODERN: Final = RECIPES["modern"]
# Widths that frameworks keep whatever the recipe: a dropout mask, and fp32 or int32 numbers.
_MASK_BYTES: Final = 1
_FULL_BYTES: Final = 4


def layer_activations(
    model: ModelSpec,
    layer: Layer,
    layout: Layout,
    seq_len: int,
    micro_batch: int,
    recipe: Recipe = MODERN,
    imbalance: float = 1.0,
) -> tuple[Activation, ...]:
    """Tensors of one layer's forward pass on one rank, in order.

    Parameters
    ----------
    seq_len, micro_batch : tokens of a whole sequence, and sequences of a micro-batch
    recipe : flash attention keeps a number a row instead of its scores, dropout keeps masks, the dispatcher moves the
        tokens of experts or all of them, and fp8 GEMMs keep their inputs in fp8
    imbalance : tokens of the fullest expert rank over the even share, >= 1

    Returns
    -------
    tuple of Activation
        Bytes may be fractions where the layout does not divide evenly (`layout_rules` says so).

    Raises
    ------
    WorkloadError
        If a size is no size, or the imbalance is under 1.
    LayoutError
        If heads do not divide (`vocabulary.local_heads`).

    Examples
    --------
    Keeping all of it takes s b h (34 + 5 a s / h) bytes (Korthikanti et al., equation 1), statistics of norms apart:

    >>> from overlapsim.workload.families import gpt
    >>> model = gpt(num_layers=1, hidden=1024, num_heads=16, vocabulary=1000, max_positions=512)
    >>> recipe = Recipe(attention="unfused", dropout=True)
    >>> found = layer_activations(model, model.layers[0], Layout(), 512, 2, recipe)
    >>> sum(tensor.size_bytes for tensor in found if tensor.needed and tensor.tensor != "statistics")
    77594624.0
    >>> 512 * 2 * 1024 * (34 + 5 * 16 * 512 / 1024)
    77594624.0
    """
    check_size("seq_len", seq_len)
    check_size("micro_batch", micro_batch)
    if not 1 <= imbalance < float("inf"):
        raise WorkloadError(f"imbalance is {imbalance!r}; expected a finite number of at least 1")
    ledger = _Ledger(model, layout, seq_len, micro_batch, recipe, imbalance)
    return tuple(ledger.layer(layer))


@dataclass(frozen=True)
class _Ledger:
    model: ModelSpec
    layout: Layout
    seq_len: int
    micro_batch: int
    recipe: Recipe
    imbalance: float

    def layer(self, layer: Layer) -> Iterator[Activation]:
        yield self._residual("attn.norm", "input")
        yield from self._norm("attn.norm")
        yield from self._attention(layer.attention, "")
        if layer.cross is not None:
            yield self._residual("attn.norm", "cross_input")
            yield from self._norm("attn.norm", "cross_")
            yield from self._attention(layer.cross, "cross_")
        yield self._residual("mlp.norm", "input")
        yield from self._norm("mlp.norm")
        if isinstance(layer.mlp, MoE):
            yield from self._moe(layer.mlp)
        else:
            yield from self._mlp(layer.mlp, "mlp.", "mlp", "mlp_act")
        yield self._residual("mlp.norm", "next_input", needed=False)

    @property
    def tokens(self) -> float:
        """Tokens on a rank inside a tensor-parallel block."""
        return self.seq_len * self.micro_batch / self.layout.context

    @property
    def residual_tokens(self) -> float:
        """Tokens on a rank between blocks."""
        return self.seq_len * self.micro_batch / self.layout.sequence_split

    @property
    def width_bytes(self) -> int:
        return dtype_bytes(self.model.dtype)

    def _residual(self, operator: str, tensor: str, *, needed: bool = True) -> Activation:
        return Activation(operator, tensor, self.residual_tokens * self.model.hidden * self.width_bytes, needed)

    def _gemm_input(self, operator: str, tensor: str, elements: float, *modules: str) -> Activation:
        size = elements * dtype_bytes("fp8" if self.recipe.fp8 else self.model.dtype)
        return Activation(operator, tensor, size, True, frozenset(modules))

    def _plain(self, operator: str, tensor: str, elements: float, *modules: str, needed: bool = True) -> Activation:
        return Activation(operator, tensor, elements * self.width_bytes, needed, frozenset(modules))

    def _norm(self, operator: str, prefix: str = "") -> Iterator[Activation]:
        numbers = 2 if self.model.norm == "layernorm" else 1
        statistics = self.residual_tokens * numbers * _FULL_BYTES
        yield Activation(operator, prefix + "statistics", statistics, True, frozenset({"layernorm"}))
        yield self._gemm_input(operator, prefix + "output", self.residual_tokens * self.model.hidden, "layernorm")

    def _masked_output(self, operator: str, tensor: str, *modules: str) -> Iterator[Activation]:
        """A block's output before the residual is added: not needed, but for the mask of its dropout."""
        elements = self.residual_tokens * self.model.hidden
        yield self._plain(operator, tensor, elements, needed=False)
        if self.recipe.dropout:
            yield Activation(operator, tensor + "_mask", elements * _MASK_BYTES, True, frozenset(modules))

    def _attention(self, attention: Attention, prefix: str) -> Iterator[Activation]:
        heads = local_heads(attention, self.layout.tp)
        q, k = heads.num_heads * attention.head_dim, heads.num_kv_heads * attention.head_dim
        v, out = heads.num_kv_heads * attention.v_dim, heads.num_heads * attention.v_dim
        rows, kv_rows = self.tokens, self.tokens
        if prefix and self.model.diffusion is not None:
            kv_rows = self.model.diffusion.context_tokens * self.micro_batch
        if attention.shared_kv:
            k = v = 0
        up = ("mla_up_proj",) if attention.latent is not None else ()
        yield from self._latent(attention)
        if attention.qk_norm != "none":
            yield self._plain("attn.qkv", prefix + "qk_norm_input", rows * q + kv_rows * k, *up)
        seen = rows * q + kv_rows * (k + v)
        rotated = self.model.positions == "rotary" and not prefix
        if self.layout.sp > 1:
            # The exchange delivers what attention reads; what it sent is freed.
            yield self._plain("attn.qkv", prefix + "qkv", seen, needed=False)
            if rotated:
                yield self._plain("attn.rope", "rotated", rows * q + kv_rows * k, needed=False)
        yield self._plain("attn.core", prefix + "qkv", seen, *up)
        yield from self._scores(attention, heads.num_heads, prefix)
        if self.layout.sp > 1:
            yield self._plain("attn.core", prefix + "output", rows * out)
            yield self._gemm_input("attn.out", prefix + "input", rows * out, "attn_exchange")
        elif not self.recipe.fp8:
            yield self._gemm_input("attn.out", prefix + "input", rows * out)
        else:
            # The projection keeps a narrower copy of its own; flash attention reads its output in full width.
            if self.recipe.attention == "flash":
                yield self._plain("attn.core", prefix + "output", rows * out)
            yield self._gemm_input("attn.out", prefix + "input", rows * out)
        yield from self._masked_output("attn.out", prefix + "output")

    def _latent(self, attention: Attention) -> Iterator[Activation]:
        """What MLA's down-projections leave: inputs of the norms, and their outputs, which the up-projections read."""
        latent = attention.latent
        if latent is None:
            return
        for name, rank in (("q", latent.q_rank or 0), ("kv", latent.kv_rank)):
            if rank:
                yield self._plain("attn.qkv", name + "_down", self.residual_tokens * rank)
                yield self._gemm_input("attn.qkv", name + "_norm", self.residual_tokens * rank)
        yield self._plain("attn.qkv", "rope_key", self.residual_tokens * latent.rope_head_dim, needed=False)

    def _scores(self, attention: Attention, num_heads: int, prefix: str) -> Iterator[Activation]:
        rebuilt = frozenset({"core_attn"})
        rows = self.tokens * num_heads
        if self.recipe.attention == "flash":
            yield Activation("attn.core", prefix + "lse", rows * _FULL_BYTES, True, rebuilt)
            return
        keys = self.seq_len
        if prefix and self.model.diffusion is not None:
            keys = self.model.diffusion.context_tokens
        yield self._plain("attn.core", prefix + "softmax", rows * keys, "core_attn")
        if self.recipe.dropout:
            yield Activation("attn.core", prefix + "softmax_mask", rows * keys * _MASK_BYTES, True, rebuilt)
            yield self._plain("attn.core", prefix + "dropped", rows * keys, "core_attn")

    def _mlp(self, mlp: Mlp, prefix: str, module: str, act: str) -> Iterator[Activation]:
        inner = self.tokens * mlp.ffn / self.layout.tp
        yield self._plain(prefix + "fc1", "output", inner * (2 if mlp.gated else 1), module)
        yield self._gemm_input(prefix + "act", "output", inner, module, act)
        yield from self._masked_output(prefix + "fc2", "output", module)

    def _moe(self, moe: MoE) -> Iterator[Activation]:
        at, hidden, tokens = self.layout, self.model.hidden, self.residual_tokens
        # Tensor-parallel ranks of an expert work on all tokens of the group, unless they have the same ones anyway.
        gathered = at.etp if at.sequence_parallel else max(1, at.etp // at.tp)
        rows = tokens * gathered * moe.top_k * self.imbalance
        yield Activation("moe.router", "scores", tokens * moe.num_experts * _FULL_BYTES, True, frozenset({"moe"}))
        yield Activation("moe.router", "choices", 2 * tokens * moe.top_k * _FULL_BYTES, True, frozenset({"moe"}))
        everyone = tokens * gathered * at.ep * hidden
        if self.recipe.dispatcher == "all_gather":
            yield self._plain("moe.dispatch", "gathered", everyone, needed=False)
        else:
            yield self._plain("moe.dispatch", "sent", tokens * moe.top_k * hidden, needed=False)
        yield self._gemm_input("moe.permute", "output", rows * hidden, "moe", "moe_dispatch")
        inner = rows * moe.expert.ffn / at.etp
        yield self._plain("moe.fc1", "output", inner * (2 if moe.expert.gated else 1), "moe")
        yield self._gemm_input("moe.act", "output", inner, "moe", "moe_act")
        yield self._plain("moe.fc2", "output", rows * hidden, needed=False)
        if self.recipe.dispatcher == "all_gather":
            yield self._plain("moe.unpermute", "output", everyone, needed=False)
        else:
            yield self._plain("moe.combine", "received", tokens * moe.top_k * hidden, needed=False)
        if moe.shared is not None:
            yield from self._shared(moe.shared)
        yield from self._masked_output("moe.combine", "output", "moe")

    def _shared(self, shared: Mlp) -> Iterator[Activation]:
        inner = self.tokens * shared.ffn / self.layout.tp
        modules = ("moe", "shared_experts")
        yield self._plain("moe.shared.fc1", "output", inner * (2 if shared.gated else 1), *modules)
        yield self._gemm_input("moe.shared.act", "output", inner, *modules, "moe_act")
        yield self._plain("moe.shared.fc2", "output", self.residual_tokens * self.model.hidden, needed=False)

"""Forward-only work: what a serving step computes for prompts, parts of prompts, and sequences that go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from overlapsim.errors import WorkloadError
from overlapsim.units import dtype_bytes
from overlapsim.workload.attention import DECODE_QUERIES, AttentionOp, FusedAttention
from overlapsim.workload.build_ends import local_vocabulary
from overlapsim.workload.build_linear import reduce_output, residual
from overlapsim.workload.build_mlp import mlp_forward
from overlapsim.workload.build_part import Part, Tokens, local_sizes, norm_kind
from overlapsim.workload.layout import Layout
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.model import Attention, Layer, ModelSpec, check_size
from overlapsim.workload.operators import GroupedGemmOp, OperatorGraph
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recorder import Recorder
from overlapsim.workload.routing import UNIFORM, Routing
from overlapsim.workload.vocabulary import local_heads

UP_PROJECTIONS: Final = "kv_up"
"""MLA's projection from the latent to keys and values; decode kernels absorb it."""


@dataclass(frozen=True)
class Segment:
    """Sequences of one step that are alike.

    Attributes
    ----------
    sequences : how many
    new : tokens of each that the step computes
    past : tokens of each that are in the cache already
    """

    sequences: int
    new: int
    past: int = 0

    def __post_init__(self) -> None:
        check_size("sequences", self.sequences)
        check_size("new", self.new)
        check_size("past", self.past, low=0)

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.sequences * self.new

    @property
    def decodes(self) -> bool:
        """Whether a decode kernel takes it: a few tokens against a cache."""
        return self.past > 0 and self.new <= DECODE_QUERIES


@dataclass(frozen=True)
class ForwardBatch:
    """What one replica computes in one step: every operator runs once for all of it.

    Attributes
    ----------
    segments : at least one

    Examples
    --------
    >>> mixed = ForwardBatch.prefill(1, 2048) + ForwardBatch.decode(15, 1024)
    >>> mixed.tokens, mixed.sequences, mixed.phase
    (2063, 16, 'mixed')
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not self.segments:
            raise WorkloadError("a forward step without sequences; expected at least one")

    @classmethod
    def prefill(cls, sequences: int, length: int, past: int = 0) -> ForwardBatch:
        """`length` tokens of each prompt, behind `past` ones of it that earlier chunks have computed."""
        return cls((Segment(sequences, length, past),))

    @classmethod
    def decode(cls, sequences: int, context: int, tokens: int = 1) -> ForwardBatch:
        """The next token of each sequence (or a few drafted ones) behind `context` tokens.

        Raises
        ------
        WorkloadError
            If the context is empty, or the tokens are more than a decode kernel takes.
        """
        if context < 1 or not 1 <= tokens <= DECODE_QUERIES:
            raise WorkloadError(
                f"decode of {tokens} token(s) behind {context}; expected 1 to {DECODE_QUERIES} behind at least one"
            )
        return cls((Segment(sequences, tokens, context),))

    def __add__(self, other: ForwardBatch) -> ForwardBatch:
        """Both in one step."""
        return ForwardBatch((*self.segments, *other.segments))

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def sequences(self) -> int:
        """Sequences in the step."""
        return sum(segment.sequences for segment in self.segments)

    @property
    def phase(self) -> str:
        """``prefill``, ``decode`` or ``mixed``."""
        kinds = {segment.decodes for segment in self.segments}
        return "mixed" if len(kinds) == 2 else ("decode" if kinds == {True} else "prefill")


@dataclass(frozen=True)
class ServingGraphs:
    """Operator graphs of a serving step: GEMMs over the tokens of all segments, one attention call for all.

    Attributes
    ----------
    model, layout, recipe : as in `build.GraphBuilder`; sequences are not split over ranks
    batch : of one replica
    kv_dtype : of the cache; empty: the model's
    imbalance : rows of the fullest expert rank over the even share
    routing : how tokens spread over experts, instead of `imbalance`

    Raises
    ------
    WorkloadError
        If the model has no tokens to go on with, attention is not fused, or the layout splits sequences.
    """

    model: ModelSpec
    layout: Layout
    recipe: Recipe
    batch: ForwardBatch
    kv_dtype: str = ""
    imbalance: float = 1.0
    routing: Routing = UNIFORM

    def __post_init__(self) -> None:
        if self.model.diffusion is not None:
            raise WorkloadError(f"{self.model.name} is a diffusion model; expected one that continues text")
        if self.recipe.attention != "flash":
            raise WorkloadError("a recipe with unfused attention has no cache to read; expected attention flash")
        if self.layout.context > 1:
            raise WorkloadError(
                f"{self.layout} splits sequences (sp or cp); expected tp, ep, pp and dp alone in a serving step"
            )

    def layer(self, layer: Layer) -> OperatorGraph:
        """Operators of one layer."""
        r, part = Recorder("fwd", self.model.dtype), self._part(layer)
        self._attention(r, part)
        mlp_forward(r, part)
        return r.graph()

    def embedding(self) -> OperatorGraph:
        """Operators of the embedding."""
        r, part = Recorder("fwd", self.model.dtype), self._part(self.model.layers[0])
        r.kernel("embed", MemoryOp("embedding", part.tokens.rows, self.model.hidden, self.model.dtype))
        if self.model.positions == "learned":
            r.kernel("embed", MemoryOp("add", part.tokens.rows, self.model.hidden, self.model.dtype))
        r.collective(part.reduction, "embed", part.hidden_bytes, self.layout.tp, group="tp")
        return r.graph()

    def head(self) -> OperatorGraph:
        """Last norm and logits of the last token of each sequence; all ranks get all logits."""
        r, part, rows = Recorder("fwd", self.model.dtype), self._part(self.model.layers[-1]), self.batch.sequences
        r.kernel("logits", MemoryOp(norm_kind(self.model), rows, self.model.hidden, self.model.dtype))
        columns, tp = local_vocabulary(part), self.layout.tp
        r.gemm("logits", rows, columns, self.model.hidden)
        r.collective("all_gather", "logits", float(rows * columns * tp * part.element_bytes), tp, group="tp")
        return r.graph()

    def attention_ops(self, layer: Layer) -> tuple[AttentionOp, ...]:
        """Attention of each segment on one rank."""
        return tuple(self._core(layer.attention, segment) for segment in self.batch.segments)

    def _part(self, layer: Layer) -> Part:
        tokens, split = self.batch.tokens, self.layout.sequence_split
        rows = Tokens(self.batch.sequences, -(-tokens // self.batch.sequences), tokens, -(-tokens // split))
        return Part(self.model, layer, self.layout, self.recipe, rows, self.imbalance, self.routing)

    def _attention(self, r: Recorder, part: Part) -> None:
        model, t, attention, tp = self.model, part.tokens, part.layer.attention, self.layout.tp
        r.kernel("attn.norm", MemoryOp(norm_kind(model), t.local, model.hidden, model.dtype))
        if tp > 1 and self.layout.sequence_parallel:
            r.collective("all_gather", "attn.qkv", part.hidden_bytes, tp, group="tp")
        for matrix in part.matrices("attn.qkv"):
            inputs, outputs = local_sizes(matrix, tp)
            rows = self._expanded_rows() if matrix.part == UP_PROJECTIONS else t.rows
            if not rows:
                continue
            r.gemm("attn.qkv", rows, outputs, inputs, dtype=part.gemm_dtype)
            if matrix.bias:
                r.kernel("attn.qkv", MemoryOp("bias_add", rows, outputs, model.dtype))
        columns = _rotated(attention, tp)
        if model.positions == "rotary" and columns:
            r.kernel("attn.rope", MemoryOp("rope", t.rows, columns, model.dtype))
        self._absorbed(r, part, "attn.qkv")
        ops = self.attention_ops(part.layer)
        r.kernel("attn.core", ops[0] if len(ops) == 1 else FusedAttention(ops))
        self._absorbed(r, part, "attn.out")
        for matrix in part.matrices("attn.out"):
            inputs, outputs = local_sizes(matrix, tp)
            r.gemm("attn.out", t.rows, outputs, inputs, dtype=part.gemm_dtype)
        reduce_output(r, part, "attn.out")
        residual(r, part, "attn.out", bias=attention.out_bias)

    def _expanded_rows(self) -> int:
        """Rows whose latent is expanded to keys and values: those of a chunk's cache too, those of decode not."""
        return sum(s.sequences * (s.past + s.new) for s in self.batch.segments if not s.decodes)

    def _absorbed(self, r: Recorder, part: Part, name: str) -> None:
        """Head by head, queries into the latent (``attn.qkv``) and latent outputs into values (``attn.out``)."""
        attention = part.layer.attention
        rows = sum(s.tokens for s in self.batch.segments if s.decodes)
        if attention.latent is None or not rows:
            return
        heads = local_heads(attention, self.layout.tp, pad=True).num_heads
        rank = attention.latent.kv_rank
        n, k = (rank, attention.latent.nope_head_dim) if name == "attn.qkv" else (attention.v_dim, rank)
        r.kernel(name, GroupedGemmOp((rows,) * heads, n, k, self.model.dtype))

    def _core(self, attention: Attention, segment: Segment) -> AttentionOp:
        heads = local_heads(attention, self.layout.tp, pad=True)
        keys = segment.past + segment.new
        if attention.window is not None:
            keys = min(keys, max(attention.window, segment.new))
        absorbed = attention.latent is not None and segment.decodes
        latent = attention.latent
        return AttentionOp(
            batch=segment.sequences,
            q_len=segment.new,
            kv_len=keys,
            heads=heads.num_heads,
            kv_heads=1 if absorbed else heads.num_kv_heads,
            head_dim=latent.kv_rank + latent.rope_head_dim if absorbed and latent else attention.head_dim,
            value_dim=latent.kv_rank if absorbed and latent else attention.v_dim,
            causal=attention.causal,
            dtype=self.model.dtype,
            kv_dtype=self.kv_dtype,
            shared_kv=absorbed,
        )


def _rotated(attention: Attention, tp: int) -> int:
    heads = local_heads(attention, tp, pad=True)
    if attention.latent is not None:
        return (heads.num_heads + 1) * attention.latent.rope_head_dim
    return (heads.num_heads + heads.num_kv_heads) * attention.head_dim


def kv_cache_bytes(graphs: ServingGraphs, layers: tuple[Layer, ...]) -> float:
    """Bytes of the cache of some layers on one rank, after the step.

    Keys and values of the rank's heads; of MLA the latent and its rotary key, on every tensor-parallel rank; of a
    window no more tokens than it sees.

    Examples
    --------
    >>> from overlapsim.workload.presets import load_model
    >>> model = load_model("llama3-8b")[0]
    >>> graphs = ServingGraphs(model, Layout(), Recipe(), ForwardBatch.decode(1, 8191))
    >>> kv_cache_bytes(graphs, model.layers) == 8192 * 32 * 2 * 8 * 128 * 2
    True
    """
    width = dtype_bytes(graphs.kv_dtype or graphs.model.dtype)
    return float(sum(width * count for layer in layers for count in _cached(graphs, layer.attention)))


def _cached(graphs: ServingGraphs, attention: Attention) -> Iterator[int]:
    """Elements of one layer's cache, by segment."""
    if attention.shared_kv:
        return
    heads = local_heads(attention, graphs.layout.tp, pad=True)
    each = heads.num_kv_heads * (attention.head_dim + attention.v_dim)
    if attention.latent is not None:
        each = attention.latent.kv_rank + attention.latent.rope_head_dim
    for segment in graphs.batch.segments:
        tokens = segment.past + segment.new
        yield segment.sequences * each * (tokens if attention.window is None else min(tokens, attention.window))

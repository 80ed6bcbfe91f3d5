"""Parameters on one rank: what tensor, expert and pipeline parallelism leave of a model's weights on a stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from overlapsim.workload.layout import Layout
from overlapsim.workload.model import Attention, Layer, ModelSpec
from overlapsim.workload.stages import stage_layers
from overlapsim.workload.vocabulary import VOCABULARY_MULTIPLE, local_heads, padded_vocabulary
from overlapsim.workload.weights import Matrix, Weight, layer_weights, model_weights, mtp_weights

# GEMMs whose outputs tensor parallelism splits, bias too, and those whose inputs it splits, bias kept whole. The others
# are on every rank: norms, routers, MLA's down-projections, and what a diffusion model has around its layers.
_COLUMNS: Final = frozenset({"q_up", "kv_up", "up", "mtp_join"})
_ROWS: Final = frozenset({"out", "cross_out", "down"})
_EXPERTS: Final = ("moe.fc1", "moe.fc2")


@dataclass(frozen=True)
class LocalParameters:
    """Parameters on one rank, before ZeRO shards them.

    Attributes
    ----------
    dense : replicated over the dense grid's data-parallel ranks (`Layout.dense_shards`)
    expert : routed experts, replicated over the expert grid's (`Layout.expert_shards`)
    copied : of `dense`, whole shared experts, which tensor-parallel ranks hold in copies and feed their own tokens
    """

    dense: int = 0
    expert: int = 0
    copied: int = 0

    def __add__(self, other: LocalParameters) -> LocalParameters:
        """Parameters of both."""
        return LocalParameters(self.dense + other.dense, self.expert + other.expert, self.copied + other.copied)

    @property
    def total(self) -> int:
        """All parameters."""
        return self.dense + self.expert


def layer_parameters_local(
    model: ModelSpec, layer: Layer, layout: Layout, *, whole_shared: bool = False
) -> LocalParameters:
    """Parameters of one layer on one rank.

    Parameters
    ----------
    whole_shared : tensor parallelism does not split shared experts (`Recipe.shared`)

    Raises
    ------
    LayoutError
        If heads do not divide; widths and experts that do not are rounded up (`layout_rules` refuses them).

    Examples
    --------
    >>> from overlapsim.workload.families import gpt
    >>> model = gpt(num_layers=1, hidden=8, num_heads=2, vocabulary=10, max_positions=4)
    >>> layer_parameters_local(model, model.layers[0], Layout(tp=2)).dense == (12 * 64 + 7 * 8) // 2 + 6 * 8
    True
    """
    return _local(layer_weights(model, layer), layout, layer, whole_shared)


def stage_parameters(
    model: ModelSpec,
    layout: Layout,
    stage: int,
    given: Sequence[int] | None = None,
    vocabulary_multiple: int = VOCABULARY_MULTIPLE,
    *,
    whole_shared: bool = False,
) -> LocalParameters:
    """Parameters of a pipeline stage on one rank: its layers, the embedding on the first, norm and logits on the last.

    A tied embedding is on both ends of a pipeline; multi-token prediction is on the last.

    Parameters
    ----------
    stage : int
        Pipeline stage, from 0.
    given : sequence of int, optional
        Layers of each chunk where stages are uneven (`stages.chunk_layers`).
    vocabulary_multiple : int
        Rows for each tensor-parallel rank to which the vocabulary is padded.
    whole_shared : bool
        As `layer_parameters_local` has it.

    Raises
    ------
    LayoutError
        If there is no such stage, or layers or heads do not divide.
    """
    found = LocalParameters()
    kinds: dict[int, LocalParameters] = {}
    for layer in (layer for chunk in stage_layers(model, layout, stage, given) for layer in chunk):
        if id(layer) not in kinds:
            kinds[id(layer)] = layer_parameters_local(model, layer, layout, whole_shared=whole_shared)
        found += kinds[id(layer)]
    last = stage == layout.pp - 1
    for weight in model_weights(model):
        ends = (weight.operator == "embed" and stage == 0) or (weight.operator == "logits" and last)
        tied = weight.part == "tokens" and weight.operator == "embed" and model.tied_embeddings and last
        if ends or tied:
            found += LocalParameters(_outside(model, weight, layout, vocabulary_multiple))
    if last and model.num_mtp_layers:
        one = _local(mtp_weights(model), layout, model.layers[-1], whole_shared)
        found += sum((one for _ in range(model.num_mtp_layers)), start=LocalParameters())
    return found


def _outside(model: ModelSpec, weight: Weight, layout: Layout, multiple: int) -> int:
    """A weight outside the layers; tables and matrices of the vocabulary are padded and split by its rows."""
    rows = padded_vocabulary(model.vocabulary, layout.tp, multiple) // layout.tp if model.vocabulary else 0
    if weight.part == "tokens" and weight.parameters:
        return rows * model.hidden
    return rows if (weight.operator, weight.part) == ("logits", "bias") else weight.parameters


def _local(weights: Iterable[Weight], layout: Layout, layer: Layer, whole_shared: bool) -> LocalParameters:
    dense = expert = copied = 0
    for weight in weights:
        if weight.operator in _EXPERTS and isinstance(weight, Matrix):
            expert += -(-weight.copies // layout.ep) * _split(weight, layout.etp)
        elif whole_shared and layout.tp > 1 and weight.operator.startswith("moe.shared."):
            copied += weight.parameters
        elif isinstance(weight, Matrix) and weight.copies:
            dense += _projection(weight, layer, layout.tp)
        elif weight.part == "sinks":
            dense += -(-weight.parameters // layout.tp)
        else:
            dense += weight.parameters
    return LocalParameters(dense + copied, expert, copied)


def _projection(weight: Matrix, layer: Layer, tp: int) -> int:
    """A matrix of a dense block. Projections to heads have whole heads on a rank, so keys and values may be copied."""
    attention = layer.cross if weight.part.startswith("cross_") else layer.attention
    outputs = None if attention is None else _head_outputs(weight.part.removeprefix("cross_"), attention, tp)
    if outputs is None:
        return _split(weight, tp)
    return weight.inputs * outputs + (outputs if weight.bias else 0)


def _head_outputs(part: str, attention: Attention, tp: int) -> int | None:
    if part not in ("q", "qkv", "kv"):
        return None
    heads = local_heads(attention, tp)
    q = heads.num_heads * attention.head_dim
    kv = heads.num_kv_heads * (attention.head_dim + attention.v_dim)
    return {"q": q, "qkv": q + kv, "kv": kv}[part]


def _split(weight: Matrix, ranks: int) -> int:
    """One copy of a matrix on one of `ranks`."""
    if weight.part in _COLUMNS:
        outputs = -(-weight.outputs // ranks)
        return outputs * (weight.inputs + (1 if weight.bias else 0))
    inputs = -(-weight.inputs // ranks) if weight.part in _ROWS else weight.inputs
    return inputs * weight.outputs + (weight.outputs if weight.bias else 0)

"""From a model and a layout to operator graphs: one layer's passes, and what stands before, after and beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from overlapsim.errors import WorkloadError
from overlapsim.workload.build_attention import Part, Tokens, attention_backward, attention_forward, core
from overlapsim.workload.build_ends import (
    embed_backward,
    embed_forward,
    head_backward,
    head_forward,
    optimizer_step,
)
from overlapsim.workload.build_mlp import mlp_backward, mlp_forward
from overlapsim.workload.layout import Layout
from overlapsim.workload.model import Layer, ModelSpec
from overlapsim.workload.operators import OperatorGraph
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recorder import Recorder

Recompute = Literal["none", "selective", "full"]
Which = Literal["forward", "backward", "input_grad", "weight_grad"]
RECOMPUTE: Final[tuple[Recompute, ...]] = get_args(Recompute)
_KEEP: Final[dict[Which, frozenset[str]]] = {
    "backward": frozenset({"dgrad", "wgrad"}),
    "input_grad": frozenset({"dgrad"}),
    "weight_grad": frozenset({"wgrad"}),
}


@dataclass(frozen=True)
class GraphBuilder:
    """Operator graphs of one model in one layout, for one micro-batch.

    Attributes
    ----------
    model, layout, recipe : what is computed, how it is split, and with which kernels
    micro_batch, sequence : sequences of a micro-batch on one data-parallel rank, and tokens of each
    recompute : what the backward pass computes again: nothing, the attention core (``selective``) or the whole layer

    Raises
    ------
    WorkloadError
        If a size is below 1 or the recompute mode is unknown.

    Examples
    --------
    >>> from overlapsim.workload.presets import load_model
    >>> builder = GraphBuilder(load_model("gpt3-175b")[0], Layout(tp=8), Recipe(), 1, 2048)
    >>> graph = builder.layer(builder.model.layers[0], "forward")
    >>> [op.name for op in graph.operators][:4]
    ['attn.norm', 'attn.qkv', 'attn.qkv', 'attn.qkv']
    """

    model: ModelSpec
    layout: Layout
    recipe: Recipe
    micro_batch: int
    sequence: int
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        if self.micro_batch < 1 or self.sequence < 1:
            raise WorkloadError(
                f"a micro-batch of {self.micro_batch} sequences of {self.sequence} tokens; expected at least 1 of 1"
            )
        if self.recompute not in RECOMPUTE:
            raise WorkloadError(f"recompute is {self.recompute!r}; expected one of {', '.join(RECOMPUTE)}")

    def layer(self, layer: Layer, which: Which) -> OperatorGraph:
        """Operators of one layer's pass; a backward pass begins with what it computes again."""
        part = self._part(layer)
        r = Recorder("fwd", self.model.dtype)
        if which == "forward":
            attention_forward(r, part)
            mlp_forward(r, part)
            return r.graph()
        keep = _KEEP[which]
        if "dgrad" in keep and self.recompute != "none":
            self._again(r, part)
        mlp_backward(r, part, keep=keep)
        attention_backward(r, part, keep=keep)
        return r.graph()

    def embedding(self, which: Which) -> OperatorGraph:
        """Operators of the embedding; it has no gradient of its input."""
        part, r = self._part(self.model.layers[0]), Recorder("fwd", self.model.dtype)
        if which == "forward":
            embed_forward(r, part)
        elif "wgrad" in _KEEP[which]:
            embed_backward(r, part)
        return r.graph()

    def head(self, which: Which) -> OperatorGraph:
        """Operators of the last norm, logits and loss."""
        part, r = self._part(self.model.layers[-1]), Recorder("fwd", self.model.dtype)
        if which == "forward":
            head_forward(r, part)
        else:
            head_backward(r, part, keep=_KEEP[which])
        return r.graph()

    def optimizer(self, parameters: float) -> OperatorGraph:
        """Operators of the optimizer's step over `parameters` of this rank."""
        r = Recorder("fwd", self.model.dtype)
        optimizer_step(r, self._part(self.model.layers[0]), parameters, norm_ranks=self.layout.world_size)
        return r.graph()

    def _part(self, layer: Layer) -> Part:
        return Part(
            self.model, layer, self.layout, self.recipe, Tokens.of(self.layout, self.micro_batch, self.sequence)
        )

    def _again(self, r: Recorder, part: Part) -> None:
        again = Recorder("recompute", self.model.dtype)
        if self.recompute == "full":
            attention_forward(again, part)
            mlp_forward(again, part)
        else:
            again.kernel("attn.core", core(part, "fwd"))
        append(r, again)


def append(r: Recorder, other: Recorder) -> None:
    """Record all operators of another recorder behind the last one."""
    graph, offset = other.graph(), len(r)
    for position, op in enumerate(graph.operators):
        before = [offset + producer for producer in graph.producers(position)] or [r.last if offset else -1]
        r.add(op, before, graph.stream_of(position), main=False)
    r.last = offset + other.last

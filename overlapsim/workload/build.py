"""From a model and a layout to operator graphs: one layer's passes, and what stands before, after and beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from overlapsim.errors import WorkloadError
from overlapsim.workload.attention import AttentionOp, UnfusedAttention
from overlapsim.workload.build_attention import attention_backward, attention_forward
from overlapsim.workload.build_ends import (
    embed_backward,
    embed_forward,
    head_backward,
    head_forward,
    optimizer_step,
)
from overlapsim.workload.build_mlp import mlp_backward, mlp_forward
from overlapsim.workload.build_part import Part, Tokens
from overlapsim.workload.layout import Layout
from overlapsim.workload.model import Layer, ModelSpec
from overlapsim.workload.operators import CollectiveOp, GemmOp, KernelOp, Operator, OperatorGraph
from overlapsim.workload.rebuilt import join_rebuilt
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recompute import Recompute
from overlapsim.workload.recorder import Recorder
from overlapsim.workload.routing import UNIFORM, Routing

Which = Literal["forward", "backward", "input_grad", "weight_grad"]
Half = Literal["attention", "mlp"]
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
    recompute : what the backward pass computes again
    imbalance : rows of the fullest expert rank over the even share; that rank sets the pace
    routing : how tokens spread over experts, instead of `imbalance`

    Raises
    ------
    WorkloadError
        If a size, or the imbalance, is below 1.

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
    recompute: Recompute = field(default_factory=Recompute)
    imbalance: float = 1.0
    routing: Routing = UNIFORM

    def __post_init__(self) -> None:
        if not 1 <= self.imbalance < float("inf"):
            raise WorkloadError(f"imbalance is {self.imbalance!r}; expected a finite number of at least 1")
        if self.micro_batch < 1 or self.sequence < 1:
            raise WorkloadError(
                f"a micro-batch of {self.micro_batch} sequences of {self.sequence} tokens; expected at least 1 of 1"
            )

    def layer(self, layer: Layer, which: Which, *, rebuilt: bool = True) -> OperatorGraph:
        """Operators of one layer's pass; a backward pass begins with what it computes again.

        Parameters
        ----------
        rebuilt : False for a layer that full recompute leaves out (method ``block``)
        """
        part = self._part(layer)
        r = Recorder("fwd", self.model.dtype)
        if which == "forward":
            attention_forward(r, part)
            mlp_forward(r, part)
            return r.graph()
        keep = _KEEP[which]
        placed: Mapping[int, int] = {}
        forward = OperatorGraph(())
        if "dgrad" in keep and self.recompute.granularity != "none" and rebuilt:
            forward, placed = self._again(r, part)
        mlp_backward(r, part, keep=keep)
        attention_backward(r, part, keep=keep)
        return join_rebuilt(r.graph(), forward, placed) if placed else r.graph()

    def half(self, layer: Layer, half: Half, which: Literal["forward", "backward"]) -> OperatorGraph:
        """Operators of the attention or the feed-forward half of a layer's pass, nothing computed again."""
        part, r = self._part(layer), Recorder("fwd", self.model.dtype)
        if which == "forward":
            (attention_forward if half == "attention" else mlp_forward)(r, part)
        else:
            (attention_backward if half == "attention" else mlp_backward)(r, part, keep=_KEEP["backward"])
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
        tokens = Tokens.of(self.layout, self.micro_batch, self.sequence)
        return Part(self.model, layer, self.layout, self.recipe, tokens, self.imbalance, self.routing)

    def _again(self, r: Recorder, part: Part) -> tuple[OperatorGraph, Mapping[int, int]]:
        """Record what is computed again; returns the forward pass, and where named modules of it went."""
        whole = Recorder("recompute", self.model.dtype)
        attention_forward(whole, part)
        mlp_forward(whole, part)
        graph, modules = whole.graph(), self.recompute.modules
        if self.recompute.granularity == "full":
            append(r, graph)
            return graph, {}
        latent = part.layer.attention.latent
        ranks = () if latent is None else (latent.q_rank, latent.kv_rank)
        again = [i for i, op in enumerate(graph.operators) if modules_of(op, ranks) & modules]
        append(r, graph.part(again))
        # Gradients wait for what they read, not for all that is rebuilt.
        r.take()
        return graph, {old: new for new, old in enumerate(again)}


def modules_of(op: Operator, latent_ranks: Sequence[int | None] = ()) -> frozenset[str]:
    """Modules (`recompute.MODULES`) that hold an operator of the forward pass.

    Parameters
    ----------
    op : operator
    latent_ranks : inner sizes by which MLA's up-projections are known
    """
    found = set()
    if isinstance(op, KernelOp):
        if isinstance(op.work, AttentionOp | UnfusedAttention):
            found.add("core_attn")
        if op.name.endswith(".norm"):
            found.add("layernorm")
        if op.name in ("mlp.act", "moe.act"):
            found.add(f"{op.name.partition('.')[0]}_act")
    if isinstance(op, GemmOp) and op.name == "attn.qkv" and op.k in latent_ranks:
        found.add("mla_up_proj")
    if op.name in ("moe.dispatch", "moe.permute"):
        found.add("moe_dispatch")
    if isinstance(op, CollectiveOp) and (op.name, op.kind) == ("attn.out", "all_to_all"):
        found.add("attn_exchange")
    room = op.name.partition(".")[0]
    if room in ("mlp", "moe") and not op.name.endswith(".norm"):
        found.add("shared_experts" if op.name.startswith("moe.shared") else room)
    return frozenset(found)


def append(r: Recorder, graph: OperatorGraph) -> None:
    """Record the operators of a graph behind the last one; what needs none of the others needs that."""
    offset, last = len(r), r.last
    for position, op in enumerate(graph.operators):
        before = [offset + producer for producer in graph.producers(position)] or [last]
        r.add(op, before, graph.stream_of(position))

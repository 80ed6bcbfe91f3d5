"""Whether a model can run in a layout: one rule a subject, each with at most one reason against it.

Rules are those of Megatron-LM's argument checks that a plan for any framework shares; what only one framework refuses
(ZeRO-3 beside pipelines, say) is for the emitters to find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from overlapsim.errors import LayoutError
from overlapsim.workload.layout import Layout
from overlapsim.workload.model import Attention, Layer, Mlp, ModelSpec, MoE, check_size
from overlapsim.workload.stages import chunk_layers
from overlapsim.workload.vocabulary import local_heads


@dataclass(frozen=True)
class Job:
    """What a layout must divide besides the model.

    Attributes
    ----------
    seq_len : tokens of a sequence
    micro_batch : sequences of one micro-batch on one data-parallel rank
    global_batch : sequences of a step; None: not asked
    world_size : GPUs that the layout must use, all of them; None: not asked
    stage_layers : layers of each chunk where stages are uneven (`stages.chunk_layers`); None: even
    """

    seq_len: int
    micro_batch: int = 1
    global_batch: int | None = None
    world_size: int | None = None
    stage_layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("seq_len", "micro_batch"):
            check_size(name, getattr(self, name))
        for name in ("global_batch", "world_size"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))

    def num_micro_batches(self, layout: Layout) -> int:
        """Micro-batches of a step on each data-parallel rank.

        Raises
        ------
        LayoutError
            If the global batch is not given or does not divide.
        """
        if self.global_batch is None:
            raise LayoutError("the global batch is not given; expected it for the number of micro-batches")
        for reason in _batch(layout, self):
            raise LayoutError(reason)
        return self.global_batch // (self.micro_batch * layout.dp)


def layout_reasons(layout: Layout, model: ModelSpec, job: Job) -> tuple[str, ...]:
    """Why a model cannot run in a layout; empty if it can.

    Parameters
    ----------
    layout : Layout
        Sound in itself (its constructor sees to that).
    job : Job
        Sequence, batch and machine.

    Returns
    -------
    tuple of str
        At most one sentence for each subject: ranks, heads, widths, experts, sequence, layers, batch, interleaving.

    Examples
    --------
    >>> from overlapsim.workload.families import gpt
    >>> model = gpt(num_layers=40, hidden=5120, num_heads=40, vocabulary=50257, max_positions=2048)
    >>> layout_reasons(Layout(tp=8, pp=8, dp=23), model, Job(2048, global_batch=32, world_size=1472))[0][:55]
    'a global batch of 32 sequences does not divide into 23 '
    """
    return tuple(reason for rule in _RULES for reason in rule(layout, model, job))


def check_layout(layout: Layout, model: ModelSpec, job: Job) -> None:
    """Refuse a layout that a model cannot run in.

    Raises
    ------
    LayoutError
        With every reason of `layout_reasons`.
    """
    reasons = layout_reasons(layout, model, job)
    if reasons:
        raise LayoutError("; ".join(reasons))


Rule = Callable[[Layout, ModelSpec, Job], Iterator[str]]


def _ranks(layout: Layout, model: ModelSpec, job: Job) -> Iterator[str]:
    if job.world_size is not None and layout.world_size != job.world_size:
        yield (
            f"{layout} has {layout.world_size} ranks (tp x sp x cp x pp x dp) for {job.world_size} GPUs; "
            "expected as many ranks as GPUs"
        )


def _heads(layout: Layout, model: ModelSpec, job: Job) -> Iterator[str]:
    for layer in _distinct(model):
        for attention in filter(None, (layer.attention, layer.cross)):
            reason = _heads_of(layout, attention)
            if reason:
                yield reason
                return


def _heads_of(layout: Layout, attention: Attention) -> str:
    try:
        local = local_heads(attention, layout.tp)
    except LayoutError as error:
        return str(error)
    if local.num_heads % layout.sp or local.num_kv_heads % layout.sp:
        return (
            f"sp is {layout.sp} and a tensor-parallel rank has {local.num_heads} query heads and "
            f"{local.num_kv_heads} key and value heads; expected a divisor of both (Ulysses deals out whole heads)"
        )
    return ""


def _widths(layout: Layout, model: ModelSpec, job: Job) -> Iterator[str]:
    for layer in _distinct(model):
        for name, degree, mlp in _blocks(layout, layer):
            if mlp.ffn % degree:
                yield f"{name} is {degree} and a feed-forward block is {mlp.ffn} wide; expected a divisor"
                return


def _blocks(layout: Layout, layer: Layer) -> Iterator[tuple[str, int, Mlp]]:
    if not isinstance(layer.mlp, MoE):
        yield "tp", layout.tp, layer.mlp
        return
    yield "etp", layout.etp, layer.mlp.expert
    if layer.mlp.shared is not None:
        yield "tp", layout.tp, layer.mlp.shared


def _experts(layout: Layout, model: ModelSpec, job: Job) -> Iterator[str]:
    counts = [layer.mlp.num_experts for layer in _distinct(model) if isinstance(layer.mlp, MoE)]
    if not counts:
        if layout.ep > 1 or layout.etp != layout.tp:
            yield f"ep is {layout.ep} and etp is {layout.etp}, and {model.name} has no experts; expected neither"
        return
    short = next((count for count in counts if count % layout.ep), None)
    if short is not None:
        yield f"ep is {layout.ep} and a layer has {short} experts; expected a divisor: ranks hold whole experts"
    elif layout.ep > 1 and layout.tp > 1 and not layout.sequence_parallel:
        yield (
            f"ep is {layout.ep} with tp={layout.tp} and sequence_parallel off; expected it on: else every "
            "tensor-parallel rank dispatches the same tokens"
        )


def _sequence(layout: Layout, model: ModelSpec, job: Job) -> Iterator[str]:
    tokens, halves = job.seq_len, 2 * layout.cp if layout.cp > 1 else 1
    if tokens % halves:
        yield (
            f"a sequence of {tokens} tokens does not divide by 2 x cp = {halves}; expected a multiple: under the "
            "causal mask each rank takes one part from the front and one from the back"
        )
    elif tokens % (halves * layout.sp):
        yield (
            f"a sequence of {tokens} tokens does not divide by sp = {layout.sp}"
            + (f" x 2 x cp = {halves}" if halves > 1 else "")
            + "; expected a multiple"
        )
    elif tokens // layout.context % (layout.sequence_split // layout.context):
        yield (
            f"{tokens // layout.context} tokens of a sequence on each rank do not divide by tp = {layout.tp}; "
            "expected a multiple, or sequence_parallel off"
        )


def _layers(layout: Layout, model: ModelSpec, job: Job) -> Iterator[str]:
    try:
        chunk_layers(layout, model.num_layers, job.stage_layers)
    except LayoutError as error:
        yield str(error)


def _batch(layout: Layout, job: Job) -> Iterator[str]:
    if job.global_batch is not None and job.global_batch % (job.micro_batch * layout.dp):
        replicas = f"{layout.dp} data-parallel replicas"
        yield (
            f"a global batch of {job.global_batch} sequences does not divide into {replicas} x micro-batches of "
            f"{job.micro_batch}; expected a multiple of {job.micro_batch * layout.dp}, or another dp"
        )


def _micro_batches(layout: Layout, model: ModelSpec, job: Job) -> Iterator[str]:
    reasons = [*_batch(layout, job)]
    yield from reasons
    if reasons or job.global_batch is None or layout.vpp == 1:
        return
    count = job.num_micro_batches(layout)
    if count % layout.pp:
        yield (
            f"{count} micro-batches do not divide by pp = {layout.pp}; expected a multiple with vpp={layout.vpp}: "
            "interleaved chunks take micro-batches in groups of pp"
        )


_RULES: Final[tuple[Rule, ...]] = (_ranks, _heads, _widths, _experts, _sequence, _layers, _micro_batches)


def _distinct(model: ModelSpec) -> tuple[Layer, ...]:
    """Layers that are not the same object: all kinds there are, found without comparing them field by field."""
    return tuple({id(layer): layer for layer in model.layers}.values())

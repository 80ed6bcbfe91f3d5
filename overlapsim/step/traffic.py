"""Data-parallel traffic of a step: what each stage's ranks reduce and gather, over which groups, in which pieces."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from overlapsim.schedule.pipeline import PipelineSchedule
from overlapsim.step.inputs import DEFAULT_BUCKET_BYTES, RANK_BUCKET_BYTES, StepInputs
from overlapsim.step.synchronisation import INNER, OUTER, two_levels
from overlapsim.units import dtype_bytes
from overlapsim.workload.layout import Layout
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.model import Layer
from overlapsim.workload.operators import CollectiveKind, CollectiveOp, KernelOp
from overlapsim.workload.stage_weights import LocalParameters, layer_parameters_local, stage_parameters
from overlapsim.workload.stages import chunk_layers, stage_layers
from overlapsim.workload.state_precision import StatePrecision, recipe_precision

MOST_BUCKETS: Final = 32
"""Pieces of a stage's gradients that are simulated one by one; smaller buckets are joined."""

CHUNKS: Final = 8
"""Pieces of what is synchronised in two levels with nothing beside it: a level waits for an eighth of the other."""
ROW_ELEMENTS: Final = 4096
"""Rows in which kernels over flat gradients are cut; any size of some thousand costs the same."""


@dataclass(frozen=True)
class StageTraffic:
    """Collectives of one pipeline device, in the order they are issued.

    Attributes
    ----------
    reduce : with the share of the gradients of its kind that must be complete before each starts
    gather : of parameters after the optimizer (ZeRO), with the share of them that comes before
    """

    reduce: tuple[tuple[CollectiveOp, float], ...]
    gather: tuple[tuple[CollectiveOp, float], ...]


def precision_of(inputs: StepInputs) -> StatePrecision:
    """Bytes of a parameter's state."""
    return inputs.precision or recipe_precision(inputs.model.dtype, inputs.recipe)


def stage_traffic(inputs: StepInputs, device: int) -> StageTraffic:
    """Traffic of one pipeline device over one step.

    Dense parameters are reduced over all ranks that hold them, experts over
    theirs. ZeRO scatters gradients and gathers parameters instead; HSDP adds
    a reduction over the groups of shards. Where parameters are dropped after
    use (``StepInputs.sharded``) only that is left: blocks hold the rest.
    Copies within nodes are reduced there first (`synchronisation.two_levels`),
    and gradients are exchanged in bf16 where the recipe compresses them.
    """
    return traffic_of(inputs, _stage(inputs, device))


def held_parameters(inputs: StepInputs, schedule: PipelineSchedule, device: int, copy: int = 0) -> LocalParameters:
    """Parameters of one copy of the model on a device, wherever a schedule puts stages (folded, or the other way)."""
    model, layout, given = inputs.model, inputs.layout, inputs.job.stage_layers
    pp, last = schedule.num_devices, schedule.num_stages - 1
    stages = [s for s in range(schedule.num_stages) if schedule.placement[copy, s] == device]
    if all(stage % pp == device for stage in stages):
        return _stage(inputs, device)
    if schedule.num_stages == pp:
        return _stage(inputs, stages[0])
    counts = chunk_layers(layout, model.num_layers, given)
    local = LocalParameters()
    for stage in stages:
        begin = sum(counts[:stage])
        own = model.layers[begin : begin + counts[stage]]
        local += _layers(inputs, own)
        # The ends of the model, as its first and last devices have them without being folded.
        for end, where in ((0, 0), (last, pp - 1)):
            if stage == end:
                whole = _stage(inputs, where)
                inner = _layers(inputs, [layer for c in stage_layers(model, layout, where, given) for layer in c])
                local += LocalParameters(whole.dense - inner.dense, whole.expert - inner.expert)
    return local


def _stage(inputs: StepInputs, stage: int) -> LocalParameters:
    whole = inputs.recipe.shared == "whole"
    return stage_parameters(inputs.model, inputs.layout, stage, inputs.job.stage_layers, whole_shared=whole)


def _layers(inputs: StepInputs, layers: Sequence[Layer]) -> LocalParameters:
    whole = inputs.recipe.shared == "whole"
    each = (layer_parameters_local(inputs.model, layer, inputs.layout, whole_shared=whole) for layer in layers)
    return sum(each, start=LocalParameters())


def traffic_of(inputs: StepInputs, local: LocalParameters) -> StageTraffic:
    """Traffic of so many parameters on a rank, as `stage_traffic` has it."""
    width, layout = precision_of(inputs), inputs.layout
    reduce: list[tuple[CollectiveOp, float]] = []
    gather: list[tuple[CollectiveOp, float]] = []
    for parameters, name, groups in _parts(local, layout):
        size = float(parameters * width.gradient_bytes)
        split = name == "grad.dense" and two_levels(inputs)
        pieces = _num_buckets(inputs, size, groups.ranks)
        if split:
            # What goes between nodes is cut in buckets; in some, if it is large, so that both levels work at once.
            leaving = size / layout.sp
            chunks = math.ceil(leaving / (RANK_BUCKET_BYTES * layout.dp))
            pieces = max(min(CHUNKS, chunks), _num_buckets(inputs, leaving, layout.dp))
        for number in range(pieces):
            done = (number + 1) / pieces if inputs.dp_overlap != "none" else 1.0
            for kind, ranks, group in _reductions(layout, groups, split=split):
                if inputs.sharded and kind == "reduce_scatter":
                    continue
                share = size / pieces / _shards_before(layout, groups, group)
                reduce.append((_reduction(inputs, kind, share, ranks, name, group), done))
        if layout.zero and not inputs.sharded and groups.shards > 1:
            own, count = float(parameters * width.gathered_bytes), pieces if inputs.dp_overlap == "both" or split else 1
            dtype = "fp8" if width.gathered_bytes == dtype_bytes("fp8") else inputs.model.dtype
            for number in range(count):
                for ranks, group in _gathers(layout, groups, split=split):
                    share = own / count / _shards_before(layout, groups, group)
                    op = CollectiveOp("all_gather", share, ranks, dtype, name, group=group)
                    gather.append((op, number / count if inputs.dp_overlap == "both" else 0.0))
    if local.copied:
        # Tensor-parallel ranks fed the copies other tokens; before data parallelism sums them, as for norms.
        summed = CollectiveOp(
            "all_reduce",
            float(local.copied * width.gradient_bytes),
            layout.tp,
            "fp32",
            "grad.dense",
            "wgrad",
            group="tp",
        )
        reduce.insert(0, (summed, 1.0))
    # What is ready within the node at once hides behind what leaves it: that is issued first of all that leaves.
    reduce.sort(key=lambda entry: (entry[1], entry[0].group == OUTER))
    gather.sort(key=lambda entry: entry[1])
    return StageTraffic(tuple(reduce), tuple(gather))


def embedding_reduction(inputs: StepInputs) -> CollectiveOp | None:
    """Sum of the tied embedding's gradients over the first and last stage; None where there is none."""
    layout, model = inputs.layout, inputs.model
    if not model.tied_embeddings or layout.pp < 2 or not model.vocabulary:
        return None
    rows = model.vocabulary / layout.tp
    size = rows * model.hidden * precision_of(inputs).gradient_bytes
    return CollectiveOp("all_reduce", size, 2, model.dtype, "grad.embed", "wgrad", group="embedding")


def copies_reductions(inputs: StepInputs, local: LocalParameters) -> tuple[tuple[CollectiveOp, float], ...]:
    """Gradients of a stage whose only other holder is the device with the second copy of it, as `StageTraffic.reduce`.

    What has data-parallel ranks as well is summed over both copies at once.
    """
    width, model = precision_of(inputs), inputs.model
    alone = (
        (local.dense, "grad.dense", inputs.layout.dense_replicas),
        (local.expert, "grad.expert", inputs.layout.edp),
    )
    return tuple(
        (
            CollectiveOp(
                "all_reduce", float(count * width.gradient_bytes), 2, model.dtype, name, "wgrad", group="embedding"
            ),
            1.0,
        )
        for count, name, ranks in alone
        if count and ranks == 1
    )


@dataclass(frozen=True)
class _Groups:
    """Ranks with the same parameters: all, those with different shards, those with the same."""

    whole: str
    shard: str
    replica: str
    ranks: int
    shards: int
    replicas: int


def _parts(local: LocalParameters, layout: Layout) -> Iterator[tuple[int, str, _Groups]]:
    dense, expert = layout.dense_replicas, layout.edp
    if local.dense and dense > 1:
        shards = dense // layout.hsdp
        yield local.dense, "grad.dense", _Groups("dp_cp", "shard", "replica", dense, shards, layout.hsdp)
    if local.expert and expert > 1:
        shards = expert // layout.hsdp
        groups = _Groups("edp", "expert_shard", "expert_replica", expert, shards, layout.hsdp)
        yield local.expert, "grad.expert", groups


def _reductions(layout: Layout, groups: _Groups, *, split: bool) -> Iterator[tuple[CollectiveKind, int, str]]:
    if split:
        yield "reduce_scatter", layout.sp, INNER
        yield "reduce_scatter", layout.dp, OUTER
        return
    if not layout.zero:
        yield "all_reduce", groups.ranks, groups.whole
        return
    if groups.shards > 1:
        yield "reduce_scatter", groups.shards, groups.shard if groups.replicas > 1 else groups.whole
    if groups.replicas > 1:
        yield "all_reduce", groups.replicas, groups.replica


def _gathers(layout: Layout, groups: _Groups, *, split: bool) -> tuple[tuple[int, str], ...]:
    return ((layout.dp, OUTER), (layout.sp, INNER)) if split else ((groups.shards, groups.shard),)


def _shards_before(layout: Layout, groups: _Groups, group: str) -> int:
    """Parts in which parameters are split already where a group's collective moves them."""
    if group == OUTER:
        return layout.sp
    return groups.shards if group.endswith("replica") else 1


def _reduction(
    inputs: StepInputs, kind: CollectiveKind, size_bytes: float, ranks: int, name: str, group: str
) -> CollectiveOp:
    """One reduction; compressed, the scatter over data-parallel ranks is an exchange of bf16 (summed where it arrives).

    Within a node gradients stay in fp32: that step hides behind the one between nodes.
    """
    own = precision_of(inputs).gradient_bytes
    if compresses_gradients(inputs) and kind == "reduce_scatter" and group != INNER:
        return CollectiveOp(
            "all_to_all", size_bytes * dtype_bytes("bf16") / own, ranks, "bf16", name, "wgrad", group=group
        )
    return CollectiveOp(kind, size_bytes, ranks, name=name, pass_="wgrad", group=group)


def compresses_gradients(inputs: StepInputs) -> bool:
    """Whether gradients are exchanged in bf16: asked for, wider, and scattered once a step."""
    wider = precision_of(inputs).gradient_bytes > dtype_bytes("bf16")
    return "grads-bf16" in inputs.recipe.compress and wider and inputs.layout.zero > 0 and not inputs.sharded


def local_work(op: CollectiveOp) -> tuple[KernelOp, ...]:
    """Kernels of a compressed reduction on its own rank: the cast before it and the sum in fp32 behind it.

    Both work in place: the copies take one half of the fp32 buffer, what arrives the other, so no memory is added.
    """
    if op.kind != "all_to_all" or not op.name.startswith("grad."):
        return ()
    elements = op.size_bytes / dtype_bytes(op.dtype)
    cast, summed = (math.ceil(count / ROW_ELEMENTS) for count in (elements, elements / op.ranks))
    return (
        KernelOp(MemoryOp("grad_cast", cast, ROW_ELEMENTS, op.dtype), op.name, "wgrad"),
        KernelOp(MemoryOp("shard_sum", summed, ROW_ELEMENTS, op.dtype, topk=op.ranks), op.name, "wgrad"),
    )


def stream_seconds(ops: Iterable[CollectiveOp], seconds_of: Callable[[CollectiveOp], float]) -> float:
    """Least seconds of collectives that are issued together: those within nodes run beside the others."""
    total: dict[bool, float] = defaultdict(float)
    for op in ops:
        total[op.group == INNER] += seconds_of(op)
    return max(total.values(), default=0.0)


def _num_buckets(inputs: StepInputs, size_bytes: float, ranks: int) -> int:
    if inputs.dp_overlap == "none":
        return 1
    bucket = inputs.bucket_bytes
    if bucket == DEFAULT_BUCKET_BYTES:
        bucket = max(bucket, RANK_BUCKET_BYTES * ranks)
    return max(1, min(MOST_BUCKETS, math.ceil(size_bytes / bucket)))


def boundary_bytes(inputs: StepInputs) -> tuple[float, float]:
    """Bytes that a rank sends to the next stage, and those it must gather on arrival from its tensor-parallel group."""
    layout, model, job = inputs.layout, inputs.model, inputs.job
    rows = job.micro_batch * job.seq_len / layout.context
    whole = rows * model.hidden * dtype_bytes(model.dtype)
    if layout.tp == 1:
        return whole, 0.0
    if layout.sequence_parallel:
        return whole / layout.tp, 0.0
    return (whole / layout.tp, whole) if inputs.scatter_gather else (whole, 0.0)

"""Degrees, pipeline, data parallelism and recompute of a plan as Megatron's arguments."""

from __future__ import annotations

from typing import Final

from overlapsim.emit.base import Subject
from overlapsim.emit.rules import Sheet
from overlapsim.plan import StepSettings
from overlapsim.workload.layout import Layout
from overlapsim.workload.recompute import MODULES

SHARDING: Final = {2: "optim_grads", 3: "optim_grads_params"}
"""Strategy of Megatron-FSDP by ZeRO stage."""
GRADIENT_BYTES: Final = 4
"""Of a gradient in a bucket: Megatron keeps and reduces them in fp32 beside bf16 weights."""
OWN_MODULES: Final = tuple(name for name in MODULES if name not in ("mlp_act", "attn_exchange", "moe_dispatch"))
"""Recompute modules that Megatron has."""
RUNS: Final = ("1f1b", "interleaved", "interleaved_pairs")
"""Pipeline schedules that Megatron has."""


def put_layout(sheet: Sheet, subject: Subject) -> None:
    """Put the degrees down."""
    layout, settings = subject.layout, subject.settings
    sheet.set("--tensor-model-parallel-size", layout.tp)
    if layout.tp > 1 and layout.sequence_parallel:
        sheet.set("--sequence-parallel")
    sheet.set("--pipeline-model-parallel-size", layout.pp)
    if layout.context > 1:
        _context(sheet, layout)
    if layout.ep > 1 or layout.etp != layout.tp:
        sheet.set("--expert-model-parallel-size", layout.ep)
        sheet.set("--expert-tensor-parallel-size", layout.etp)
    order = [name for name in settings.rank_order if name in ("pp", "dp")]
    if layout.pp > 1 and layout.dp > 1 and order == ["pp", "dp"]:
        sheet.set("--use-tp-pp-dp-mapping")
    sheet.set("--micro-batch-size", settings.micro_batch)
    sheet.set("--global-batch-size", subject.step.inputs.global_batch)


def _context(sheet: Sheet, layout: Layout) -> None:
    sheet.set("--context-parallel-size", layout.context)
    if layout.cp_kind == "hybrid":
        sheet.set("--cp-comm-type", "a2a+p2p")
        sheet.set("--hierarchical-context-parallel-sizes", layout.sp, layout.cp)
    else:
        sheet.set("--cp-comm-type", {"ring": "p2p", "allgather": "allgather", "ulysses": "a2a"}[layout.cp_kind])


def put_pipeline(sheet: Sheet, subject: Subject) -> None:
    """Put stages and schedule down, and how transfers stand to computation."""
    layout, settings = subject.layout, subject.settings
    if layout.pp == 1:
        return
    if settings.stage_layers:
        sheet.set("--pipeline-model-parallel-layout", stages_text(settings.stage_layers, subject.spec.num_mtp_layers))
    elif layout.vpp > 1:
        sheet.set("--num-virtual-stages-per-pipeline-rank", layout.vpp)
    if settings.schedule not in RUNS:
        instead = "interleaved 1F1B" if layout.vpp > 1 else "1F1B"
        sheet.unsaid(
            f"the schedule {settings.schedule}; Megatron runs {instead}, and the prediction does not hold for it"
        )
    overlapped = settings.p2p != "blocking"
    if overlapped and layout.vpp == 1:
        sheet.unsaid("transfers beside computation without virtual stages; Megatron's 1F1B waits for them")
    elif not overlapped and layout.vpp > 1:
        sheet.set("--no-overlap-p2p-communication")
    elif settings.p2p == "overlapped":
        sheet.set("--overlap-p2p-communication-warmup-flush")
    if layout.tp > 1 and not layout.sequence_parallel and not settings.scatter_gather:
        sheet.set("--no-scatter-gather-tensors-in-pipeline", why="whole activations are sent by every rank")


def stages_text(stage_layers: tuple[int, ...], num_mtp_layers: int = 0) -> str:
    """Layers of each chunk as Megatron's layout: E embedding, t layers, m extra layers, L loss, ``|`` between chunks.

    Examples
    --------
    >>> stages_text((3, 4, 4, 3))
    'Et*3|t*4|t*4|t*3L'
    """
    parts = [f"t*{count}" if count else "" for count in stage_layers]
    parts[0] = "E" + parts[0]
    parts[-1] += "m" * num_mtp_layers + "L"
    return "|".join(parts)


def put_data_parallel(sheet: Sheet, subject: Subject) -> None:
    """Put sharding, buckets and their overlap down."""
    layout, settings = subject.layout, subject.settings
    if layout.zero >= 2:
        _fsdp(sheet, layout, settings)
        return
    if layout.zero:
        sheet.set("--use-distributed-optimizer")
        if layout.hsdp > 1:
            sheet.set("--num-distributed-optimizer-instances", layout.hsdp)
    if settings.dp_overlap != "none" and layout.dense_replicas > 1:
        sheet.set("--overlap-grad-reduce")
        sheet.set("--ddp-bucket-size", max(1, round(settings.bucket_bytes / GRADIENT_BYTES)))
        if settings.dp_overlap == "both" and layout.zero:
            sheet.set("--overlap-param-gather")


def _fsdp(sheet: Sheet, layout: Layout, settings: StepSettings) -> None:
    sheet.set("--use-megatron-fsdp")
    sheet.set("--data-parallel-sharding-strategy", SHARDING[layout.zero])
    sheet.set("--use-distributed-optimizer")
    sheet.set("--ckpt-format", "fsdp_dtensor")
    sheet.set("--no-gradient-accumulation-fusion")
    if layout.hsdp > 1:
        sheet.set("--num-distributed-optimizer-instances", layout.hsdp)
    if settings.dp_overlap != "none":
        sheet.set("--overlap-grad-reduce")
    if settings.dp_overlap == "both":
        sheet.set("--overlap-param-gather")
    if layout.zero == 3 and not settings.reshard:
        sheet.unsaid("parameters kept over a step; Megatron-FSDP drops them after use")
    sheet.unsaid(
        f"buckets of {settings.bucket_bytes / 1e6:.3g} MB: Megatron-FSDP makes one of each layer "
        "(--suggested-communication-unit-size is a hint)"
    )


def put_recompute(sheet: Sheet, settings: StepSettings) -> None:
    """Put down what the backward pass rebuilds."""
    if settings.recompute == "full":
        sheet.set("--recompute-granularity", "full")
        sheet.set("--recompute-method", settings.recompute_method)
        sheet.set("--recompute-num-layers", settings.recompute_layers)
    elif settings.recompute == "selective":
        known = [name for name in settings.recompute_modules if name in OWN_MODULES]
        if known:
            sheet.set("--recompute-granularity", "selective")
            sheet.set("--recompute-modules", *known)
        for name in settings.recompute_modules:
            if name not in OWN_MODULES:
                sheet.unsaid(f"recompute of {name}: Megatron keeps it, and needs the memory")

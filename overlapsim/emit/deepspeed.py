"""A DeepSpeed configuration: ZeRO, batches, degrees that JSON can say; the pipeline is said in a model's code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from overlapsim.emit.base import Emitted, Emitter, Subject
from overlapsim.emit.leftovers import arranging_left, host_left, order_left, recipe_left, strategies_left
from overlapsim.emit.rules import Version
from overlapsim.errors import PlanError
from overlapsim.units import DTYPE_BYTES

FILE: Final = "deepspeed.json"
PREFETCH_ELEMENTS: Final = 50_000_000
"""DeepSpeed's ``stage3_prefetch_bucket_size``."""
# Gradients are added up and reduced in fp32 in every recipe (`workload.state_precision`).
_GRADIENT: Final = "fp32"
_ORDER: Final = ("tp", "sp", "ep", "dp", "pp")
_HEAD: Final = "overlapsim"


class DeepSpeed(Emitter):
    """DeepSpeed, from plans of training steps."""

    name = "deepspeed"
    framework = "deepspeed"

    def write(self, subject: Subject, version: Version) -> Emitted:
        """Return the configuration as JSON; DeepSpeed does not read its block ``overlapsim``.

        Raises
        ------
        PlanError
            If ZeRO 2 or 3 is planned with a pipeline, or experts that are split differently from the rest.
        """
        layout = subject.layout
        if layout.pp > 1 and layout.zero > 1:
            raise PlanError(
                f"DeepSpeed refuses ZeRO 2 and 3 with a pipeline; the plan has zero={layout.zero} with pp={layout.pp}: "
                "plan with zero=1 or pp=1"
            )
        content: dict[str, Any] = {_HEAD: list(self.header(subject, version)), **_batch(subject)}
        content |= _types(subject) | {"zero_optimization": _zero(subject)} | _degrees(subject)
        return Emitted({FILE: json.dumps(content, indent=2) + "\n"}, tuple(_left(subject)))


def bucket_elements(subject: Subject) -> int:
    """Gradients of a bucket: DeepSpeed counts elements."""
    return max(1, round(subject.settings.bucket_bytes / DTYPE_BYTES[_GRADIENT]))


def _batch(subject: Subject) -> dict[str, Any]:
    settings = subject.settings
    return {
        "train_batch_size": subject.step.inputs.global_batch,
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        "gradient_accumulation_steps": settings.num_micro_batches,
    }


def _types(subject: Subject) -> dict[str, Any]:
    dtype = subject.spec.dtype
    kinds = {"bf16": "bf16", "fp16": "fp16"}
    half = {kinds[dtype]: {"enabled": True}} if dtype in kinds else {}
    return {**half, "communication_data_type": _GRADIENT} if subject.layout.dp > 1 else half


def _zero(subject: Subject) -> dict[str, Any]:
    settings, layout = subject.settings, subject.layout
    zero: dict[str, Any] = {"stage": layout.zero}
    if layout.zero == 0:
        return zero
    # At level 3 the framework gathers ahead by default; the plan's traffic of that level has no setting of its own.
    zero |= {
        "overlap_comm": layout.zero == 3 or settings.dp_overlap != "none",
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket_elements(subject),
        "allgather_bucket_size": bucket_elements(subject),
    }
    if layout.zero == 3:
        zero["stage3_prefetch_bucket_size"] = PREFETCH_ELEMENTS
    return zero


def _degrees(subject: Subject) -> dict[str, Any]:
    layout = subject.layout
    found: dict[str, Any] = {}
    if layout.tp > 1:
        found["tensor_parallel"] = {"autotp_size": layout.tp}
    if layout.sp > 1:
        found["sequence_parallel_size"] = layout.sp
    if layout.ep > 1:
        found["expert_parallel"] = {
            "enabled": True,
            "autoep_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
        }
    return found


def _left(subject: Subject) -> Iterator[str]:
    """What the configuration cannot say."""
    title, settings, layout = "DeepSpeed", subject.settings, subject.layout
    if layout.pp > 1:
        yield (
            f"DeepSpeed is told of pipelines in code: PipelineModule(num_stages={layout.pp}), whose order is 1F1B; the "
            f"plan has {settings.schedule} with {layout.vpp} chunks a stage"
        )
    if layout.cp > 1:
        yield (
            f"DeepSpeed has no attention over {layout.cp} parts of a sequence (cp); its own way is Ulysses "
            f"(sequence_parallel_size), which splits heads: plan with sp={layout.cp}"
        )
    if layout.tp > 1 and layout.sequence_parallel:
        yield "DeepSpeed's tensor parallelism adds up with all-reduces; the plan splits norms along the sequence"
    if layout.hsdp > 1:
        yield f"DeepSpeed shards state over all data-parallel ranks; the plan holds {layout.hsdp} whole sets of shards"
    if layout.zero == 0 and layout.dp > 1:
        yield f"without ZeRO DeepSpeed reduces gradients after the backward; the plan overlaps {settings.dp_overlap}"
    if layout.zero in (1, 2) and settings.dp_overlap == "both":
        yield "DeepSpeed gathers parameters after the optimizer's step at ZeRO 1 and 2; the plan hides the gather"
    if layout.zero == 3 and settings.dp_overlap == "none" and not settings.arranging:
        yield "DeepSpeed gathers ahead at ZeRO 3; the plan counts on nothing overlapped: expect less time"
    if layout.zero == 3 and not settings.reshard:
        yield "DeepSpeed drops parameters after use at ZeRO 3; the plan keeps them"
    if settings.recompute != "none":
        yield f"DeepSpeed recomputes what a model's code marks; the plan recomputes {settings.recompute}"
    if settings.fp8:
        yield "DeepSpeed's configuration has no fp8; the plan multiplies in it"
    yield from strategies_left(subject, title, {"serial"})
    yield from recipe_left(subject, title, ("all_to_all",))
    yield from arranging_left(subject, title, {"grad_buckets", "fsdp_prefetch"})
    yield from order_left(subject, title, _ORDER)
    yield from host_left(subject, title, graphs=False)


EMITTER = DeepSpeed()

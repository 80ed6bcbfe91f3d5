"""A module for PyTorch: device mesh, FSDP2 or DDP, async tensor parallelism, and the pipeline's schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from overlapsim.emit.base import Emitted, Emitter, Subject
from overlapsim.emit.leftovers import arranging_left, host_left, order_left, recipe_left, strategies_left
from overlapsim.emit.pytorch_text import module_text, replicated
from overlapsim.emit.rules import Version
from overlapsim.emit.torch_schedules import CLASSES, schedule_class, schedule_file, splits_backward
from overlapsim.errors import PlanError
from overlapsim.plan import Finding

FILE: Final = "pytorch_plan.py"
SCHEDULE_FILE: Final = "pytorch_schedule.csv"
LOOKED_AT: Final = Version.parse("2.13")
_ORDER: Final = ("tp", "cp", "dp", "pp")


class PyTorch(Emitter):
    """PyTorch's own parallelism, from plans of training steps."""

    name = "pytorch"
    framework = "pytorch"

    def write(self, subject: Subject, version: Version) -> Emitted:
        """Return the module, and the schedule's actions where torch has no name for them.

        Raises
        ------
        PlanError
            If the schedule holds two copies of the model, or heads are split over Ulysses ranks.
        """
        layout, settings = subject.layout, subject.settings
        if layout.sp > 1:
            raise PlanError(f"PyTorch does not split heads over sp={layout.sp} (Ulysses) by itself; plan with sp=1")
        if layout.pp > 1:
            schedule_class(settings)
        actions = schedule_file(settings, layout.pp, layout.vpp)
        files = {FILE: module_text(subject, version, self.header(subject, version), SCHEDULE_FILE if actions else None)}
        if actions is not None:
            files[SCHEDULE_FILE] = actions
        return Emitted(files, tuple(_left(subject)), tuple(_findings(subject, version)))


def _left(subject: Subject) -> Iterator[str]:
    """What the module leaves to the model's code, or PyTorch cannot do."""
    title, settings, layout = "PyTorch", subject.settings, subject.layout
    if layout.ep > 1:
        yield f"experts are dealt out in the model's code: ep={layout.ep} with etp={layout.etp}"
    if layout.cp > 1:
        yield (
            f"a context is split around the step in the training loop: context_parallel(mesh['cp'], ...) with cp="
            f"{layout.cp} and the plan's attention of kind {layout.cp_kind}"
        )
    if layout.zero < 3 and layout.dp * layout.cp > 1 and not replicated(subject):
        yield (
            f"FSDP2 shards parameters, gradients and the optimizer's state; the plan has zero={layout.zero}: "
            "parameters are kept gathered from forward to backward, traffic and memory differ"
        )
    if layout.tp > 1 and not layout.sequence_parallel:
        yield "split() splits norms along the sequence; the plan does not"
    if settings.recompute != "none":
        yield f"recomputation is marked in the model's code; the plan recomputes {settings.recompute}"
    if settings.fp8:
        yield "fp8 comes with torchao's conversion of linear layers; the plan multiplies in it"
    if layout.dp > 1 and settings.dp_overlap == "none" and not settings.arranging:
        yield "FSDP2 and DDP move data beside computation always; the plan counts on nothing overlapped: it takes less"
    parted = splits_backward(settings, layout.pp)
    if parted and any(op.strategy == "async_tp" for op in subject.entry.operators):
        yield "compiled stages do not go together with a split backward, and async TP needs them"
    yield from strategies_left(subject, title, {"serial"} if parted else {"serial", "async_tp"})
    yield from recipe_left(subject, title, ("all_to_all",))
    yield from arranging_left(subject, title, {"fsdp_prefetch", "grad_buckets"})
    yield from order_left(subject, title, _ORDER)
    yield from host_left(subject, title, graphs=False)


def _findings(subject: Subject, version: Version) -> Iterator[Finding]:
    if subject.layout.pp > 1 and version < LOOKED_AT and subject.settings.schedule not in ("1f1b", "gpipe"):
        name = CLASSES.get(subject.settings.schedule, "a schedule from a file")
        yield Finding(
            "schedule_not_looked_at",
            f"{name} was looked at in PyTorch {LOOKED_AT}; whether {version} has it and orders it alike was not",
        )


EMITTER = PyTorch()

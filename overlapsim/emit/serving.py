"""Degrees of a training plan as an inference engine names them: shared by the emitters of vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Iterator

from overlapsim.emit.base import Subject
from overlapsim.emit.leftovers import strategies_left
from overlapsim.emit.rules import Sheet, words
from overlapsim.plan import Finding
from overlapsim.workload.model import MoE


def has_experts(subject: Subject) -> bool:
    """Whether any layer of the model has routed experts."""
    return any(isinstance(layer.mlp, MoE) for layer in subject.spec.kinds)


def training_left(subject: Subject, title: str) -> Iterator[str]:
    """What holds for training alone, or has no counterpart when serving."""
    settings, layout = subject.settings, subject.layout
    yield (
        f"the plan is of a training step: batch, sequence and predicted times are not of serving; {title} is given its "
        "degrees and what overlaps"
    )
    if layout.zero:
        yield f"{title} shards no state over data-parallel ranks; the plan has zero={layout.zero}"
    if layout.vpp > 1 or (layout.pp > 1 and settings.schedule not in ("1f1b", "gpipe")):
        yield f"{title} has one chunk a pipeline stage and no backward; the plan has {settings.schedule}"
    if settings.recompute != "none":
        yield f"{title} has nothing to recompute"
    yield from strategies_left(subject, title, {"serial"})


def weights_open(subject: Subject) -> tuple[Finding, ...]:
    """Finding that weights have to be named."""
    message = f"the model is named {subject.spec.name}, as in the plan; put the path of its weights there"
    return (Finding("weights_open", message),)


def args_text(sheet: Sheet) -> str:
    """One flag a line, for ``xargs`` or an argument file."""
    return "".join(f"{spelling}{' ' if values else ''}{words(values)}\n" for spelling, values in sheet.lines)

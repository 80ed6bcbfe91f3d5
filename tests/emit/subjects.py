"""The six plans that emitters are tested with, and their golden outputs."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from overlapsim.emit.base import Emitted, Subject
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import StepPlan, of_kind, read_plan
from overlapsim.workload.presets import load_model

HERE: Final = Path(__file__).parent
PLANS: Final = ("dense", "moe", "long_context", "fsdp", "tp_overlap", "pipeline")
GOLDEN: Final = HERE / "golden"


@functools.cache
def subject(name: str) -> Subject:
    """One of the six plans with what it names."""
    plan = of_kind(read_plan(HERE / "plans" / f"{name}.yaml"), StepPlan)
    model, _ = load_model(plan.inputs.model)
    return Subject(plan, 1, model, load_cluster(plan.inputs.cluster))


def changed(name: str, layout: dict[str, Any] | None = None, **settings: Any) -> Subject:
    """One of the plans with other degrees or settings; numbers that it predicts stay and mean nothing."""
    base = subject(name)
    degrees = {**base.settings.layout, **(layout or {})}
    choice = replace(base.step.choice, settings=replace(base.settings, layout=degrees, **settings))
    return replace(base, plan=replace(base.step, choice=choice))


def asked(base: Subject, **inputs: Any) -> Subject:
    """A plan with other inputs."""
    return replace(base, plan=replace(base.step, inputs=replace(base.step.inputs, **inputs)))


def as_text(emitted: Emitted) -> str:
    """Files, what was left unsaid and findings, as one text."""
    parts = [f"==> {name}\n{text}" for name, text in emitted.files.items()]
    parts += [f"unexpressed: {line}\n" for line in emitted.unexpressed]
    parts += [f"finding {finding.code}: {finding.message}\n" for finding in emitted.findings]
    return "".join(parts)


def check_golden(name: str, emitted: Emitted) -> None:
    """Compare with the golden file; OVERLAPSIM_WRITE_GOLDEN=1 writes it anew, to be read before it is committed."""
    path = GOLDEN / f"{name}.txt"
    text = as_text(emitted)
    if os.environ.get("OVERLAPSIM_WRITE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text

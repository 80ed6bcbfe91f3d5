"""Emit a plan for some targets, write their files, and say what no file holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec

from overlapsim.cli.output import compile_note
from overlapsim.cli.trace import planned_cluster, planned_model
from overlapsim.emit.base import Emitted, Subject
from overlapsim.emit.registry import EMITTERS, load_emitter
from overlapsim.emit.rules import Version
from overlapsim.errors import UsageError
from overlapsim.plan import Plan, StepPlan
from overlapsim.report.files import write_text
from overlapsim.units import format_time


def subject_of(plan: Plan, folder: Path, rank: int = 1) -> Subject:
    """What is emitted: a plan with the model and the cluster it names; paths are tried from the plan's folder too.

    Raises
    ------
    OverlapSimError
        If the plan of a step was edited into one that cannot be run: frameworks are told nothing of it then.
    """
    from overlapsim.planner.step_plan import step_inputs_of
    from overlapsim.step.simulate import step_schedule

    cluster = planned_cluster(plan.inputs.cluster, folder)
    if not isinstance(plan, StepPlan):
        return Subject(plan, cluster=cluster)
    model = planned_model(plan.inputs.model, folder)
    if plan.inputs.dtype is not None:
        model = replace(model, dtype=plan.inputs.dtype)
    step_schedule(step_inputs_of(plan.inputs, plan.candidate(rank), model, cluster))
    return Subject(plan, rank, model, cluster)


def versions_of(texts: Sequence[str], targets: Sequence[str]) -> Mapping[str, str]:
    """Read ``VERSION`` (one target) or ``TARGET=VERSION`` (each of several) into versions by target.

    Raises
    ------
    UsageError
        If a target is not emitted or has two versions, or one version is given for several targets.

    Examples
    --------
    >>> versions_of(["0.19.2"], ["megatron"])
    {'megatron': '0.19.2'}
    """
    found: dict[str, str] = {}
    for text in texts:
        name, given, version = text.rpartition("=")
        if not given and len(targets) > 1:
            raise UsageError(f"--framework-version is {text} for {', '.join(targets)}; expected TARGET=VERSION of each")
        name = name or targets[0]
        if name not in targets:
            raise UsageError(f"--framework-version names {name!r}; expected one of {', '.join(targets)}")
        if name in found:
            raise UsageError(f"--framework-version {name} is given twice; give one version")
        Version.parse(version)
        found[name] = version
    return found


def emit_all(subject: Subject, targets: Sequence[str], versions: Mapping[str, str]) -> dict[str, Emitted]:
    """Files by target."""
    return {name: load_emitter(name).emit(subject, versions.get(name)) for name in targets}


def targets_for(kind: str) -> tuple[str, ...]:
    """Targets that take plans of a kind, in the order of the registry."""
    return tuple(name for name in EMITTERS if load_emitter(name).kind == kind)


def told_seconds(subject: Subject, targets: Sequence[str]) -> dict[str, float]:
    """Predicted time of the step as a framework can run it, by target, where that is not the plan's."""
    from overlapsim.step.simulate import simulate_step

    asked = [(name, load_emitter(name).told(subject)) for name in targets]
    with compile_note():
        return {name: simulate_step(inputs).step_time_s for name, inputs in asked if inputs is not None}


def write_emitted(emitted: Mapping[str, Emitted], folder: Path) -> list[tuple[str, Path]]:
    """Write each target's files into a folder of its name; returns target and file.

    Raises
    ------
    UsageError
        If a folder cannot be made or a file not written.
    """
    written = []
    for name, one in emitted.items():
        target = folder / name
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the folder {target}: {error.strerror}; choose another one") from None
        for file_name, text in one.files.items():
            write_text(target / file_name, text)
            written.append((name, target / file_name))
    return written


def emitted_json(emitted: Mapping[str, Emitted]) -> list[dict[str, Any]]:
    """The documented JSON: one entry a target."""
    return [
        {
            "target": name,
            "files": dict(one.files),
            "unexpressed": list(one.unexpressed),
            "findings": msgspec.to_builtins(one.findings),
        }
        for name, one in emitted.items()
    ]


def show_emitted(
    emitted: Mapping[str, Emitted],
    written: Sequence[tuple[str, Path]],
    told_s: Mapping[str, float] | None = None,
    planned_s: float = 0.0,
) -> None:
    """Print files (those written: where), what the framework cannot be told and what that leaves, and findings."""
    places = dict.fromkeys(name for name, _ in written)
    for name, one in emitted.items():
        for target, path in written:
            if target == name:
                click.echo(f"{name} written to {path}")
        if name not in places:
            for file_name, text in one.files.items():
                click.echo(f"--- {name}: {file_name}")
                click.echo(text, nl=not text.endswith("\n"))
        for sentence in one.unexpressed:
            click.echo(f"not expressed in {name}: {sentence}", err=True)
        if told_s and name in told_s:
            left = f"{format_time(told_s[name])} a step without that; the plan's is {format_time(planned_s)}"
            click.echo(f"predicted in {name}: {left}", err=True)
        for finding in one.findings:
            click.echo(f"finding {finding.code}: {finding.message}", err=True)

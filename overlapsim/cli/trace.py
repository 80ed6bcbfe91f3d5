"""`overlapsim trace`: simulate a plan file again; its numbers are the plan's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click
import msgspec

from overlapsim.cli.options import check_targets
from overlapsim.cli.output import compile_note, print_json
from overlapsim.engine.timeline import Timeline
from overlapsim.errors import ProfileError, WorkloadError
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import Finding, OperatorPlan, StepPlan, read_plan
from overlapsim.planner.operator import seconds_of, simulate
from overlapsim.planner.operator_plan import replay
from overlapsim.planner.step_plan import replay_step
from overlapsim.step.simulate import simulate_step
from overlapsim.units import format_time
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.presets import load_model


@click.command("trace")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a Perfetto trace (.json or .json.gz).")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a Gantt plot (.png or .svg).")
@click.option("--cluster", help="Use this profile instead of the one the plan names.")
@click.option("--rank", type=int, default=1, show_default=True, help="Which of the plans of a training step.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(plan: Path, output: Path | None, plot: Path | None, cluster: str | None, rank: int, as_json: bool) -> None:
    """Simulate PLAN again: print its time, write its timeline."""
    content = read_plan(plan)
    check_targets(trace=output, plot=plot)
    machine = load_cluster(cluster) if cluster else planned_cluster(content.inputs.cluster, plan.parent)
    with compile_note():
        if isinstance(content, StepPlan):
            again = _step_again(content, machine, plan.parent, rank, with_serial=plot is not None)
        else:
            again = _operator_again(content, machine, with_serial=plot is not None)
    title = again.title
    timeline = again.timelines[again.name]
    if output is not None:
        from overlapsim.report.trace import write_trace

        write_trace(timeline, output, title=title)
    if plot is not None:
        from overlapsim.report.plots import gantt

        gantt(again.timelines, plot, title=title)
    findings = again.findings
    if as_json:
        answer = {
            again.key: again.named,
            "simulated_s": again.simulated_s,
            "planned_s": again.planned_s,
            "findings": msgspec.to_builtins(findings),
        }
        print_json(answer)
        return
    click.echo(f"{again.name}: {format_time(again.simulated_s)} (plan: {format_time(again.planned_s)})")
    for finding in findings:
        click.echo(f"finding {finding.code}: {finding.message}")
    for target in (output, plot):
        if target is not None:
            click.echo(f"written to {target}")


@dataclass(frozen=True, eq=False)
class _Again:
    """What was simulated again: key and value that name it in JSON, timelines with the one asked for under `name`."""

    name: str
    key: str
    named: str | int
    planned_s: float
    simulated_s: float
    timelines: Mapping[str, Timeline]
    findings: tuple[Finding, ...]
    title: str = ""


def _operator_again(content: OperatorPlan, machine: Cluster, *, with_serial: bool) -> _Again:
    again = replay(content, machine)
    name, chosen = again.strategy.name, (again.strategy, again.parameters)
    timelines = {
        strategy.name: simulate(strategy, again.context, parameters, contention=content.inputs.contention, record=True)
        for strategy, parameters in ((again.serial, chosen) if with_serial else (chosen,))
    }
    simulated_s = seconds_of(timelines[name], again.context)
    findings = (*again.findings, *again.differences(simulated_s))
    return _Again(name, "strategy", name, again.planned_s, simulated_s, timelines, findings)


def _step_again(content: StepPlan, machine: Cluster, folder: Path, rank: int, *, with_serial: bool) -> _Again:
    model = planned_model(content.inputs.model, folder)
    if content.inputs.dtype is not None:
        model = replace(model, dtype=content.inputs.dtype)
    entry, name = content.candidate(rank), f"plan {rank}"
    again = replay_step(content, model, machine, entry)
    timelines: dict[str, Timeline] = {}
    if with_serial and content.serial is not None and content.serial.rank != rank:
        plain = replay_step(content, model, machine, content.serial)
        timelines["no overlap strategies"] = simulate_step(plain.inputs, ranges=False).timeline
    timelines[name] = simulate_step(again.inputs, ranges=False).timeline
    simulated_s = timelines[name].duration_s
    findings = (*again.findings, *again.differences(simulated_s))
    title = f"{model.name} in {again.inputs.layout} on {machine.name}, one GPU of each stage"
    return _Again(name, "rank", rank, again.planned_s, simulated_s, timelines, findings, title)


def planned_model(name: str, folder: Path) -> ModelSpec:
    """The model a plan names; a path that leads nowhere from here is tried from the plan's folder."""
    try:
        return load_model(name)[0]
    except WorkloadError:
        if Path(name).exists() or not (folder / name).exists():
            raise
        return load_model(folder / name)[0]


def planned_cluster(name: str, folder: Path) -> Cluster:
    """The cluster a plan names; a path that leads nowhere from here is tried from the plan's folder."""
    try:
        return load_cluster(name)
    except ProfileError:
        if Path(name).exists() or not (folder / name).exists():
            raise
        return load_cluster(str(folder / name))

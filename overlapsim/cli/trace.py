"""`overlapsim trace`: simulate a plan file again; its numbers are the plan's."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from overlapsim.cli.options import check_targets
from overlapsim.cli.output import compile_note, print_json
from overlapsim.errors import ProfileError
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import read_plan
from overlapsim.planner.operator import simulate
from overlapsim.planner.operator_plan import replay
from overlapsim.units import format_time


@click.command("trace")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a Perfetto trace (.json or .json.gz).")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a Gantt plot (.png or .svg).")
@click.option("--cluster", help="Use this profile instead of the one the plan names.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(plan: Path, output: Path | None, plot: Path | None, cluster: str | None, as_json: bool) -> None:
    """Simulate PLAN again: print its time, write its timeline."""
    content = read_plan(plan)
    check_targets(trace=output, plot=plot)
    machine = load_cluster(cluster) if cluster else planned_cluster(content.inputs.cluster, plan.parent)
    contention = content.inputs.contention
    with compile_note():
        again = replay(content, machine)
        chosen = (again.strategy, again.parameters)
        timelines = {
            strategy.name: simulate(strategy, again.context, parameters, contention=contention, record=True)
            for strategy, parameters in ((again.serial, chosen) if plot else (chosen,))
        }
    timeline = timelines[again.strategy.name]
    findings = (*again.findings, *again.differences(timeline.duration_s))
    if output is not None:
        from overlapsim.report.trace import write_trace

        write_trace(timeline, output)
    if plot is not None:
        from overlapsim.report.plots import gantt

        gantt(timelines, plot)
    if as_json:
        answer = {
            "strategy": again.strategy.name,
            "simulated_s": timeline.duration_s,
            "planned_s": again.planned_s,
            "findings": msgspec.to_builtins(findings),
        }
        print_json(answer)
        return
    click.echo(f"{again.strategy.name}: {format_time(timeline.duration_s)} (plan: {format_time(again.planned_s)})")
    for finding in findings:
        click.echo(f"finding {finding.code}: {finding.message}")
    for target in (output, plot):
        if target is not None:
            click.echo(f"written to {target}")


def planned_cluster(name: str, folder: Path) -> Cluster:
    """The cluster a plan names; a path that leads nowhere from here is tried from the plan's folder."""
    try:
        return load_cluster(name)
    except ProfileError:
        if Path(name).exists() or not (folder / name).exists():
            raise
        return load_cluster(str(folder / name))

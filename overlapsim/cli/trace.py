"""`overlapsim trace`: simulate a plan file again; its numbers are the plan's."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from overlapsim.cli.options import check_targets
from overlapsim.cli.output import print_json
from overlapsim.errors import UsageError
from overlapsim.hardware.loading import load_cluster
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
    """Simulate PLAN again and write its timeline."""
    if output is None and plot is None and not as_json:
        raise UsageError("nothing to write; give -o TRACE, --plot FILE or --json")
    check_targets(trace=output, plot=plot)
    content = read_plan(plan)
    again = replay(content, load_cluster(cluster or content.inputs.cluster))
    timeline = simulate(
        again.strategy, again.context, again.parameters, contention=content.inputs.contention, record=True
    )
    if output is not None:
        from overlapsim.report.trace import write_trace

        write_trace(timeline, output)
    if plot is not None:
        from overlapsim.report.plots import gantt

        gantt({again.strategy.name: timeline}, plot)
    planned = content.predictions[again.strategy.name].value_s
    if as_json:
        answer = {
            "strategy": again.strategy.name,
            "simulated_s": timeline.duration_s,
            "planned_s": planned,
            "findings": msgspec.to_builtins(again.findings),
        }
        print_json(answer)
        return
    click.echo(f"{again.strategy.name}: {format_time(timeline.duration_s)} (plan: {format_time(planned)})")
    for finding in again.findings:
        click.echo(f"finding {finding.code}: {finding.message}")
    for target in (output, plot):
        if target is not None:
            click.echo(f"written to {target}")

"""`overlapsim accuracy`: measured against predicted, by group, on committed splits or on a table of your own."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Final

import click

from overlapsim.accuracy.progress import progress_to
from overlapsim.accuracy.suite import Group, Suite
from overlapsim.cli.measured import progress_line
from overlapsim.cli.options import check_targets
from overlapsim.cli.output import compile_note, console, print_json
from overlapsim.errors import UsageError

# Suite -> module with `evaluate(data: Path | None) -> Suite`; imported when asked for.
SUITES: Final = {
    "flashoverlap": "overlapsim.accuracy.flashoverlap",
    "collectives": "overlapsim.accuracy.collectives",
    "gemm": "overlapsim.accuracy.gemm",
    "operators": "overlapsim.accuracy.operators",
    "steps": "overlapsim.accuracy.steps",
    "strategies": "overlapsim.accuracy.strategies",
    "moe": "overlapsim.accuracy.moe",
    "loop": "overlapsim.accuracy.loop",
}


@click.command("accuracy")
@click.option("--suite", type=click.Choice(list(SUITES)), required=True, help="What to score.")
@click.option("--data", type=click.Path(path_type=Path), help="Score this table instead (format: docs/accuracy.md).")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw predicted against measured (.png or .svg).")
@click.option("--timelines", is_flag=True, help="Suite moe: print each layer's order found and made by hand instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", is_flag=True, help="Print one Markdown row of the overall score (README's table).")
def command(suite: str, data: Path | None, plot: Path | None, timelines: bool, as_json: bool, markdown: bool) -> None:
    """Score predictions against measurements."""
    check_targets(plot=plot)
    if timelines:
        _timelines(suite)
        return
    with compile_note(), progress_to(progress_line(time.monotonic())):
        result: Suite = importlib.import_module(SUITES[suite]).evaluate(data)
    if plot is not None:
        from overlapsim.report.scatter import accuracy_plot

        of = "" if data is None else f" on {data.name}"
        measured = [row for row in result.rows if row.measured == row.measured]
        accuracy_plot(measured, plot, title=f"accuracy of {result.suite}{of}")
    if as_json:
        print_json(result.to_dict())
        return
    if markdown:
        click.echo("| " + " | ".join((result.suite, *_cells(result.overall)[1:9])) + " |")
        return
    _table(result)
    if plot is not None:
        click.echo(f"plot written to {plot}")


def _timelines(suite: str) -> None:
    from overlapsim.accuracy.moe_order import compare_orders

    if suite != "moe":
        raise UsageError(f"--timelines with --suite {suite}; only moe compares orders of a layer's operators")
    with compile_note():
        for comparison in compare_orders():
            click.echo(comparison.text())


def _table(result: Suite) -> None:
    from rich.table import Table

    view = console(140)
    table = Table(title=f"accuracy of {result.suite} (errors in %, predicted over measured)")
    for column in ("group", "points", "fitted", "bias", "median", "mean", "p90", "p95", "in 90 % range", "signs"):
        table.add_column(column)
    for group in (*result.groups, result.overall):
        table.add_row(*_cells(group))
    view.print(table)
    for key, value in result.notes.items():
        view.print(f"{key}: {value}", highlight=False, markup=False)
    for finding in result.findings:
        view.print(f"finding {finding.code}: {finding.message}", highlight=False, markup=False)


def _cells(group: Group) -> tuple[str, ...]:
    fitted = {True: "yes", False: "no", None: "-"}[group.fitted]
    if not group.num_points:
        return (group.name, "0", fitted, *("-",) * 7)
    errors = (group.median_signed, group.median_abs, group.mean_abs, group.p90_abs, group.p95_abs)
    first, *others = (100 * error for error in errors)
    signs = f"{group.sign_right}/{group.sign_total}" if group.sign_total else ""
    return (
        group.name,
        str(group.num_points),
        fitted,
        f"{first:+.1f}",
        *(f"{error:.1f}" for error in others),
        f"{100 * group.coverage90:.0f} %",
        signs,
    )

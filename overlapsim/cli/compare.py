"""`overlapsim compare`: a measured file against what a profile predicts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from overlapsim.calibration.compare import Compared, Comparison, Line, compare
from overlapsim.cli.measured import hints_of, measured_options, progress_line, read_files, show_findings
from overlapsim.cli.options import check_targets
from overlapsim.cli.output import console, print_json
from overlapsim.hardware.loading import load_cluster


@click.command("compare")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--cluster", required=True, help="Profile to judge: a name, a YAML file or a folder.")
@measured_options
@click.option("--plot", type=click.Path(path_type=Path), help="Draw predicted over measured (.png or .svg).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(
    files: tuple[Path, ...],
    cluster: str,
    ranks_per_node: int | None,
    collective: str | None,
    ranks: int | None,
    dtype: str | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Set measurements in FILES against the prices of a profile, by kind and regime.

    FILES are read as by `calibrate`.
    """
    hints = hints_of(ranks_per_node, collective, ranks, dtype)
    check_targets(plot=plot)
    machine = load_cluster(cluster)
    readings = read_files(files, hints, progress_line(time.monotonic()))
    result = compare([record for reading in readings for record in reading.records], machine)
    findings = [*(finding for reading in readings for finding in reading.findings), *result.findings]
    if plot is not None:
        from overlapsim.report.compare_plot import compare_plot

        compare_plot(result, plot)
    if as_json:
        print_json({**_content(result), "findings": msgspec.to_builtins(findings)})
        return
    _table(result)
    show_findings(findings)
    if plot is not None:
        click.echo(f"plot written to {plot}")


def _content(result: Comparison) -> dict[str, Any]:
    return {
        "cluster": result.cluster,
        "num_points": len(result.rows),
        "groups": msgspec.to_builtins(result.lines),
        "beside_others": msgspec.to_builtins(result.slowdowns),
        "rows": [_row(row) for row in result.rows],
    }


def _row(row: Compared) -> dict[str, Any]:
    record = msgspec.to_builtins(row.record)
    return {
        **{key: value for key, value in record.items() if value not in (None, "")},
        "group": row.group,
        "regime": row.regime,
        "measured_s": row.record.median_s,
        "predicted_s": row.predicted_s,
        "error": row.error,
        "calibrated": row.calibrated,
    }


def _table(result: Comparison) -> None:
    from rich.table import Table

    view = console(150)
    for title, lines in (
        (f"{result.cluster}: predicted over measured, errors in %", result.lines),
        ("beside other kernels: price alone over measured, in %", result.slowdowns),
    ):
        if not lines:
            continue
        table = Table(title=title)
        for column in ("what", "regime", "points", "bias", "median", "p90", "worst", "measured in profile"):
            table.add_column(column)
        _fill(table, lines)
        view.print(table)


def _fill(table: Any, lines: Sequence[Line]) -> None:
    group = ""
    for line in lines:
        table.add_row(
            "" if line.group == group else line.group,
            line.regime,
            str(line.num_points),
            f"{100 * line.median_signed:+.1f}",
            f"{100 * line.median_abs:.1f}",
            f"{100 * line.p90_abs:.1f}",
            f"{100 * line.worst:+.1f}",
            f"{100 * line.calibrated:.0f} %",
        )
        group = line.group

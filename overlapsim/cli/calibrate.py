"""`overlapsim calibrate`: make a profile of your own machine out of measurements at hand."""

from __future__ import annotations

import time
from pathlib import Path

import click

from overlapsim.calibration.fit import Calibration, calibrate
from overlapsim.calibration.profile_writer import check_folder, write_profile
from overlapsim.calibration.regimes import RegimeError
from overlapsim.calibration.report import report_of
from overlapsim.cli.measured import hints_of, measured_options, progress_line, read_files, show_findings
from overlapsim.cli.output import console, print_json
from overlapsim.errors import CalibrationError
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import Finding
from overlapsim.units import format_bandwidth, format_time


@click.command("calibrate")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--cluster", required=True, help="Base: a profile of this kind of machine (see `profiles list`).")
@measured_options
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for the profile.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(
    files: tuple[Path, ...],
    cluster: str,
    ranks_per_node: int | None,
    collective: str | None,
    ranks: int | None,
    dtype: str | None,
    output: Path,
    as_json: bool,
) -> None:
    """Turn measurements in FILES into a profile usable as --cluster.

    FILES may be nccl-tests text or JSON, torch profiler traces (one a rank), CSV tables with units in their column
    names, or records; the format is told by the content. Hosts, users and addresses are dropped.
    """
    hints = hints_of(ranks_per_node, collective, ranks, dtype)
    output = output.absolute()
    check_folder(output)
    base = load_cluster(cluster)
    tell = progress_line(time.monotonic())
    readings = read_files(files, hints, tell)
    told = [finding for reading in readings for finding in reading.findings]
    # File names may hold host names; the profile is to be passed on.
    kept = [Finding(finding.code, _unnamed(finding.message, files)) for finding in told]
    records = [record for reading in readings for record in reading.records]
    devices = sorted({reading.header.device for reading in readings if reading.header.device})
    if len(devices) > 1:
        raise CalibrationError(f"the files are of {len(devices)} devices ({', '.join(devices)}); a profile is of one")
    header = next((reading.header for reading in readings if reading.header.device), readings[0].header)
    result = calibrate(records, base, cluster, header=header, findings=kept, progress=tell)
    profile = write_profile(result, output)
    tell(f"written to {profile}")
    if as_json:
        print_json({"profile": str(profile), **report_of(result)})
        return
    _tables(result)
    show_findings((*told, *result.findings[len(kept) :]))
    click.echo(f"profile written to {profile}; use it as --cluster {output}")


def _unnamed(message: str, files: tuple[Path, ...]) -> str:
    for number, file in enumerate(files, start=1):
        message = message.replace(file.name, f"input {number}")
    return message


def _tables(result: Calibration) -> None:
    from rich.table import Table

    view = console(150)
    if result.curves:
        table = Table(title=f"collectives of {result.base.name}, errors on sizes held out, in %")
        for column in ("collective", "ranks", "nodes", "points", "left out", "latency", "rate", "noise"):
            table.add_column(column)
        for column in ("regime", "held out", "bias", "median", "p90", "accepted"):
            table.add_column(column)
        for curve in result.curves:
            cells = (
                curve.key.collective,
                str(curve.key.ranks),
                str(curve.key.nodes),
                str(len(curve.points)),
                str(len(curve.left_out)),
                "-" if curve.latency_s is None else format_time(curve.latency_s),
                "-" if curve.bytes_per_s is None else format_bandwidth(curve.bytes_per_s),
                "-" if curve.noise is None else f"{100 * curve.noise:.1f}",
            )
            _add(table, cells, curve.regimes, curve.accepted)
        view.print(table)
    if result.kernels:
        table = Table(title=f"kernels of {result.base.device.name}, errors on shapes held out, in %")
        for column in (
            "kernel",
            "shapes",
            "left out",
            "noise",
            "regime",
            "held out",
            "bias",
            "median",
            "p90",
            "accepted",
        ):
            table.add_column(column)
        for kernel in result.kernels:
            noise = "-" if kernel.table.noise is None else f"{100 * kernel.table.noise:.1f}"
            names = (kernel.table.name, str(int(kernel.used.sum())), str(int((~kernel.used).sum())), noise)
            _add(table, names, kernel.regimes, kernel.accepted)
        view.print(table)
    for item in result.contention:
        click.echo(
            f"{item.op} beside {item.concurrent}: {item.median:.3g} times its time alone "
            f"({item.low:.3g} to {item.high:.3g}, {item.num_points} records)"
        )


def _add(table: object, cells: tuple[str, ...], regimes: tuple[RegimeError, ...], accepted: bool) -> None:
    from rich.table import Table

    assert isinstance(table, Table)
    blank = tuple("" for _ in cells)
    if not regimes:
        table.add_row(*cells, "-", "0", "-", "-", "-", "yes" if accepted else "no")
    for number, regime in enumerate(regimes):
        table.add_row(
            *(blank if number else cells),
            regime.name,
            str(regime.num_points),
            f"{100 * regime.median_signed:+.1f}",
            f"{100 * regime.median_abs:.1f}",
            f"{100 * regime.p90_abs:.1f}",
            ("yes" if regime.accepted else "no") if accepted or not regime.accepted else "regime yes, table no",
        )

"""Options shared by `calibrate` and `compare`, and reading their files with progress on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import click

from overlapsim.calibration.readers.detect import read_measurements
from overlapsim.calibration.readers.reading import Hints, Reading
from overlapsim.errors import UsageError
from overlapsim.plan import Finding
from overlapsim.workload.operators import COLLECTIVES

_OPTIONS: Final = (
    click.option("--ranks-per-node", type=int, help="Ranks on each node in the measurement; a log does not say."),
    click.option("--collective", type=click.Choice(COLLECTIVES), help="Collective of tables that do not name it."),
    click.option("--ranks", type=int, help="Ranks of tables and logs that do not list them."),
    click.option("--dtype", help="Element type of GEMM tables without one."),
)


def measured_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what a file does not."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def hints_of(ranks_per_node: int | None, collective: str | None, ranks: int | None, dtype: str | None) -> Hints:
    """Check the options.

    Raises
    ------
    UsageError
        If a number is not positive.
    """
    if ranks_per_node is not None and ranks_per_node < 1:
        raise UsageError(f"--ranks-per-node is {ranks_per_node}; expected at least 1")
    if ranks is not None and ranks < 2:
        raise UsageError(f"--ranks is {ranks}; expected at least 2")
    return Hints(ranks_per_node, collective, ranks, dtype)


def progress_line(started: float) -> Callable[[str], None]:
    """A function that writes what is being done, and since when, to stderr."""

    def tell(message: str) -> None:
        click.echo(f"[{time.monotonic() - started:5.1f} s] {message}", err=True)

    return tell


def read_files(files: Iterable[Path], hints: Hints, tell: Callable[[str], None]) -> list[Reading]:
    """Read all files and say what each gave."""
    readings = read_measurements(list(files), hints, progress=tell)
    for reading in readings:
        tell(f"{len(reading.records)} records from {reading.format}")
    return readings


def show_findings(findings: Iterable[Finding]) -> None:
    """Findings for people, on stdout with the answer."""
    for finding in findings:
        click.echo(f"finding {finding.code}: {finding.message}")

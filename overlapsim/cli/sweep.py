"""`overlapsim sweep`: one question for many models, machines and settings; killed runs are carried on."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import msgspec

from overlapsim.cli.measured import progress_line
from overlapsim.cli.output import print_json
from overlapsim.errors import UsageError
from overlapsim.sweep.run import Workers, left_over, run_sweep
from overlapsim.sweep.spec import Sweep, read_sweep
from overlapsim.sweep.store import Store, find_store


@click.command("sweep")
@click.argument("spec", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Results: a file .csv or a folder .parquet."
)
@click.option("--workers", type=int, help="Processes on this machine (default: its CPUs).")
@click.option("--scheduler", metavar="ADDRESS", help="Use a dask.distributed cluster, such as tcp://10.0.0.1:8786.")
@click.option("--dry-run", is_flag=True, help="Check the spec and count points; run nothing, write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(spec: Path, output: Path, workers: int | None, scheduler: str | None, dry_run: bool, as_json: bool) -> None:
    """Ask plan, simulate or operator for all points of SPEC (YAML; docs/sweep.md).

    Rows are written as they arrive. The same command again does what is missing.
    """
    if workers is not None and scheduler is not None:
        raise UsageError("--workers and --scheduler are both given; a cluster has workers of its own: give one of them")
    if workers is not None and workers < 1:
        raise UsageError(f"--workers is {workers}; expected at least 1")
    tell = progress_line(time.monotonic())
    sweep = read_sweep(spec)
    store = find_store(output, sweep.kind.row_columns)
    left = left_over(sweep, store)
    _notes(sweep, tell)
    content = {"spec": str(spec), "output": str(output), "points": len(sweep.points), "repeated": sweep.repeated}
    if dry_run or not left:
        counts: dict[str, int] = dict(Counter(store.done.values()))
        if not dry_run:
            _finish(sweep, store)
        _answer({**content, "done_before": len(store.done), "run": 0}, counts, sweep, 0.0, as_json)
        return
    store.open()
    try:
        pool = _workers(workers, scheduler)
        try:
            done = run_sweep(sweep, store, pool, tell)
        finally:
            pool.close()
    finally:
        store.close()
    content |= {"done_before": done.num_done_before, "run": done.num_run}
    _answer(content, done.statuses, sweep, done.elapsed_s, as_json)


def _workers(workers: int | None, scheduler: str | None) -> Workers:
    if scheduler is not None:
        from overlapsim.sweep.cluster import ClusterWorkers

        return ClusterWorkers(scheduler)
    from overlapsim.sweep.processes import ProcessWorkers, usable_cpus

    return ProcessWorkers(workers or usable_cpus())


def _finish(sweep: Sweep, store: Store) -> None:
    """All points are there; a run killed at its very end may not have put them in order."""
    store.open()
    try:
        store.finish([point.id for point in sweep.points])
    finally:
        store.close()


def _notes(sweep: Sweep, tell: Any) -> None:
    if sweep.repeated:
        tell(f"{sweep.repeated:,} point(s) of the spec are the same as others; each is asked once")
    for finding in sweep.findings:
        tell(f"finding {finding.code}: {finding.message}")


def _answer(content: dict[str, Any], statuses: Any, sweep: Sweep, elapsed_s: float, as_json: bool) -> None:
    counts = {status: statuses.get(status, 0) for status in ("ok", "infeasible", "failed")}
    if as_json:
        findings = msgspec.to_builtins(sweep.findings)
        print_json({"command": sweep.kind.name, **content, **counts, "elapsed_s": elapsed_s, "findings": findings})
        return
    there = sum(counts.values())
    click.echo(
        f"{content['points']:,} points of {sweep.kind.name}: {content['done_before']:,} were there, "
        f"{content['run']:,} run now, {content['points'] - there:,} to do"
    )
    if there:
        click.echo(", ".join(f"{number:,} {status}" for status, number in counts.items()))
    if counts["infeasible"] or counts["failed"]:
        click.echo("the column `reason` says why a point has no answer")
    if there:
        click.echo(f"results in {content['output']}")

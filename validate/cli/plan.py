"""`validate plan`: hold a plan file against itself and its profile, or run it with real kernels."""

from __future__ import annotations

from pathlib import Path

import click
from overlapsim.validate.cli.options import on_ranks, run_options

from overlapsim.cli.output import compile_note, print_json
from overlapsim.units import format_time


@click.command("plan")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Only check the plan: needs no torch and no GPU.")
@click.option("--cluster", help="Hold the plan against this profile instead of the one it names.")
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the cases that were run (.json).")
def command(
    plan: Path,
    check: bool,
    cluster: str | None,
    ranks: int | None,
    backend: str | None,
    time_budget: float,
    timeout: float,
    repeats: int,
    as_json: bool,
    output: Path | None,
) -> None:
    """Run PLAN as `overlapsim operator -o` wrote it, beside serial execution of the same shape.

    With --check nothing is run: whatever does not fit (group tables, side files, ranks, edited settings) is one error.
    """
    from overlapsim.validate.plans import read_spec

    if check:
        with compile_note():
            spec = read_spec(plan, ranks=ranks, cluster=cluster)
        answer = {
            "strategy": spec.strategy,
            "collective": spec.collective,
            "ranks": spec.ranks,
            "m": spec.m,
            "n": spec.n,
            "k": spec.k,
            "predicted_s": spec.predicted_s,
            "findings": [{"code": finding.code, "message": finding.message} for finding in spec.findings],
        }
        if as_json:
            print_json(answer)
            return
        click.echo(
            f"{plan}: {spec.strategy} with {spec.collective} on {spec.ranks} ranks, {spec.m}x{spec.n}x{spec.k} "
            f"{spec.dtype}: fits"
        )
        for finding in spec.findings:
            click.echo(f"finding {finding.code}: {finding.message}")
        return
    if ranks is not None:
        # Before anything is started: what does not fit is one line, not one a rank.
        with compile_note():
            read_spec(plan, ranks=ranks, cluster=cluster)
    with on_ranks(ranks, backend, timeout) as joined:
        if joined is None:
            return
        from overlapsim.validate.cases import Case, cases_table, run_cases, serial_of, write_cases
        from overlapsim.validate.measure import Sampling

        with compile_note():
            spec = read_spec(plan, ranks=joined.size, cluster=cluster)
        name = plan.stem
        cases = [Case(name, serial_of(spec), spec.serial_s)]
        if spec.strategy != "serial":
            cases.append(Case(name, spec, spec.predicted_s))
        results = run_cases(joined, cases, time_budget=time_budget, sampling=Sampling(repeats=repeats))
        if not joined.is_first:
            return
        if output is not None:
            write_cases(results, output, joined)
        if as_json:
            print_json([result.to_dict() for result in results])
            return
        cases_table(results)
        best = min(results, key=lambda result: result.timing.median_s)
        click.echo(f"fastest: {best.case.spec.strategy} at {format_time(best.timing.median_s)}")
        for finding in spec.findings:
            click.echo(f"finding {finding.code}: {finding.message}")

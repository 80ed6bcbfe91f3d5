"""`validate loop`: measure parts, calibrate, predict whole operators of other sizes, run them, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from overlapsim.errors import UsageError

PARTS_SHARE: Final = 0.55
"""Of the time budget; the rest is for the cases, calibration takes seconds."""


@click.command("loop")
@click.option("--ranks", type=int, default=2, show_default=True, help="Ranks to start on this machine.")
@click.option(
    "--backend", type=click.Choice(["gloo"]), default="gloo", show_default=True, help="CPU tensors over gloo."
)
@click.option(
    "--time-budget", type=float, default=240.0, show_default=True, help="Seconds of both measurements together."
)
@click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds a rank is waited for.")
@click.option("--repeats", type=int, default=12, show_default=True, help="Timed calls behind a median.")
@click.option("--fresh", is_flag=True, help="Measure anew what the folder holds already.")
@click.option("--json", "as_json", is_flag=True, help="Print the suite's JSON instead of the table.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Folder of the loop; resumed.")
@click.option("--stage", type=click.Choice(["all", "parts", "cases"]), default="all", hidden=True)
def command(
    ranks: int,
    backend: str,
    time_budget: float,
    timeout: float,
    repeats: int,
    fresh: bool,
    as_json: bool,
    output: Path,
    stage: str,
) -> None:
    """Run the whole loop on CPU ranks: nothing of what is predicted has been measured before.

    Its figures exercise measuring, calibrating, predicting and comparing. They are times of a CPU and say nothing about
    GPUs. On GPUs take the steps one by one: gemm, collective and contention, `overlapsim calibrate`, `operator`, plan.
    """
    folder = output.absolute()
    if stage != "all":
        _on_ranks(stage, folder, backend, time_budget, timeout, repeats)
        return
    from overlapsim.validate.launch import run_ranks, under_torchrun
    from overlapsim.validate.loop.compare import are_predicted

    if under_torchrun():
        raise UsageError("loop starts its own ranks: run it without torchrun, with --ranks N")
    if ranks < 2:
        raise UsageError(f"--ranks is {ranks}; a collective needs at least 2")
    _prepare(folder, fresh=fresh)
    common = ["loop", "--timeout", str(timeout), "--repeats", str(repeats), "-o", str(folder)]
    parts_s = time_budget * PARTS_SHARE
    if are_predicted(folder):
        click.echo("measurements and predictions are kept; --fresh starts over", err=True)
    else:
        run_ranks([*common, "--stage", "parts", "--time-budget", f"{parts_s:g}"], ranks)
        _predict(folder, ranks)
    run_ranks([*common, "--stage", "cases", "--time-budget", f"{time_budget - parts_s:g}"], ranks)
    _compare(folder, as_json=as_json)


def _prepare(folder: Path, *, fresh: bool) -> None:
    from overlapsim.validate.loop.compare import CASES, PREDICTIONS
    from overlapsim.validate.loop.measure import KERNELS, RECORDS

    from overlapsim.accuracy.loop import FILE

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make folder {folder}: {error.strerror}; choose another") from None
    if fresh:
        for name in (RECORDS, KERNELS, PREDICTIONS, CASES, FILE):
            (folder / name).unlink(missing_ok=True)


def _on_ranks(stage: str, folder: Path, backend: str, time_budget: float, timeout: float, repeats: int) -> None:
    """What torchrun's children do."""
    from overlapsim.validate.ranks import start

    with start(backend, timeout) as ranks:
        if stage == "parts":
            from overlapsim.validate.loop.measure import measure_parts

            measure_parts(ranks, folder, time_budget, repeats)
            return
        import msgspec
        from overlapsim.validate.cases import run_cases
        from overlapsim.validate.loop.compare import PREDICTIONS, kept_results, with_predictions, write_results
        from overlapsim.validate.loop.measure import PATIENCE_S, WARMUP_S
        from overlapsim.validate.loop.sizes import headline_specs
        from overlapsim.validate.measure import Sampling
        from overlapsim.validate.output import header_of

        kept = kept_results(folder)
        done = {entry["case"] for entry in kept}
        cases = with_predictions(headline_specs(ranks.size), folder / PREDICTIONS)
        # Files are read on every rank before rank 0 writes: all run the same cases.
        ranks.meet("what is left to run")
        left = [case for case in cases if case.name not in done]
        sampling = Sampling(repeats=repeats, warmup_s=WARMUP_S, patience_s=PATIENCE_S)
        results = run_cases(ranks, left, time_budget=time_budget, sampling=sampling)
        if ranks.is_first:
            entries = [*kept, *(result.to_dict() for result in results)]
            order = {case.name: number for number, case in enumerate(cases)}
            entries.sort(key=lambda entry: order[entry["case"]])
            write_results(entries, msgspec.to_builtins(header_of(ranks)), ranks.num_nodes, folder)


def _predict(folder: Path, ranks: int) -> None:
    """Calibrate and predict; what is told goes to stderr."""
    import time

    from overlapsim.validate.loop.compare import write_predictions
    from overlapsim.validate.loop.predict import predict_cases
    from overlapsim.validate.loop.profile import calibrate_machine

    from overlapsim.cli.measured import progress_line
    from overlapsim.cli.output import compile_note

    tell = progress_line(time.monotonic())
    with compile_note():
        machine = calibrate_machine(folder, tell)
        for finding in machine.calibration.findings:
            tell(f"finding {finding.code}: {finding.message}")
        for kind, speed in machine.beside.items():
            tell(f"a GEMM beside {kind}: {speed:.0%} of its speed, both slow-downs together")
        tell(f"kernel by tiles: {machine.tiles_ratio:.2f} times its tiles as GEMMs of their own")
        write_predictions(predict_cases(machine, ranks), folder)
    tell("predictions written, before anything of them is run")


def _compare(folder: Path, *, as_json: bool) -> None:
    from overlapsim.validate.loop.compare import CASES, print_table, rows_of, write_rows

    from overlapsim.cli.output import print_json

    rows, header = rows_of(folder / CASES)
    path = write_rows(rows, header, folder)
    if as_json:
        from overlapsim.accuracy.loop import evaluate

        print_json(evaluate(path).to_dict())
        return
    print_table(rows)
    click.echo("times of a CPU over gloo: they exercise the loop and say nothing about GPUs")
    click.echo(
        f"profile in {folder / 'profile'}, rows in {path}; score them with `accuracy --suite loop --data {folder}`"
    )

"""`overlapsim crossover`: the row count from which overlap pays, and with which strategy."""

from __future__ import annotations

from typing import Final

import click

from overlapsim.cli.options import dimensions, size_bytes
from overlapsim.cli.output import compile_note, console, print_json
from overlapsim.cost.launch import STACKS
from overlapsim.errors import UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.operator import Effort
from overlapsim.planner.operator_sweep import Answer, Question, sweep_operators
from overlapsim.units import format_time
from overlapsim.workload.operators import COLLECTIVES, GemmOp

# Ranges are needed to tell a gain from a tie; the search around the best split is left to `operator`.
EFFORT: Final = Effort(runs=6, refinements=0)


@click.command("crossover")
@click.option("--cluster", required=True, help="Profile name (see `profiles list`) or a YAML file.")
@click.option("--nodes", type=int, default=1, show_default=True, help="Nodes of the cluster in use.")
@click.option("--ranks", type=int, required=True, help="Ranks (GPUs) of the collective.")
@click.option("--m", "rows", default="256:65536", show_default=True, help="Rows on one rank: FROM:TO or a list.")
@click.option("--n", type=int, required=True, help="Columns of C on one rank.")
@click.option("--k", type=int, required=True, help="Inner size on one rank.")
@click.option("--dtype", default="bf16", show_default=True, help="Type of A, B and C.")
@click.option("--accumulate", type=click.Choice(["fp16", "fp32"]), default="fp32", show_default=True)
@click.option("--collective", type=click.Choice(COLLECTIVES), default="all_reduce", show_default=True)
@click.option(
    "--independent",
    type=size_bytes,
    metavar="SIZE",
    help="The collective needs nothing of the GEMM (a bulk pair) and has this size at every M, such as 64MiB.",
)
@click.option("--stack", default="graph", show_default=True, help=f"How kernels are launched: {', '.join(STACKS)}.")
@click.option("--strategy", "strategies", multiple=True, help="Consider only these (serial always; repeatable).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(
    cluster: str,
    nodes: int,
    ranks: int,
    rows: str,
    n: int,
    k: int,
    dtype: str,
    accumulate: str,
    collective: str,
    independent: float | None,
    stack: str,
    strategies: tuple[str, ...],
    as_json: bool,
) -> None:
    """Plan the operator for many row counts M and say where overlap starts to pay.

    FROM:TO takes 2^i and 1.5 x 2^i between; a list is M1,M2,...
    """
    machine = load_cluster(cluster).with_nodes(nodes)
    if not 2 <= ranks <= machine.num_devices:
        raise UsageError(f"--ranks is {ranks}; {machine.name} has {machine.num_devices} GPUs, expected 2 to that many")
    kind = next(kind for kind in COLLECTIVES if kind == collective)
    questions = [Question(GemmOp(m, n, k, dtype, accumulate), kind, ranks, independent) for m in dimensions(rows)]
    names = ("serial", *strategies) if strategies else ()
    with compile_note():
        answers = sweep_operators(machine, questions, strategies=names, effort=EFFORT, stack=stack)
    pays = [answer.question.gemm.m for answer in answers if answer.verdict == "overlap"]
    not_then = [a.question.gemm.m for a in answers if pays and a.question.gemm.m > min(pays) and a.verdict != "overlap"]
    if as_json:
        print_json(
            {
                "pays_from_m": min(pays, default=None),
                "but_not_at_m": not_then,
                "points": [_entry(answer) for answer in answers],
            }
        )
        return
    _table(answers)
    if pays:
        but = f", but not at m = {', '.join(map(str, not_then))}" if not_then else ""
        click.echo(f"overlap pays from m = {min(pays)} (of the row counts tried){but}")
    else:
        click.echo("overlap does not pay at any row count tried")
    click.echo("crossover tries fewer candidates than operator and shows no ranges: plan the chosen m with operator")


def _entry(answer: Answer) -> dict[str, object]:
    return {
        "m": answer.question.gemm.m,
        "verdict": answer.verdict,
        "cause": answer.cause,
        "best": answer.best,
        "serial_s": answer.serial_s,
        "best_s": answer.best_s,
        "best_overlap": answer.best_overlap,
        "overlap_speedup": answer.overlap_speedup or None,
        "ceiling": answer.ceiling,
    }


def _table(answers: tuple[Answer, ...]) -> None:
    from rich.table import Table

    table = Table()
    for column in ("m", "serial", "best overlap", "speed-up over best serial", "ceiling", "verdict", "cause"):
        table.add_column(column)
    for answer in answers:
        speedup = f"{answer.overlap_speedup:.2f}x" if answer.overlap_s else "-"
        table.add_row(
            str(answer.question.gemm.m),
            format_time(answer.serial_s),
            f"{answer.best_overlap} {format_time(answer.overlap_s)}" if answer.overlap_s else "none applies",
            speedup,
            f"{answer.ceiling:.2f}x",
            answer.verdict,
            "" if answer.cause == "none" else answer.cause,
        )
    console().print(table)

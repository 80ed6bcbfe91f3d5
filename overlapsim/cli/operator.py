"""`overlapsim operator`: plan how one GEMM overlaps with its collective."""

from __future__ import annotations

import hashlib
from pathlib import Path

import click

from overlapsim import __version__
from overlapsim.cli.operator_view import result_json, result_table
from overlapsim.cli.options import check_targets, kernel_times, positive_time_s, size_bytes
from overlapsim.cli.options import rank_rows as parse_rank_rows
from overlapsim.cli.options import tile as parse_tile
from overlapsim.cli.output import compile_note, print_json
from overlapsim.cost.launch import STACKS
from overlapsim.hardware.curves import read_curve
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import CurveInput, OperatorInputs, dump_plan
from overlapsim.planner.operator import OperatorResult, plan_operator, simulate
from overlapsim.planner.operator_plan import context_from, to_plan
from overlapsim.report.files import write_text
from overlapsim.schedule.reorder import planned_map, write_side_file
from overlapsim.strategy.registry import load_strategies, strategy_names
from overlapsim.workload.operators import COLLECTIVES


@click.command("operator")
@click.option("--cluster", required=True, help="Profile name (see `profiles list`) or a YAML file.")
@click.option("--nodes", type=int, default=1, show_default=True, help="Nodes of the cluster in use.")
@click.option("--ranks", type=int, required=True, help="Ranks (GPUs) of the collective.")
@click.option("--m", type=int, required=True, help="Rows of C on one rank.")
@click.option("--n", type=int, required=True, help="Columns of C on one rank.")
@click.option("--k", type=int, required=True, help="Inner size on one rank.")
@click.option("--dtype", default="bf16", show_default=True, help="Type of A, B and C.")
@click.option("--accumulate", type=click.Choice(["fp16", "fp32"]), default="fp32", show_default=True)
@click.option("--collective", type=click.Choice(COLLECTIVES), default="all_reduce", show_default=True)
@click.option("--gemm-time", type=positive_time_s, metavar="TIME", help="Measured time of the vendor GEMM on all SMs.")
@click.option("--kernel-time", multiple=True, metavar="STRATEGY=TIME", help="Measured time of a strategy's own kernel.")
@click.option(
    "--tile", type=parse_tile, metavar="TILE", help="BMxBN[xBK] of the strategies' kernel (default: searched)."
)
@click.option("--comm-sms", type=int, help="SMs the collective holds (default: the cluster's).")
@click.option("--curve", type=click.Path(path_type=Path), help="CSV `size_bytes,time_s` of the collective.")
@click.option(
    "--rank-rows",
    type=parse_rank_rows,
    metavar="M0,M1,..",
    help="Rows on each rank of an unbalanced all_to_all; the largest is --m.",
)
@click.option(
    "--independent",
    type=size_bytes,
    metavar="SIZE",
    help="The collective needs nothing of the GEMM (a bulk pair) and has this size, such as 64MiB.",
)
@click.option("--stack", default="graph", show_default=True, help=f"How kernels are launched: {', '.join(STACKS)}.")
@click.option("--strategy", "strategies", multiple=True, help="Consider only these (serial always; repeatable).")
@click.option("--no-contention", is_flag=True, help="Leave HBM and link sharing out.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a Perfetto trace (.json or .json.gz).")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a Gantt plot (.png or .svg).")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the plan file (YAML).")
def command(
    cluster: str,
    nodes: int,
    ranks: int,
    m: int,
    n: int,
    k: int,
    dtype: str,
    accumulate: str,
    collective: str,
    gemm_time: float | None,
    kernel_time: tuple[str, ...],
    tile: tuple[int, ...] | None,
    comm_sms: int | None,
    curve: Path | None,
    rank_rows: tuple[int, ...] | None,
    independent: float | None,
    stack: str,
    strategies: tuple[str, ...],
    no_contention: bool,
    as_json: bool,
    trace: Path | None,
    plot: Path | None,
    output: Path | None,
) -> None:
    """Plan how one GEMM overlaps with the collective on its output (all_gather: on its rows, before it).

    M, N and K are sizes on one rank; with all_gather M counts the gathered rows. Times take units:
    2.36ms, 62us or seconds.
    """
    check_targets(plan=output, trace=trace, plot=plot)
    machine = load_cluster(cluster)
    table, curve_name, curve_sha256 = None, "", ""
    if curve is not None:
        table, curve_name = read_curve(curve), curve.name
        curve_sha256 = hashlib.sha256(curve.read_bytes()).hexdigest()
    own_kernels = tuple(s.name for s in load_strategies() if s.own_kernel)
    inputs = OperatorInputs(
        cluster=cluster,
        cluster_sha256=machine.digest,
        nodes=nodes,
        ranks=ranks,
        m=m,
        n=n,
        k=k,
        dtype=dtype,
        accumulate=accumulate,
        collective=collective,
        gemm_time_s=gemm_time,
        kernel_time_s=kernel_times(kernel_time, own_kernels, strategy_names()),
        curve=None if table is None else CurveInput(curve_name, curve_sha256, table.size_bytes, table.time_s),
        tile=tile,
        comm_sms=comm_sms,
        contention=not no_contention,
        rank_rows=rank_rows or (),
        independent_bytes=independent,
        stack=stack,
    )
    chosen = tuple(s for s in load_strategies(strategies, "pair") if s.overlaps)
    baselines = tuple(s for s in load_strategies(scope="pair") if not s.overlaps)
    with compile_note():
        result = plan_operator(context_from(inputs, machine), (*baselines, *chosen), contention=inputs.contention)
        if output is not None:
            plan = to_plan(result, inputs, {"overlapsim": __version__})
            # The map first: a plan never names a file that is not there.
            for settings in (operator.settings for operator in plan.operators):
                if "file" in settings.get("map", {}):
                    write_side_file(planned_map(settings), output.parent)
            write_text(output, dump_plan(plan))
        _draw(result, trace, plot, contention=inputs.contention)
    if as_json:
        print_json(result_json(result))
    else:
        result_table(result)
        for what, target in (("plan", output), ("trace", trace), ("plot", plot)):
            if target is not None:
                click.echo(f"{what} written to {target}")


def _draw(result: OperatorResult, trace: Path | None, plot: Path | None, *, contention: bool) -> None:
    if trace is None and plot is None:
        return
    shown = [result.serial, *([result.best] if result.best is not result.serial else [])]
    timelines = {}
    for entry in shown:
        assert entry.best is not None
        timelines[entry.strategy.name] = simulate(
            entry.strategy, result.context, entry.best.parameters, contention=contention, record=True
        )
    if trace is not None:
        from overlapsim.report.trace import write_trace

        write_trace(timelines[result.best.strategy.name], trace)
    if plot is not None:
        from overlapsim.report.plots import gantt

        gantt(timelines, plot)

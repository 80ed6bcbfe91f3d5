"""`overlapsim plan`: from a model, a machine and a batch to ranked, explained plans of a training step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click

from overlapsim import __version__
from overlapsim.cli.emit_files import emit_all, emitted_json, show_emitted, write_emitted
from overlapsim.cli.options import gpu_memory_bytes
from overlapsim.cli.output import compile_note, print_json
from overlapsim.cli.plan_files import output_folder, write_answer
from overlapsim.cli.plan_view import answer_json, infeasible_json, plan_table
from overlapsim.cost.launch import STACKS
from overlapsim.emit.base import Subject
from overlapsim.emit.registry import check_targets
from overlapsim.errors import PlanError, UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import Objective, StepPlanInputs
from overlapsim.planner.allowed import ALLOWED
from overlapsim.planner.search import TOP, PlanRequest
from overlapsim.planner.space import Axes, Constraint
from overlapsim.planner.step import Goal, plan_step
from overlapsim.planner.step_plan import model_digest, to_step_plan
from overlapsim.schedule.pipeline_kinds import SCHEDULES
from overlapsim.step.perturb import Perturbation
from overlapsim.units import DTYPE_BYTES
from overlapsim.workload.dispatchers import DISPATCHERS
from overlapsim.workload.presets import load_model
from overlapsim.workload.recipe import RECIPES


def words(text: str) -> tuple[str, ...]:
    """Words of a list separated by commas."""
    return tuple(part for part in (part.strip() for part in text.split(",")) if part)


@click.command("plan")
@click.argument("model")
@click.option("--cluster", required=True, help="Profile name (see `profiles list`) or a YAML file.")
@click.option("--nodes", type=int, default=1, show_default=True, help="Nodes of the cluster.")
@click.option("--global-batch", type=click.IntRange(1), required=True, help="Sequences of a step.")
@click.option("--seq", type=click.IntRange(1), required=True, help="Tokens of a sequence.")
@click.option("--constraint", "constraints", multiple=True, metavar="RULE", help="tp<=8, pp>=2 ...; repeatable.")
@click.option("--fix", multiple=True, metavar="NAME=VALUE", help="pp=4, micro_batch=1, recompute=full ...; repeatable.")
@click.option(
    "--memory", type=gpu_memory_bytes, metavar="SIZE", help="Of one GPU, such as 75GiB (default: all of its HBM)."
)
@click.option("--objective", type=click.Choice(get_args(Objective)), default="step_time", show_default=True)
@click.option(
    "--perturb",
    type=Perturbation.parse,
    default="",
    metavar="KEY=X,..",
    help="slow=SHARE[@RANK], nvlink=SHARE[@RANK], nic=SHARE[@NODE], jitter, imbalance, routing=zipf:S, seed.",
)
@click.option("--schedules", type=words, default="", metavar="NAME,..", help=f"Tried: of {', '.join(SCHEDULES)}.")
@click.option("--dispatchers", type=words, default="", metavar="NAME,..", help=f"Tried: of {', '.join(DISPATCHERS)}.")
@click.option("--uneven", is_flag=True, help="Also stages with unequal numbers of layers.")
@click.option("--allow", type=words, default="", metavar="NAME,..", help=f"What changes results: {', '.join(ALLOWED)}.")
@click.option("--dtype", type=click.Choice(sorted(DTYPE_BYTES)), help="Type of the model instead of its own.")
@click.option("--recipe", type=click.Choice(list(RECIPES)), default="modern", show_default=True, help="Kernels.")
@click.option("--stack", default="graph", show_default=True, help=f"How kernels are launched: {', '.join(STACKS)}.")
@click.option("--sustained-clock", type=float, default=1.0, show_default=True, help="Clock of a long run, a share.")
@click.option("--exhaustive", is_flag=True, help="Run the engine on everything that fits.")
@click.option("--top", type=click.IntRange(1, 50), default=TOP, show_default=True, help="Plans to show.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for plan file, tables, trace and plots.")
@click.option("--emit", "targets", type=words, default="", metavar="NAME,..", help="Also as configs: see `emit --to`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(**given: Any) -> None:
    """Plan a training step of MODEL (a name, a model file, a config.json or its folder) on a cluster."""
    targets = check_targets(given["targets"]) if given["targets"] else ()
    folder = None if given["output"] is None else output_folder(given["output"])
    spec, assumed = load_model(given["model"])
    if given["nodes"] < 1:
        raise UsageError(f"--nodes is {given['nodes']}; expected at least 1")
    cluster = load_cluster(given["cluster"])
    if given["dtype"]:
        spec = replace(spec, dtype=given["dtype"])
    request = PlanRequest(
        spec,
        cluster.with_nodes(given["nodes"]),
        given["global_batch"],
        given["seq"],
        axes=axes_of(given["schedules"], given["dispatchers"], uneven=given["uneven"]),
        constraints=rules_of(given["constraints"], given["fix"]),
        memory_bytes=given["memory"],
        recipe=RECIPES[given["recipe"]],
        stack=given["stack"],
        sustained_clock=given["sustained_clock"],
        top=given["top"],
        exhaustive=given["exhaustive"],
    )
    goal = Goal(given["objective"], given["perturb"], given["allow"])
    began = time.perf_counter()
    try:
        with compile_note():
            answer = plan_step(request, goal, _progress())
    except PlanError as error:
        if given["as_json"] and error.exit_code == 1:
            print_json(infeasible_json(time.perf_counter() - began))
        raise
    answer = replace(answer, findings=(*assumed, *answer.findings))
    inputs = StepPlanInputs(
        model=given["model"],
        model_sha256=model_digest(spec),
        cluster=given["cluster"],
        cluster_sha256=cluster.digest,
        nodes=given["nodes"],
        global_batch=given["global_batch"],
        seq_len=given["seq"],
        dtype=given["dtype"],
        objective=goal.objective,
        constraints=(*given["constraints"], *given["fix"]),
        schedules=given["schedules"],
        dispatchers=given["dispatchers"],
        memory_bytes=given["memory"],
        recipe=given["recipe"],
        stack=given["stack"],
        sustained_clock=given["sustained_clock"],
        allow=goal.allow,
        perturbation=str(goal.perturbation),
        uneven=given["uneven"],
        exhaustive=given["exhaustive"],
        top=given["top"],
    )
    plan = to_step_plan(answer, inputs, {"overlapsim": __version__})
    content = answer_json(plan, answer)
    written = [] if folder is None else write_answer(plan, content, answer, folder)
    emitted = emit_all(Subject(plan, 1, spec, cluster), targets, {})
    configs = [] if folder is None else write_emitted(emitted, folder)
    if emitted:
        content["emitted"] = emitted_json(emitted)
    if given["as_json"]:
        print_json(content)
        return
    plan_table(plan, answer)
    for what, path in written:
        click.echo(f"{what} written to {path}")
    show_emitted(emitted, configs)


def rules_of(constraints: Sequence[str], fixed: Sequence[str]) -> tuple[Constraint, ...]:
    """Rules of --constraint and --fix.

    Raises
    ------
    PlanError
        If a rule is not understood, or one that fixes is no equation.
    """
    for text in fixed:
        if "<" in text or ">" in text:
            raise UsageError(f"--fix is {text!r}; expected NAME=VALUE such as pp=4, or --constraint for a range")
    return tuple(Constraint.parse(text) for text in (*constraints, *fixed))


def axes_of(schedules: Sequence[str], dispatchers: Sequence[str] = (), *, uneven: bool) -> Axes:
    """What --schedules, --dispatchers and --uneven leave open.

    Raises
    ------
    UsageError
        If a schedule or dispatcher is unknown.
    """
    for option, given, known in (("schedules", schedules, SCHEDULES), ("dispatchers", dispatchers, DISPATCHERS)):
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise UsageError(f"--{option} names {unknown[0]!r}; expected of {', '.join(known)}")
    axes = Axes(uneven=uneven)
    axes = replace(axes, schedule=tuple(schedules)) if schedules else axes
    return replace(axes, dispatcher=tuple(n for n in DISPATCHERS if n in dispatchers)) if dispatchers else axes


def _progress() -> Callable[[str], None]:
    """Lines on stderr: how far the search is."""
    return lambda text: click.echo(text, err=True)

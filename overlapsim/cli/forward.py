"""`overlapsim simulate --phase prefill|decode|mixed`: one serving step, as asked and as shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import click
import msgspec
from click.core import ParameterSource
from rich.table import Table

from overlapsim.cli.output import compile_note, console, layout_words, print_json, together
from overlapsim.errors import UsageError
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import Finding
from overlapsim.step.perturb import Perturbation
from overlapsim.step.serving import ForwardInputs, ForwardResult, simulate_forward
from overlapsim.strategy.overlaps import composition
from overlapsim.units import DTYPE_BYTES, format_bytes, format_rate, format_time
from overlapsim.workload.layout import Layout
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.rank_map import ORDER
from overlapsim.workload.recipe import RECIPES, with_dispatch
from overlapsim.workload.routing import UNIFORM
from overlapsim.workload.serving import ForwardBatch

TRAIN: Final = "train"
PHASES: Final = (TRAIN, "prefill", "decode", "mixed")
ONLY_SERVING: Final = ("batch", "past", "context", "decodes", "kv_dtype")
ONLY_TRAINING: Final = (
    *("global_batch", "micro_batch", "schedule", "virtual", "stage_layers", "recompute", "dp_overlap", "bucket_size"),
    *("p2p", "rings", "queues", "no_reshard", "ignore_memory", "trace", "fp8", "compress", "dp_sync"),
)
NEEDED: Final = {
    TRAIN: ("global_batch", "seq"),
    "prefill": ("seq",),
    "decode": ("context",),
    "mixed": ("seq", "decodes", "context"),
}
"""Options that a phase cannot do without."""


def phase_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of serving steps to a command."""
    options = (
        click.option("--phase", type=click.Choice(PHASES), default=TRAIN, show_default=True, help="What is simulated."),
        click.option("--batch", type=int, default=1, help="Serving: prompts (decode: sequences) of a replica's step."),
        click.option("--past", type=int, default=0, help="Serving: tokens of a prompt that earlier chunks computed."),
        click.option("--context", type=int, help="Serving: tokens in the cache of a sequence that decodes."),
        click.option("--decodes", type=int, help="Serving, mixed: sequences that decode beside the prompts."),
        click.option("--kv-dtype", type=click.Choice(sorted(DTYPE_BYTES)), help="Serving: type of the cache."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def check_phase(context: click.Context) -> None:
    """Refuse options that the phase does not have, and a phase without what it needs.

    Raises
    ------
    UsageError
        Naming the options.
    """
    phase = context.params["phase"]
    foreign = ONLY_SERVING if phase == TRAIN else ONLY_TRAINING
    given = [name for name in foreign if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if phase == "prefill":
        given += [name for name in ("context", "decodes") if context.params[name] is not None]
    if phase == "decode":
        given += [name for name in ("seq", "decodes") if context.params[name] is not None]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{names} with --phase {phase}; expected options of that phase (`simulate --help`)")
    missing = [name for name in NEEDED[phase] if context.params[name] is None]
    if missing:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise UsageError(f"--phase {phase} without {names}; expected {' and '.join(NEEDED[phase])}")


def run_forward(given: dict[str, Any], model: ModelSpec, machine: Cluster, believed: Sequence[Finding]) -> None:
    """Simulate and print a serving step.

    Raises
    ------
    UsageError
        If a perturbation other than unbalanced experts is asked for.
    """
    perturbation: Perturbation = given["perturb"]
    if replace(perturbation, imbalance=1.0, routing=UNIFORM, seed=0) != Perturbation():
        raise UsageError(f"--perturb {perturbation} in a serving step; expected imbalance or routing alone")
    inputs = ForwardInputs(
        model,
        machine,
        Layout.parse(given["layout"]),
        _batch(given),
        recipe=with_dispatch(RECIPES[given["recipe"]], given["dispatch"]),
        kv_dtype=given["kv_dtype"] or "",
        stack=given["stack"],
        imbalance=perturbation.imbalance,
        routing=perturbation.routing,
        rank_order=given["rank_order"] or ORDER,
        sustained_clock=given["sustained_clock"],
        contention=not given["no_contention"],
    )
    if given["overlap"]:
        inputs = replace(inputs, composition=composition(given["overlap"], inputs.gemms))
    with compile_note():
        result = simulate_forward(inputs)
    result = replace(result, findings=(*believed, *result.findings))
    if given["as_json"]:
        print_json(forward_json(result))
    else:
        _show(result)


def forward_json(result: ForwardResult) -> dict[str, Any]:
    """Content of the JSON answer; keys carry units, see docs/simulate.md."""
    memory = result.memory
    return {
        "phase": result.inputs.batch.phase,
        "tokens": result.inputs.batch.tokens,
        "time_s": result.time_s,
        "low_s": result.low_s,
        "high_s": result.high_s,
        "tokens_per_s": result.tokens_per_s,
        "memory_bytes": {"parameters": memory.parameters, "kv_cache": memory.kv_cache, "context": memory.context},
        "cache_tokens": None if result.cache_tokens == float("inf") else result.cache_tokens,
        "breakdown_s": dict(result.breakdown_s),
        "findings": msgspec.to_builtins(result.findings),
    }


def _batch(given: dict[str, Any]) -> ForwardBatch:
    if given["phase"] == "decode":
        return ForwardBatch.decode(given["batch"], given["context"])
    prompts = ForwardBatch.prefill(given["batch"], given["seq"], given["past"])
    if given["phase"] == "prefill":
        return prompts
    return prompts + ForwardBatch.decode(given["decodes"], given["context"])


def _show(result: ForwardResult) -> None:
    view, i, memory = console(), result.inputs, result.memory
    title = f"{i.model.name} on {i.layout.world_size} GPU(s) of {i.cluster.name}: {i.batch.phase} "
    title = (title + layout_words(i.layout, i.model)).rstrip()
    view.print(f"[bold]{title}[/bold]", highlight=False)
    view.print(
        f"step {format_time(result.time_s)} ({format_time(result.low_s)} .. {format_time(result.high_s)}) for "
        f"{i.batch.tokens} tokens of {i.batch.sequences} sequence(s) a replica; "
        f"{format_rate(result.tokens_per_s, 'tokens/s')} in all",
        highlight=False,
    )
    room = "" if result.cache_tokens == float("inf") else f"; room for {result.cache_tokens:.3g} tokens of cache"
    view.print(
        f"memory of a GPU: weights {format_bytes(memory.parameters)}, cache {format_bytes(memory.kv_cache)} of "
        f"{format_bytes(i.cluster.device.hbm_bytes)}{room}",
        highlight=False,
    )
    table = Table(title="where the time goes", title_justify="left")
    table.add_column("what runs")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for kind, seconds in result.breakdown_s.items():
        if seconds > 0:
            table.add_row(kind, format_time(seconds), f"{seconds / result.time_s:.1%}")
    view.print(table)
    for finding in together(result.findings):
        view.print(f"finding {finding.code}: {finding.message}", highlight=False, markup=False)

"""`overlapsim emit`: a plan as settings of frameworks, and checks of settings people have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from overlapsim.cli.emit_files import (
    emit_all,
    emitted_json,
    show_emitted,
    subject_of,
    told_seconds,
    versions_of,
    write_emitted,
)
from overlapsim.cli.output import compile_note, print_json
from overlapsim.emit.base import Emitted, Subject
from overlapsim.emit.registry import EMITTERS, LINTERS, check_targets
from overlapsim.errors import UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import read_plan


@click.command("emit")
@click.argument("plan", type=click.Path(path_type=Path), required=False)
@click.option("--to", "targets", metavar="NAME,..", default="", help=f"Targets: {', '.join(EMITTERS)}.")
@click.option(
    "--framework-version", "versions", multiple=True, metavar="V", help="Of a target, or TARGET=V; repeatable."
)
@click.option("--rank", type=int, default=1, show_default=True, help="Which of the plans of a training step.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for the files (default: print them).")
@click.option("--check", "checked", type=click.Path(path_type=Path), metavar="FILE", help="Check a config instead.")
@click.option(
    "--as", "linter", type=click.Choice(list(LINTERS)), help="What the checked file is (default: recognised)."
)
@click.option("--hidden", type=int, help="Instead of PLAN: width of a layer to fill transformer_engine's file for.")
@click.option("--model", help="Instead of --hidden: the model whose layer it is; with --check: of the config.")
@click.option("--ffn", type=int, help="Inner width of the feed-forward block (default: 4 x hidden).")
@click.option("--heads", type=int, help="Query heads (default: of 128).")
@click.option("--kv-heads", type=int, help="Key and value heads (default: as query heads).")
@click.option("--gated", is_flag=True, help="The feed-forward block has a gate (SwiGLU).")
@click.option("--tp", type=int, default=8, show_default=True, help="Tensor-parallel degree.")
@click.option("--micro-batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences of a micro-batch.")
@click.option("--seq", type=click.IntRange(1), help="Tokens of a sequence.")
@click.option("--cluster", help="Profile name (see `profiles list`) or a YAML file.")
@click.option("--world-size", type=click.IntRange(1), help="Of a checked config, where the file does not say it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(**given: Any) -> None:
    """Write PLAN as settings of frameworks (--to), or check a config that is there (--check)."""
    from overlapsim.cli.emit_check import check

    sized = given["hidden"] is not None or given["model"] is not None
    if given["checked"] is not None:
        if given["plan"] is not None:
            raise UsageError("a plan and --check are given; expected one of them")
        check(given)
        return
    if given["plan"] is not None:
        _emit(given)
    elif sized:
        _fill(given)
    else:
        raise UsageError("expected a plan file and --to, --check with a config, or --hidden to fill a layer's file")


def _emit(given: dict[str, Any]) -> None:
    targets = check_targets([name for part in given["targets"].split(",") if (name := part.strip())])
    versions = versions_of(given["versions"], targets)
    plan = read_plan(given["plan"])
    subject = subject_of(plan, given["plan"].parent, given["rank"])
    emitted = emit_all(subject, targets, versions)
    told_s = {} if given["as_json"] else told_seconds(subject, targets)
    _show(given, emitted, {"plan": subject.digest, "rank": subject.rank}, told_s, subject)


def _fill(given: dict[str, Any]) -> None:
    """Fill the userbuffer file of one layer from its sizes."""
    from overlapsim.emit.fill import fill, one_layer
    from overlapsim.emit.rules import settle
    from overlapsim.emit.transformer_engine import FILE
    from overlapsim.workload.presets import load_model

    targets = check_targets([name for part in given["targets"].split(",") if (name := part.strip())])
    if targets != ("transformer_engine",):
        raise UsageError(
            f"--to is {given['targets']!r} without a plan; sizes alone fill transformer_engine's file only"
        )
    for name in ("cluster", "seq"):
        if given[name] is None:
            raise UsageError(f"--{name} is missing; expected it to fill a layer's file")
    if given["hidden"] is not None and given["model"] is not None:
        raise UsageError("--hidden and --model are given; expected one of them")
    version, findings = settle("transformer_engine", versions_of(given["versions"], targets).get(targets[0]))
    if given["model"] is not None:
        model = load_model(given["model"])[0]
    else:
        model = one_layer(given["hidden"], given["ffn"], given["heads"], given["kv_heads"], gated=given["gated"])
    with compile_note():
        filled = fill(model, load_cluster(given["cluster"]), given["tp"], given["micro_batch"], given["seq"], version)
    emitted = Emitted({FILE: filled.text}, filled.unexpressed, (*findings, *filled.findings))
    _show(given, {targets[0]: emitted}, {})


def _show(
    given: dict[str, Any],
    emitted: dict[str, Emitted],
    named: dict[str, Any],
    told_s: Mapping[str, float] | None = None,
    subject: Subject | None = None,
) -> None:
    written = [] if given["output"] is None else write_emitted(emitted, given["output"])
    if given["as_json"]:
        print_json({**named, "targets": emitted_json(emitted)})
        return
    show_emitted(emitted, written, told_s, subject.entry.step.value_s if told_s and subject is not None else 0.0)

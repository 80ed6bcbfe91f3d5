"""`overlapsim emit`: a plan as settings of frameworks, and checks of settings people have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from overlapsim.cli.emit_files import emit_all, emitted_json, show_emitted, subject_of, versions_of, write_emitted
from overlapsim.cli.output import print_json
from overlapsim.emit.registry import EMITTERS, LINTERS, check_targets
from overlapsim.errors import UsageError
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
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(**given: Any) -> None:
    """Write PLAN as settings of frameworks (--to), or check a config that is there (--check)."""
    if (given["checked"] is None) == (given["plan"] is None):
        raise UsageError("expected a plan file and --to, or --check with a config")
    if given["checked"] is not None:
        raise UsageError("checking is not there yet")
    _emit(given)


def _emit(given: dict[str, Any]) -> None:
    targets = check_targets([name for part in given["targets"].split(",") if (name := part.strip())])
    versions = versions_of(given["versions"], targets)
    plan = read_plan(given["plan"])
    subject = subject_of(plan, given["plan"].parent, given["rank"])
    emitted = emit_all(subject, targets, versions)
    written = [] if given["output"] is None else write_emitted(emitted, given["output"])
    if given["as_json"]:
        print_json({"plan": subject.digest, "rank": subject.rank, "targets": emitted_json(emitted)})
        return
    show_emitted(emitted, written)

"""`overlapsim emit --check`: what is wrong with a config, what does nothing, what is missing, what would be faster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from overlapsim.cli.output import compile_note, print_json
from overlapsim.emit.lint_base import Checked, Facts, Lint
from overlapsim.emit.registry import linter_of, load_linter
from overlapsim.errors import ProfileError, UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import Finding
from overlapsim.workload.presets import load_model


def check(given: dict[str, Any]) -> None:
    """Check a file; ends with 3 (bad data) where a framework would stop at it."""
    path: Path = given["checked"]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"cannot read {path}: {reason}; expected a config file") from None
    linter = load_linter(given["linter"]) if given["linter"] else linter_of(path.name, text)
    cluster = None if given["cluster"] is None else load_cluster(given["cluster"])
    architecture = None if cluster is None else cluster.device.architecture
    version = _version(given["versions"])
    checked = linter.lint(text, Facts(given["world_size"], architecture), version)
    lints, findings = [*checked.lints], [*checked.findings]
    if cluster is not None and checked.reading is not None:
        lints, found = _predicted(checked, cluster, given["model"])
        findings += found
    _show(path, linter.name, lints, findings, as_json=given["as_json"])
    if any(lint.kind in ("conflict", "unknown") for lint in lints):
        click.get_current_context().exit(ProfileError.exit_code)


def _version(texts: Sequence[str]) -> str | None:
    if len(texts) > 1 or any("=" in text for text in texts):
        raise UsageError(f"--framework-version is {', '.join(texts)}; expected one version with --check")
    return texts[0] if texts else None


def _predicted(checked: Checked, cluster: Any, model: str | None) -> tuple[list[Lint], Sequence[Finding]]:
    """Remarks, less the overlap that gains nothing, and what the planner would change; where the model is known."""
    from overlapsim.emit.gain import gains, weighed

    assert checked.reading is not None
    spec = checked.reading.model if model is None else load_model(model)[0]
    if spec is None:
        message = "the config does not hold the model's sizes: give --model for what the planner would change"
        return [*checked.lints], (Finding("model_not_said", message),)
    if any(lint.kind == "conflict" for lint in checked.lints):
        message = "the config has conflicts: nothing is predicted before they are gone"
        return [*checked.lints], (Finding("not_predicted", message),)
    with compile_note():
        changes = gains(checked.reading, spec, cluster)
        if any(lint.kind == "conflict" for lint in changes):
            return [*checked.lints, *changes], ()
        return [*weighed(checked.lints, checked.reading, spec, cluster), *changes], ()


def _show(path: Path, name: str, lints: Sequence[Lint], findings: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        said = [{"kind": x.kind, "line": x.line, "message": x.message, "fix": x.fix} for x in lints]
        print_json({"file": str(path), "checked_as": name, "lints": said, "findings": findings})
        return
    for lint in lints:
        place = f"{path}:{lint.line}" if lint.line is not None else str(path)
        click.echo(f"{place}: {lint.kind.replace('_', ' ')}: {lint.message}\n    fix: {lint.fix}")
    if not lints:
        click.echo(f"{path}: nothing to remark ({name})")
    for finding in findings:
        click.echo(f"finding {finding.code}: {finding.message}", err=True)

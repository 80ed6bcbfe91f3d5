"""`overlapsim profiles`: which machines are known, every number with its source, and what a profile lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import click

from overlapsim.cli.output import print_json
from overlapsim.hardware.check import contradictions, gaps
from overlapsim.hardware.loading import list_profiles, load_cluster
from overlapsim.hardware.profile import Cluster, CurveKey, Sources
from overlapsim.units import format_bandwidth, format_bytes, format_rate, format_time


@click.group("profiles")
def command() -> None:
    """List, show and check hardware profiles."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    """One line a cluster that ships; a YAML file of your own works wherever a name does."""
    rows = [_summary(load_cluster(name)) for name in list_profiles("cluster")]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        click.echo(
            f"{row['name']:16} {row['num_devices']} x {row['device']:18} {row['scale_up']:12}"
            f" measured curves: {row['num_curves']}{'' if row['calibrated'] else ', not calibrated'}"
        )


@command.command("show")
@click.argument("cluster")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(cluster: str, as_json: bool) -> None:
    """Print every number of CLUSTER with its layer, source code and trust (codes: hwprofiles/SOURCES.md)."""
    machine = load_cluster(cluster)
    if as_json:
        print_json(
            {
                **_summary(machine),
                "sha256": machine.digest,
                "values": [
                    {"part": part, "name": name, "value": value, **source}
                    for part, name, value, source in _rows(machine)
                ],
                "curves": [_curve(machine, key) for key in machine.curves],
            }
        )
        return
    click.echo(f"{machine.name}: {machine.num_devices} x {machine.device.name}, {machine.node.scale_up}")
    for part, name, value, source in _rows(machine):
        told = f"{source['layer']}, {source['reference']}, {source['trust']}" if source else "-"
        click.echo(f"  {part:8} {name:34} {_for_people(name, value):>22}  {told}")
    for key in machine.curves:
        curve = _curve(machine, key)
        click.echo(
            f"  curve    {key.collective} over {key.ranks} ranks on {key.nodes} node(s): {curve['num_points']} points, "
            f"{format_bytes(curve['smallest_bytes'])} to {format_bytes(curve['largest_bytes'])}, {curve['reference']}"
        )


@command.command("check")
@click.argument("cluster")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(cluster: str, as_json: bool) -> None:
    """Say where CLUSTER contradicts itself (exit code 3) and what each missing table disables."""
    machine = load_cluster(cluster)
    wrong, missing = contradictions(machine), gaps(machine)
    if as_json:
        print_json({"name": machine.name, "contradictions": wrong, "gaps": missing})
    else:
        for label, messages in (("contradiction", wrong), ("gap", missing)):
            for message in messages:
                click.echo(f"{label}: {message}")
        if not wrong:
            click.echo(f"{machine.name}: no contradictions, {len(missing)} gaps")
    if wrong:
        raise click.exceptions.Exit(3)


def _summary(cluster: Cluster) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "device": cluster.device.name,
        "num_devices": cluster.num_devices,
        "scale_up": cluster.node.scale_up,
        "num_curves": len(cluster.curves),
        "calibrated": cluster.calibrated,
    }


def _curve(cluster: Cluster, key: CurveKey) -> dict[str, Any]:
    table = cluster.curves[key]
    return {
        **asdict(key),
        "num_points": len(table.size_bytes),
        "smallest_bytes": table.size_bytes[0],
        "largest_bytes": table.size_bytes[-1],
        **asdict(table.source),
    }


def _rows(cluster: Cluster) -> Iterator[tuple[str, str, Any, dict[str, str]]]:
    parts: tuple[tuple[str, Any, Sources], ...] = (
        ("device", cluster.device, cluster.device.sources),
        ("node", cluster.node, cluster.node.sources),
        ("cluster", cluster, cluster.sources),
    )
    skipped = {"name", "sources", "device", "node", "curves", "calibrated", "digest"}
    for part, spec, sources in parts:
        for name, value in _values(spec, "", skipped):
            source = sources.get(name)
            yield (
                part,
                name,
                value,
                ({"layer": source.layer, "reference": source.reference, "trust": source.trust} if source else {}),
            )


def _values(spec: Any, prefix: str, skipped: set[str]) -> Iterator[tuple[str, Any]]:
    for item in fields(spec):
        if item.name in skipped:
            continue
        value = getattr(spec, item.name)
        if is_dataclass(value):
            yield from _values(value, f"{item.name}.", set())
        elif isinstance(value, dict):
            yield from ((f"{prefix}{item.name}.{key}", inner) for key, inner in value.items())
        else:
            yield prefix + item.name, value


def _for_people(name: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value) if len(str(value)) <= 40 else f"{len(value)} entries"
    for suffix, text in (
        ("_bytes_per_s", format_bandwidth),
        ("_bytes", format_bytes),
        ("_hz", lambda x: format_rate(x, "Hz")),
        ("_s", format_time),
    ):
        if name.endswith(suffix) and "flop_per_s" not in name:
            return text(value)
    return format_rate(value, "FLOP/s") if "flop_per_s" in name else f"{value:.3g}"

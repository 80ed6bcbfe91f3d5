"""`overlapsim profiles`: which machines are known, every number with its source, and what a profile lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import click

from overlapsim.cli.output import print_json
from overlapsim.errors import ProfileError, UsageError
from overlapsim.hardware.check import contradictions, gaps
from overlapsim.hardware.levels import levels
from overlapsim.hardware.loading import list_profiles, load_cluster, nearest_cluster, parse_cluster
from overlapsim.hardware.profile import Cluster, CurveKey, Fit, Sources
from overlapsim.hardware.seed import profile_text, seed_profile
from overlapsim.hardware.topo_matrix import read_topo_matrix
from overlapsim.report.files import write_text
from overlapsim.units import format_bandwidth, format_bytes, format_rate, format_time


@click.group("profiles")
def command() -> None:
    """List, show, check and seed hardware profiles."""


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
            f"{row['name']:19} {row['num_devices']:3} x {row['device']:20} {row['scale_up']:12}"
            f" measured curves: {row['num_curves']}, fits: {len(row['fits'])}"
            f"{'' if row['calibrated'] else ', not calibrated'}"
        )


@command.command("show")
@click.argument("cluster")
@click.option("--nodes", type=int, help="Number of nodes, instead of the profile's.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(cluster: str, nodes: int | None, as_json: bool) -> None:
    """Print every number of CLUSTER with its layer, source code and trust (codes: hwprofiles/SOURCES.md)."""
    # A profile that contradicts itself is shown all the same: here one looks for what is wrong.
    machine = load_cluster(cluster, consistent=False)
    machine = machine if nodes is None else machine.with_nodes(nodes)
    if as_json:
        print_json(
            {
                **_summary(machine),
                "sha256": machine.digest,
                "values": [
                    {"part": part, "name": name, "value": value, **source}
                    for part, name, value, source in _rows(machine)
                ],
                "levels": [asdict(level) for level in levels(machine)],
                "curves": [_curve(machine, key) for key in machine.curves],
                "fits": [asdict(fit) for fit in _fits(machine).values()],
                "dropped": machine.dropped,
                "contradictions": contradictions(machine),
            }
        )
        return
    click.echo(f"{machine.name}: {machine.num_devices} x {machine.device.name}, {machine.node.scale_up}")
    for part, name, value, source in _rows(machine):
        if value == ():
            continue
        told = f"{source['layer']}, {source['reference']}, {source['trust']}" if source else "-"
        click.echo(f"  {part:8} {name:34} {_for_people(name, value):>22}  {told}")
    for level in levels(machine):
        click.echo(
            f"  level    {level.name}: groups of {level.ranks}, "
            f"{format_bandwidth(level.bandwidth_bytes_per_s)} a GPU and direction, hop {format_time(level.latency_s)}"
        )
    for name, fit in _fits(machine).items():
        origin = fit.source
        click.echo(f"  fit      {name}: {fit.num_points} points, {origin.layer}, {origin.reference}, {origin.trust}")
    for key in machine.curves:
        curve = _curve(machine, key)
        click.echo(
            f"  curve    {key.collective} over {key.ranks} ranks on {key.nodes} node(s): {curve['num_points']} points, "
            f"{format_bytes(curve['smallest_bytes'])} to {format_bytes(curve['largest_bytes'])}, {curve['reference']}"
        )
    for sentence in machine.dropped:
        click.echo(f"  dropped  {sentence}")
    for problem in contradictions(machine):
        click.echo(f"contradiction: {problem}")


@command.command("seed")
@click.argument("topo", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--device", required=True, help="GPU that is built in: the name or file of a device profile.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="YAML file; stdout without it.")
def seed(topo: Path, device: str, output: Path | None) -> None:
    """Write a cluster profile from TOPO, the output of `nvidia-smi topo -m`, and the nearest bundled machine."""
    if output is not None and output.suffix not in (".yaml", ".yml"):
        raise UsageError(f"output is {str(output)!r}; expected a name that ends in .yaml or .yml")
    try:
        text = topo.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ProfileError(f"{topo.name} is not UTF-8 text; expected the output of nvidia-smi topo -m") from None
    profile, remarks = seed_profile(read_topo_matrix(text, topo.name), nearest_cluster(device), topo.name)
    written = profile_text(profile, remarks)
    # Built before it is written: what is on disk can be used.
    machine = parse_cluster(output.stem if output else "seeded", written)
    if output is None:
        click.echo(written, nl=False)
        return
    write_text(output, written)
    click.echo(f"{output}: {machine.num_devices} x {machine.device.name}, {machine.node.scale_up}")
    for remark in (*remarks, *machine.dropped):
        click.echo(f"note: {remark}")


@command.command("check")
@click.argument("cluster")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(cluster: str, as_json: bool) -> None:
    """Say where CLUSTER contradicts itself (exit code 3) and what each missing table disables."""
    machine = load_cluster(cluster, consistent=False)
    wrong, missing = contradictions(machine), gaps(machine)
    if as_json:
        print_json({"name": machine.name, "contradictions": wrong, "gaps": missing})
    else:
        for label, messages in (("contradiction", wrong), ("gap", missing)):
            for message in messages:
                click.echo(f"{label}: {message}")
        click.echo(f"{machine.name}: {_count(wrong, 'contradiction')}, {_count(missing, 'gap')}")
    if wrong:
        raise click.exceptions.Exit(3)


def _count(found: list[str], what: str) -> str:
    return f"{len(found) or 'no'} {what}{'' if len(found) == 1 else 's'}"


def _summary(cluster: Cluster) -> dict[str, Any]:
    return {
        "name": cluster.name,
        "device": cluster.device.name,
        "num_devices": cluster.num_devices,
        "scale_up": cluster.node.scale_up,
        "fabric": cluster.fabric.name if cluster.fabric else None,
        "num_curves": len(cluster.curves),
        "fits": sorted(_fits(cluster)),
        "calibrated": cluster.calibrated,
    }


def _fits(cluster: Cluster) -> dict[str, Fit]:
    return {**cluster.device.fits, **cluster.fits}


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
        *((("fabric", cluster.fabric, cluster.fabric.sources),) if cluster.fabric else ()),
        ("cluster", cluster, cluster.sources),
    )
    skipped = {"name", "sources", "device", "node", "fabric", "curves", "calibrated", "digest", "fits", "dropped"}
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
        return str(value) if len(str(value)) <= 40 or isinstance(value, str) else f"{len(value)} entries"
    for suffix, text in (
        ("_bytes_per_s", format_bandwidth),
        ("_bytes", format_bytes),
        ("_hz", lambda x: format_rate(x, "Hz")),
        ("_s", format_time),
    ):
        if name.endswith(suffix) and "flop_per_s" not in name:
            return text(value)
    return format_rate(value, "FLOP/s") if "flop_per_s" in name else f"{value:.3g}"

"""`validate doctor`: what can run here, which versions, and what is missing."""

from __future__ import annotations

import click

from overlapsim.cli.output import print_json


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Look at this machine: GPUs, versions, links, CPUs; say what can run and what to do about the rest."""
    from overlapsim.validate.doctor import examine

    found = examine()
    if as_json:
        print_json(found)
        return
    for key, value in found["versions"].items():
        click.echo(f"{key:12} {value}")
    for line in (*found["machine"], *found["gpus"]):
        click.echo(line)
    click.echo("can run:")
    for line in found["can_run"]:
        click.echo(f"  {line}")
    if found["missing"]:
        click.echo("missing:")
        for line in found["missing"]:
            click.echo(f"  {line}")

"""`overlapsim strategies`: what can be planned, what each takes, where it can be switched on."""

from __future__ import annotations

import click
import msgspec

from overlapsim.cli.output import print_json
from overlapsim.strategy.registry import load_strategies, load_strategy


@click.group("strategies")
def command() -> None:
    """List and show overlap strategies."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    """One line a strategy."""
    strategies = load_strategies()
    if as_json:
        entries = [{"name": s.name, "overlaps": s.overlaps, "summary": s.info.summary} for s in strategies]
        print_json(entries)
        return
    width = max(len(s.name) for s in strategies)
    for strategy in strategies:
        click.echo(f"{strategy.name:{width}}  {strategy.info.summary}")


@command.command("show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(name: str, as_json: bool) -> None:
    """Show what strategy NAME hides, costs and needs."""
    strategy = load_strategy(name)
    info = {"name": strategy.name, "overlaps": strategy.overlaps, **msgspec.to_builtins(strategy.info)}
    if as_json:
        print_json(info)
        return
    for key, value in info.items():
        click.echo(f"{key:12} {'; '.join(value) or '-' if isinstance(value, list | tuple) else value}")

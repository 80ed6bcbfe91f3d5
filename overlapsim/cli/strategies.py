"""`overlapsim strategies`: what can be planned, what each takes, where it can be switched on."""

from __future__ import annotations

from typing import Any, Final

import click
import msgspec

from overlapsim.cli.output import console, print_json
from overlapsim.strategy.base import Strategy
from overlapsim.strategy.parameter_words import parameter_example, parameter_words
from overlapsim.strategy.registry import load_strategies, load_strategy


@click.group("strategies")
def command() -> None:
    """List and show overlap strategies."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    """What each strategy takes, hides and costs."""
    strategies = load_strategies()
    if as_json:
        print_json([_entry(strategy) for strategy in strategies])
        return
    from rich.table import Table

    table = Table()
    for column in ("strategy", "takes", "granularity", "hides", "cost"):
        table.add_column(column)
    for strategy in strategies:
        info = strategy.info
        table.add_row(strategy.name, _takes(strategy), info.granularity, info.hides, info.cost)
    console().print(table)


@command.command("show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(name: str, as_json: bool) -> None:
    """Show what strategy NAME hides, costs and needs, and its parameters."""
    strategy = load_strategy(name)
    info = _entry(strategy)
    if as_json:
        print_json(info)
        return
    for key, value in info.items():
        if key != "parameters":
            click.echo(f"{key:12} {'; '.join(value) or '-' if isinstance(value, list | tuple) else value}")
    for number, (name, word) in enumerate(info["parameters"].items()):
        click.echo(f"{'' if number else 'parameters':12} {name}: {word}")
    example = parameter_example(strategy.parameter_type)
    where = "step" if strategy.scope == "graph" else "OPERATOR"
    if example or strategy.scope == "graph":
        click.echo(f"{'example':12} simulate --overlap {where}={':'.join(filter(None, (strategy.name, example)))}")


def _entry(strategy: Strategy) -> dict[str, Any]:
    facts = {"name": strategy.name, "overlaps": strategy.overlaps, "takes": _takes(strategy)}
    together = {"traits": sorted(strategy.traits), "needs": list(strategy.needs), "excludes": sorted(strategy.excludes)}
    parameters = {"parameters": parameter_words(strategy.parameter_type)}
    info = msgspec.to_builtins(strategy.info)
    del info["takes"]
    return {**facts, **info, **together, **parameters}


_PLACES: Final = {
    "after": "GEMM, then collective",
    "before": "all_gather, then GEMM",
    "independent": "independent pair",
}


def _takes(strategy: Strategy) -> str:
    if strategy.scope == "graph":
        return "a whole graph"
    if not strategy.overlaps:
        return "anything"
    if strategy.info.takes:
        return strategy.info.takes
    return "; ".join(_PLACES[relation] for relation in strategy.relations)

"""What a plan says and a framework of the torch family cannot be told: sentences that several emitters share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from overlapsim.emit.base import Subject
from overlapsim.units import format_parameter


def strategies_left(subject: Subject, title: str, taken: Collection[str]) -> Iterator[str]:
    """One sentence for each strategy of operators that the framework has no kernel for.

    Parameters
    ----------
    subject : whose operators are looked at
    title : of the framework
    taken : strategies that it is told of
    """
    by_strategy: dict[str, list[str]] = {}
    for op in subject.entry.operators:
        if op.strategy not in taken:
            by_strategy.setdefault(op.strategy, []).append(f"{op.operator} {op.pass_}")
    for strategy, names in by_strategy.items():
        yield f"{title} has no {strategy}; the plan's time counts on it for {', '.join(names)}"


def arranging_left(subject: Subject, title: str, taken: Collection[str]) -> Iterator[str]:
    """One sentence for each strategy of whole graphs that the framework has no setting for."""
    for name, parameters in subject.settings.arranging:
        if name not in taken:
            yield f"{title} has no setting for {name}{_said(parameters)}"


def recipe_left(subject: Subject, title: str, dispatchers: Collection[str]) -> Iterator[str]:
    """Sentences on how a plan moves tokens and narrows what it sends, where the framework is not told.

    Parameters
    ----------
    dispatchers : ways to experts that the framework is told of
    """
    settings = subject.settings
    if subject.layout.ep > 1 and settings.dispatcher not in dispatchers:
        yield f"{title} has no setting for dispatch by {settings.dispatcher}; the plan's time counts on it"
    if settings.dispatch_dtype:
        yield f"{title} has no setting for tokens that reach their experts in {settings.dispatch_dtype}"
    for name in settings.compress:
        yield f"{title} has no setting for {name}; the plan's time counts on it"


def order_left(subject: Subject, title: str, order: tuple[str, ...]) -> Iterator[str]:
    """A sentence where the framework fills the ranks in another order than the plan.

    Parameters
    ----------
    order : degrees, the fastest first, as the framework fills them
    """
    layout = subject.layout
    sizes = {"tp": layout.tp, "sp": layout.sp, "cp": layout.cp, "ep": layout.ep, "dp": layout.dp, "pp": layout.pp}
    planned = [name for name in subject.settings.rank_order if sizes[name] > 1 and name in order]
    given = [name for name in order if sizes[name] > 1]
    if planned != given:
        yield f"{title} fills ranks in the order {'-'.join(given)}; the plan has {'-'.join(planned)}"


def host_left(subject: Subject, title: str, graphs: bool) -> Iterator[str]:
    """A sentence where the plan counts on CUDA graphs and the framework launches kernel by kernel."""
    if subject.step.inputs.stack == "graph" and not graphs:
        yield (
            f"{title} launches kernel by kernel here; the plan counts no host time (a CUDA graph): plan with "
            "--stack eager or compiled for what the host costs"
        )


def recompute_left(subject: Subject, title: str, what: str) -> Iterator[str]:
    """Sentences on what is rebuilt and the framework rebuilds otherwise.

    Parameters
    ----------
    what : that the framework's selective form rebuilds
    """
    settings = subject.settings
    if settings.recompute == "selective":
        modules = ", ".join(settings.recompute_modules)
        yield f"{title} rebuilds {what} where it is selective; the plan rebuilds {modules}"
    elif settings.recompute == "full" and (settings.recompute_method == "block" or settings.recompute_layers != 1):
        yield (
            f"{title} keeps the input of every layer; the plan keeps them by {settings.recompute_method} with "
            f"{settings.recompute_layers} layers"
        )


def _said(parameters: Mapping[str, Any]) -> str:
    return f" ({', '.join(format_parameter(key, value) for key, value in parameters.items())})" if parameters else ""

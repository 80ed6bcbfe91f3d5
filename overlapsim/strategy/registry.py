"""Where strategies are found: the folders of ``strategies/`` and the entry points of installed packages."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Final

from overlapsim.errors import StrategyError
from overlapsim.strategy.base import Scope, Strategy

GROUP: Final = "overlapsim.strategies"
"""Entry-point group of third parties, and the package whose folders are the bundled strategies."""


def strategy_names() -> tuple[str, ...]:
    """Names of all strategies that can be loaded, sorted."""
    return tuple(sorted(_offers()))


def _offers() -> dict[str, set[str]]:
    """``module:attribute`` of every strategy on offer, by name: a folder with a ``strategy.py``, or an entry point."""
    offers: dict[str, set[str]] = {}
    for folder in pkgutil.iter_modules(importlib.import_module(GROUP).__path__):
        if folder.ispkg:
            offers.setdefault(folder.name, set()).add(f"{GROUP}.{folder.name}.strategy:STRATEGY")
    for point in entry_points(group=GROUP):
        offers.setdefault(point.name, set()).add(point.value)
    return offers


def load_strategy(name: str) -> Strategy:
    """Load one strategy by its entry-point name.

    Raises
    ------
    StrategyError
        If no such strategy exists, two packages offer the name, or what is offered is not a strategy.
    """
    return _load(name, _offers())


def _load(name: str, offers: Mapping[str, set[str]]) -> Strategy:
    if name not in offers:
        near = difflib.get_close_matches(name, offers, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise StrategyError(f"strategy {name!r} is unknown; {hint}known strategies: {', '.join(sorted(offers))}")
    if len(offers[name]) > 1:
        raise StrategyError(
            f"strategy {name!r} is offered by {' and '.join(sorted(offers[name]))}; uninstall or rename one of them"
        )
    (value,) = offers[name]
    module, _, attribute = value.partition(":")
    try:
        strategy = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise StrategyError(f"strategy {name!r} ({value}) cannot be loaded: {error}; fix or uninstall it") from error
    if not isinstance(strategy, Strategy):
        raise StrategyError(
            f"strategy {name!r} ({value}) is a {type(strategy).__name__}; expected an instance of Strategy"
        )
    return strategy


def load_strategies(names: Iterable[str] = (), scope: Scope | None = None) -> tuple[Strategy, ...]:
    """Load the named strategies in the order given, or all of them (of one scope) sorted by name.

    Raises
    ------
    StrategyError
        If one of them is unknown or cannot be loaded.
    """
    # Looking through all installed packages takes longer than planning one operator: once for all names.
    given, offers = tuple(dict.fromkeys(names)), _offers()
    found = [_load(name, offers) for name in given or sorted(offers)]
    return tuple(s for s in found if given or scope in (None, s.scope))

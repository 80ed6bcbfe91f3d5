"""Which runner takes which plan, and what its settings must be; no torch until one is made."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from overlapsim.errors import PlanError

if TYPE_CHECKING:
    from overlapsim.validate.numerics import Problem
    from overlapsim.validate.plans import RunSpec
    from overlapsim.validate.runners.base import Runner


@dataclass(frozen=True)
class Entry:
    """One runner.

    Attributes
    ----------
    make : ``module:function`` that takes a Problem
    collectives : it takes
    check : raises PlanError where the settings do not fit
    """

    make: str
    collectives: tuple[str, ...]
    check: Callable[[RunSpec], None]


def check_settings(spec: RunSpec) -> None:
    """Refuse plans that no runner takes, or whose settings do not fit the output.

    Raises
    ------
    PlanError
        Naming the setting.
    """
    entry = _entry(spec.strategy)
    if spec.collective not in entry.collectives:
        raise PlanError(
            f"the runner of {spec.strategy} takes {', '.join(entry.collectives)}; the plan is for {spec.collective}"
        )
    entry.check(spec)


def make_runner(problem: Problem) -> Runner:
    """Runner of a plan on this rank; imports torch and what the plan needs."""
    module, _, function = _entry(problem.spec.strategy).make.partition(":")
    runner: Runner = getattr(importlib.import_module(module), function)(problem)
    return runner


def _entry(strategy: str) -> Entry:
    if strategy not in RUNNERS:
        raise PlanError(
            f"no runner for strategy {strategy!r}; expected one of {', '.join(RUNNERS)}: plan with --strategy NAME"
        )
    return RUNNERS[strategy]


def _nothing(spec: RunSpec) -> None:
    """Serial execution leaves nothing open."""


def _check_chunks(spec: RunSpec) -> None:
    rows = spec.settings.get("chunk_rows")
    whole = isinstance(rows, list | tuple) and all(type(count) is int and count > 0 for count in rows)
    if not whole or not rows or sum(rows) != spec.m:
        raise PlanError(
            f"chunk_rows in the plan's settings is {str(rows):.80}; expected positive counts that add up to the "
            f"{spec.m} rows: plan again"
        )


def _check_groups(spec: RunSpec) -> None:
    from overlapsim.validate.kernels.config import GemmConfig
    from overlapsim.validate.plans import check_map

    check_map(spec)
    GemmConfig.from_settings(spec.settings)


_AFTER: Final = ("all_reduce", "reduce_scatter", "all_to_all")
_ROOM: Final = "overlapsim.validate.runners"
RUNNERS: Final[Mapping[str, Entry]] = {
    "serial": Entry(f"{_ROOM}.chunked:make_serial", ("all_gather", *_AFTER), _nothing),
    "chunked": Entry(f"{_ROOM}.chunked:make_chunked", ("all_gather", *_AFTER), _check_chunks),
    "wave_group": Entry(f"{_ROOM}.wave_group:make", _AFTER, _check_groups),
}
"""Runners by strategy."""

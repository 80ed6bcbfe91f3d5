"""What a directed case is: a small program, its instants derived by hand, and what else it is to show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from overlapsim.schedule.program import Program
from tests.engine.golden import Builder

NEVER = -1
T12 = 10**12
"""A unit time so long that one bit of a speed moves its end."""


@dataclass(frozen=True)
class Directed:
    """A program and, per task, issued, eligible, resident, start, end; a bare number is an end, all else 0.

    `progress` and `held_sm` are for deadlocks (default: all units, no SM); `speeds` maps a runner to
    its first speed.
    """

    program: Program
    rows: Sequence[int | tuple[int, ...]]
    contention: bool = True
    progress: Sequence[int] | None = None
    held_sm: Sequence[int] | None = None
    speeds: Mapping[int, float] = field(default_factory=dict)

    def instants(self) -> list[list[int]]:
        """Five instants per task."""
        return [[0, 0, 0, 0, row] if isinstance(row, int) else list(row) for row in self.rows]


Make = Callable[[], Directed]


def all_at(start: int, end: int) -> tuple[int, int, int, int, int]:
    """Issued, eligible, resident and started at once."""
    return start, start, start, start, end


def flows(b: Builder, resource: int, demands: Sequence[float], weights: Sequence[float] | None = None) -> None:
    """Add one-chunk FLOWs of T12 ps without SMs, each with a demand on `resource`."""
    for k, demand in enumerate(demands):
        b.F(1, T12, 0, demands={resource: demand}, weight=1.0 if weights is None else weights[k])

"""How far a sweep is and how long it will take, now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from overlapsim.sweep.kinds import OK

EVERY_S: Final = 2.0
QUIET_S: Final = 30.0
"""At most so long without a word, where nothing arrives."""


class Progress:
    """Says how many points are there and about how long the others take, at the rate since the first of this run came.

    Parameters
    ----------
    total, before : points of the sweep, and those found in the results
    tell : takes a line
    clock : seconds; for tests
    """

    def __init__(
        self, total: int, before: int, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._before, self._tell, self._clock = total, before, tell, clock
        self._now = 0
        self._others: Mapping[str, int] = {}
        self._first = (0, 0.0)
        self._told_at = clock()
        self._told = -1
        if before:
            tell(f"{before:,} of {total:,} points are there already")

    def add(self, count: int, statuses: Mapping[str, int]) -> None:
        """Count points that arrived; `statuses` are those of all of this run."""
        self._now += count
        if not self._first[0]:
            # What comes before is the start of the workers.
            self._first = (count, self._clock())
        self._others = {status: number for status, number in statuses.items() if status != OK}

    def tick(self) -> None:
        """Tell, where it is time to."""
        waited = self._clock() - self._told_at
        if waited >= (EVERY_S if self._now != self._told else QUIET_S):
            self._line()

    def end(self) -> None:
        """Tell the last of it."""
        if self._now != self._told:
            self._line()

    def say(self, text: str) -> None:
        """Tell something else, as often as progress that does not move."""
        if self._clock() - self._told_at >= EVERY_S and self._told != self._now:
            self._told, self._told_at = self._now, self._clock()
            self._tell(text)

    def _line(self) -> None:
        self._told, self._told_at = self._now, self._clock()
        left = self._total - self._before - self._now
        parts = [f"{self._before + self._now:,} of {self._total:,} points"]
        parts += [f"{number:,} {status}" for status, number in sorted(self._others.items())]
        since = self._now - self._first[0]
        if left and since:
            parts.append(f"about {format_left((self._told_at - self._first[1]) / since * left)} left")
        self._tell(", ".join(parts))


def format_left(seconds: float) -> str:
    """Time left for people: a few digits, since it is an estimate.

    Examples
    --------
    >>> format_left(7.21), format_left(312), format_left(8000)
    ('7 s', '5 min', '2.2 h')
    """
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

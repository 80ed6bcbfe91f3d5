"""What a plan chosen by predicted times would have cost: regret of the first choice, and of the best of three."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from overlapsim.accuracy.steps_scoring import Timed

LEAST_MEMBERS: Final = 3
"""Measured layouts from which on a group says something about a choice."""
TRIED: Final = 3
"""Plans that are tried on hardware."""
NEAR: Final = 0.03
"""Regret of the best one tried that counts as found."""


@dataclass(frozen=True)
class Choice:
    """How good choices were over groups of one model, machine and batch.

    Attributes
    ----------
    num_groups : with at least `LEAST_MEMBERS` measured layouts
    mean_regret, worst_regret : measured time of the layout predicted fastest, over the fastest measured, minus one
    mean_of_tried : the same for the best of the first `TRIED`
    share_near : groups in which that is at most `NEAR`
    """

    num_groups: int
    mean_regret: float
    worst_regret: float
    mean_of_tried: float
    share_near: float

    def __str__(self) -> str:
        """One line."""
        if not self.num_groups:
            return f"no group has {LEAST_MEMBERS} measured layouts"
        return (
            f"first choice {100 * self.mean_regret:.1f} % above the fastest measured on average (worst "
            f"{100 * self.worst_regret:.1f} %), best of the first {TRIED} {100 * self.mean_of_tried:.1f} %, within "
            f"{100 * NEAR:.0f} % in {100 * self.share_near:.1f} % of {self.num_groups} groups"
        )


def choices(rows: Iterable[Timed]) -> Choice:
    """Take in each menu the layout that is predicted fastest, and the first three.

    Parameters
    ----------
    rows : measured and predicted times; the menu is what a plan is chosen for

    Examples
    --------
    >>> times = ((1.0, 2.0), (1.1, 1.0), (1.5, 3.0), (2.0, 4.0))
    >>> found = choices([Timed(0, measured, predicted) for measured, predicted in times])
    >>> round(found.mean_regret, 3), found.share_near
    (0.1, 1.0)
    """
    firsts, tried = [], []
    for members in _menus(rows).values():
        if len(members) < LEAST_MEMBERS:
            continue
        best = min(row.measured_s for row in members)
        order = sorted(members, key=lambda row: row.predicted_s)
        firsts.append(order[0].measured_s / best - 1)
        tried.append(min(row.measured_s for row in order[:TRIED]) / best - 1)
    count = len(firsts)
    if not count:
        return Choice(0, 0.0, 0.0, 0.0, 0.0)
    near = sum(regret <= NEAR for regret in tried)
    return Choice(count, sum(firsts) / count, max(firsts), sum(tried) / count, near / count)


def choice_notes(rows: Mapping[str, Iterable[Timed]]) -> dict[str, str]:
    """Notes of an accuracy suite: each table apart, and all together."""
    tables = {name: list(entries) for name, entries in rows.items()}
    found = {f"{name}: layout chosen by prediction": str(choices(entries)) for name, entries in tables.items()}
    if len(tables) > 1:
        every = [
            Timed((name, row.menu), row.measured_s, row.predicted_s) for name, part in tables.items() for row in part
        ]
        found["pooled: layout chosen by prediction"] = str(choices(every))
    return found


def _menus(rows: Iterable[Timed]) -> dict[Hashable, list[Timed]]:
    menus: dict[Hashable, list[Timed]] = defaultdict(list)
    for row in rows:
        menus[row.menu].append(row)
    return menus

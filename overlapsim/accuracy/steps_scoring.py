"""Statistics of measured steps beside the groups' own: order within menus, cells, bias and spread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

ORDER_GAP: Final = 0.05
"""Measured times that differ by more count as a pair to be ordered."""
TAU_GAP: Final = 0.03


@dataclass(frozen=True)
class Timed:
    """One row: the menu it belongs to, and both times."""

    menu: Hashable
    measured_s: float
    predicted_s: float


def ordered(rows: Iterable[Timed], gap: float = ORDER_GAP) -> tuple[int, int]:
    """Pairs of one menu whose measured times differ by more than `gap`: how many are ordered right, and all.

    Examples
    --------
    >>> ordered([Timed(0, 1.0, 2.0), Timed(0, 1.2, 1.0), Timed(0, 1.5, 3.0), Timed(1, 9.0, 1.0)])
    (2, 3)
    """
    right = total = 0
    for members in _menus(rows).values():
        for a, b in combinations(members, 2):
            low, high = sorted((a, b), key=lambda row: row.measured_s)
            if high.measured_s > (1 + gap) * low.measured_s:
                total += 1
                right += high.predicted_s > low.predicted_s
    return right, total


def kendall_tau(rows: Iterable[Timed], gap: float = TAU_GAP) -> dict[Hashable, float]:
    """Kendall's tau of each menu, over pairs more than `gap` apart; menus without such a pair are left out."""
    found = {}
    for menu, members in _menus(rows).items():
        right, total = ordered(members, gap)
        if total:
            found[menu] = (2 * right - total) / total
    return found


def _menus(rows: Iterable[Timed]) -> dict[Hashable, list[Timed]]:
    menus: dict[Hashable, list[Timed]] = defaultdict(list)
    for row in rows:
        menus[row.menu].append(row)
    return menus


def by_cell(cells: Sequence[Hashable], errors: Sequence[float]) -> tuple[float, float]:
    """Median and mean over cells of each cell's mean absolute error.

    Examples
    --------
    >>> by_cell(["a", "a", "b"], [0.1, -0.3, 0.4])
    (0.3, 0.3)
    """
    inside: dict[Hashable, list[float]] = defaultdict(list)
    for cell, error in zip(cells, errors, strict=True):
        inside[cell].append(abs(error))
    means = [float(np.mean(values)) for values in inside.values()]
    return round(float(np.median(means)), 6), round(float(np.mean(means)), 6)


def summary(errors: Sequence[float]) -> str:
    """Bias, median, mean, 75th and 95th percentile of errors, and how many lie within 8 and 10 %, for people."""
    if not len(errors):
        return "no rows"
    size = np.abs(errors)
    quantiles = ", ".join(f"p{100 * q:.0f} {100 * np.quantile(size, q):.1f}" for q in (0.75, 0.95))
    return (
        f"{len(size)} rows: bias {100 * np.median(errors):+.1f}, median {100 * np.median(size):.1f}, mean "
        f"{100 * size.mean():.1f}, {quantiles} %; {100 * np.mean(size <= 0.08):.0f} % within 8 %, "
        f"{100 * np.mean(size <= 0.10):.0f} % within 10 %"
    )


def common_bias(errors: Sequence[float]) -> tuple[float, float, float]:
    """Median error, and what is left when all predictions are divided by it: median and largest.

    Examples
    --------
    >>> common_bias([-0.10, -0.05, 0.0])
    (-0.05, 0.052632, 0.052632)
    """
    bias = float(np.median(errors))
    left = np.abs((1 + np.asarray(errors)) / (1 + bias) - 1)
    return round(bias, 6), round(float(np.median(left)), 6), round(float(left.max()), 6)

"""Regimes of size and time, errors in each, and whether they are small enough: never one figure over all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

KIB: Final = 1024.0
SIZE_REGIMES: Final = (("below 64 KiB", 64 * KIB), ("64 KiB to 64 MiB", 64 * KIB**2), ("from 64 MiB", float("inf")))
TIME_REGIMES: Final = (("below 20 us", 20e-6), ("20 us to 200 us", 200e-6), ("from 200 us", float("inf")))
# Public tables interpolated from every second point: 2 to 4 % at the median, 12 % at the 90th percentile.
MAX_BIAS: Final = 0.15
MAX_MEDIAN: Final = 0.15
MAX_P90: Final = 0.50


@dataclass(frozen=True)
class RegimeError:
    """Errors (predicted over measured, minus one) of held-out points of one regime.

    Attributes
    ----------
    name : of the regime
    num_points : held-out points
    median_signed, median_abs, p90_abs : fractions
    accepted : all three within their limits (15 %, 15 %, 50 %)
    """

    name: str
    num_points: int
    median_signed: float
    median_abs: float
    p90_abs: float
    accepted: bool


def regime_of(values: FloatArray, regimes: Sequence[tuple[str, float]]) -> list[str]:
    """Name of the regime of each value.

    Examples
    --------
    >>> regime_of(np.array([1e3, 1e6, 1e9]), SIZE_REGIMES)
    ['below 64 KiB', '64 KiB to 64 MiB', 'from 64 MiB']
    """
    limits = [limit for _, limit in regimes]
    return [regimes[int(place)][0] for place in np.searchsorted(limits, values, side="right")]


def judge(
    errors: FloatArray, values: FloatArray, regimes: Sequence[tuple[str, float]] = SIZE_REGIMES
) -> tuple[RegimeError, ...]:
    """Errors by regime, each judged alone: a slow half and a fast half do not cancel.

    Examples
    --------
    >>> judged = judge(np.array([0.3, 0.3, -0.3, -0.3]), np.array([1e3, 2e3, 1e9, 2e9]))
    >>> [(regime.name, regime.median_signed, regime.accepted) for regime in judged]
    [('below 64 KiB', 0.3, False), ('from 64 MiB', -0.3, False)]
    """
    names = regime_of(values, regimes)
    judged = []
    for name, _ in regimes:
        mine = errors[[label == name for label in names]]
        if mine.size:
            signed, size = float(np.median(mine)), np.abs(mine)
            median, p90 = float(np.median(size)), float(np.quantile(size, 0.9))
            within = abs(signed) <= MAX_BIAS and median <= MAX_MEDIAN and p90 <= MAX_P90
            judged.append(RegimeError(name, int(mine.size), signed, median, p90, within))
    return tuple(judged)


def told(errors: Iterable[RegimeError]) -> str:
    """The regimes that were not accepted, for a message."""
    return "; ".join(
        f"{regime.name}: bias {regime.median_signed:+.0%}, median {regime.median_abs:.0%}, p90 {regime.p90_abs:.0%} "
        f"over {regime.num_points} held-out points"
        for regime in errors
        if not regime.accepted
    )

"""How much slower things run beside others: what is left of concurrent records over the solo price."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from overlapsim.calibration.records import Record


@dataclass(frozen=True)
class Slowdown:
    """Measured beside something over the solo price on the SMs that were left.

    Attributes
    ----------
    kind, op, concurrent : what ran, beside what
    num_points : records
    median, low, high : of the ratio; low and high hold the central 90 %
    """

    kind: str
    op: str
    concurrent: str
    num_points: int
    median: float
    low: float
    high: float

    @property
    def key(self) -> str:
        """Name of its fit, such as ``gemm_beside_all_reduce``."""
        return re.sub(r"[^a-z0-9_]+", "_", f"{self.op}_beside_{self.concurrent}".lower()).strip("_")


def fit_contention(records: Iterable[Record], solo_seconds: Callable[[Record], float | None]) -> tuple[Slowdown, ...]:
    """Slow-down by what ran beside what.

    Parameters
    ----------
    records : all; those that ran alone, or are not valid, are passed over
    solo_seconds : price of a record's work alone on the SMs that were left to it; None if it has none

    Returns
    -------
    tuple of Slowdown
        By name: the median of the ratio, which one stalled run cannot move, and its central 90 %.
    """
    ratios: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for record in records:
        if record.alone or not record.valid:
            continue
        solo = solo_seconds(record)
        if solo is not None:
            ratios[record.kind, record.op, record.concurrent].append(record.median_s / solo)
    found = []
    for (kind, op, concurrent), values in sorted(ratios.items()):
        low, median, high = (float(value) for value in np.exp(np.quantile(np.log(values), (0.05, 0.5, 0.95))))
        found.append(Slowdown(kind, op, concurrent, len(values), median, low, high))
    return tuple(found)

"""Collective times read out of series measurements: GEMM then collective, with and without another collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from overlapsim.cost.curve import Curve
from overlapsim.errors import CalibrationError


@dataclass(frozen=True)
class SeriesRow:
    """One measured series: a vendor GEMM, then a collective on its output.

    Attributes
    ----------
    m, n, k : the GEMM on one rank
    kind, ranks : the collective
    series_s : measured time of both
    """

    m: int
    n: int
    k: int
    kind: str
    ranks: int
    series_s: float

    @property
    def shape(self) -> tuple[int, int, int]:
        """The GEMM."""
        return self.m, self.n, self.k

    @property
    def size_bytes(self) -> float:
        """Bytes of the fp16 output."""
        return 2.0 * self.m * self.n


def vendor_times(rows: Iterable[SeriesRow], curve: Curve, kind: str, ranks: int) -> dict[tuple[int, int, int], float]:
    """Vendor GEMM time of every shape that was measured with the one collective whose curve is known.

    Repeats of a shape are averaged.

    Raises
    ------
    CalibrationError
        If a series is shorter than its collective.
    """
    times = defaultdict(list)
    for row in rows:
        if (row.kind, row.ranks) == (kind, ranks):
            times[row.shape].append(row.series_s - float(curve.seconds(row.size_bytes)))
    if any(min(values) <= 0 for values in times.values()):
        raise CalibrationError("a series is shorter than its collective on the given curve; check units and curve")
    return {shape: float(np.mean(values)) for shape, values in times.items()}


def curve_ratios(
    rows: Iterable[SeriesRow], vendor_s: Mapping[tuple[int, int, int], float], curve: Curve
) -> dict[tuple[str, int], float]:
    """Time of every other collective over the known curve's at the same size: the median over shapes.

    On the published rows the ratio hardly depends on size (2 to 5 % apart
    from 128 to 512 MiB), so one number carries a curve over.
    """
    ratios = defaultdict(list)
    for row in rows:
        if row.shape in vendor_s:
            other_s = row.series_s - vendor_s[row.shape]
            ratios[row.kind, row.ranks].append(other_s / float(curve.seconds(row.size_bytes)))
    return {key: float(np.median(values)) for key, values in ratios.items()}


@dataclass(frozen=True)
class RoutedRows:
    """GEMM rows of the slowest rank behind an all_to_all, from two series that differ in K only.

    Attributes
    ----------
    rows : rows of the GEMM
    collective_s : what is left of the series for the all_to_all
    """

    rows: int
    collective_s: float


def routed_rows(short: SeriesRow, long: SeriesRow, wave_s: Mapping[int, float], wave_elements: float) -> RoutedRows:
    """Solve two series for the rows that explain them.

    ``series(K) = waves * wave_s[K] + collective``: the difference of two K
    gives the waves, and with elements per wave the rows.

    Parameters
    ----------
    short, long : the same m, n, kind and ranks, two K
    wave_s : vendor time of one wave, by K
    wave_elements : output elements of one wave

    Raises
    ------
    CalibrationError
        If the longer K is not slower.
    """
    waves = (long.series_s - short.series_s) / (wave_s[long.k] - wave_s[short.k])
    if waves <= 0:
        raise CalibrationError(f"K = {long.k} is not slower than K = {short.k}; the series cannot be solved for rows")
    rows = max(1, round(waves * wave_elements / short.n))
    return RoutedRows(rows, short.series_s - waves * wave_s[short.k])

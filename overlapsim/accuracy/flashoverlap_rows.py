"""Rows of the FlashOverlap artifact and what they say without their overlapped columns: GEMM and collective times."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from overlapsim.calibration.series import RoutedRows, SeriesRow, routed_rows, vendor_times
from overlapsim.cost.curve import Curve
from overlapsim.errors import CalibrationError

COLUMNS = ("M", "N", "K", "primitive", "gpu", "baseline")
TILE = (256, 128, 32)
"""Tile of the stored plans; the artifact's other templates are not larger."""
NUM_SMS = 108


@dataclass(frozen=True)
class Measured:
    """One row: the series it starts from, and its overlapped times where they are known (seconds, or None)."""

    series: SeriesRow
    chunked_s: float | None
    wave_group_s: float | None

    @property
    def label(self) -> str:
        """Shape, collective and ranks."""
        s = self.series
        return f"{s.kind}-{s.ranks}-{s.m}x{s.n}x{s.k}"


def read_rows(text: str, name: str) -> list[Measured]:
    """Parse a table in the artifact's format (milliseconds); blank overlapped columns are allowed.

    Raises
    ------
    CalibrationError
        If a column is missing or a value is not a positive number.
    """
    reader = csv.DictReader(io.StringIO(text.lstrip("\ufeff")))
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise CalibrationError(
            f"{name} lacks column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            f"expected {','.join(COLUMNS)},decomposition,flashoverlap"
        )
    rows = []
    for number, row in enumerate(reader, start=2):
        try:
            sizes = [int(row[key]) for key in ("M", "N", "K", "gpu")]
            times = [_ms(row.get(key)) for key in ("baseline", "decomposition", "flashoverlap")]
        except (TypeError, ValueError) as error:
            raise CalibrationError(f"{name} line {number}: {error}; expected whole sizes and times in ms") from None
        if times[0] is None or min(sizes) < 1:
            raise CalibrationError(f"{name} line {number}: a size is below 1 or baseline is blank; both are needed")
        m, n, k, ranks = sizes
        rows.append(Measured(SeriesRow(m, n, k, row["primitive"], ranks, times[0]), times[1], times[2]))
    if not rows:
        raise CalibrationError(f"{name} has no rows; expected at least one below the header")
    return rows


def _ms(text: str | None) -> float | None:
    if text is None or not text.strip():
        return None
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"time {text!r} is not positive")
    return value * 1e-3


@dataclass(frozen=True)
class Parts:
    """GEMM rows and the two times a series is made of."""

    rows: int
    vendor_s: float
    collective_s: float


class Splitter:
    """Splits any series into vendor GEMM and collective, knowing curves and the series of all rows.

    Parameters
    ----------
    known : rows whose series are known (the bundled table, and the one to be scored)
    curves : curve by (collective, ranks)
    """

    def __init__(self, known: Iterable[Measured], curves: Mapping[tuple[str, int], Curve]) -> None:
        self.curves = curves
        self.series = [row.series for row in known]
        vendor = vendor_times(self.series, curves["all_reduce", 2], "all_reduce", 2)
        per_wave: dict[int, list[float]] = {}
        for (m, n, k), seconds in vendor.items():
            per_wave.setdefault(k, []).append(seconds / waves(m, n))
        self.wave_s = {k: float(np.median(values)) for k, values in per_wave.items()}

    def parts(self, row: SeriesRow) -> Parts:
        """Split one series.

        An all_to_all's GEMM has more rows than its tokens (top-k, and the
        slowest rank of an unbalanced routing): they are solved from the two K
        that were measured.

        Raises
        ------
        CalibrationError
            If there is no curve, no second K, or nothing left for one of the parts.
        """
        if row.kind == "all_to_all":
            routed = self.routed(row)
            vendor_s = self.wave_s[row.k] * routed.rows * row.n / wave_elements()
            return self._checked(row, routed.rows, row.series_s - vendor_s)
        curve = self.curves.get((row.kind, row.ranks))
        if curve is None:
            raise CalibrationError(f"no curve of {row.kind} over {row.ranks} ranks; the row cannot be split")
        return self._checked(row, row.m, float(curve.seconds(row.size_bytes)))

    def routed(self, row: SeriesRow) -> RoutedRows:
        """Rows of the slowest rank behind an all_to_all.

        Raises
        ------
        CalibrationError
            If only one K was measured.
        """
        same = [s for s in self.series if (s.m, s.n, s.kind, s.ranks) == (row.m, row.n, row.kind, row.ranks)]
        by_k: dict[int, list[float]] = {}
        for s in same:
            by_k.setdefault(s.k, []).append(s.series_s)
        if len(by_k) < 2:
            raise CalibrationError(f"{row.kind} {row.m}x{row.n} over {row.ranks} ranks has one K; two are needed")
        short, long = (
            SeriesRow(row.m, row.n, k, row.kind, row.ranks, float(np.mean(by_k[k]))) for k in (min(by_k), max(by_k))
        )
        return routed_rows(short, long, self.wave_s, wave_elements())

    def _checked(self, row: SeriesRow, rows: int, collective_s: float) -> Parts:
        if not 0 < collective_s < row.series_s:
            raise CalibrationError(
                f"{row.kind} {row.m}x{row.n}x{row.k} over {row.ranks} ranks: a series of {row.series_s * 1e3:.4g} ms "
                f"leaves {collective_s * 1e3:.4g} ms to the collective; check units"
            )
        return Parts(rows, row.series_s - collective_s, collective_s)


def waves(m: int, n: int) -> int:
    """Waves of an output of m x n on an A800 with the stored plans' tile."""
    return math.ceil(math.ceil(m / TILE[0]) * math.ceil(n / TILE[1]) / NUM_SMS)


def wave_elements() -> float:
    """Output elements of one wave."""
    return float(NUM_SMS * TILE[0] * TILE[1])

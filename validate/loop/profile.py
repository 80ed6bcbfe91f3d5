"""Second stage: records to a calibrated profile, by the library's calibration; contention to overlap constants."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from overlapsim.validate.loop import sizes
from overlapsim.validate.loop.measure import KERNELS, RECORDS

from overlapsim.calibration.fit import Calibration, calibrate
from overlapsim.calibration.fit_contention import Slowdown
from overlapsim.calibration.fit_curve import LEAST_POINTS, CurveFit
from overlapsim.calibration.profile_writer import write_profile
from overlapsim.calibration.records import RecordSet, read_records
from overlapsim.cost.overlap import OverlapSpec
from overlapsim.cost.prices import PriceBook
from overlapsim.errors import CalibrationError
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import Cluster, Source
from overlapsim.workload.operators import GemmOp

BASE: Final = "cpu-gloo8"
PROFILE: Final = "profile"
LEAST_SPEED: Final = 0.02
"""Of a GEMM beside a collective: the model's speeds are above 0."""


@dataclass(frozen=True)
class Machine:
    """What the loop knows of the machine it ran on.

    Attributes
    ----------
    cluster : the calibrated profile, as written and loaded again
    calibration : how it was made
    beside : by collective, speed of a GEMM beside it with the collective at its full speed
    tiles_ratio : the kernel by tiles over the price of its tiles as GEMMs of their own
    """

    cluster: Cluster
    calibration: Calibration
    beside: Mapping[str, float]
    tiles_ratio: float

    def overlap(self, kind: str) -> OverlapSpec:
        """Constants of a GEMM beside a collective.

        A collective holds one of the rank's slots while it moves, and the GEMM keeps the others at ``gemm_speed``:
        together the measured speed. Where that is nearer to undisturbed than to what the slots left can give, the
        collective holds none.
        """
        speed, slots = self.beside[kind], self.cluster.device.num_sms
        left = (slots - 1) / slots
        source = Source("measured", RECORDS, "high")
        if speed > (1 + left) / 2:
            return OverlapSpec(0, 1.0, 0.0, source)
        return OverlapSpec(1, min(1.0, speed / left), 0.0, source)


def calibrate_machine(folder: Path, tell: Callable[[str], None]) -> Machine:
    """Calibrate on the folder's records and write the profile beside them.

    Raises
    ------
    CalibrationError
        If there are no records, nothing of them can be accepted, or contention was not measured.
    """
    content: RecordSet = read_records(folder / RECORDS)
    base = load_cluster(BASE)
    result = calibrate(content.records, base, BASE, header=content.header, findings=content.findings, progress=tell)
    _refuse_gaps(result)
    write_profile(result, folder / PROFILE)
    cluster = load_cluster(str(folder / PROFILE))
    beside = {kind: speed_beside(kind, result.contention) for kind in sizes.KINDS}
    return Machine(cluster, result, beside, _tiles_ratio(folder / KERNELS, cluster))


def _refuse_gaps(result: Calibration) -> None:
    """Stop before predictions that would stand on the base's round constants instead of measurements."""
    missing = [f"curve of {kind}" for kind in sizes.KINDS if not any(_is_curve(curve, kind) for curve in result.curves)]
    if not any(kernel.accepted and kernel.table.name == f"gemm.{sizes.DTYPE}" for kernel in result.kernels):
        missing.append(f"{sizes.DTYPE} GEMMs")
    if missing:
        valid = sum(record.valid for record in result.records)
        found = [finding for curve in result.curves for finding in curve.findings]
        found += [finding for kernel in result.kernels for finding in kernel.findings]
        why = [finding.message for finding in found if finding.code == "not_accepted"]
        raise CalibrationError(
            f"{valid} of {len(result.records)} measurements are valid, too few for: {', '.join(missing)}; run the same "
            "command again when the machine is quiet: what is valid is kept"
            + "".join(f"\n  {reason}" for reason in why)
        )


def _is_curve(curve: CurveFit, kind: str) -> bool:
    return curve.accepted and curve.key.collective == kind and len(curve.points) >= LEAST_POINTS


def speed_beside(kind: str, contention: Sequence[Slowdown]) -> float:
    """Speed of a GEMM beside a collective, all that both lose put on the GEMM.

    Both slow each other: the GEMM runs x times, the collective y times as long. While a collective of solo time c
    moves it takes y c, in which the GEMM does y c / x of its work: the price of hiding it is y c - y c / x, or
    ``u = y (1 - 1 / x)`` of its solo time, and the model's GEMM runs at ``1 - u`` while the collective takes c.

    Raises
    ------
    CalibrationError
        If one of the two was not measured.

    Examples
    --------
    >>> pair = [Slowdown("gemm", "gemm", "all_reduce", 1, 1.5, 1.5, 1.5),
    ...         Slowdown("collective", "all_reduce", "gemm", 1, 2.0, 2.0, 2.0)]
    >>> round(speed_beside("all_reduce", pair), 3)
    0.333
    """
    found = {(entry.op, entry.concurrent): entry.median for entry in contention}
    try:
        gemm, flow = found["gemm", kind], found[kind, "gemm"]
    except KeyError:
        raise CalibrationError(
            f"contention of gemm and {kind} was not measured or is not valid; run the loop again on a quiet machine"
        ) from None
    lost = max(1.0, flow) * (1 - 1 / max(1.0, gemm))
    return float(min(1.0, max(LEAST_SPEED, 1 - lost)))


def tiles_s(prices: PriceBook, m: int, n: int, k: int, dtype: str) -> float:
    """Price of the kernel by tiles: each tile is a GEMM of the vendor's library, edges included."""
    bm, bn, _ = sizes.TILE
    rows = [bm] * (m // bm) + ([m % bm] if m % bm else [])
    columns = [bn] * (n // bn) + ([n % bn] if n % bn else [])
    times = {
        (height, width): prices.vendor_gemm(GemmOp(height, width, k, dtype)).duration_s
        for height in set(rows)
        for width in set(columns)
    }
    return sum(times[height, width] for height in rows for width in columns)


def _tiles_ratio(path: Path, cluster: Cluster) -> float:
    """Measured kernels by tiles over their price, at the median."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content["rows"]
    except (OSError, ValueError, KeyError) as error:
        raise CalibrationError(f"{path} cannot be read: {error}; run the loop's measurement again") from None
    prices = PriceBook(cluster, 2)
    ratios = [row["time_s"] / tiles_s(prices, row["m"], row["n"], row["k"], content["dtype"]) for row in rows]
    return float(np.median(ratios))

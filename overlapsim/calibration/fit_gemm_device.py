"""Everything one bundled GEMM table tells: the fit that ships, what it misses on unseen shapes, and its sisters'."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from overlapsim.calibration.fit_gemm import fit_gemm, predicted, spread_by_regime
from overlapsim.calibration.gemm_splits import splits
from overlapsim.cost.gemm_fitted import GemmRows
from overlapsim.hardware.profile import DeviceSpec, Fit, Source

FloatArray = NDArray[np.float64]

# A sister's times miss by about half as much again as unseen shapes of the same device (B200 and GB200, B300).
SISTER_WIDENING: Final = 1.5


@dataclass(frozen=True)
class TableFits:
    """Fits of one table.

    Attributes
    ----------
    fit : on all rows, with ranges from rows that were not fitted
    parts : fits on the seen rows of each split, by name of the split
    """

    fit: Fit
    parts: Mapping[str, Fit]


def fit_table(
    rows: GemmRows,
    device: DeviceSpec,
    dtype: str,
    *,
    reference: str,
    quantised: bool = False,
    warm: bool = False,
    launch_s: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> TableFits:
    """Fit a table whole and by splits; parameters as `fit_gemm`.

    Parameters
    ----------
    progress : called with a line for people before each fit
    """
    tell = progress or (lambda message: None)

    def fitted(part: GemmRows) -> Fit:
        return fit_gemm(part, device, dtype, reference=reference, quantised=quantised, warm=warm, launch_s=launch_s)

    parts, ratios, where, told = dict[str, Fit](), list[FloatArray](), list[GemmRows](), list[str]()
    for name, (seen, unseen) in splits(rows).items():
        tell(f"{device.name} {dtype}: {name}, {int(seen.sum())} shapes")
        parts[name] = fitted(rows[seen])
        ratio = rows[unseen].time_s / predicted(parts[name], device, rows[unseen], rows[seen])
        error = np.abs(1 / ratio - 1)
        told.append(f"{name} {100 * np.median(error):.1f}/{100 * np.quantile(error, 0.9):.1f}")
        # Sizes far beyond what was fitted are another question than shapes between.
        if name != "large_m":
            ratios.append(ratio)
            where.append(rows[unseen])
    tell(f"{device.name} {dtype}: all {len(rows)} shapes")
    m, k = (np.concatenate([getattr(part, axis) for part in where]) for axis in "mk")
    notes = f"median/p90 error in % on unfitted rows: {', '.join(told)}; ranges from hashed and blocked rows"
    whole = replace(fitted(rows), spread=spread_by_regime(np.concatenate(ratios), m, k), notes=notes)
    return TableFits(whole, parts)


def sister_fit(fit: Fit, owner: DeviceSpec, sister: DeviceSpec) -> Fit:
    """The fit of `owner` taken over by a device of the same family that was not measured.

    Shares of peak and HBM stay, the former by the two profiles' ``gemm_efficiency``; the rates of L2 and of one SM
    stay in bytes/s, for they do not follow HBM; the residuals of the owner's table stay.  So a time is the owner's
    measured one times the ratio of the two models.  Ranges widen by half (in logarithms).
    """
    values = dict(fit.parameters)
    values["compute_efficiency"] = min(
        1.0, values["compute_efficiency"] * sister.kernels.gemm_efficiency / owner.kernels.gemm_efficiency
    )
    spread = {
        name: (math.exp(SISTER_WIDENING * math.log(low)), math.exp(SISTER_WIDENING * math.log(high)))
        for name, (low, high) in fit.spread.items()
    }
    return replace(
        fit,
        parameters=values,
        spread=spread,
        num_points=0,
        source=Source("derived", fit.source.reference, "medium"),
        notes=f"sister: {owner.name}; its parameters, its table times the ratio of the two models; not measured here",
    )

"""From a fit (or a stated prior) to priced operators: regimes, spreads, lower bound and source, in one place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from overlapsim.cost.base import Cost, Demand, Family, Spread, hbm_name, hbm_rate
from overlapsim.errors import StrategyError
from overlapsim.hardware.profile import DeviceSpec, Fit, Source
from overlapsim.plan import Finding

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

FLOOR: Final = "floor"
RAMP: Final = "ramp"
PLATEAU: Final = "plateau"
REGIMES: Final = (FLOOR, RAMP, PLATEAU)
"""Launch-bound, in between, and at the rate of the machine."""
# Share of the launch floor in the time: a half and a twentieth part the three regimes.
FLOOR_SHARE: Final = 0.5
PLATEAU_SHARE: Final = 0.05
# Central 90 % of measured over predicted time without any point of the device: what a fit taken from its sister
# and a form without any fit have been seen to miss (docs/accuracy.md, operators).
PRIOR_SPREAD: Final = (0.6, 1.7)


@dataclass(frozen=True, eq=False)
class Priced:
    """Times of many shapes and how far to trust them; all arrays have one shape.

    Attributes
    ----------
    seconds : time, never below `bound_s`
    low, high : central 90 % of measured over predicted
    bound_s : FLOP over the dense peak, and bytes over the sheet's HBM rate, whichever is longer
    in_range : the shape lies inside what was measured
    fit : the constants used
    """

    seconds: FloatArray
    low: FloatArray
    high: FloatArray
    bound_s: FloatArray
    in_range: BoolArray
    fit: Fit

    @property
    def low_s(self) -> FloatArray:
        """Low end of the 90 % interval; not below the bound."""
        return np.minimum(self.seconds, np.maximum(self.seconds * self.low, self.bound_s))

    @property
    def high_s(self) -> FloatArray:
        """High end of the 90 % interval."""
        return self.seconds * self.high


def find_fit(device: DeviceSpec, family: str, keys: Iterable[str], prior: Fit) -> Fit:
    """First of the device's fits under `family` and these keys, or the stated prior."""
    for key in keys:
        fit = device.fits.get(f"{family}.{key}")
        if fit is not None:
            return fit
    return prior


def is_prior(fit: Fit) -> bool:
    """Whether no point of this very device went into the fit."""
    return fit.num_points == 0


def prior_fit(family: str, key: str, parameters: Mapping[str, float], reference: str, notes: str = "") -> Fit:
    """A fit that nothing was fitted to: a judgement, with the reference where it is explained."""
    return Fit(family, key, dict(parameters), Source("prior", reference, "low"), 0, {}, notes)


def priced(
    fit: Fit, seconds: FloatArray, floor_s: FloatArray | float, bound_s: FloatArray, in_range: BoolArray
) -> Priced:
    """Put times above their bound and give each the spread of its regime.

    Parameters
    ----------
    seconds : model times
    floor_s : the part of them that does not depend on work
    bound_s : see `Priced`
    in_range : inside what the fit saw; a prior has seen nothing, so False then
    """
    seconds, bound_s = np.broadcast_arrays(np.maximum(seconds, bound_s), bound_s)
    regime = regimes(seconds, floor_s)
    ends = {name: fit.spread.get(name, PRIOR_SPREAD) for name in REGIMES}
    low = np.choose(regime, [min(1.0, ends[name][0]) for name in REGIMES])
    high = np.choose(regime, [max(1.0, ends[name][1]) for name in REGIMES])
    inside = np.broadcast_to(in_range & (not is_prior(fit)), seconds.shape)
    return Priced(seconds, low, high, bound_s, inside, fit)


def regimes(seconds: FloatArray, floor_s: FloatArray | float) -> NDArray[np.intp]:
    """Position in `REGIMES` of each time, by how much of it is launch floor.

    Examples
    --------
    >>> regimes(np.array([10e-6, 40e-6, 1e-3]), 6e-6).tolist()
    [0, 1, 2]
    """
    share = np.broadcast_to(floor_s, seconds.shape) / seconds
    return np.where(share >= FLOOR_SHARE, 0, np.where(share >= PLATEAU_SHARE, 1, 2)).astype(np.intp)


def cost_of(result: Priced, device: DeviceSpec, *, sms: int, family: Family, hbm_bytes: float) -> Cost:
    """`Cost` of the only shape in `result`."""
    low, high = float(result.low.reshape(-1)[0]), float(result.high.reshape(-1)[0])
    measured = not is_prior(result.fit) and bool(result.fit.spread)
    return Cost(
        duration_s=float(result.seconds.reshape(-1)[0]),
        sm=sms,
        family=family,
        spread=Spread(low, high, "residual" if measured else "prior"),
        source=result.fit.source,
        demands=(Demand(hbm_name(0), hbm_bytes, hbm_rate(device)),),
        in_range=bool(result.in_range.reshape(-1)[0]),
    )


def fit_findings(device: DeviceSpec, fits: Iterable[Fit]) -> tuple[Finding, ...]:
    """One finding for each fit that no point of this device went into."""
    found = (
        Finding(
            "operator_not_measured",
            f"{fit.family}.{fit.key} of {device.name} is a prior ({fit.source.reference}): no table of this device; "
            "measure it with your own kernels and calibrate",
        )
        for fit in fits
        if is_prior(fit)
    )
    return tuple(dict.fromkeys(found))


def inside(values: FloatArray, fit: Fit, name: str) -> BoolArray:
    """Whether values lie between the fit's parameters ``<name>_low`` and ``<name>_high``; all do where it has none."""
    low, high = fit.parameters.get(f"{name}_low", -np.inf), fit.parameters.get(f"{name}_high", np.inf)
    return (values >= low) & (values <= high)


def checked_sms(sms: int | None, device: DeviceSpec) -> int:
    """SMs that a kernel gets; all of the device's when None.

    Raises
    ------
    StrategyError
        If the device does not have that many.
    """
    if sms is None:
        return device.num_sms
    if not 1 <= sms <= device.num_sms:
        raise StrategyError(f"a kernel is given {sms} SMs; {device.name} has {device.num_sms}: expected 1 to that many")
    return sms

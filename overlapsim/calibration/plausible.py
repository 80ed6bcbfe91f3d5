"""Whether times can be what they say: against what the machine allows, and against a known profile of its kind."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlapsim.errors import CalibrationError
from overlapsim.units import format_time

FloatArray = NDArray[np.float64]

# Timers are coarse and boost clocks pass the sheet's a little.
BOUND_SLACK: Final = 0.95
# A few lucky rows are left out; more, and the file or the base is wrong.
MAX_FAST_SHARE: Final = 0.2
# Misconfigured fabrics are slower than their base by up to 100; units by 1000.
UNIT_SLACK_DECADES: Final = 0.8
# A machine of the base's kind is within a factor of two of it; sizes in KiB are off by ten and more at the end.
KIB_FITS: Final = 0.7
KIB_LEAST_FACTOR: Final = 10.0
_PAIRS: Final = {
    1: "us in a column of ms, or ms in a column of s",
    2: "us in a column of s, or ns in a column of ms",
    3: "ns in a column of s",
    -1: "ms in a column of us, or s in a column of ms",
    -2: "s in a column of us, or ms in a column of ns",
    -3: "s in a column of ns",
}


class Checked(NamedTuple):
    """Which points are faster than the machine allows (left out), and the ratio to the base at the large end."""

    too_fast: NDArray[np.bool_]
    over_base: float


def check_times(
    what: str,
    base_name: str,
    measured_s: FloatArray,
    base_s: FloatArray,
    bound_s: FloatArray,
    size: FloatArray,
    kib_base_s: FloatArray | None = None,
) -> Checked:
    """Compare measured times of one table with the base profile's price and with what no kernel can beat.

    Parameters
    ----------
    what, base_name : of the table and the profile, for messages
    measured_s, base_s, bound_s : times of each point; of the base's model; lower bounds
    size : bytes or FLOP of each point, to tell large ones
    kib_base_s : base prices if the sizes were KiB

    Raises
    ------
    CalibrationError
        If the times are off the base by a factor that only a wrong unit explains (the likely unit is named), or
        more than a fifth of them beat the bound.
    """
    ratio = measured_s / base_s
    large = size >= np.quantile(size, 0.5)
    over = float(np.median(ratio[large]))
    thousands = round(math.log10(over) / 3)
    at = int(np.flatnonzero(large)[0])
    seen = f"{format_time(float(measured_s[at]))} where {base_name} has {format_time(float(base_s[at]))}"
    if kib_base_s is not None and _explains(measured_s / kib_base_s, ratio):
        raise CalibrationError(
            f"{what}: small sizes fit {base_name}, large ones are far slower ({seen}): as if "
            "the sizes were KiB; give bytes"
        )
    if thousands and abs(math.log10(over) - 3 * thousands) < UNIT_SLACK_DECADES:
        likely = _PAIRS[max(-3, min(3, thousands))]
        raise CalibrationError(f"{what}: times are {_factor(over)} ({seen}): likely {likely}; convert the column")
    fast = measured_s < BOUND_SLACK * bound_s
    if fast.sum() > max(1, MAX_FAST_SHARE * fast.size) or fast.all():
        worst = int(np.argmin(measured_s / np.maximum(bound_s, 1e-30)))
        raise CalibrationError(
            f"{what}: {int(fast.sum())} of {fast.size} times are shorter than {base_name} allows "
            f"({format_time(float(measured_s[worst]))} against at least {format_time(float(bound_s[worst]))}): check "
            "the unit of times and sizes, --ranks-per-node, and that --cluster is this machine's kind"
        )
    return Checked(fast, over)


def _explains(other: FloatArray, stated: FloatArray) -> bool:
    """Whether another reading of the sizes fits the base well, and the stated one badly."""
    close, off = (float(np.median(np.abs(np.log(ratio)))) for ratio in (other, stated))
    return close < KIB_FITS and off > 3 * close and float(stated.max()) > KIB_LEAST_FACTOR


def _factor(ratio: float) -> str:
    return f"{ratio:,.0f} times longer than expected" if ratio > 1 else f"{1 / ratio:,.0f} times shorter than expected"

"""What a collective gains by SMs: each feeds so many bytes a second, until the links bind."""

from __future__ import annotations

import math
from typing import Final

from overlapsim.cost.contention import Ranged
from overlapsim.cost.tuner import channel_bytes_per_s
from overlapsim.errors import UsageError
from overlapsim.hardware.profile import DeviceSpec, Source
from overlapsim.plan import Finding

# Kernels differ in what one SM moves by far more than GPUs do (hwprofiles/SOURCES.md, SM-FEED).
LEAST: Final = 4.5e9
MOST: Final = 70e9


def sm_bytes_per_s(device: DeviceSpec) -> Ranged:
    """Bus bytes/s that one SM of a collective moves: the library's limit of a channel, bounded by other kernels.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_device
    >>> sm_bytes_per_s(load_device("h100-sxm5-80gb")).typical / 1e9
    36.7
    """
    return Ranged(
        LEAST,
        channel_bytes_per_s(device.architecture),
        MOST,
        Source("derived", "SM-FEED", "low"),
        "plain loads and stores on an H100 to an all-reduce over symmetric memory",
    )


def fewer_sms_s(bandwidth_s: float, bus_bytes: float, sms: int, full_sms: int, rate_bytes_per_s: float) -> float:
    """Seconds that a collective takes longer on `sms` SMs than on the `full_sms` it was priced on.

    Model: links and SMs combine as ``time^2 = (bytes / links)^2 + (bytes / (SMs x rate))^2``, the form that expert
    dispatch over 12 and 24 SMs shows (`expected.expected_dispatch`); latency does not change. Where the SMs it was
    priced on would not feed what it reaches, they feed just that, and time goes as one over SMs.

    Parameters
    ----------
    bandwidth_s : its time on `full_sms` without latency
    bus_bytes : bytes that its bus bandwidth counts: size times the bus factor of nccl-tests
    sms, full_sms : at least 1; no gain above `full_sms`
    rate_bytes_per_s : of one SM

    Returns
    -------
    float
        0 from `full_sms` up; falls with `sms`.

    Raises
    ------
    UsageError
        If a number of SMs is below 1.

    Examples
    --------
    A collective that 24 SMs bring to 300 GB/s of bus bandwidth takes 1.39 times as long on 8 of 36.7 GB/s each:

    >>> round(1 + fewer_sms_s(1.0, 300e9, 8, 24, 36.7e9), 2)
    1.39
    """
    if sms < 1 or full_sms < 1:
        raise UsageError(f"a collective on {sms} of {full_sms} SMs; expected at least 1")
    if sms >= full_sms or bandwidth_s <= 0:
        return 0.0
    fed_s = min(bus_bytes / rate_bytes_per_s, bandwidth_s * full_sms)
    return math.sqrt(bandwidth_s**2 + fed_s**2 * (sms**-2.0 - full_sms**-2.0)) - bandwidth_s


def feed_finding(device: DeviceSpec, sms: int, full_sms: int) -> Finding:
    """Say that the price on fewer SMs is believed."""
    rate = sm_bytes_per_s(device)
    message = (
        f"the collective on {sms} SMs instead of {full_sms} is priced by {rate.typical / 1e9:.3g} GB/s a SM (kernels "
        f"move {rate.low / 1e9:.3g} to {rate.high / 1e9:.3g}): measure it with NCCL_MAX_CTAS={sms}"
    )
    return Finding("comm_rate_by_sms_assumed", message)

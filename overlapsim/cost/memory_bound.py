"""Time of memory-bound operators: norms, activations, rope, softmax, routing, loss, optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from overlapsim.cost.base import Cost
from overlapsim.cost.priced import Priced, checked_sms, cost_of, find_fit, fit_findings, inside, priced, prior_fit
from overlapsim.hardware.profile import DeviceSpec, Fit
from overlapsim.plan import Finding
from overlapsim.workload.memory_bound import FITTED_LIKE, FloatArray, MemoryOp, memory_bytes, traffic_of

FAMILY: Final = "memory"
PARAMETERS: Final = ("floor_s", "column_s", "hbm_efficiency", "l2_efficiency", "row_s", "norm")
# Footprint over L2 at which half of it still hits, and how sharp the edge is: H100 and A100 norms fall to HBM rate
# between 0.7 and 1.3 of the L2 (hwprofiles/SOURCES.md, VIDUR).
L2_EDGE: Final = 0.9
L2_SHARPNESS: Final = 6.0
# The widest row that published kernels give to one thread block.
WHOLE_ROW: Final = 32768.0
# A kernel on few SMs draws at most this much from each, as tile loads of GEMMs do.
SM_BYTES_PER_CLOCK: Final = 64.0

# For a device or operator without a table: well-written kernels reach 0.80 of the sheet (STREAM figures of A100, H100
# and H200 are 0.79 to 0.94, hwprofiles/SOURCES.md, AZ); a launch takes 2.5 us.
PRIOR: Final[Mapping[str, float]] = {
    "floor_s": 2.5e-6,
    "column_s": 0.2e-9,
    "hbm_efficiency": 0.75,
    "l2_efficiency": 0.95,
    "row_s": 0.0,
    "norm": 2.0,
}


def memory_cost(op: MemoryOp, device: DeviceSpec, *, sms: int | None = None) -> Cost:
    """Time of one memory-bound operator.

    ``(floor^norm + (bytes / rate + row_s rows)^norm)^(1/norm)``: a floor, a ramp and a plateau. The floor is a launch
    and the pass of one thread block over one row, ``floor_s + column_s columns``; the rate goes from
    ``l2_efficiency`` to ``hbm_efficiency`` of the sheet as the bytes outgrow L2. Operators of several kernels pay
    the floor for each. Never below the bytes at the sheet's HBM rate.

    Parameters
    ----------
    op : kind, grid, dtype, pass
    device : HBM, L2 and ``fits`` (family ``memory``, key the operator's kind, ``default`` for all others)
    sms : SMs the kernel gets; all by default. Few SMs cannot draw the whole HBM rate.

    Returns
    -------
    Cost
        Family ``memory``; ``in_range`` is True where the device has a fit of this operator that saw such bytes.

    Raises
    ------
    StrategyError
        If the device has no such number of SMs.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_device
    >>> cost = memory_cost(MemoryOp("rmsnorm", 4096, 8192), load_device("a100-sxm4-80gb"))
    >>> 60e-6 < cost.duration_s < 250e-6
    True
    """
    sms = checked_sms(sms, device)
    result = memory_prices(op.kind, op.rows, op.columns, device, dtype=op.dtype, pass_=op.pass_, topk=op.topk, sms=sms)
    return cost_of(result, device, sms=sms, family="memory", hbm_bytes=op.hbm_bytes)


def memory_seconds(
    kind: str,
    rows: ArrayLike,
    columns: ArrayLike,
    device: DeviceSpec,
    dtype: str = "bf16",
    pass_: str = "fwd",
) -> FloatArray:
    """Times of arrays of shapes of one operator."""
    return memory_prices(kind, rows, columns, device, dtype=dtype, pass_=pass_).seconds


def memory_prices(
    kind: str,
    rows: ArrayLike,
    columns: ArrayLike,
    device: DeviceSpec,
    *,
    dtype: str = "bf16",
    pass_: str = "fwd",
    topk: ArrayLike = 1,
    sms: int | None = None,
    key: str | None = None,
) -> Priced:
    """Times, spreads and bounds of arrays of shapes of one operator.

    Parameters
    ----------
    key : fit of family ``memory`` to use instead of the operator's (another library's kernel)

    Raises
    ------
    WorkloadError
        If the operator or pass is unknown.
    StrategyError
        If the device has no such number of SMs.
    """
    sms = checked_sms(sms, device)
    rows, columns = np.asarray(rows, dtype=np.float64), np.asarray(columns, dtype=np.float64)
    size = memory_bytes(kind, rows, columns, dtype, pass_, topk)
    fit = fit_for(kind, pass_, device, key)
    exact = fit.key in (key, kind, f"{kind}_{pass_}")
    kernels = traffic_of(kind, pass_).kernels
    seconds = model_seconds(size, rows, columns, fit.parameters, device, kernels=kernels, sms=sms)
    box = inside(size, fit, "bytes")
    bound_s = size / device.hbm_bandwidth_bytes_per_s
    return priced(fit, seconds, kernels * floor_seconds(columns, fit.parameters), bound_s, box & exact)


def model_seconds(
    size_bytes: FloatArray,
    rows: FloatArray,
    columns: FloatArray,
    parameters: Mapping[str, float],
    device: DeviceSpec,
    *,
    kernels: int = 1,
    sms: int | None = None,
) -> FloatArray:
    """The form of `memory_cost` for given constants; rises with bytes, rows and columns."""
    p = parameters
    sheet = device.hbm_bandwidth_bytes_per_s
    hit = 1 / (1 + (size_bytes / kernels / (L2_EDGE * device.l2_bytes)) ** L2_SHARPNESS)
    # The cache is never slower than memory, whatever a fit says.
    cached = max(p["l2_efficiency"], p["hbm_efficiency"])
    transfer_s = size_bytes / sheet * (hit / cached + (1 - hit) / p["hbm_efficiency"])
    if sms is not None and sms < device.num_sms:
        transfer_s = np.maximum(transfer_s, size_bytes / (sms * SM_BYTES_PER_CLOCK * device.boost_clock_hz))
    work_s = transfer_s + p["row_s"] * rows
    floor_s = kernels * floor_seconds(columns, p)
    total: FloatArray = (floor_s ** p["norm"] + work_s ** p["norm"]) ** (1 / p["norm"])
    return total


def floor_seconds(columns: FloatArray, parameters: Mapping[str, float]) -> FloatArray:
    """Launch of one kernel, and the pass of one thread block over a row of so many columns.

    Rows beyond ``WHOLE_ROW`` are cut among blocks by every library and cost no more.
    """
    floor: FloatArray = parameters["floor_s"] + parameters["column_s"] * np.minimum(columns, WHOLE_ROW)
    return floor


def fit_for(kind: str, pass_: str, device: DeviceSpec, key: str | None = None) -> Fit:
    """Constants for an operator: its own fit, that of its like, the device's ``default``, or the stated prior."""
    like = FITTED_LIKE.get(kind, kind)
    keys = (key,) if key is not None else (f"{kind}_{pass_}", kind, like, "default")
    return find_fit(device, FAMILY, keys, prior_fit(FAMILY, kind, PRIOR, "PRIOR-MEMORY"))


def memory_findings(op: MemoryOp, device: DeviceSpec) -> tuple[Finding, ...]:
    """What is believed and not measured about this operator on this device."""
    return fit_findings(device, [fit_for(op.kind, op.pass_, device)])

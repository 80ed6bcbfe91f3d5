"""Attention time: flash kernels in prefill, decode and backward, and attention built from batched GEMMs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from overlapsim.cost.base import Cost
from overlapsim.cost.priced import Priced, checked_sms, cost_of, find_fit, fit_findings, inside, priced, prior_fit
from overlapsim.errors import UsageError
from overlapsim.hardware.profile import DeviceSpec, Fit
from overlapsim.plan import Finding
from overlapsim.workload.attention import AttentionOp, AttentionShapes, FloatArray

FAMILY: Final = "attention"
PREFILL_PARAMETERS: Final = (
    "floor_s",
    "tensor_efficiency",
    "narrow_efficiency",
    "broad_efficiency",
    "diagonal",
    "narrow_diagonal",
    "hbm_efficiency",
    "kv_traffic",
    "token_s",
    "path",
)
DECODE_PARAMETERS: Final = ("floor_s", "tensor_efficiency", "hbm_efficiency", "group_rows", "norm")
# Rows of queries that one CTA of a prefill kernel takes.
TILE_ROWS: Final = 128.0
# Head dimensions of the three efficiencies of a prefill fit; interpolated in the logarithm of the dimension.
DIMS: Final = (64.0, 128.0, 256.0)

# Judgements for a device without any table, near the middle of the fits of five devices (hwprofiles/SOURCES.md,
# FIT-ATTENTION): shares of the sheet's rates, so that they follow the device.
PREFILL_PRIOR: Final[Mapping[str, float]] = {
    "floor_s": 9e-6,
    "tensor_efficiency": 0.62,
    "narrow_efficiency": 0.47,
    "broad_efficiency": 0.6,
    "diagonal": 100.0,
    "narrow_diagonal": 300.0,
    "hbm_efficiency": 0.6,
    "kv_traffic": 2.5,
    "token_s": 0.8e-9,
    "path": 0.3,
}
DECODE_PRIOR: Final[Mapping[str, float]] = {
    "floor_s": 22e-6,
    "tensor_efficiency": 0.45,
    "hbm_efficiency": 0.9,
    "group_rows": 8.0,
    "norm": 2.5,
}
# Backward FLOP/s over forward FLOP/s of flash kernels: 330 of 450 TFLOP/s in published H100 training, 0.66 to 1.0 on
# the B200 rows of SIMUMAX.
BACKWARD_RATE: Final = 0.75


def attention_cost(op: AttentionOp, device: DeviceSpec, *, sms: int | None = None, key: str | None = None) -> Cost:
    """Time of a fused (flash) attention kernel.

    Prefill: ``floor + token_s tokens + bytes / (hbm_efficiency HBM) + tensor time + path``, where tensor time counts
    visible pairs plus half a diagonal band of tiles at a share of the dense peak, and path is the part of the longest
    CTA that nothing overlaps. Decode: floor plus the norm of reading the cache and of multiplying with query groups
    padded to ``group_rows``. Never below FLOP over the peak and bytes over the sheet's HBM rate.

    Parameters
    ----------
    op : shape, dtypes, pass
    device : peaks, HBM and ``fits``
    sms : SMs the kernel gets; all by default
    key : a fit of family ``attention`` to use instead of the one for the op (another library's kernel)

    Returns
    -------
    Cost
        Family ``attention``; ``in_range`` is True when the shape lies in the box of the fit.

    Raises
    ------
    StrategyError
        If the device has no such number of SMs.
    ProfileError
        If the device has no rate for the dtype.
    UsageError
        If `key` is not one of the device's fits.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_device
    >>> op = AttentionOp(batch=1, q_len=4096, kv_len=4096, heads=32, kv_heads=8, head_dim=128)
    >>> 0.2e-3 < attention_cost(op, load_device("h100-sxm5-80gb")).duration_s < 0.4e-3
    True
    """
    sms = checked_sms(sms, device)
    result = attention_prices(op.shapes, device, dtype=op.dtype, kv_dtype=op.kv_dtype, sms=sms, key=key)
    return cost_of(result, device, sms=sms, family="attention", hbm_bytes=op.hbm_bytes)


def attention_seconds(ops: list[AttentionOp], device: DeviceSpec) -> FloatArray:
    """Times of a list of operators, which may differ in phase and dtype; vectorised over those that share a fit."""
    seconds = np.empty(len(ops))
    groups: dict[tuple[str, ...], list[int]] = {}
    for position, op in enumerate(ops):
        groups.setdefault((*fit_keys(op), op.dtype, op.kv_dtype), []).append(position)
    for members in groups.values():
        first = ops[members[0]]
        shapes = AttentionShapes.of([ops[member] for member in members])
        seconds[members] = attention_prices(shapes, device, dtype=first.dtype, kv_dtype=first.kv_dtype).seconds
    return seconds


def attention_prices(
    shapes: AttentionShapes,
    device: DeviceSpec,
    *,
    dtype: str = "bf16",
    kv_dtype: str = "",
    sms: int | None = None,
    key: str | None = None,
) -> Priced:
    """Times, spreads and bounds of shapes of one phase, dtype and pass.

    Raises
    ------
    UsageError
        If the shapes mix phases (decode, prefill, backward), or `key` is not a fit of the device.
    """
    sms = checked_sms(sms, device)
    fit, exact = _fit(shapes, device, dtype, kv_dtype, key)
    model = decode_seconds if _one(shapes.decode, "decode and prefill") else prefill_seconds
    seconds = model(shapes, fit.parameters, device, dtype, sms)
    box = inside(shapes.kv_len, fit, "length") & inside(shapes.head_dim, fit, "dim")
    return priced(fit, seconds, fit.parameters["floor_s"], lower_bound_s(shapes, device, dtype), box & exact)


def lower_bound_s(shapes: AttentionShapes, device: DeviceSpec, dtype: str = "bf16") -> FloatArray:
    """No kernel is faster: FLOP of visible pairs at the dense peak, operands once at the sheet's HBM rate."""
    return np.maximum(shapes.flop / device.peak(dtype), shapes.hbm_bytes / device.hbm_bandwidth_bytes_per_s)


def prefill_seconds(
    shapes: AttentionShapes, parameters: Mapping[str, float], device: DeviceSpec, dtype: str, sms: int
) -> FloatArray:
    """Model of prefill and backward kernels; see `attention_cost`, parameters `PREFILL_PARAMETERS`.

    ``kv_traffic`` counts keys and values that often: they are also written to the cache and read again by each query
    tile. ``diagonal`` is the width of the tiles that the causal edge cuts, in elements.
    """
    p = parameters
    dims = shapes.head_dim + shapes.value_dim
    efficiency = _by_dim(dims / 2, p["narrow_efficiency"], p["tensor_efficiency"], p["broad_efficiency"])
    diagonal = _by_dim(dims / 2, p["narrow_diagonal"], p["diagonal"], p["diagonal"])
    rate = device.peak(dtype) * efficiency / device.num_sms
    products = shapes.flop / shapes.pairs
    tensor_s = products * (shapes.pairs + shapes.q_len * diagonal / 2) / (rate * sms)
    rows = np.minimum(shapes.q_len, TILE_ROWS)
    path_s = p["path"] * 2 * rows * (shapes.kv_len + diagonal) * dims / rate
    tokens = shapes.batch * shapes.q_len
    traffic = (shapes.q_bytes + p["kv_traffic"] * shapes.kv_bytes) * (shapes.hbm_bytes / _forward_bytes(shapes))
    memory_s = traffic / (device.hbm_bandwidth_bytes_per_s * p["hbm_efficiency"])
    total: FloatArray = p["floor_s"] + p["token_s"] * tokens + memory_s + tensor_s + path_s
    return total


def decode_seconds(
    shapes: AttentionShapes, parameters: Mapping[str, float], device: DeviceSpec, dtype: str, sms: int
) -> FloatArray:
    """Model of decode kernels with split keys; see `attention_cost`, parameters `DECODE_PARAMETERS`.

    The queries that share a key head are multiplied together; fewer than ``group_rows`` cost as many.
    """
    p = parameters
    memory_s = shapes.hbm_bytes / (device.hbm_bandwidth_bytes_per_s * p["hbm_efficiency"])
    rows = shapes.heads / shapes.kv_heads * shapes.q_len
    padded = np.maximum(rows, p["group_rows"]) / rows
    rate = device.peak(dtype) * p["tensor_efficiency"] * sms / device.num_sms
    tensor_s = shapes.flop * padded / rate
    total: FloatArray = p["floor_s"] + (memory_s ** p["norm"] + tensor_s ** p["norm"]) ** (1 / p["norm"])
    return total


def fit_keys(op: AttentionOp) -> tuple[str, ...]:
    """Keys under which a fit for the operator is looked for, best first."""
    return _keys(op.shapes, op.dtype, op.kv_dtype)


def attention_floor_s(op: AttentionOp, device: DeviceSpec) -> float:
    """The part of the operator's time that does not depend on its work: launch, and what a kernel does first."""
    return _fit(op.shapes, device, op.dtype, op.kv_dtype, None)[0].parameters["floor_s"]


def attention_findings(op: AttentionOp, device: DeviceSpec) -> tuple[Finding, ...]:
    """What is believed and not measured about this operator on this device."""
    return fit_findings(device, [_fit(op.shapes, device, op.dtype, op.kv_dtype, None)[0]])


def _keys(shapes: AttentionShapes, dtype: str, kv_dtype: str) -> tuple[str, ...]:
    # fp16 and bf16 run at one rate and move the same bytes.
    name = "bf16" if dtype == "fp16" else dtype
    kv_name = "bf16" if kv_dtype == "fp16" else kv_dtype or name
    if _one(shapes.decode, "decode and prefill"):
        phase = "decode"
        latent = _one(shapes.shared_kv > 0, "shared and separate values")
    else:
        phase = "backward" if _one(shapes.backward > 0, "forward and backward") else "prefill"
        latent = bool(np.all(shapes.head_dim != shapes.value_dim))
    wanted = f"{phase}_mla_{name}" if latent else f"{phase}_{name}"
    if phase == "decode" and kv_name != name:
        wanted = f"{wanted}_kv_{kv_name}"
    # Shares of the sheet's rates travel between kernels of one phase better than a judgement does.
    others = (*([f"{phase}_mla_bf16"] if latent else []), f"{phase}_{name}", f"{phase}_bf16")
    return tuple(dict.fromkeys((wanted, *others)))


def _fit(shapes: AttentionShapes, device: DeviceSpec, dtype: str, kv_dtype: str, key: str | None) -> tuple[Fit, bool]:
    """Return the fit, and whether it is of this very kind of kernel."""
    if key is not None:
        fit = device.fits.get(f"{FAMILY}.{key}")
        if fit is None:
            known = ", ".join(name for name in device.fits if name.startswith(FAMILY + ".")) or "none"
            raise UsageError(f"{device.name} has no fit attention.{key}; it has {known}")
        return fit, True
    keys = _keys(shapes, dtype, kv_dtype)
    prior = _prior(keys[0], device)
    fit = find_fit(device, FAMILY, keys, prior)
    return fit, fit.key == keys[0]


def _prior(key: str, device: DeviceSpec) -> Fit:
    if key.startswith("decode"):
        return prior_fit(FAMILY, key, DECODE_PRIOR, "PRIOR-ATTENTION")
    if key.startswith("backward"):
        forward = find_fit(
            device, FAMILY, [key.replace("backward", "prefill")], prior_fit(FAMILY, key, PREFILL_PRIOR, "")
        )
        slower = {
            name: forward.parameters[name] * BACKWARD_RATE
            for name in ("tensor_efficiency", "narrow_efficiency", "broad_efficiency")
        }
        return prior_fit(FAMILY, key, {**forward.parameters, **slower}, "PRIOR-ATTENTION")
    return prior_fit(FAMILY, key, PREFILL_PRIOR, "PRIOR-ATTENTION")


def _by_dim(dim: FloatArray, narrow: float, wide: float, broad: float) -> FloatArray:
    return np.interp(np.log2(dim), np.log2(DIMS), (narrow, wide, broad))


def _one(values: FloatArray | np.ndarray, what: str) -> bool:
    if len(values) and not (np.all(values) or not np.any(values)):
        raise UsageError(f"shapes mix {what}; price each kind apart")
    return bool(np.all(values)) and len(values) > 0


def _forward_bytes(shapes: AttentionShapes) -> FloatArray:
    return replace(shapes, backward=np.zeros_like(shapes.backward)).hbm_bytes

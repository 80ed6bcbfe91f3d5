"""Attention as separate kernels: batched GEMMs with the scores in memory, softmax and dropout between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from overlapsim.cost.attention import FAMILY
from overlapsim.cost.base import Cost
from overlapsim.cost.memory_bound import memory_cost, memory_prices
from overlapsim.cost.priced import Priced, checked_sms, cost_of, find_fit, priced, prior_fit
from overlapsim.hardware.profile import DeviceSpec, Fit
from overlapsim.workload.attention import AttentionOp, AttentionShapes, FloatArray
from overlapsim.workload.memory_bound import MemoryOp

PARAMETERS: Final = ("tensor_efficiency", "hbm_efficiency", "shorter", "floor_s")
# 180 of 312 TFLOP/s reproduce published training steps on A100, which are insensitive to it; the shorter of compute
# and memory time hides to 70 % behind the longer (hwprofiles/SOURCES.md, OP-BYTES).
PRIOR: Final[Mapping[str, float]] = {
    "tensor_efficiency": 0.577,
    "hbm_efficiency": 0.72,
    "shorter": 0.3,
    "floor_s": 3e-6,
}


def unfused_attention_costs(
    op: AttentionOp,
    device: DeviceSpec,
    *,
    fused_softmax: bool = True,
    dropout: bool = False,
    sms: int | None = None,
) -> dict[str, Cost]:
    """Costs of the kernels that make up attention without a fused kernel, in order of execution.

    Every product computes all pairs, also the masked ones, and moves the scores once and its operands once.

    Parameters
    ----------
    op : the attention; forward two GEMMs, backward four
    device : peaks, HBM and ``fits`` (family ``attention``, key ``unfused_bf16``, where present)
    fused_softmax : scale, mask and softmax in one kernel; five kernels otherwise
    dropout : whether attention probabilities are dropped
    sms : SMs each kernel gets; all by default

    Returns
    -------
    dict of str to Cost
        ``scores``, ``softmax``, ``dropout`` and ``context`` (backward: ``context``, ``scores`` ... in that order);
        the time of attention is their sum.

    Raises
    ------
    StrategyError
        If the device has no such number of SMs.
    """
    sms = checked_sms(sms, device)
    backward = op.pass_ == "bwd"
    rows = op.batch * op.heads * op.q_len
    kind = ("causal_softmax" if op.causal else "softmax") if fused_softmax else "unfused_softmax"
    between = {"softmax": memory_cost(MemoryOp(kind, rows, op.kv_len, op.dtype, op.pass_), device, sms=sms)}
    if dropout:
        between["dropout"] = memory_cost(MemoryOp("dropout", rows, op.kv_len, op.dtype, op.pass_), device, sms=sms)
    shapes = op.shapes
    products = {"scores": shapes.head_dim, "context": shapes.value_dim}
    times = 2 if backward else 1
    gemms = {}
    for name, dim in products.items():
        result = _product(shapes, dim, times, device, op.dtype, sms)
        size = float(_product_bytes(shapes, dim)[0]) * times
        gemms[name] = cost_of(result, device, sms=sms, family="attention", hbm_bytes=size)
    if backward:
        ordered = {"context": gemms["context"], **dict(reversed(between.items())), "scores": gemms["scores"]}
        return ordered
    return {"scores": gemms["scores"], **between, "context": gemms["context"]}


def unfused_prices(shapes: AttentionShapes, device: DeviceSpec, *, dtype: str = "bf16") -> Priced:
    """Times of forward attention without dropout, softmax in one kernel, for arrays of shapes."""
    scores = _product(shapes, shapes.head_dim, 1, device, dtype, device.num_sms)
    context = _product(shapes, shapes.value_dim, 1, device, dtype, device.num_sms)
    rows = shapes.batch * shapes.heads * shapes.q_len
    softmax = memory_prices("softmax", rows, shapes.kv_len, device, dtype=dtype)
    seconds = scores.seconds + softmax.seconds + context.seconds
    bound_s = np.maximum(shapes.flop / device.peak(dtype), shapes.hbm_bytes / device.hbm_bandwidth_bytes_per_s)
    return replace(scores, seconds=seconds, bound_s=bound_s)


def _product(shapes: AttentionShapes, dim: FloatArray, times: int, device: DeviceSpec, dtype: str, sms: int) -> Priced:
    """`times` batched GEMMs of all pairs over `dim`."""
    fit = _fit(device)
    p = fit.parameters
    flop = 2 * shapes.batch * shapes.heads * shapes.q_len * shapes.kv_len * dim
    size = _product_bytes(shapes, dim)
    compute_s = flop / (device.peak(dtype) * p["tensor_efficiency"] * sms / device.num_sms)
    memory_s = size / (device.hbm_bandwidth_bytes_per_s * p["hbm_efficiency"])
    longer, shorter = np.maximum(compute_s, memory_s), np.minimum(compute_s, memory_s)
    seconds = times * (p["floor_s"] + longer + p["shorter"] * shorter)
    bound_s = times * np.maximum(flop / device.peak(dtype), size / device.hbm_bandwidth_bytes_per_s)
    return priced(fit, seconds, times * p["floor_s"], bound_s, np.ones(len(shapes), dtype=bool))


def _product_bytes(shapes: AttentionShapes, dim: FloatArray) -> FloatArray:
    scores = shapes.batch * shapes.heads * shapes.q_len * shapes.kv_len
    operands = shapes.batch * (shapes.q_len * shapes.heads + shapes.kv_len * shapes.kv_heads) * dim
    size: FloatArray = shapes.element_bytes * (scores + operands)
    return size


def _fit(device: DeviceSpec) -> Fit:
    return find_fit(device, FAMILY, ["unfused_bf16"], prior_fit(FAMILY, "unfused_bf16", PRIOR, "OP-BYTES"))

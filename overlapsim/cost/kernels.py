"""Which model prices a kernel that is not a plain GEMM: by the type of its work."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from overlapsim.cost.attention import attention_cost, attention_floor_s
from overlapsim.cost.base import MEASURED, Cost, Demand, Spread, hbm_name, hbm_rate
from overlapsim.cost.grouped import grouped_gemm_cost
from overlapsim.cost.memory_bound import memory_cost
from overlapsim.cost.unfused_attention import unfused_attention_costs
from overlapsim.errors import WorkloadError
from overlapsim.hardware.profile import DeviceSpec, Source
from overlapsim.workload.attention import AttentionOp, FusedAttention, UnfusedAttention
from overlapsim.workload.memory_bound import MemoryOp, traffic_of
from overlapsim.workload.operators import GroupedGemmOp, TimedWork, Work

LOOPED_SHARE: Final = 0.25
"""Host time of a GEMM launched by a library's own loop over one launched by the framework: about 10 us of heuristics
and driver (hwprofiles/SOURCES.md, LAUNCH-CPU) against 40."""


def work_cost(work: Work, device: DeviceSpec) -> Cost:
    """Time of one kernel alone on all SMs of `device`.

    Raises
    ------
    WorkloadError
        If the work is of no type that has a model.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_device
    >>> work_cost(TimedWork(1e-3), load_device("a100-sxm4-80gb")).duration_s
    0.001
    """
    if isinstance(work, AttentionOp):
        return attention_cost(work, device)
    if isinstance(work, UnfusedAttention):
        return _unfused(work, device)
    if isinstance(work, FusedAttention):
        return _fused(work, device)
    if isinstance(work, MemoryOp):
        return memory_cost(work, device)
    if isinstance(work, GroupedGemmOp):
        return grouped_gemm_cost(
            work.rows, work.n, work.k, device, dtype=work.dtype, accumulate=work.accumulate, adds=work.adds
        )
    if isinstance(work, TimedWork):
        demands = (Demand(hbm_name(0), work.hbm_bytes, hbm_rate(device)),) if work.hbm_bytes else ()
        return Cost(work.duration_s, device.num_sms, "gemm", MEASURED, Source("override", "given"), demands)
    raise WorkloadError(
        f"work of type {type(work).__name__} has no model; expected attention, MemoryOp, GroupedGemmOp or TimedWork"
    )


def num_kernels(work: Work) -> int:
    """Launches of one piece of work: unfused chains have several.

    Examples
    --------
    >>> num_kernels(MemoryOp("cross_entropy", 8, 8)), num_kernels(GroupedGemmOp((1, 2), 8, 8))
    (8, 1)
    """
    if isinstance(work, MemoryOp):
        return traffic_of(work.kind, work.pass_).kernels
    if isinstance(work, UnfusedAttention):
        products = 4 if work.op.pass_ == "bwd" else 2
        return products + (1 if work.fused_softmax else 5) + (1 if work.dropout else 0)
    if isinstance(work, GroupedGemmOp) and work.looped:
        return max(1, round(LOOPED_SHARE * sum(1 for count in work.rows if count)))
    return 1


def is_synced(work: Work) -> bool:
    """Whether the host waits for this work's result before it launches anything else.

    Examples
    --------
    >>> is_synced(MemoryOp("gating", 8, 8)), is_synced(MemoryOp("router", 8, 8))
    (True, False)
    """
    return isinstance(work, MemoryOp) and traffic_of(work.kind, work.pass_).synced


def _fused(work: FusedAttention, device: DeviceSpec) -> Cost:
    """One launch for all, then their work: CTAs of one wait for SMs that those of another hold.

    Prompts want tensor cores and decodes want memory, so a kernel made for both could be faster, down to the bound.
    """
    parts = [attention_cost(op, device) for op in work.ops]
    floors = [attention_floor_s(op, device) for op in work.ops]
    work_s = sum(cost.duration_s - floor for cost, floor in zip(parts, floors, strict=True))
    bound_s = max(work.flop / device.peak(work.ops[0].dtype), work.hbm_bytes / device.hbm_bandwidth_bytes_per_s)
    seconds = max(max(floors) + work_s, bound_s)
    longest = max(parts, key=lambda cost: cost.duration_s)
    spread = Spread(min(c.spread.low for c in parts), max(c.spread.high for c in parts), longest.spread.origin)
    return replace(
        longest,
        duration_s=seconds,
        spread=replace(spread, low=max(spread.low, min(1.0, bound_s / seconds))),
        demands=(Demand(hbm_name(0), work.hbm_bytes, hbm_rate(device)),),
        in_range=all(cost.in_range for cost in parts),
    )


def _unfused(work: UnfusedAttention, device: DeviceSpec) -> Cost:
    """The sum of its kernels, with the widest of their spreads."""
    parts = list(
        unfused_attention_costs(work.op, device, fused_softmax=work.fused_softmax, dropout=work.dropout).values()
    )
    longest = max(parts, key=lambda cost: cost.duration_s)
    moved = sum(demand.amount for cost in parts for demand in cost.demands)
    spread = Spread(min(c.spread.low for c in parts), max(c.spread.high for c in parts), longest.spread.origin)
    return replace(
        longest,
        duration_s=sum(cost.duration_s for cost in parts),
        spread=spread,
        demands=(Demand(hbm_name(0), moved, hbm_rate(device)),),
        in_range=all(cost.in_range for cost in parts),
    )

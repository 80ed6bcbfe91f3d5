"""Which model prices a kernel that is not a plain GEMM: by the type of its work."""

from __future__ import annotations

from overlapsim.cost.attention import attention_cost
from overlapsim.cost.base import MEASURED, Cost, Demand, hbm_name, hbm_rate
from overlapsim.cost.grouped import grouped_gemm_cost
from overlapsim.cost.memory_bound import memory_cost
from overlapsim.errors import WorkloadError
from overlapsim.hardware.profile import DeviceSpec, Source
from overlapsim.workload.attention import AttentionOp
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import GroupedGemmOp, TimedWork, Work


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
    if isinstance(work, MemoryOp):
        return memory_cost(work, device)
    if isinstance(work, GroupedGemmOp):
        return grouped_gemm_cost(work.rows, work.n, work.k, device, dtype=work.dtype, accumulate=work.accumulate)
    if isinstance(work, TimedWork):
        demands = (Demand(hbm_name(0), work.hbm_bytes, hbm_rate(device)),) if work.hbm_bytes else ()
        return Cost(work.duration_s, device.num_sms, "gemm", MEASURED, Source("override", "given"), demands)
    raise WorkloadError(
        f"work of type {type(work).__name__} has no model; expected AttentionOp, MemoryOp, GroupedGemmOp or TimedWork"
    )

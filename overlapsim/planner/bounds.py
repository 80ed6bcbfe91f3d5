"""What no strategy can beat: FLOP over peak, compulsory HBM bytes, wire bytes."""

from __future__ import annotations

from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.profile import Cluster
from overlapsim.workload.operators import CollectiveOp, GemmOp, KernelOp, OperatorGraph


def lower_bound_s(graph: OperatorGraph, cluster: Cluster) -> float:
    """Time that the hardware alone forbids to go below.

    The largest of: all FLOP at the dense peak, the compulsory HBM bytes
    (operands read and outputs written once) at the sheet's rate, and the
    bytes that collectives over the same ranks must move over the narrowest
    link they cross.

    Parameters
    ----------
    graph : operators on one rank
    cluster : machine

    Returns
    -------
    float
        Seconds, > 0.
    """
    device = cluster.device
    compute = sum(op.flop / device.peak(op.dtype, op.accumulate) for op in graph.of_type(GemmOp))
    memory: float = sum(op.operand_bytes + op.output_bytes for op in graph.of_type(GemmOp))
    kernels = [op.work for op in graph.of_type(KernelOp)]
    # Kernels multiply in the fastest type that the device has, at best.
    compute += sum(work.flop for work in kernels) / max(device.peak_flop_per_s.values())
    memory += sum(work.hbm_bytes for work in kernels)
    # Collectives over other ranks may cross other links, at the same time.
    wire: dict[int, float] = {}
    for op in graph.of_type(CollectiveOp):
        if op.route is not None:
            # A token that several experts of a node take crosses to it once: fewer bytes than the exchange has.
            continue
        wire[op.ranks] = wire.get(op.ranks, 0.0) + wire_lower_bound_s(cluster, op.ranks, op.kind, op.size_bytes)
    return max(compute, memory / device.hbm_bandwidth_bytes_per_s, *wire.values(), 0.0)

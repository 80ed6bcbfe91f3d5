"""What no strategy can beat: FLOP over peak, compulsory HBM bytes, wire bytes."""

from __future__ import annotations

from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.profile import Cluster
from overlapsim.workload.operators import CollectiveOp, GemmOp, OperatorGraph


def lower_bound_s(graph: OperatorGraph, cluster: Cluster) -> float:
    """Time that the hardware alone forbids to go below.

    The largest of: all FLOP at the dense peak, the compulsory HBM bytes
    (operands read and outputs written once) at the sheet's rate, and the
    bytes every collective must move over the narrowest link it crosses.

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
    memory = sum(op.operand_bytes + op.output_bytes for op in graph.of_type(GemmOp))
    wire = sum(wire_lower_bound_s(cluster, op.ranks, op.kind, op.size_bytes) for op in graph.of_type(CollectiveOp))
    return max(compute, memory / device.hbm_bandwidth_bytes_per_s, wire)

"""What no algorithm can beat: wire time of a collective from what must cross a GPU's and a node's edge."""

from __future__ import annotations

from collections.abc import Sequence

from overlapsim.errors import ProfileError, UsageError
from overlapsim.hardware.profile import Cluster
from overlapsim.hardware.wire import COLLECTIVES, by_node, ring_devices


def wire_lower_bound_s(cluster: Cluster, ranks: int | Sequence[int], collective: str, size_bytes: float) -> float:
    """Smallest time in which the links can move a collective, whatever the algorithm.

    The bytes that must cross one GPU's edge in one direction over the rate of its links, and the same for a node.
    A ring's own bound (`wire.bottleneck`) is no such limit: with switch reduction (NVLS) an H100 node reports
    483 GB/s of bus bandwidth over links of 450, and trees beat a flat ring across nodes
    (hwprofiles/SOURCES.md, NT-P5). An all-reduce must send at least S(n-1)/n twice from each part, or S once where
    switches reduce; the NICs' switches may always reduce, so a node sends at least S.

    Parameters
    ----------
    ranks : int or sequence of int
        As in `wire.ring_wire_bytes`.
    size_bytes : float
        Size as nccl-tests defines it, S.

    Returns
    -------
    float
        Seconds; 0 for one rank.

    Raises
    ------
    UsageError
        If the collective is unknown.
    LayoutError
        If a device is not in the cluster or named twice.
    ProfileError
        If the ranks span nodes that have no NIC.
    """
    if collective not in COLLECTIVES:
        raise UsageError(f"collective {collective!r} is unknown; expected one of {', '.join(COLLECTIVES)}")
    devices = ring_devices(cluster, ranks)
    node, count = cluster.node, len(devices)
    if count == 1:
        return 0.0
    parts = [len(inside) for inside in by_node(cluster, devices).values()]
    nvlink, pcie = node.nvlink_bandwidth_bytes_per_s, node.pcie_bandwidth_bytes_per_s
    if len(parts) == 1:
        # Within one node a library moves the data over NVLink or over PCIe.
        return _edge_bytes(collective, count, 1, size_bytes, reduces=node.switch_reduction) / max(nvlink, pcie)
    if not node.num_nics:
        raise ProfileError(f"node {node.name} has no NIC; give num_nics and nic_bandwidth to span nodes")
    nics = node.num_nics * node.nic_bandwidth_bytes_per_s
    return max(
        _edge_bytes(collective, count, 1, size_bytes, reduces=True) / (nvlink + pcie),
        *(_edge_bytes(collective, count, inside, size_bytes, reduces=True) / nics for inside in parts),
    )


def _edge_bytes(collective: str, count: int, inside: int, size_bytes: float, *, reduces: bool) -> float:
    """Bytes that must cross, in one direction, the edge around `inside` of `count` ranks."""
    outside = count - inside
    if collective == "all_reduce":
        return size_bytes if reduces else 2 * size_bytes * outside / count
    if collective in ("broadcast", "send_recv"):
        return size_bytes
    if collective == "all_to_all":
        return size_bytes * inside * outside / count
    # Gather: a part takes in what the others own; scatter: it gives out what the others will own.
    return size_bytes * outside / count

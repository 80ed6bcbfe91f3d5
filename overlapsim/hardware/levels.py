"""The levels of a cluster, innermost first: what a hierarchical collective crosses, and how fast and how late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from overlapsim.hardware.mesh import islands
from overlapsim.hardware.profile import Cluster, NodeSpec


@dataclass(frozen=True)
class Level:
    """One level of a cluster.

    Attributes
    ----------
    name : ``nvlink`` (an NVLink or xGMI domain), ``pcie_switch``, ``socket``, ``node``, ``rail`` or ``leaf`` (nodes
        below one leaf switch), ``spine``, or ``network`` where the network counts as one switch
    ranks : GPUs of one group at this level; each level's groups are made of whole groups of the one before
    bandwidth_bytes_per_s : per rank and direction, what a rank gets to ranks of other groups of the level before
        when all ranks of the group send at once
    latency_s : one hop of a small message
    links : beginnings of the names in `topology.links` that carry it
    """

    name: str
    ranks: int
    bandwidth_bytes_per_s: float
    latency_s: float
    links: tuple[str, ...]


def levels(cluster: Cluster) -> tuple[Level, ...]:
    """Levels of the cluster in use, innermost first; a level no larger than the one before is left out.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_cluster
    >>> [(level.name, level.ranks) for level in levels(load_cluster("h100-sxm8").with_nodes(64))]
    [('nvlink', 8), ('rail', 256), ('spine', 512)]
    """
    found: list[Level] = []
    for level in (*_inside(cluster.node), *_between(cluster)):
        if level.ranks > (found[-1].ranks if found else 1):
            found.append(level)
    return tuple(found)


def _inside(node: NodeSpec) -> Iterator[Level]:
    if node.scale_up != "pcie":
        domain = min(map(len, islands(node, range(node.num_devices))))
        nvlink = ("nvlink_out", "nvlink_in") if node.scale_up == "nvswitch" else ("nvlink",)
        yield Level("nvlink", domain, node.nvlink_bandwidth_bytes_per_s, node.nvlink_latency_s, nvlink)
    group, socket = max(map(len, node.pcie_groups)), max(map(len, node.numa_groups))
    if node.p2p:
        own = ("pcie_up", "pcie_down")
        yield Level("pcie_switch", group, node.pcie_bandwidth_bytes_per_s, node.pcie_latency_s, own)
    rate, links = _beyond_switch(node)
    yield Level("socket", socket, rate, node.pcie_latency_s, links)
    across = min(rate, node.numa_bandwidth_bytes_per_s / socket)
    yield Level("node", node.num_devices, across, node.pcie_latency_s, (*links, "numa"))


def _beyond_switch(node: NodeSpec) -> tuple[float, tuple[str, ...]]:
    """Rate of each GPU when all leave their PCIe switch at once, and the links that takes."""
    group, socket = max(map(len, node.pcie_groups)), max(map(len, node.numa_groups))
    rate = min(node.pcie_bandwidth_bytes_per_s, node.root_port_bandwidth_bytes_per_s / group)
    links: tuple[str, ...] = ("pcie_up", "root_up", "root_down", "pcie_down")
    if not node.p2p:
        # Staged bytes are written to host memory and read again.
        rate = min(rate, node.host_memory_bandwidth_bytes_per_s / (2 * socket))
        links = (*links, "host_memory")
    return rate, links


def _between(cluster: Cluster) -> Iterator[Level]:
    node, fabric = cluster.node, cluster.fabric
    if cluster.num_nodes == 1 or not node.num_nics:
        return
    inner = node.pcie_bandwidth_bytes_per_s if node.p2p else _beyond_switch(node)[0]
    nic = node.num_nics * node.nic_bandwidth_bytes_per_s / node.num_devices
    rate, latency, links = min(inner, nic), cluster.net_latency_s, ("nic_out", "nic_in")
    if fabric is None or not fabric.nodes_per_leaf:
        yield Level("network", cluster.num_devices, rate, latency, links)
        return
    below = min(fabric.nodes_per_leaf, cluster.num_nodes) * node.num_devices
    yield Level("rail" if fabric.rail_optimised else "leaf", below, rate, latency, links)
    across = min(rate, nic / fabric.spine_oversubscription)
    yield Level("spine", cluster.num_devices, across, latency, (*links, "leaf_up", "leaf_down"))

"""Between nodes: NIC links and whom they serve, leaf switches by rail, and the peer that lends its NIC.

A rail-optimised network joins the i-th NICs of all nodes by leaf switches of their own. Libraries keep to a rail by
handing data for another rail over NVLink to the GPU beside that rail's NIC (NCCL: PXN). Leaf switches appear as links
``leaf_up[p.r] leaf_down[p.r]``, pod p (the nodes below one leaf) and rail r, with the capacity of their uplinks:
traffic between NICs below one leaf does not cross them.
"""

from __future__ import annotations

from collections.abc import Iterator

from overlapsim.errors import ProfileError
from overlapsim.hardware.profile import Cluster, NodeSpec


def num_nic_links(node: NodeSpec) -> int:
    """NIC links of a node: several NICs that serve one GPU, or the same GPUs, count as one link of their joint rate."""
    return len(node.nic_groups) or min(node.num_nics, node.num_devices)


def nic_link_bandwidth_bytes_per_s(node: NodeSpec) -> float:
    """Rate of one NIC link and direction; 0 without NICs."""
    return node.nic_bandwidth_bytes_per_s * node.num_nics / max(num_nic_links(node), 1)


def nic_of(node: NodeSpec, local: int) -> int:
    """NIC link nearest to a node's device: as `nic_groups` says, else devices are dealt to NICs in order.

    Raises
    ------
    ProfileError
        If the node has no NIC.
    """
    if not node.num_nics:
        raise ProfileError(f"node {node.name} has no NIC; give num_nics and nic_bandwidth to span nodes")
    if node.nic_groups:
        return next(nic for nic, group in enumerate(node.nic_groups) if local in group)
    return local * num_nic_links(node) // node.num_devices


def nic_home(node: NodeSpec, nic: int) -> int:
    """The first device that a NIC link serves: the one whose PCIe switch it shares."""
    return min(node.nic_groups[nic]) if node.nic_groups else -(-nic * node.num_devices // num_nic_links(node))


def keeps_rail(cluster: Cluster) -> bool:
    """Whether libraries hand data over NVLink to the GPU beside the receiver's rail."""
    return cluster.fabric is not None and cluster.fabric.rail_optimised and cluster.node.scale_up == "nvswitch"


def pod_of(cluster: Cluster, number: int) -> int:
    """Which nodes below one leaf a node belongs to; 0 if the network counts as one switch."""
    per_leaf = cluster.fabric.nodes_per_leaf if cluster.fabric else 0
    return number // per_leaf if per_leaf else 0


def leaf_of(cluster: Cluster, number: int, nic: int) -> str:
    """Leaf switch of a node's NIC link, ``pod.rail``; empty if the network counts as one switch."""
    if cluster.fabric is None or not cluster.fabric.nodes_per_leaf:
        return ""
    return f"{pod_of(cluster, number)}.{nic if cluster.fabric.rail_optimised else 0}"


def leaf_hop(leaf: str, to_leaf: str) -> tuple[str, ...]:
    """Links between two leaf switches."""
    return () if leaf == to_leaf else (f"leaf_up[{leaf}]", f"leaf_down[{to_leaf}]")


def leaf_links(cluster: Cluster) -> Iterator[tuple[str, float]]:
    """Uplinks of every leaf switch in use, with their rate and direction; none on one node."""
    fabric, node = cluster.fabric, cluster.node
    if fabric is None or not fabric.nodes_per_leaf or not node.num_nics or cluster.num_nodes == 1:
        return
    rails = num_nic_links(node) if fabric.rail_optimised else 1
    below = fabric.nodes_per_leaf * node.num_nics * node.nic_bandwidth_bytes_per_s / rails
    for pod in range(pod_of(cluster, cluster.num_nodes - 1) + 1):
        for rail in range(rails):
            for way in ("up", "down"):
                yield f"leaf_{way}[{pod}.{rail}]", below / fabric.spine_oversubscription

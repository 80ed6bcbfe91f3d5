"""Direct links of an NVLink mesh: who is joined to whom, by how many links, and what way a byte takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from overlapsim.hardware.profile import NodeSpec


def neighbours(node: NodeSpec, local: int) -> dict[int, int]:
    """Links from a node's device to each that it is joined to; empty unless the node is an NVLink mesh.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_node
    >>> neighbours(load_node("mi300x8"), 0)[7]
    1
    """
    if node.scale_up != "nvlink_mesh":
        return {}
    if not node.nvlink_pairs:
        return {peer: 1 for peer in range(node.num_devices) if peer != local}
    ends = ((a, b, links) if a == local else (b, a, links) for a, b, links in node.nvlink_pairs if local in (a, b))
    return {peer: links for _, peer, links in sorted(ends)}


def link_bandwidth_bytes_per_s(node: NodeSpec) -> float:
    """Rate of one link and direction: a GPU's NVLink rate over the links of the GPU that has most."""
    most = max(sum(neighbours(node, local).values()) for local in range(node.num_devices))
    return node.nvlink_bandwidth_bytes_per_s / most


def mesh_path(node: NodeSpec, src: int, dst: int) -> tuple[tuple[int, int], ...]:
    """Hops over NVLink from one device to another: one, or two through the widest common neighbour; else none."""
    here, there = neighbours(node, src), neighbours(node, dst)
    if dst in here:
        return ((src, dst),)
    common = sorted(here.keys() & there.keys(), key=lambda peer: (-min(here[peer], there[peer]), peer))
    return ((src, common[0]), (common[0], dst)) if common else ()


def islands(node: NodeSpec, members: Collection[int]) -> list[list[int]]:
    """Sets of devices that NVLink joins, directly or through others of `members`; a switch joins all."""
    if node.scale_up == "nvswitch":
        return [sorted(members)]
    left, found = set(members), list[list[int]]()
    while left:
        island, edge = set[int](), {min(left)}
        while edge:
            island |= edge
            edge = {peer for local in edge for peer in neighbours(node, local)} & left - island
        left -= island
        found.append(sorted(island))
    return found


def spread(node: NodeSpec, local: int, members: Collection[int]) -> Mapping[int, float]:
    """Shares in which a library spreads a device's ring traffic over its links to `members`."""
    links = {peer: count for peer, count in neighbours(node, local).items() if peer in members}
    return {peer: count / sum(links.values()) for peer, count in links.items()}

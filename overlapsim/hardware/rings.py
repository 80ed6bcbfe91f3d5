"""The library's rings: in which order they visit devices, and what their hops put on each link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from overlapsim.hardware.fabric import nic_of
from overlapsim.hardware.mesh import islands, spread
from overlapsim.hardware.profile import Cluster
from overlapsim.hardware.topology import route

Nodes = Mapping[int, Sequence[int]]


def ring_loads(
    cluster: Cluster, nodes: Nodes, size_bytes: float, without_into: int | None = None
) -> Iterator[tuple[str, float]]:
    """Links and bytes of rings over the devices of `nodes`, each of which sends `size_bytes` to its neighbour.

    There is one ring for each NIC link that the fullest node uses, with an equal share. A ring passes a node's devices
    one after another, starting at another NIC's device than the other rings.

    Parameters
    ----------
    nodes : mapping of int to sequence of int
        Devices of each node that has any, in rising order.
    without_into : int, optional
        Device that nothing is sent to: where a broadcast starts.
    """
    rings = list(_turns(cluster, nodes))
    share = size_bytes / len(rings)
    for src, dst, count in _switched(cluster, nodes, rings, without_into):
        yield f"nvlink_out[{src}]", share * count[0]
        yield f"nvlink_in[{dst}]", share * count[1]
    joined = {number: _is_joined(cluster, devices) for number, devices in nodes.items()}
    for src, dst in _hops(cluster, nodes, rings):
        if dst == without_into:
            continue
        number = src // cluster.node.num_devices
        if joined[number] and number == dst // cluster.node.num_devices:
            yield from ((link, share * part) for link, part in _spread_hop(cluster, nodes[number], src))
        else:
            yield from ((link, share) for link in route(cluster, src, dst))


def _turns(cluster: Cluster, nodes: Nodes) -> Iterator[tuple[int, ...]]:
    """For each ring, at which of its devices each node is entered."""
    if len(nodes) == 1:
        yield (0,)
        return
    starts = [_nic_starts(cluster, devices) for devices in nodes.values()]
    for number in range(max(map(len, starts))):
        yield tuple(start[number % len(start)] for start in starts)


def _nic_starts(cluster: Cluster, devices: Sequence[int]) -> list[int]:
    nics = [nic_of(cluster.node, device % cluster.node.num_devices) for device in devices]
    return [position for position, nic in enumerate(nics) if nic not in nics[:position]]


def _hops(cluster: Cluster, nodes: Nodes, rings: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Hops of all rings, those between two GPUs of one NVSwitch left out."""
    everyone = list(nodes.values())
    for turns in rings:
        for position, (devices, turn) in enumerate(zip(everyone, turns, strict=True)):
            following = (position + 1) % len(everyone)
            if cluster.node.scale_up != "nvswitch":
                visited = [*devices[turn:], *devices[:turn]]
                yield from pairwise(visited)
            if len(everyone) > 1 or cluster.node.scale_up != "nvswitch":
                yield devices[turn - 1], everyone[following][turns[following]]


def _switched(
    cluster: Cluster, nodes: Nodes, rings: Sequence[Sequence[int]], without_into: int | None
) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """How many rings leave and enter each device over its NVSwitch: all but those that leave or enter the node there.

    Counted instead of walked: a rack of 72 has as many rings, each with a hop at every device.
    """
    if cluster.node.scale_up != "nvswitch":
        return
    single = len(nodes) == 1
    for position, devices in enumerate(nodes.values()):
        leave, enter, unsent = Counter[int](), Counter[int](), Counter[int]()
        for turns in rings:
            if not single:
                leave[devices[turns[position] - 1]] += 1
                enter[devices[turns[position]]] += 1
            if without_into in devices and (single or devices[turns[position]] != without_into):
                unsent[devices[devices.index(without_into) - 1]] += 1
        for device in devices:
            skipped = unsent.total() if device == without_into else 0
            counts = (len(rings) - leave[device] - unsent[device], len(rings) - enter[device] - skipped)
            yield device, device, counts


def _is_joined(cluster: Cluster, devices: Sequence[int]) -> bool:
    node = cluster.node
    return node.scale_up == "nvlink_mesh" and len(islands(node, [d % node.num_devices for d in devices])) == 1


def _spread_hop(cluster: Cluster, devices: Sequence[int], src: int) -> Iterator[tuple[str, float]]:
    per_node = cluster.node.num_devices
    first = src - src % per_node
    for peer, part in spread(cluster.node, src - first, [device - first for device in devices]).items():
        yield f"nvlink[{src}>{first + peer}]", part

"""Bytes on each link of a collective as the library's ring (or pairwise exchange) moves them, and the worst link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations, product
from typing import Final, NamedTuple

from overlapsim.errors import LayoutError, UsageError
from overlapsim.hardware.pairs import remote_pairs
from overlapsim.hardware.profile import Cluster
from overlapsim.hardware.rings import ring_loads
from overlapsim.hardware.topology import devices_of, links, route

# Bytes that each rank sends to its neighbour in the ring, over the nccl-tests "size", for n ranks
# (nccl-tests, doc/PERFORMANCE.md): the bus-bandwidth factor. all_to_all goes pairwise instead.
_RING: Final[Mapping[str, Callable[[int], float]]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send_recv": lambda n: 1.0,
}
COLLECTIVES: Final = (*_RING, "all_to_all")

# Reads of a rank's own memory for each byte it sends: where it reduces it also reads the received buffer
# (hwprofiles/SOURCES.md, DERIVED-HBM). An all-reduce reduces in half of its steps.
_READS: Final = defaultdict(lambda: 1.0, {"reduce_scatter": 2.0, "all_reduce": 1.5})


class Bottleneck(NamedTuple):
    """The link that takes longest; `link` is empty and the time 0 if nothing moves."""

    link: str
    time_s: float


def ring_wire_bytes(
    cluster: Cluster, ranks: int | Sequence[int], collective: str, size_bytes: float
) -> dict[str, float]:
    """Bytes that one collective puts on each link, summed over ranks.

    A ring passes the ranks of a node one after another, enters and leaves each node once, and visits devices in
    order of their numbers. Over several nodes the library builds one ring for each NIC link, each leaving through
    another, and gives them equal shares; within an NVLink mesh that joins the ranks it spreads each hop over all links.
    ``all_to_all`` sends 1/n of the size from each rank to each other one. ``broadcast`` starts at the first device;
    ``send_recv`` is nccl-tests' shift: every rank sends `size_bytes` to the next (for one transfer see `route`).

    Parameters
    ----------
    ranks : int or sequence of int
        Number of ranks, placed on consecutive devices, or the devices themselves in any order.
    collective : str
        One of `COLLECTIVES`.
    size_bytes : float
        Size as nccl-tests defines it.

    Returns
    -------
    dict of str to float
        Bytes by link name (`topology`); empty for one rank.

    Raises
    ------
    UsageError
        If the collective is unknown.
    LayoutError
        If a device is not in the cluster or named twice.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_cluster
    >>> ring_wire_bytes(load_cluster("a100-sxm8"), 4, "all_reduce", 1000.0)["nvlink_out[2]"]
    1500.0
    """
    if collective not in COLLECTIVES:
        raise UsageError(f"collective {collective!r} is unknown; expected one of {', '.join(COLLECTIVES)}")
    devices = ring_devices(cluster, ranks)
    loads: dict[str, float] = defaultdict(float)
    if len(devices) == 1:
        return {}
    nodes = by_node(cluster, devices)
    if collective == "all_to_all":
        _load_pairs(cluster, nodes, size_bytes / len(devices), loads)
        return dict(loads)
    start = devices[0] if collective == "broadcast" else None
    for link, size in ring_loads(cluster, nodes, _RING[collective](len(devices)) * size_bytes, start):
        loads[link] += size
    return {link: size for link, size in loads.items() if size}


def hbm_bytes(cluster: Cluster, ranks: int | Sequence[int], collective: str, size_bytes: float) -> dict[str, float]:
    """HBM traffic of a collective by ``hbm[d]``, a stated prior.

    Each byte sent is read once (twice where it is reduced with a received one), each byte received written once:
    3 bytes of HBM traffic per wire byte for reduce-scatter, 2.5 for all-reduce, 2 for the others.

    Raises
    ------
    UsageError, LayoutError
        As `ring_wire_bytes`.
    """
    if collective not in COLLECTIVES:
        raise UsageError(f"collective {collective!r} is unknown; expected one of {', '.join(COLLECTIVES)}")
    devices = ring_devices(cluster, ranks)
    count = len(devices)
    if count == 1:
        return {}
    factor = (count - 1) / count if collective == "all_to_all" else _RING[collective](count)
    sent = factor * size_bytes
    return {f"hbm[{device}]": sent * (1 + _READS[collective]) for device in devices}


def bottleneck(cluster: Cluster, loads: Mapping[str, float]) -> Bottleneck:
    """The link with the largest bytes over capacity, and that time: what this way of moving them takes at least.

    It bounds the ring (or pairwise exchange) whose bytes `loads` are, not every algorithm: see `bounds`.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_cluster
    >>> cluster = load_cluster("a800-sxm8")
    >>> bottleneck(cluster, ring_wire_bytes(cluster, 2, "all_reduce", 200e6)).time_s
    0.001
    """
    capacity = links(cluster)
    times = ((name, size / capacity[name]) for name, size in loads.items())
    return Bottleneck(*max(times, key=lambda item: item[1], default=("", 0.0)))


def ring_devices(cluster: Cluster, ranks: int | Sequence[int]) -> tuple[int, ...]:
    """Devices in the order a ring visits them.

    Raises
    ------
    LayoutError
        If a device is not in the cluster or named twice.
    """
    if isinstance(ranks, int):
        return devices_of(cluster, ranks)
    devices = tuple(sorted(ranks))
    if not devices or len(set(devices)) < len(devices) or not 0 <= devices[0] <= devices[-1] < cluster.num_devices:
        raise LayoutError(f"devices {list(ranks)} are not distinct devices 0..{cluster.num_devices - 1}")
    return devices


def by_node(cluster: Cluster, devices: Sequence[int]) -> dict[int, list[int]]:
    """Devices of each node that has any."""
    nodes: dict[int, list[int]] = defaultdict(list)
    for device in devices:
        nodes[device // cluster.node.num_devices].append(device)
    return nodes


def _load_pairs(
    cluster: Cluster, nodes: Mapping[int, Sequence[int]], pair_bytes: float, loads: dict[str, float]
) -> None:
    """Every rank to every other. What leaves a node for one rail goes one way out, so it is summed first."""
    for devices in nodes.values():
        if cluster.node.scale_up == "nvswitch":
            for way, device in product(("out", "in"), devices if len(devices) > 1 else ()):
                loads[f"nvlink_{way}[{device}]"] += pair_bytes * (len(devices) - 1)
            continue
        for src, dst in permutations(devices, 2):
            for link in route(cluster, src, dst):
                loads[link] += pair_bytes
    if len(nodes) > 1:
        for load in remote_pairs(cluster, nodes):
            for link in load.links if load.pairs else ():
                loads[link] += pair_bytes * load.pairs

"""How fast the rings of several groups leave one node together: which NIC each ring enters and leaves by, link by link.

A ring passes all its group's GPUs of a node between the NIC by which it enters and the one by which it leaves. Both
ends lie at one NIC (or at two below one PCIe switch, which rings then use both ways) if the group has two GPUs there,
or a single GPU. Otherwise the ends are different NICs: each carries one direction only, and half the node's rate is
idle, unless the library builds a mirrored ring for every such ring, or hands the bytes over NVLink to the GPU beside
the other NIC. NCCL pairs rings with their mirrors from 2.20 on (``src/graph/search.cc``: a graph that crosses NICs, of
type 2); older versions first look for rings that use no GPU in both directions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, get_args

from overlapsim.errors import LayoutError, UsageError
from overlapsim.hardware.fabric import leaf_hop, leaf_of, nic_home, nic_of
from overlapsim.hardware.mesh import islands, spread
from overlapsim.hardware.profile import Cluster
from overlapsim.hardware.rings import ring_loads
from overlapsim.hardware.topology import egress, ingress, route
from overlapsim.hardware.wire import bottleneck

Rings = Literal["one_way", "mirrored"]
RINGS: Final[tuple[Rings, ...]] = get_args(Rings)


@dataclass(frozen=True)
class NicSharing:
    """What the rings of all groups of one node get together.

    Attributes
    ----------
    num_groups : groups whose rings leave the node
    bandwidth_bytes_per_s : bytes that leave the node per second, all rings running: the links' rate, of which a library
        reaches `FabricSpec.nic_efficiency`
    nic_bandwidth_bytes_per_s : rate and direction of all the node's NICs
    bottleneck : link that holds them up
    nic_share : bytes on each NIC link and direction of the node, over the bytes that leave the node
    """

    num_groups: int
    bandwidth_bytes_per_s: float
    nic_bandwidth_bytes_per_s: float
    bottleneck: str
    nic_share: Mapping[str, float]

    @property
    def group_bandwidth_bytes_per_s(self) -> float:
        """Rate at which one group's rings leave the node: a collective's ring bytes of a rank over it are its time."""
        return self.bandwidth_bytes_per_s / self.num_groups


def nic_sharing(cluster: Cluster, groups: Sequence[Sequence[int]], *, rings: Rings) -> NicSharing:
    """Rate of concurrent rings, one group of ranks each, that share the NICs of a node.

    Every node of a group is taken to hold the same of its GPUs, as in a layout whose groups are strides of the ranks;
    traffic of other nodes on leaf switches is not looked at.

    Parameters
    ----------
    cluster : Cluster
        Its node, NICs and fabric; the number of nodes means nothing here.
    groups : sequence of sequences of int
        Numbers within the node of the GPUs of each group (`Placement.node_members`); each group goes on to other nodes.
    rings : {"one_way", "mirrored"}
        ``mirrored``: one ring for each NIC nearest to a GPU of the group, both directions in use, as
        `wire.ring_wire_bytes` has it (NCCL from 2.20 on, or handing over to a rail's GPU). ``one_way``: rings that
        enter at one NIC and leave by another have no mirror (older libraries without hand-over).

    Raises
    ------
    UsageError
        If `rings` is neither.
    LayoutError
        If there is no group, or a GPU is not in the node or named twice.
    ProfileError
        If the node has no NIC.

    Examples
    --------
    Data-parallel groups of TP 4 on a node with eight GPUs and four NICs of 25 GB/s, and those of TP 8:

    >>> from dataclasses import replace
    >>> from overlapsim.hardware.loading import load_cluster
    >>> a100 = load_cluster("a100-sxm8")
    >>> four = replace(a100, node=replace(a100.node, num_nics=4))
    >>> pairs = [(0, 4), (1, 5), (2, 6), (3, 7)]
    >>> [nic_sharing(four, pairs, rings=kind).bandwidth_bytes_per_s / 1e9 for kind in ("one_way", "mirrored")]
    [50.0, 100.0]
    >>> nic_sharing(four, [(d,) for d in range(8)], rings="one_way").bandwidth_bytes_per_s / 1e9
    100.0
    """
    if rings not in RINGS:
        raise UsageError(f"rings is {rings!r}; expected one of {', '.join(RINGS)}")
    per_node = cluster.node.num_devices
    named = [device for group in groups for device in group]
    if not groups or not all(groups) or len(set(named)) < len(named) or not set(named) <= set(range(per_node)):
        raise LayoutError(f"groups {[list(group) for group in groups]} are no distinct GPUs of a node of {per_node}")
    # Two nodes stand for a ring over any number of them: each is entered once and left once.
    two = cluster.with_nodes(2)
    loads: dict[str, float] = defaultdict(float)
    for group in map(sorted, groups):
        nodes = {number: [number * per_node + device for device in group] for number in (0, 1)}
        found = ring_loads(two, nodes, 1.0) if rings == "mirrored" else _one_way(two, nodes)
        for link, size in found:
            loads[link] += size
    link, time_s = bottleneck(two, loads)
    count, node = len(groups), cluster.node
    own = {name: size / count for name, size in loads.items() if name.startswith(("nic_out[0.", "nic_in[0.")) and size}
    return NicSharing(count, count / time_s, node.num_nics * node.nic_bandwidth_bytes_per_s, link, own)


def _one_way(cluster: Cluster, nodes: Mapping[int, Sequence[int]]) -> Iterator[tuple[str, float]]:
    """Links and bytes of one group's rings, each node entered and left by the NICs nearest to the ends."""
    ends = {number: _ends(cluster, devices) for number, devices in nodes.items()}
    share = 1.0 / len(ends[0])
    for number, devices in nodes.items():
        for (first, last), (onward, _) in zip(ends[number], ends[1 - number], strict=True):
            between = [device for device in devices if device not in (first, last)]
            for src, dst in pairwise([first, *between, last] if first != last else [first]):
                yield from ((link, share * part) for link, part in _inner_hop(cluster, devices, src, dst))
            yield from ((link, share) for link in _hop(cluster, last, onward))


def _ends(cluster: Cluster, devices: Sequence[int]) -> list[tuple[int, int]]:
    """First and last GPU of each ring in a node: at one NIC or PCIe switch where that can be, else at two NICs."""
    node, per_node = cluster.node, cluster.node.num_devices
    beside: dict[int, list[int]] = defaultdict(list)
    for device in devices:
        home = nic_home(node, nic_of(node, device % per_node))
        beside[next(switch for switch, group in enumerate(node.pcie_groups) if home in group)].append(device)
    rings = list[tuple[int, int]]()
    for members in beside.values():
        nics = [nic_of(node, device % per_node) for device in members]
        starts = [place for place, nic in enumerate(nics) if nic not in nics[:place]]
        rings += [(members[place], members[place - 1]) for place in starts if len(members) > 1]
    alone = [members[0] for members in beside.values() if len(members) == 1]
    rings += zip(alone[::2], alone[1::2], strict=False)
    if len(alone) % 2 and (len(alone) > 1 or not rings):
        rings.append((alone[-1], alone[0]))
    return rings


def _inner_hop(cluster: Cluster, devices: Sequence[int], src: int, dst: int) -> Iterator[tuple[str, float]]:
    """Links of a hop within a node and their parts of it; a mesh that joins the group spreads it over all its links."""
    node, per_node = cluster.node, cluster.node.num_devices
    members = [device % per_node for device in devices]
    if node.scale_up == "nvlink_mesh" and len(islands(node, members)) == 1:
        first = src - src % per_node
        for peer, part in spread(node, src % per_node, members).items():
            yield f"nvlink[{src}>{first + peer}]", part
    else:
        yield from ((link, 1.0) for link in route(cluster, src, dst))


def _hop(cluster: Cluster, src: int, dst: int) -> tuple[str, ...]:
    """Links between GPUs of two nodes, each by its nearest NIC, no hand-over to the receiver's rail."""
    per_node = cluster.node.num_devices
    (number, local), (to_number, to_local) = divmod(src, per_node), divmod(dst, per_node)
    leaf = leaf_of(cluster, number, nic_of(cluster.node, local))
    to_leaf = leaf_of(cluster, to_number, nic_of(cluster.node, to_local))
    return (*egress(cluster, src), *leaf_hop(leaf, to_leaf), *ingress(cluster, dst))

"""Links of a cluster by name, and the links a byte crosses between two GPUs.

Names carry cluster-wide numbers: ``hbm[d]``; ``nvlink_out[d] nvlink_in[d]`` (NVSwitch) or ``nvlink[s>d]`` (full mesh);
``pcie_up[d] pcie_down[d]``; ``root_up[g] root_down[g]`` of a PCIe group; ``host_memory[s]`` of a socket;
``numa[s>t]`` between sockets; ``nic_out[n.i] nic_in[n.i]`` of node n; ``leaf_up[p.r] leaf_down[p.r]`` of a leaf switch
(`fabric`). Each is one direction except ``hbm`` and ``host_memory``, which reads and writes share.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from itertools import permutations
from types import MappingProxyType
from typing import Final

from overlapsim.errors import LayoutError
from overlapsim.hardware.fabric import (
    keeps_rail,
    leaf_hop,
    leaf_links,
    leaf_of,
    nic_home,
    nic_link_bandwidth_bytes_per_s,
    nic_of,
    num_nic_links,
)
from overlapsim.hardware.mesh import link_bandwidth_bytes_per_s, mesh_path, neighbours
from overlapsim.hardware.profile import Cluster

OWN_LINKS: Final = frozenset({"hbm", "nvlink_out", "nvlink_in", "pcie_up", "pcie_down"})
"""Links that one device has to itself; the others are shared."""


def carries(device: int, resource: str) -> bool:
    """Whether a modelled device stands for a resource: its own, or device 0 for those that are shared.

    Examples
    --------
    >>> carries(0, "hbm[0]"), carries(0, "hbm[1]"), carries(0, "root_up[3]"), carries(1, "root_up[3]")
    (True, False, True, False)
    """
    kind, _, number = resource.partition("[")
    return number == f"{device}]" if kind in OWN_LINKS else device == 0


_Known = tuple["weakref.ref[Cluster]", Mapping[str, float]]
# Planners ask for the slowest link of thousands of transfers: a large cluster's are kept as long as it lives.
_LINKS: Final[dict[int, _Known]] = {}


def links(cluster: Cluster) -> Mapping[str, float]:
    """Capacity of every link in bytes/s, by name.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_cluster
    >>> links(load_cluster("a800-sxm8"))["nvlink_out[0]"]
    200000000000.0
    """
    key = id(cluster)
    known = _LINKS.get(key)
    if known is not None and known[0]() is cluster:
        return known[1]
    inner = (link for number in range(cluster.num_nodes) for link in _node_links(cluster, number))
    found = MappingProxyType({**dict(inner), **dict(leaf_links(cluster))})
    _LINKS[key] = (weakref.ref(cluster, lambda _: _LINKS.pop(key, None)), found)
    return found


def _node_links(cluster: Cluster, number: int) -> Iterator[tuple[str, float]]:
    node = cluster.node
    first, group0, socket0 = number * node.num_devices, number * len(node.pcie_groups), number * len(node.numa_groups)
    devices = range(first, first + node.num_devices)
    for device in devices:
        yield f"hbm[{device}]", node.device.hbm_bandwidth_bytes_per_s
        yield f"pcie_up[{device}]", node.pcie_bandwidth_bytes_per_s
        yield f"pcie_down[{device}]", node.pcie_bandwidth_bytes_per_s
        if node.scale_up == "nvswitch":
            yield f"nvlink_out[{device}]", node.nvlink_bandwidth_bytes_per_s
            yield f"nvlink_in[{device}]", node.nvlink_bandwidth_bytes_per_s
    if node.scale_up == "nvlink_mesh":
        link = link_bandwidth_bytes_per_s(node)
        for src in devices:
            for peer, count in neighbours(node, src - first).items():
                yield f"nvlink[{src}>{first + peer}]", count * link
    for group in range(group0, group0 + len(node.pcie_groups)):
        yield f"root_up[{group}]", node.root_port_bandwidth_bytes_per_s
        yield f"root_down[{group}]", node.root_port_bandwidth_bytes_per_s
    sockets = range(socket0, socket0 + len(node.numa_groups))
    for socket in sockets:
        yield f"host_memory[{socket}]", node.host_memory_bandwidth_bytes_per_s
    for src, dst in permutations(sockets, 2):
        yield f"numa[{src}>{dst}]", node.numa_bandwidth_bytes_per_s
    for nic in range(num_nic_links(node)):
        yield f"nic_out[{number}.{nic}]", nic_link_bandwidth_bytes_per_s(node)
        yield f"nic_in[{number}.{nic}]", nic_link_bandwidth_bytes_per_s(node)


def devices_of(cluster: Cluster, ranks: int, nodes: int | None = None) -> tuple[int, ...]:
    """Devices of `ranks` consecutive ranks: a node is filled first, or the ranks are dealt evenly to `nodes`.

    Raises
    ------
    LayoutError
        If the ranks do not fit on the cluster or do not divide by `nodes`.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_cluster
    >>> devices_of(load_cluster("a100-sxm8").with_nodes(2), 4, nodes=2)
    (0, 1, 8, 9)
    """
    per_node = cluster.node.num_devices
    if not 1 <= ranks <= cluster.num_devices:
        raise LayoutError(
            f"{ranks} ranks do not fit on {cluster.name} with {cluster.num_nodes} node(s) of {per_node} GPUs; "
            f"expected 1 to {cluster.num_devices}, or more nodes"
        )
    if nodes is None:
        return tuple(range(ranks))
    if not 1 <= nodes <= cluster.num_nodes or ranks % nodes or ranks // nodes > per_node:
        raise LayoutError(f"{ranks} ranks do not spread evenly over {nodes} of {cluster.num_nodes} nodes of {per_node}")
    return tuple(node * per_node + local for node in range(nodes) for local in range(ranks // nodes))


def route(cluster: Cluster, src: int, dst: int) -> tuple[str, ...]:
    """Links that a byte crosses from one GPU's memory to another's (HBM left out); empty from a GPU to itself.

    A link named twice carries the byte twice: memory of a host that stages the transfer is written, then read.
    Within a node NVLink is taken if there is any, in a mesh through one other GPU where two are not joined;
    peer-to-peer PCIe stays below the lowest common switch; without peer-to-peer the sender's socket stages. Between
    nodes the NIC nearest to each GPU is taken; on rails the sender's side changes the rail (`fabric`).

    Raises
    ------
    LayoutError
        If a device is not in the cluster.
    ProfileError
        If the devices are on different nodes and the nodes have no NIC.
    """
    for device in (src, dst):
        if not 0 <= device < cluster.num_devices:
            raise LayoutError(f"device {device} is not in {cluster.name}; expected 0 to {cluster.num_devices - 1}")
    node, per_node = cluster.node, cluster.node.num_devices
    if src == dst:
        return ()
    if src // per_node != dst // per_node:
        return _between_nodes(cluster, src, dst)
    if node.scale_up == "nvswitch":
        return (f"nvlink_out[{src}]", f"nvlink_in[{dst}]")
    first = src - src % per_node
    if path := mesh_path(node, src - first, dst - first):
        return tuple(f"nvlink[{first + a}>{first + b}]" for a, b in path)
    group, to_group = _group(cluster, src), _group(cluster, dst)
    socket, to_socket = _socket(cluster, src), _socket(cluster, dst)
    if node.p2p and group == to_group:
        return (f"pcie_up[{src}]", f"pcie_down[{dst}]")
    staged = () if node.p2p else (f"host_memory[{socket}]",) * 2
    return (
        f"pcie_up[{src}]",
        f"root_up[{group}]",
        *staged,
        *_numa(socket, to_socket),
        f"root_down[{to_group}]",
        f"pcie_down[{dst}]",
    )


def _between_nodes(cluster: Cluster, src: int, dst: int) -> tuple[str, ...]:
    node, per_node = cluster.node, cluster.node.num_devices
    (number, local), (to_number, to_local) = divmod(src, per_node), divmod(dst, per_node)
    nic, to_nic = nic_of(node, local), nic_of(node, to_local)
    handed: tuple[str, ...] = ()
    if nic != to_nic and keeps_rail(cluster):
        proxy = number * per_node + nic_home(node, to_nic)
        handed, src, nic = (f"nvlink_out[{src}]", f"nvlink_in[{proxy}]"), proxy, to_nic
    hop = leaf_hop(leaf_of(cluster, number, nic), leaf_of(cluster, to_number, to_nic))
    return (*handed, *egress(cluster, src), *hop, *ingress(cluster, dst))


def egress(cluster: Cluster, device: int) -> tuple[str, ...]:
    """Links from a GPU to its node's edge."""
    nic, home = _nic_and_home(cluster, device)
    group, socket = _group(cluster, device), _socket(cluster, device)
    inner: tuple[str, ...] = ()
    if not cluster.node.p2p:
        inner = (f"root_up[{group}]", *(f"host_memory[{socket}]",) * 2, *_numa(socket, _socket(cluster, home)))
    elif group != _group(cluster, home):
        inner = (
            f"root_up[{group}]",
            *_numa(socket, _socket(cluster, home)),
            f"root_down[{_group(cluster, home)}]",
        )
    return (f"pcie_up[{device}]", *inner, f"nic_out[{nic}]")


def ingress(cluster: Cluster, device: int) -> tuple[str, ...]:
    """Links from a node's edge to a GPU."""
    nic, home = _nic_and_home(cluster, device)
    group, socket, home_socket = _group(cluster, device), _socket(cluster, device), _socket(cluster, home)
    inner: tuple[str, ...] = ()
    if not cluster.node.p2p:
        inner = (*(f"host_memory[{home_socket}]",) * 2, *_numa(home_socket, socket), f"root_down[{group}]")
    elif group != _group(cluster, home):
        inner = (f"root_up[{_group(cluster, home)}]", *_numa(home_socket, socket), f"root_down[{group}]")
    return (f"nic_in[{nic}]", *inner, f"pcie_down[{device}]")


def _nic_and_home(cluster: Cluster, device: int) -> tuple[str, int]:
    """Name of the nearest NIC link, and the device whose switch it shares."""
    node = cluster.node
    number, local = divmod(device, node.num_devices)
    nic = nic_of(node, local)
    return f"{number}.{nic}", number * node.num_devices + nic_home(node, nic)


def _group(cluster: Cluster, device: int) -> int:
    return _place(cluster, device, cluster.node.pcie_groups)


def _socket(cluster: Cluster, device: int) -> int:
    return _place(cluster, device, cluster.node.numa_groups)


def _place(cluster: Cluster, device: int, groups: tuple[tuple[int, ...], ...]) -> int:
    number, local = divmod(device, cluster.node.num_devices)
    return number * len(groups) + next(index for index, group in enumerate(groups) if local in group)


def _numa(src: int, dst: int) -> tuple[str, ...]:
    return () if src == dst else (f"numa[{src}>{dst}]",)

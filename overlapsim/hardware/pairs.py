"""Exchanges between all ranks of different nodes, counted by rail instead of pair by pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from overlapsim.hardware.fabric import keeps_rail, leaf_of, nic_home, nic_of, pod_of
from overlapsim.hardware.profile import Cluster
from overlapsim.hardware.topology import egress, ingress


class PairLoad(NamedTuple):
    """Links that carry the bytes of so many (sender, receiver) pairs."""

    links: tuple[str, ...]
    pairs: int


def remote_pairs(cluster: Cluster, nodes: Mapping[int, Sequence[int]]) -> Iterator[PairLoad]:
    """Loads of one message from every rank to every rank of another node, as `topology.route` leads them.

    Parameters
    ----------
    nodes : mapping of int to sequence of int
        Devices of each node that has any.
    """
    per_node, keeps = cluster.node.num_devices, keeps_rail(cluster)
    rails = {number: Counter(nic_of(cluster.node, d % per_node) for d in devices) for number, devices in nodes.items()}
    everywhere = sum(rails.values(), Counter[int]())
    for number, devices in nodes.items():
        away = everywhere - rails[number]
        for device in devices:
            own = away[nic_of(cluster.node, device % per_node)] if keeps else away.total()
            yield PairLoad(ingress(cluster, device), away.total())
            yield PairLoad(egress(cluster, device), own)
            if keeps:
                yield PairLoad((f"nvlink_out[{device}]",), away.total() - own)
        for nic, count in away.items() if keeps else ():
            # Those whose own rail is another hand their bytes to the GPU beside this one's NIC.
            proxy = number * per_node + nic_home(cluster.node, nic)
            handed = (len(devices) - rails[number][nic]) * count
            yield PairLoad((f"nvlink_in[{proxy}]", *egress(cluster, proxy)), handed)
    if cluster.fabric is not None and cluster.fabric.nodes_per_leaf:
        yield from _leaf_loads(cluster, rails, keeps)


def _leaf_loads(cluster: Cluster, rails: Mapping[int, Counter[int]], keeps: bool) -> Iterator[PairLoad]:
    """What crosses leaf uplinks: pairs of different nodes that are not below one leaf switch."""
    everywhere = sum(rails.values(), Counter[int]())
    pods: dict[int, Counter[int]] = {}
    for number, counts in rails.items():
        pods[pod_of(cluster, number)] = pods.get(pod_of(cluster, number), Counter[int]()) + counts
    one_leaf_a_pod = cluster.fabric is None or not cluster.fabric.rail_optimised
    for number, counts in rails.items():
        inside = pods[pod_of(cluster, number)]
        outside = everywhere - inside
        for nic in everywhere if keeps else counts:
            if keeps:
                # A kept rail crosses between pods only: out on the receiver's rail, in on one's own.
                out, back = counts.total() * outside[nic], counts[nic] * outside.total()
            else:
                below = inside.total() - counts.total() if one_leaf_a_pod else inside[nic] - counts[nic]
                out = back = counts[nic] * (everywhere.total() - counts.total() - below)
            leaf = leaf_of(cluster, number, nic)
            yield PairLoad((f"leaf_up[{leaf}]",), out)
            yield PairLoad((f"leaf_down[{leaf}]",), back)

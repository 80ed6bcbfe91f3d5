"""Time of a collective across nodes: a tree or ring over the NICs, from constants of one fabric.

Three branches, the fastest of which is taken: LL, LL128 and Simple differ in what a hop between nodes costs and in
rate. Latency of the first: ``base + 2 ((ranks per node - 1) hop + log2(nodes) net)`` for all-reduce (a tree), and
``base + steps inside hop + steps between net`` for all-gather and reduce-scatter (a ring). The last is bound by
the slower of what one node's links reduce (``node_rate``) and what its NICs move (`nic_bus_bytes_per_s`).
All-to-all is bound by what each GPU sends out of its node. Constants differ between fabrics by factors (a small hop is
6 to 9 us on InfiniBand, 27 on EFA, 54 on TCPXO): they do not transfer, and where none were fitted a prior stands in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapsim.cost.structural import bus_factor
from overlapsim.cost.tuner import FloatArray
from overlapsim.hardware.profile import Cluster

# name -> (unit, start, least, most); each group of collectives has its own set, as ``GROUP_NAME``.
_BRANCHED: Final[Mapping[str, tuple[str, float, float, float]]] = {
    "net": ("s", 8e-6, 1e-6, 300e-6),
    "ll_rate": ("B/s", 0.8e9, 0.03e9, 100e9),
    "net_ll128": ("s", 5e-6, 0.1e-6, 300e-6),
    "ll128_rate": ("B/s", 20e9, 1e9, 400e9),
    "net_simple": ("s", 20e-6, 0.1e-6, 900e-6),
    "root": ("s", 14e-6, 0.01e-6, 200e-6),
    "node_rate": ("B/s", 400e9, 5e9, 2000e9),
    "nic_efficiency": ("ratio", 0.93, 0.2, 1.0),
}
_PAIR: Final[Mapping[str, tuple[str, float, float, float]]] = {
    "net": ("s", 40e-6, 1e-6, 600e-6),
    "root": ("s", 14e-6, 0.01e-6, 300e-6),
    "nic_efficiency": ("ratio", 0.9, 0.2, 1.0),
}
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "tree": ("all_reduce",),
    "ring": ("all_gather", "reduce_scatter", "broadcast"),
    "pair": ("all_to_all", "send_recv"),
}
FABRIC_PARAMETERS: Final[Mapping[str, tuple[str, float, float, float]]] = {
    **{f"{group}_{name}": value for group in ("tree", "ring") for name, value in _BRANCHED.items()},
    **{f"pair_{name}": value for name, value in _PAIR.items()},
}
"""Constants of one fabric: unit, start and bounds of the fit."""
PRIOR: Final[Mapping[str, float]] = {name: start for name, (_, start, _, _) in FABRIC_PARAMETERS.items()}
"""An InfiniBand or RoCE fabric as the public two-node tables show it; ``tree_net`` is then the cluster's own."""
# Bus rate that a node's links reach inside an all-reduce across nodes, over NVLink's sheet rate: two-node tables of
# A100 (192 of 300), H100 (505 of 450, the switch reduces) and B200 (727 of 900).
NODE_SHARE: Final[Mapping[str, float]] = {"ampere": 0.64, "hopper": 1.12, "blackwell": 0.81}
_MIB: Final = float(2**20)


@dataclass(frozen=True)
class FabricModel:
    """Collectives over `ranks` ranks on `nodes` nodes.

    Parameters
    ----------
    parameters : SI values by the names of `FABRIC_PARAMETERS`
    base_s, hop_s : of the smallest message inside a node
    ranks, nodes : of the collective; nodes >= 2
    nic_bytes_per_s : rate of one node's NICs together, per direction
    trees : whether an all-reduce over two nodes is free of the ring's bytes (`nic_bus_bytes_per_s`)
    """

    parameters: Mapping[str, float]
    base_s: float
    hop_s: float
    ranks: int
    nodes: int
    nic_bytes_per_s: float
    trees: bool = True

    @property
    def ranks_per_node(self) -> float:
        """Ranks of a node; the last node may hold fewer."""
        return self.ranks / self.nodes

    def prices(self, kind: str) -> bool:
        """Whether constants for this collective are there."""
        return f"{group_of(kind)}_nic_efficiency" in self.parameters

    def seconds(self, kind: str, sizes: FloatArray) -> FloatArray:
        """Times of sizes."""
        if group_of(kind) == "pair":
            return self._pair(kind, sizes)
        moved, first = sizes * bus_factor(kind, self.ranks), self.latency_s(kind)
        hops = 2 * math.log2(self.nodes) if kind == "all_reduce" else float(self.nodes - 1)
        ll = first + moved / self._get(kind, "ll_rate")
        ll128 = first + hops * self._get(kind, "net_ll128") + moved / self._get(kind, "ll128_rate")
        fences = self._get(kind, "root") * np.sqrt(moved / _MIB)
        simple = first + hops * self._get(kind, "net_simple") + moved / self.bus_bytes_per_s(kind) + fences
        return np.asarray(np.minimum(np.minimum(ll, ll128), simple))

    def latency_s(self, kind: str) -> float:
        """Time of the smallest message."""
        net, inside = self._get(kind, "net"), self.ranks_per_node - 1
        if group_of(kind) == "pair":
            return self.base_s + net
        if kind == "all_reduce":
            return self.base_s + 2 * (inside * self.hop_s + math.log2(self.nodes) * net)
        return self.base_s + self.nodes * inside * self.hop_s + (self.nodes - 1) * net

    def bus_bytes_per_s(self, kind: str) -> float:
        """Bus bandwidth of large messages: the slower of a node's own links and its NICs."""
        return min(self.bounds(kind).values())

    def binding(self, kind: str) -> str:
        """Which of the two bounds large messages: ``nic`` or ``node``."""
        bounds = self.bounds(kind)
        return min(bounds, key=lambda name: bounds[name])

    def bounds(self, kind: str) -> dict[str, float]:
        """Bus bandwidth that the NICs, and a node's own links, allow."""
        nics = self._get(kind, "nic_efficiency") * nic_bus_bytes_per_s(
            kind, self.ranks, self.nodes, self.nic_bytes_per_s, trees=self.trees
        )
        return {"nic": nics} if group_of(kind) == "pair" else {"nic": nics, "node": self._get(kind, "node_rate")}

    def _get(self, kind: str, name: str) -> float:
        return self.parameters[f"{group_of(kind)}_{name}"]

    def _pair(self, kind: str, sizes: FloatArray) -> FloatArray:
        rate = self.nic_bytes_per_s / max(1.0, self.ranks_per_node) * self._get(kind, "nic_efficiency")
        share = 1.0 if kind == "send_recv" else (self.ranks - self.ranks_per_node) / self.ranks
        moved = sizes * share
        return np.asarray(self.latency_s(kind) + moved / rate + self._get(kind, "root") * np.sqrt(moved / _MIB))


def group_of(kind: str) -> str:
    """Group of constants that a collective uses."""
    return next(group for group, kinds in GROUPS.items() if kind in kinds)


def nic_bus_bytes_per_s(kind: str, ranks: int, nodes: int, nic_bytes_per_s: float, *, trees: bool = True) -> float:
    """Bus bandwidth at which the NICs of a node are full.

    A ring sends the bus bytes once through each node's NICs, so its bus rate is theirs. A tree over two nodes reduces
    inside them first and sends the size itself: nearly twice the ring's rate, as four GH200 a node with NICs of 100
    GB/s show (158 GB/s). Over more nodes the inner ones of a double binary tree send twice the size, no less than a
    ring does (the same nodes: 92 GB/s over 8, 89 over 128). Libraries without mirrored rings are taken to have the
    ring's rate over two nodes too (36 of 50 GB/s for all-gather and all-reduce alike on Polaris' A100, NCCL 2.18).

    Parameters
    ----------
    trees : False for such a library

    Examples
    --------
    >>> nic_bus_bytes_per_s("all_gather", 16, 2, 400e9) / 1e9, nic_bus_bytes_per_s("all_reduce", 16, 2, 400e9) / 1e9
    (400.0, 750.0)
    >>> nic_bus_bytes_per_s("all_reduce", 32, 8, 100e9) / 1e9
    100.0
    """
    if kind != "all_reduce" or nodes > 2 or not trees:
        return nic_bytes_per_s
    return nic_bytes_per_s * bus_factor(kind, ranks)


def fabric_prior(cluster: Cluster) -> dict[str, float]:
    """Constants for a fabric without a fit: the cluster's own hop, a prior for the rest."""
    net = cluster.net_latency_s
    # Twice the tree's hop, as the one fabric with both tables has it (A100 over HDR InfiniBand: 7 and 15 us).
    hops = {"tree_net": net, "ring_net": 2 * net, "pair_net": max(PRIOR["pair_net"], 2 * net)}
    slower = {name: PRIOR[name] * net / PRIOR["tree_net"] for name in PRIOR if name.endswith(("_ll128", "_simple"))}
    slower = {name: value for name, value in slower.items() if "net" in name}
    link = cluster.node.nvlink_bandwidth_bytes_per_s or cluster.node.pcie_bandwidth_bytes_per_s
    node = NODE_SHARE.get(cluster.device.architecture.split("_")[0], 0.8) * link
    rates = {"tree_node_rate": node, "ring_node_rate": 0.78 * link}
    # LL128 in a tree reaches about a tenth of the NICs together: 17 of 200 (A100), 49 of 400 (EFA), 3 of 50 GB/s.
    nics = cluster.node.num_nics * cluster.node.nic_bandwidth_bytes_per_s
    rates["tree_ll128_rate"] = max(0.1 * nics, 1e9)
    if cluster.fabric is not None:
        reach = cluster.fabric.nic_efficiency
        rates |= {f"{group}_nic_efficiency": min(reach, PRIOR[f"{group}_nic_efficiency"]) for group in GROUPS}
    return {**PRIOR, **hops, **slower, **rates}

"""Time of routed tokens on their way between nodes and inside them: what crosses which link, and at which rate.

A plain all-to-all sends every copy of a token to its rank. Kernels made for experts send a token once to each node that
it goes to and once to each GPU there (``hierarchical``, ``deepep``, ``hybrid_ep``), or every copy by itself but without
SMs (``low_latency``). Volumes are expectations over an even choice of experts (`workload.routes`).

Kernels: ``time = latency + max(NIC bytes / NIC rate, NVLink bytes / NVLink rate)``, joined in squares with what their
SMs feed (`sm_feed`). The hierarchical exchange is two exchanges of the library one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike

from overlapsim.cost.base import Cost, Demand, Spread, hbm_name, hbm_rate
from overlapsim.cost.collective import CollectiveModel
from overlapsim.cost.curve import FloatArray, checked_sizes
from overlapsim.cost.fabric import FabricModel
from overlapsim.cost.fitted import fabric_model
from overlapsim.cost.group_collective import GroupPlace
from overlapsim.cost.sm_feed import MOST, sm_bytes_per_s
from overlapsim.errors import LayoutError
from overlapsim.hardware.mesh import neighbours
from overlapsim.hardware.profile import Cluster, NodeSpec, Source
from overlapsim.hardware.topology import links
from overlapsim.plan import Finding
from overlapsim.workload.routes import Route

# Fitted to DeepEP's table of normal kernels on H800 (hwprofiles/SOURCES.md, DEEPEP): the mean of its two rows on one
# node (153 and 158 GB/s, local copies counted; 7/8 of it on wires of 200 GB/s), and of its two at 64 ranks (51 and 50
# GB/s, local copies counted; 7/8 of it on NICs of 50 GB/s). The rows at 16 and 32 ranks and those of the second
# version and of the low-latency kernels are predicted.
NVLINK_SHARE: Final = 155.5 / 200 * 7 / 8
NIC_SHARE: Final = 50.5 / 50 * 7 / 8
# Low latency, fitted to one row (dispatch over 32 ranks, 155 us): flight beside its bytes, what issue and receive
# kernels (priced apart) leave of it.
FLIGHT_S: Final = 16e-6
KERNELS: Final = Spread(0.85, 1.18, "prior")
"""Range of kernels for experts: the rows of the tables that were not fitted."""
_HUGE: Final = 2.0**50  # where latency is nothing


@dataclass(frozen=True)
class Carried:
    """Bytes of one rank for each byte of size, both directions alike: over its NIC, and over its NVLink port."""

    nic: float
    nvlink: float


def carried(route: Route, ranks: int, nodes: int) -> Carried:
    """What a rank's links carry of an exchange.

    Examples
    --------
    Two nodes, eight of 256 experts: a copy crosses once, and then goes to 6.5 GPUs of which 7/8 are others.

    >>> found = carried(Route("deepep", 8, 256), 16, 2)
    >>> round(8 * found.nic, 2), round(8 * found.nvlink, 2)
    (1.0, 5.71)
    """
    inside, leaving = ranks / nodes, (nodes - 1) / nodes
    if route.method == "low_latency":
        return Carried(leaving, (1 - leaving) * (inside - 1) / inside)
    copies = route.ranks_of_token(ranks, nodes) / route.top_k
    return Carried(route.nodes_of_token(nodes) / route.top_k * leaving, copies * (inside - 1) / inside)


class DispatchModel:
    """Time and demands of one exchange of routed tokens, for any size; the interface of `CollectiveModel`.

    `size_bytes` is what a plain all-to-all would move: all copies of a rank's tokens.

    Parameters
    ----------
    cluster, route : machine, and how tokens travel
    place : of the ranks; `GroupPlace.nic_bytes_per_s` is filled in from the cluster where it is 0

    Raises
    ------
    LayoutError
        If kernels cannot reach all peers of a node over NVLink, the ranks leave nodes without NICs, or a GPU has fewer
        SMs than the kernels hold.
    """

    kind: Final = "all_to_all"

    def __init__(self, cluster: Cluster, route: Route, place: GroupPlace) -> None:
        node = cluster.node
        inside_ranks = max(1, round(place.ranks / place.nodes))
        if (place.nodes > 1 and not node.num_nics) or not _reaches(node, route, inside_ranks):
            raise LayoutError(
                f"dispatch {route.method} over {place.ranks} ranks of {cluster.name}: its kernels write into peers' "
                "memory, over NVLink and by RDMA; expected a machine with both, or dispatcher all_to_all"
            )
        if route.sms > cluster.device.num_sms:
            raise LayoutError(
                f"dispatch {route.method} on {route.sms} SMs and {cluster.device.name} has {cluster.device.num_sms}; "
                "expected fewer, or leave sms out for its own number"
            )
        self.cluster, self.route, self.place = cluster, route, place
        self.carried = carried(route, place.ranks, place.nodes)
        self._inside_ranks = inside_ranks
        nics = place.nic_bytes_per_s * place.nic_load or node.num_nics * node.nic_bandwidth_bytes_per_s * min(
            1.0, self._inside_ranks / node.num_devices
        )
        self._nic_bytes_per_s = nics / self._inside_ranks
        self.source = Source("derived", "DEEPEP", "medium")
        if route.method == "hierarchical":
            self.source = Source("derived", "exchanges of the library, between nodes and inside them", "medium")

    def seconds(self, size_bytes: ArrayLike) -> FloatArray:
        """Times of sizes; one rank moves nothing."""
        return self._seconds(checked_sizes(size_bytes), latency=True)

    def bandwidth_seconds(self, size_bytes: ArrayLike) -> FloatArray:
        """Times of sizes without latency."""
        return self._seconds(checked_sizes(size_bytes), latency=False)

    def seconds_at(self, size_bytes: ArrayLike, end: Literal["low", "high"]) -> FloatArray:
        """Times of sizes at one end of their spread."""
        return np.asarray(self.seconds(size_bytes) * getattr(KERNELS, end))

    def cost(self, size_bytes: float, device: int | None = None) -> Cost:
        """Cost of one exchange."""
        return Cost(
            duration_s=float(self.seconds(size_bytes)),
            sm=self.route.sms,
            family="collective",
            spread=KERNELS,
            source=self.source,
            demands=self.demands(size_bytes, device),
            in_range=False,
        )

    def demands(self, size_bytes: float, device: int | None = None) -> tuple[Demand, ...]:
        """Bytes on one device's memory, NVLink port and share of the NICs; at most what each moves in the time."""
        if self.place.ranks == 1:
            return ()
        number, node = device or 0, self.cluster.node
        duration_s = float(self.seconds(size_bytes))
        nic, nvlink = self.carried.nic * size_bytes, self.carried.nvlink * size_bytes
        share = node.num_nics * node.nic_bandwidth_bytes_per_s / node.num_devices
        rates, reached = links(self.cluster), self.cluster.collectives.wire_efficiency
        found = [(f"nic_share_{way}[{number}]", nic, share) for way in ("out", "in") if share]
        for way in ("out", "in"):
            name = f"nvlink_{way}[{number}]"
            if name in rates:
                found.append((name, nvlink, rates[name] * reached))
        # What is sent is read once and what arrives is written once, at each hop.
        found.append((hbm_name(number), 2 * (nic + nvlink), hbm_rate(self.cluster.device)))
        return tuple(Demand(name, min(amount, duration_s * rate), rate) for name, amount, rate in found if amount > 0)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was believed and not measured."""
        if self.place.ranks == 1 or self.route.method == "hierarchical":
            return ()
        message = (
            f"dispatch {self.route.method} over {self.place.ranks} ranks on {self.place.nodes} nodes of "
            f"{self.cluster.name} is priced by {NVLINK_SHARE:.2f} of NVLink and {NIC_SHARE:.2f} of the NIC, from a "
            "table of H800 taken to count local copies: measure it"
        )
        return (Finding("dispatch_kernels_assumed", message),)

    # Parts

    def _seconds(self, sizes: FloatArray, *, latency: bool) -> FloatArray:
        if self.place.ranks == 1:
            return np.zeros_like(sizes)
        if self.route.method == "hierarchical":
            return self._hierarchical(sizes, latency=latency)
        slower = self.place.slower
        wires = np.maximum(self.carried.nic * sizes / self._nic_rate, self.carried.nvlink * sizes / self._nvlink_rate)
        if self.route.sms:
            fed = (self.carried.nic + self.carried.nvlink) * sizes / (self.route.sms * self._feed)
            wires = np.hypot(wires, fed)
        return np.asarray(wires * slower + (self._latency_s if latency else 0.0))

    def _hierarchical(self, sizes: FloatArray, *, latency: bool) -> FloatArray:
        """Between nodes to the GPU of the same index, then inside the node."""
        total = np.zeros_like(sizes)
        between, inside = self._levels
        if between is not None:
            crossing = sizes * self.route.nodes_of_token(self.place.nodes) / self.route.top_k
            total = total + self.place.slower * (
                between.seconds(self.kind, crossing)
                if latency
                else crossing * float(between.seconds(self.kind, np.asarray(_HUGE))) / _HUGE
            )
        if inside is not None:
            spread = sizes * self.route.ranks_of_token(self.place.ranks, self.place.nodes) / self.route.top_k
            total = total + (inside.seconds(spread) if latency else inside.bandwidth_seconds(spread))
        return np.asarray(total)

    @cached_property
    def _levels(self) -> tuple[FabricModel | None, CollectiveModel | None]:
        between = None
        if self.place.nodes > 1:
            model, _ = fabric_model(self.cluster, self.place.nodes, self.place.nodes)
            nodes = self.place.nodes
            between = FabricModel(model.parameters, model.base_s, model.hop_s, nodes, nodes, self._nic_bytes_per_s)
        ranks = self._inside_ranks
        return between, CollectiveModel(self.cluster.with_nodes(1), self.kind, ranks) if ranks > 1 else None

    @property
    def _latency_s(self) -> float:
        net = self.cluster.net_latency_s if self.place.nodes > 1 else 0.0
        if self.route.method == "low_latency":
            return FLIGHT_S
        # Counts go first, then tokens: two rounds.
        return 2 * (self.cluster.collectives.base_s + net)

    @property
    def _nic_rate(self) -> float:
        return NIC_SHARE * self._nic_bytes_per_s if self._nic_bytes_per_s else float("inf")

    @property
    def _nvlink_rate(self) -> float:
        node = self.cluster.node
        return NVLINK_SHARE * (node.nvlink_bandwidth_bytes_per_s or node.pcie_bandwidth_bytes_per_s)

    @property
    def _feed(self) -> float:
        """Bytes/s of one SM: plain loads and stores, or the bulk copies of later kernels."""
        return sm_bytes_per_s(self.cluster.device).typical if self.route.method == "deepep" else MOST


def _reaches(node: NodeSpec, route: Route, ranks: int) -> bool:
    """Whether `ranks` GPUs side by side can run the route: the library takes any way, kernels NVLink to each peer."""
    if route.method == "hierarchical" or ranks == 1 or node.scale_up == "nvswitch":
        return True
    return all(set(range(ranks)) <= {local, *neighbours(node, local)} for local in range(ranks))

"""Collectives of a layout's groups: ranks dealt to nodes as the layout has them, NICs shared with the groups beside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike

from overlapsim.cost.base import Cost, Demand, Spread, hbm_name, hbm_rate
from overlapsim.cost.collective import CollectiveModel
from overlapsim.cost.contention import hbm_per_wire_byte
from overlapsim.cost.curve import FloatArray, checked_sizes
from overlapsim.cost.fabric import FABRIC_PARAMETERS, FabricModel, group_of
from overlapsim.cost.fitted import (
    FABRIC_FITTED,
    FABRIC_KEY,
    FABRIC_PRIOR,
    REGIMES,
    fabric_model,
    regime_of,
    spreads_of,
)
from overlapsim.cost.structural import bus_factor
from overlapsim.hardware.nic_sharing import NicSharing, Rings, nic_sharing
from overlapsim.hardware.profile import Cluster, Source
from overlapsim.plan import Finding
from overlapsim.workload.operators import CollectiveKind
from overlapsim.workload.placement import Placement
from overlapsim.workload.rank_map import GroupKind

FREE: Final = Spread(1.0, 1.0, "prior")
LARGE_BYTES: Final = 2.0**40


@dataclass(frozen=True)
class GroupPlace:
    """Where the groups of one kind lie.

    Attributes
    ----------
    ranks, nodes : ranks of a group and the nodes that it spans
    nic_bytes_per_s : rate at which one group's ring leaves a node while all groups of its kind do; 0 inside a node
    nic_load : bytes that a device's share of its node's NICs is busy with, over the bytes that the device sends out:
        above 1 where rings leave some links idle
    slower : time of bytes over what healthy links take, from 1: the slowest link of a group sets its pace
    trees : whether the library's trees spare an all-reduce over two nodes the ring's bytes
    """

    ranks: int
    nodes: int = 1
    nic_bytes_per_s: float = 0.0
    nic_load: float = 1.0
    slower: float = 1.0
    trees: bool = True


def group_places(
    cluster: Cluster,
    placements: Mapping[GroupKind, Placement],
    *,
    rings: Rings = "mirrored",
    models: dict[Any, Any] | None = None,
) -> dict[str, GroupPlace]:
    """Places of a layout's groups on a cluster, by kind.

    Parameters
    ----------
    placements : as `workload.placement.placements` gives them
    rings : whether rings that enter and leave a node by different NICs have a mirror image (`nic_sharing`)
    models : results on this cluster, shared between calls: many layouts deal the same members to a node

    Raises
    ------
    ProfileError
        If a group leaves its node and the nodes have no NIC.
    """
    known = {} if models is None else models
    return {kind: _place(cluster, placement, rings, known) for kind, placement in placements.items()}


def _place(cluster: Cluster, placement: Placement, rings: Rings, known: dict[Any, Any]) -> GroupPlace:
    if placement.nodes == 1 or not placement.node_members:
        return GroupPlace(placement.size, 1)
    key = ("nic_sharing", placement.node_members, rings)
    if key not in known:
        known[key] = nic_sharing(cluster, placement.node_members, rings=rings)
    shared: NicSharing = known[key]
    own = shared.nic_bandwidth_bytes_per_s / placement.node_groups
    return GroupPlace(
        placement.size,
        placement.nodes,
        shared.group_bandwidth_bytes_per_s,
        own / shared.group_bandwidth_bytes_per_s,
        trees=rings == "mirrored",
    )


class GroupModel:
    """Time and demands of a collective over one group of a layout, for any size; the interface of `CollectiveModel`.

    Inside a node the group's ranks are as good as the first ones. Across
    nodes the fabric's model holds, at the rate that the group's rings get.
    Demands are one device's: its memory, and its share of its node's NICs in
    each direction (``nic_share_out[d]``, ``nic_share_in[d]``).

    Parameters
    ----------
    cluster, kind : machine and collective
    place : of the group
    """

    def __init__(self, cluster: Cluster, kind: CollectiveKind, place: GroupPlace) -> None:
        self.cluster, self.kind, self.place = cluster, kind, place
        self._inside = CollectiveModel(cluster.with_nodes(1), kind, place.ranks) if place.nodes == 1 else None
        self._fabric: FabricModel | None = None
        if self._inside is None:
            model, fit = fabric_model(cluster, place.ranks, place.nodes)
            group = group_of(kind)
            # An exchange is no ring: each GPU sends by its own NIC, whatever the links that rings pass in the node.
            rate = place.nic_bytes_per_s * (place.nic_load if group == "pair" else 1.0)
            self._fabric = FabricModel(
                model.parameters, model.base_s, model.hop_s, place.ranks, place.nodes, rate, place.trees
            )
            fitted = fit is not None and any(
                name.startswith(f"{group}_") for name in fit.parameters if name in FABRIC_PARAMETERS
            )
            self._spreads = spreads_of(fit, FABRIC_FITTED) if fit and fitted else (FABRIC_PRIOR,) * len(REGIMES)
            prior = Source("prior", f"two-node tables of other fabrics, at the hop and NICs of {cluster.name}", "low")
            self.source = fit.source if fit and fitted else prior

    def seconds(self, size_bytes: ArrayLike) -> FloatArray:
        """Times of sizes (nccl-tests "size"); one rank moves nothing."""
        sizes = checked_sizes(size_bytes)
        if self.place.ranks == 1:
            return np.zeros_like(sizes)
        healthy = self._healthy_s(sizes)
        if self.place.slower == 1.0:
            return healthy
        return healthy + (self.place.slower - 1) * self._healthy_bandwidth_s(sizes)

    def bandwidth_seconds(self, size_bytes: ArrayLike) -> FloatArray:
        """Times of sizes at the rate of large messages, without latency."""
        return self._healthy_bandwidth_s(checked_sizes(size_bytes)) * self.place.slower

    def seconds_at(self, size_bytes: ArrayLike, end: Literal["low", "high"]) -> FloatArray:
        """Times of sizes at one end of their spread."""
        sizes = checked_sizes(size_bytes)
        if self._inside is not None:
            at_end = self._inside.seconds_at(sizes, end)
            return at_end + (self.place.slower - 1) * self._healthy_bandwidth_s(sizes)
        regime = regime_of(sizes)
        factor = np.array([getattr(spread, end) for spread in self._spreads])[regime]
        scaled: FloatArray = self.seconds(sizes) * factor
        return scaled

    def cost(self, size_bytes: float, device: int | None = None) -> Cost:
        """Cost of one collective."""
        if self.place.ranks == 1:
            return Cost(0.0, 0, "collective", FREE, Source("derived", "one rank moves nothing"))
        if self._inside is not None:
            return replace(self._inside.cost(size_bytes, device), duration_s=float(self.seconds(size_bytes)))
        spread = self._spreads[int(regime_of(np.asarray(size_bytes, dtype=np.float64)))]
        return Cost(
            duration_s=float(self.seconds(size_bytes)),
            sm=self.cluster.collectives.sms,
            family="collective",
            spread=spread,
            source=self.source,
            demands=self.demands(size_bytes, device),
            in_range=False,
        )

    def demands(self, size_bytes: float, device: int | None = None) -> tuple[Demand, ...]:
        """Bytes on one device's memory and share of the NICs; at most what each moves in the time."""
        if self.place.ranks == 1:
            return ()
        if self._inside is not None:
            return self._inside.demands(size_bytes, device)
        assert self._fabric is not None
        number, node = device or 0, self.cluster.node
        duration = float(self.seconds(size_bytes))
        sent = size_bytes * bus_factor(self.kind, self.place.ranks)
        # Of a ring's hops only those that leave a node use its NICs, one in `ranks per node`.
        leaving = sent / max(1.0, self._fabric.ranks_per_node) * self.place.nic_load
        if group_of(self.kind) == "pair":
            leaving = sent
        share = node.num_nics * node.nic_bandwidth_bytes_per_s / node.num_devices
        # What a library cannot reach is busy all the same: the capacity is one for all kinds of collective.
        leaving /= self._fabric.parameters[f"{group_of(self.kind)}_nic_efficiency"]
        memory, rate = sent * hbm_per_wire_byte(self.kind).typical, hbm_rate(self.cluster.device)
        return (
            Demand(f"nic_share_out[{number}]", min(leaving, duration * share), share),
            Demand(f"nic_share_in[{number}]", min(leaving, duration * share), share),
            Demand(hbm_name(number), min(memory, duration * rate), rate),
        )

    def _healthy_s(self, sizes: FloatArray) -> FloatArray:
        if self._inside is not None:
            return self._inside.seconds(sizes)
        assert self._fabric is not None
        return self._fabric.seconds(self.kind, sizes)

    def _healthy_bandwidth_s(self, sizes: FloatArray) -> FloatArray:
        if self._inside is not None:
            return self._inside.bandwidth_seconds(sizes)
        return sizes * float(self._healthy_s(np.asarray(LARGE_BYTES))) / LARGE_BYTES

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was believed and not measured."""
        if self._inside is not None:
            return self._inside.findings
        if self.source.layer != "prior":
            return ()
        where = f"{self.kind} of {self.place.ranks} ranks on {self.place.nodes} nodes of {self.cluster.name}"
        message = f"{where} is not calibrated (no fit {FABRIC_KEY}): priced by hop and NIC rate"
        return (Finding("not_calibrated", f"{message}; measure it and calibrate"),)

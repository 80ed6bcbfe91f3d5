"""Collective time: a measured curve where there is one, else latency plus bytes over the narrowest link."""

from __future__ import annotations

import math
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike

from overlapsim.cost.base import Cost, Demand, Spread, hbm_rate
from overlapsim.cost.curve import Curve, FloatArray, checked_sizes
from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.profile import Cluster, CurveKey, Source
from overlapsim.hardware.topology import links
from overlapsim.hardware.wire import bottleneck, hbm_bytes, ring_wire_bytes
from overlapsim.workload.operators import CollectiveKind, CollectiveOp

# Central 90 % of measured over predicted time, all sizes, on the 2-, 4- and 8-rank tables of A100 and H100 nodes
# (hwprofiles/SOURCES.md, AIC-A100, AIC-H100).  A straight line is right at both ends and too fast between: by 1.2 to
# 1.6 at the median from 256 KiB to 64 MiB, where the library changes protocol and pays for fences.
FALLBACK: Final = Spread(0.9, 2.0, "prior")
FREE: Final = Spread(1.0, 1.0, "prior")


def busbw_factor(kind: CollectiveKind, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines them.

    Examples
    --------
    >>> busbw_factor("all_reduce", 8), busbw_factor("all_gather", 8), busbw_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    match kind:
        case "all_reduce":
            return 2.0 * (ranks - 1) / ranks
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return (ranks - 1) / ranks
        case "broadcast" | "send_recv":
            return 1.0


def algbw_bytes_per_s(size_bytes: float, time_s: float) -> float:
    """Algorithm bandwidth of nccl-tests: size over time."""
    return size_bytes / time_s


def busbw_bytes_per_s(kind: CollectiveKind, ranks: int, size_bytes: float, time_s: float) -> float:
    """Bus bandwidth of nccl-tests: comparable with a link's rate whatever the number of ranks."""
    return algbw_bytes_per_s(size_bytes, time_s) * busbw_factor(kind, ranks)


def num_steps(kind: CollectiveKind, ranks: int) -> int:
    """Steps of the ring (or of the pairwise exchange for all_to_all): messages that wait for one another."""
    match kind:
        case "all_reduce":
            return 2 * (ranks - 1)
        case "all_gather" | "reduce_scatter" | "all_to_all" | "broadcast":
            return ranks - 1
        case "send_recv":
            return min(1, ranks - 1)


def num_nodes(cluster: Cluster, ranks: int) -> int:
    """Nodes that `ranks` ranks span, each filled before the next."""
    return math.ceil(ranks / cluster.node.num_devices)


class CollectiveModel:
    """Time and demands of one kind of collective over the first `ranks` devices, for any size.

    A measured curve where there is one.  Else latency plus bytes over rate:
    ``base + steps inside nodes * hop + steps between nodes * net latency``,
    and for each byte of size what the ring's busiest link (pairwise exchange
    for all_to_all) needs at ``wire_efficiency`` of its rate: never below
    wire bytes over link rate.

    Parameters
    ----------
    cluster : links, ``collectives`` constants, ``net_latency_s`` and measured curves
    kind, ranks : collective and its ranks
    curve : a measured curve to use; the cluster's for (kind, ranks, nodes) when None

    Raises
    ------
    ProfileError
        If the cluster's table cannot be read as a curve, or the ranks span nodes without NICs.
    LayoutError
        If the ranks do not fit on the cluster.
    """

    def __init__(self, cluster: Cluster, kind: CollectiveKind, ranks: int, curve: Curve | None = None) -> None:
        self.cluster, self.kind, self.ranks = cluster, kind, ranks
        nodes = num_nodes(cluster, ranks)
        if curve is None and (table := cluster.curves.get(CurveKey(kind, ranks, nodes))) is not None:
            curve = Curve(table)
        self.curve = curve
        # All loads are proportional to size; a large round one keeps rounding in them out of the ratios.
        wire = ring_wire_bytes(cluster, ranks, kind, _REFERENCE_BYTES)
        memory = hbm_bytes(cluster, ranks, kind, _REFERENCE_BYTES)
        spec = cluster.collectives
        self._latency_s = 0.0 if ranks == 1 else _latency_s(cluster, kind, ranks, nodes)
        self._s_per_byte = bottleneck(cluster, wire).time_s / _REFERENCE_BYTES / spec.wire_efficiency
        self._bound_s_per_byte = wire_lower_bound_s(cluster, ranks, kind, _REFERENCE_BYTES) / _REFERENCE_BYTES
        # Capacities are what is reached, for links as for HBM: two collectives on one link share that, not the sheet's.
        rates = links(cluster)
        self._demands = tuple(
            (name, amount / _REFERENCE_BYTES, capacity)
            for name, amount, capacity in (
                *((link, amount, rates[link] * spec.wire_efficiency) for link, amount in wire.items()),
                *((name, amount, hbm_rate(cluster.device)) for name, amount in memory.items()),
            )
            if amount > 0
        )

    def seconds(self, size_bytes: ArrayLike) -> FloatArray:
        """Times of sizes (nccl-tests "size"), any shape; size 0 gives the latency, one rank 0.

        Raises
        ------
        UsageError
            If a size is negative or not finite.
        """
        sizes = checked_sizes(size_bytes)
        if self.ranks == 1:
            return np.zeros_like(sizes)
        if self.curve is not None:
            return self.curve.seconds(sizes)
        return self._latency_s + sizes * self._s_per_byte

    def bandwidth_seconds(self, size_bytes: ArrayLike) -> FloatArray:
        """Times of sizes without latency: at the best rate that the curve shows, or the link's."""
        sizes = checked_sizes(size_bytes)
        if self.ranks == 1 or self.curve is None:
            return sizes * self._s_per_byte
        return sizes * self.curve.best_s_per_byte()

    def seconds_at(self, size_bytes: ArrayLike, end: Literal["low", "high"]) -> FloatArray:
        """Times of sizes at one end of their spread; the low end stays above what the wires allow."""
        sizes = checked_sizes(size_bytes)
        seconds = self.seconds(sizes)
        if self.curve is None:
            low, high = np.full_like(sizes, FALLBACK.low), np.full_like(sizes, FALLBACK.high)
        else:
            low, high = self.curve.spread_ends(sizes)
        if end == "high":
            return seconds * high
        # A measured time below the bound (buffers smaller than caches, a wrong profile) is kept, not raised.
        return np.minimum(seconds, np.maximum(seconds * low, sizes * self._bound_s_per_byte))

    def cost(self, size_bytes: float) -> Cost:
        """Cost of one collective; ``in_range`` is False outside the measured sizes and without a curve."""
        if self.ranks == 1:
            return Cost(0.0, 0, "collective", FREE, Source("derived", "one rank moves nothing"))
        if self.curve is None:
            spread, in_range = FALLBACK, False
            source = Source("prior", f"latency and wire bytes with collectives.* of {self.cluster.name}", "low")
        else:
            spread, in_range = self.curve.spread(size_bytes), self.curve.in_range(size_bytes)
            source = self.curve.table.source
        return Cost(
            duration_s=float(self.seconds(size_bytes)),
            sm=self.cluster.collectives.sms,
            family="collective",
            spread=spread,
            source=source,
            demands=tuple(Demand(name, amount * size_bytes, rate) for name, amount, rate in self._demands),
            in_range=in_range,
        )


def collective_cost(op: CollectiveOp, cluster: Cluster, *, curve: Curve | None = None) -> Cost:
    """Time and demands of one collective alone.

    Parameters
    ----------
    op : kind, size, ranks (placed on the first devices)
    cluster : machine
    curve : a measured curve that replaces the cluster's

    Returns
    -------
    Cost
        Demands are the ring's bytes on every link and every member's HBM.

    Raises
    ------
    ProfileError, LayoutError
        As `CollectiveModel`.
    """
    return CollectiveModel(cluster, op.kind, op.ranks, curve).cost(op.size_bytes)


_REFERENCE_BYTES: Final = 2.0**30


def _latency_s(cluster: Cluster, kind: CollectiveKind, ranks: int, nodes: int) -> float:
    steps = num_steps(kind, ranks)
    # The messages of an all_to_all between nodes are in flight together; those of a ring follow one another.
    between = min(1, nodes - 1) if kind in ("all_to_all", "send_recv") else steps * (nodes - 1) // (ranks - 1)
    spec = cluster.collectives
    return spec.base_s + (steps - between) * spec.hop_s + between * cluster.net_latency_s

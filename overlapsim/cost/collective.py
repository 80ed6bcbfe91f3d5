"""Collective time: a measured curve, else a fit of the platform, else latency plus bytes over the narrowest link."""

from __future__ import annotations

import math
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike

from overlapsim.cost.algorithms import CATALOGUE, wire_bytes
from overlapsim.cost.base import Cost, Demand, Spread, hbm_rate
from overlapsim.cost.collective_curves import Knots, between_ranks, knots_of
from overlapsim.cost.curve import Curve, FloatArray, checked_sizes
from overlapsim.cost.fitted import FABRIC_KEY, NCCL_KEY, Fitted, fitted_price, one_node_model, regime_of
from overlapsim.cost.structural import bus_factor
from overlapsim.cost.tuner import num_steps
from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.profile import Cluster, CurveKey, Source
from overlapsim.hardware.topology import carries, links
from overlapsim.hardware.wire import bottleneck, hbm_bytes, ring_wire_bytes
from overlapsim.plan import Finding
from overlapsim.workload.operators import CollectiveKind, CollectiveOp

Basis = Literal["table", "fit", "neighbours", "prior"]
# Central 90 % of measured over predicted time, all sizes, on the 2-, 4- and 8-rank tables of A100 and H100 nodes
# (hwprofiles/SOURCES.md, AIC-A100, AIC-H100).  A straight line is right at both ends and too fast between: by 1.2 to
# 1.6 at the median from 256 KiB to 64 MiB, where the library changes protocol and pays for fences.
FALLBACK: Final = Spread(0.9, 2.0, "prior")
# A rank count between two tables of a PCIe node: four ranks from two and eight on L40S and RTX PRO 6000. Host staging
# sets in somewhere between (L40S: 20, 5 and 1.5 GB/s at 2, 4 and 8 ranks).
NEIGHBOURS: Final = Spread(0.65, 1.5, "prior")
FREE: Final = Spread(1.0, 1.0, "prior")
MANY_LINKS: Final = 64
"""Of more shared links than this one stands for all that are alike: clusters of thousands have thousands."""

__all__ = [
    *("Basis", "CollectiveModel", "FALLBACK", "NEIGHBOURS", "algbw_bytes_per_s", "busbw_bytes_per_s"),
    *("busbw_factor", "collective_cost", "num_nodes", "num_steps"),
]


def busbw_factor(kind: CollectiveKind, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines them.

    Examples
    --------
    >>> busbw_factor("all_reduce", 8), busbw_factor("all_gather", 8), busbw_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    return bus_factor(kind, ranks)


def algbw_bytes_per_s(size_bytes: float, time_s: float) -> float:
    """Algorithm bandwidth of nccl-tests: size over time."""
    return size_bytes / time_s


def busbw_bytes_per_s(kind: CollectiveKind, ranks: int, size_bytes: float, time_s: float) -> float:
    """Bus bandwidth of nccl-tests: comparable with a link's rate whatever the number of ranks."""
    return algbw_bytes_per_s(size_bytes, time_s) * busbw_factor(kind, ranks)


def num_nodes(cluster: Cluster, ranks: int) -> int:
    """Nodes that `ranks` ranks span, each filled before the next."""
    return math.ceil(ranks / cluster.node.num_devices)


class CollectiveModel:
    """Time and demands of one kind of collective over the first `ranks` devices, for any size.

    The first of these that there is:

    table
        a measured curve, given or the cluster's for (kind, ranks, nodes);
    fit
        the cluster's fit ``collective.nccl`` inside a node (`structural`), ``collective.fabric`` across nodes
        (`fabric`; its prior where the platform is known and the fabric is not);
    neighbours
        between two measured rank counts: latency straight in ranks, bus bandwidth in log ranks;
    prior
        ``base + steps inside nodes * hop + steps between nodes * net latency``, and for each byte of size what the
        ring's busiest link (pairwise exchange for all_to_all) needs at ``wire_efficiency`` of its rate.

    But for a measured curve, never below what the wires allow.

    Parameters
    ----------
    cluster : links, ``collectives`` constants, ``net_latency_s``, measured curves and fits
    kind, ranks : collective and its ranks
    curve : a measured curve to use; the cluster's for (kind, ranks, nodes) when None
    floor_s : least time of any message, of an installation whose host is slow to launch (torch runs: 26 to 75 us)

    Attributes
    ----------
    basis : which of the above
    curve : the measured curve, None without

    Raises
    ------
    ProfileError
        If the cluster's table cannot be read as a curve, or the ranks span nodes without NICs.
    LayoutError
        If the ranks do not fit on the cluster.
    """

    def __init__(
        self,
        cluster: Cluster,
        kind: CollectiveKind,
        ranks: int,
        curve: Curve | None = None,
        *,
        floor_s: float = 0.0,
    ) -> None:
        self.cluster, self.kind, self.ranks, self.floor_s = cluster, kind, ranks, floor_s
        self.nodes = num_nodes(cluster, ranks)
        # All loads are proportional to size; a large round one keeps rounding in them out of the ratios.
        wire = ring_wire_bytes(cluster, ranks, kind, _REFERENCE_BYTES)
        spec = cluster.collectives
        self._latency_s = 0.0 if ranks == 1 else _latency_s(cluster, kind, ranks, self.nodes)
        self._s_per_byte = bottleneck(cluster, wire).time_s / _REFERENCE_BYTES / spec.wire_efficiency
        self._bound_s_per_byte = wire_lower_bound_s(cluster, ranks, kind, _REFERENCE_BYTES) / _REFERENCE_BYTES
        self.curve = self._curve_of(curve)
        self.basis: Basis = "table"
        self._fitted: Fitted | None = None
        self._knots: Knots | None = None
        if self.curve is None and ranks > 1:
            self._price_without_table()
        self._demands: dict[tuple[str, int | None], tuple[tuple[str, float, float], ...]] = {}
        self._algorithms: dict[int, str] = {}

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
            seconds = self.curve.seconds(sizes)
        elif self._knots is not None:
            seconds = np.asarray(np.interp(sizes, *self._knots), dtype=np.float64)
        else:
            seconds = self._latency_s + sizes * self._s_per_byte
        return np.maximum(seconds, self.floor_s) if self.floor_s else seconds

    def bandwidth_seconds(self, size_bytes: ArrayLike) -> FloatArray:
        """Times of sizes without latency: at the best rate that the curve or fit shows, or the link's."""
        sizes = checked_sizes(size_bytes)
        if self.ranks == 1:
            return sizes * self._s_per_byte
        if self.curve is not None:
            return sizes * self.curve.best_s_per_byte()
        if self._knots is not None:
            at, time = self._knots
            return sizes * float((time[1:] / at[1:]).min())
        return sizes * self._s_per_byte

    def spread_ends(self, size_bytes: ArrayLike) -> tuple[FloatArray, FloatArray]:
        """Low and high multipliers of the central 90 %, for sizes of any shape."""
        sizes = checked_sizes(size_bytes)
        if self.curve is not None:
            return self.curve.spread_ends(sizes)
        if self._fitted is not None:
            regime = regime_of(sizes)
            low = np.array([spread.low for spread in self._fitted.spreads])
            high = np.array([spread.high for spread in self._fitted.spreads])
            return low[regime], high[regime]
        spread = NEIGHBOURS if self.basis == "neighbours" else FALLBACK
        return np.full_like(sizes, spread.low), np.full_like(sizes, spread.high)

    def seconds_at(self, size_bytes: ArrayLike, end: Literal["low", "high"]) -> FloatArray:
        """Times of sizes at one end of their spread; the low end stays above what the wires allow."""
        sizes = checked_sizes(size_bytes)
        seconds = self.seconds(sizes)
        low, high = self.spread_ends(sizes)
        if end == "high":
            return seconds * high
        # A measured time below the bound (buffers smaller than caches, a wrong profile) is kept, not raised.
        return np.minimum(seconds, np.maximum(seconds * low, sizes * self._bound_s_per_byte))

    def cost(self, size_bytes: float, device: int | None = None) -> Cost:
        """Cost of one collective; ``in_range`` is False outside the measured sizes and without a curve.

        With `device`, demands are those it carries: its own HBM and links, and
        for device 0 also what all share (root ports, host memory, NICs, switches).

        Links and SMs are those of the algorithm that the library runs at this size. A demand is at most what its
        link moves in the time: a curve that beats the profile's efficiency fills the link, no more.
        """
        if self.ranks == 1:
            return Cost(0.0, 0, "collective", FREE, Source("derived", "one rank moves nothing"))
        duration = float(self.seconds(size_bytes))
        algorithm = self.algorithm(size_bytes)
        spec = self.cluster.collectives
        return Cost(
            duration_s=duration,
            sm=min(spec.sms, CATALOGUE[algorithm].num_sms(self.cluster.device.architecture)),
            family="collective",
            spread=self._spread(size_bytes),
            source=self._source(),
            demands=self.demands(size_bytes, device, duration),
            in_range=self.curve is not None and self.curve.in_range(size_bytes),
        )

    def demands(
        self, size_bytes: float, device: int | None = None, duration_s: float | None = None
    ) -> tuple[Demand, ...]:
        """Bytes on links and in HBM, of all devices or of one; at most what each moves in the time."""
        duration = float(self.seconds(size_bytes)) if duration_s is None else duration_s
        return tuple(
            Demand(name, min(amount * size_bytes, duration * rate), rate)
            for name, amount, rate in self._demands_of(self.algorithm(size_bytes), device)
        )

    def algorithm(self, size_bytes: float) -> str:
        """Algorithm that the library runs inside a node at this size; ring (or pairwise) across nodes."""
        if self.kind in ("all_to_all", "send_recv"):
            return "pairwise"
        # Links and SMs change at the library's switches; an eighth of a doubling finds them closely enough.
        step = round(8 * math.log2(max(size_bytes, 1.0)))
        if step not in self._algorithms:
            self._algorithms[step] = self._algorithm(2.0 ** (step / 8))
        return self._algorithms[step]

    def _algorithm(self, size_bytes: float) -> str:
        model = one_node_model(self.cluster)
        if self.nodes > 1 or model is None or not model.prices(self.kind):
            return "ring"
        branch = int(model.branches(self.kind, self.ranks, np.array([size_bytes]))[0])
        return "nvls" if branch == 3 and self.cluster.node.scale_up == "nvswitch" else "ring"

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was believed and not measured."""
        where = f"{self.kind} of {self.ranks} ranks on {self.nodes} node(s) of {self.cluster.name}"
        if self.curve is not None or self.ranks == 1:
            return ()
        if self._fitted is not None and self._source().layer == "derived":
            message = f"{where} is not calibrated: priced by the constants of a sister at this machine's links"
            return (Finding("not_calibrated", f"{message}; give --curve FILE or calibrate"),)
        if self._fitted is not None and self._source().layer != "prior":
            return (Finding("curve_fitted", f"no table of {where}: priced by the platform's fit; give --curve FILE"),)
        if self.basis == "neighbours":
            return (Finding("curve_between", f"no table of {where}: drawn between two rank counts; give --curve FILE"),)
        key = NCCL_KEY if self.nodes == 1 else FABRIC_KEY
        message = f"{where} is not calibrated (no table, no fit {key}): priced by latency and wire bytes"
        return (Finding("not_calibrated", f"{message}; give --curve FILE or calibrate"),)

    def _curve_of(self, curve: Curve | None) -> Curve | None:
        table = self.cluster.curves.get(CurveKey(self.kind, self.ranks, self.nodes))
        if curve is not None or table is None:
            return curve
        model = one_node_model(self.cluster) if self.nodes == 1 else None
        known = model.latency_s(self.kind, self.ranks) if model is not None and model.prices(self.kind) else None
        return Curve(table, known)

    def _price_without_table(self) -> None:
        self._fitted = fitted_price(self.cluster, self.kind, self.ranks, self.nodes)
        if self._fitted is not None:
            self.basis = "fit"
            self._knots = knots_of(self._fitted.seconds, self._bound_s_per_byte)
            return
        self._knots = between_ranks(self.cluster, self.kind, self.ranks, self.nodes)
        self.basis = "prior" if self._knots is None else "neighbours"

    def _spread(self, size_bytes: float) -> Spread:
        if self.curve is not None:
            return self.curve.spread(size_bytes)
        if self._fitted is not None:
            return self._fitted.spreads[int(regime_of(np.asarray(size_bytes, dtype=np.float64)))]
        return NEIGHBOURS if self.basis == "neighbours" else FALLBACK

    def _source(self) -> Source:
        if self.curve is not None:
            return self.curve.table.source
        if self._fitted is not None:
            return self._fitted.source
        if self.basis == "neighbours":
            return Source("derived", f"tables of {self.cluster.name} at two rank counts", "low")
        return Source("prior", f"latency and wire bytes with collectives.* of {self.cluster.name}", "low")

    def _demands_of(self, algorithm: str, device: int | None) -> tuple[tuple[str, float, float], ...]:
        """Resource, bytes for each byte of size, and capacity."""
        key = (algorithm, device)
        if device is not None:
            if key not in self._demands:
                every = self._demands_of(algorithm, None)
                own = tuple(entry for entry in every if carries(device, entry[0]))
                self._demands[key] = _one_of_each(own) if len(own) > MANY_LINKS else own
            return self._demands[key]
        if key not in self._demands:
            cluster = self.cluster
            if algorithm == "nvls":
                wire = wire_bytes(cluster, self.ranks, algorithm, self.kind, _REFERENCE_BYTES)
            else:
                wire = ring_wire_bytes(cluster, self.ranks, self.kind, _REFERENCE_BYTES)
            memory = hbm_bytes(cluster, self.ranks, self.kind, _REFERENCE_BYTES)
            # Capacities are what is reached, for links as for HBM: two collectives on a link share that.
            rates, reached = links(cluster), cluster.collectives.wire_efficiency
            self._demands[key] = tuple(
                (name, amount / _REFERENCE_BYTES, capacity)
                for name, amount, capacity in (
                    *((link, amount, rates[link] * reached) for link, amount in wire.items()),
                    *((name, amount, hbm_rate(cluster.device)) for name, amount in memory.items()),
                )
                if amount > 0
            )
        return self._demands[key]


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


def _one_of_each(loads: tuple[tuple[str, float, float], ...]) -> tuple[tuple[str, float, float], ...]:
    """The first of the links of one kind that carry as much at the same rate: all of them are equally full."""
    first: dict[tuple[str, float, float], tuple[str, float, float]] = {}
    for name, amount, rate in loads:
        first.setdefault((name.partition("[")[0], amount, rate), (name, amount, rate))
    return tuple(first.values())

"""Collectives that no library kernel on SMs moves: by copy engines, or by a switch that reduces (NVLS)."""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike

from overlapsim.cost.algorithms import CATALOGUE, wire_bytes
from overlapsim.cost.base import Cost, Demand, Spread, hbm_name, hbm_rate
from overlapsim.cost.choice import algorithm_seconds
from overlapsim.cost.collective import num_nodes
from overlapsim.cost.contention import hbm_per_wire_byte, stolen_sms
from overlapsim.cost.copy_engine import KINDS, NVLINK_SHARE, PIECE_S, copy_engine_seconds
from overlapsim.cost.curve import FloatArray, checked_sizes
from overlapsim.errors import UsageError
from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.profile import Cluster, Source
from overlapsim.hardware.topology import carries, links
from overlapsim.workload.operators import CollectiveKind, Engine

FREE: Final = Spread(1.0, 1.0, "prior")
# NVLS over registered buffers against the branch fitted to plain ones, and gathers priced without a measured one.
NVLS: Final = Spread(0.85, 1.25, "prior")
_REFERENCE: Final = 2.0**30
_HUGE: Final = 2.0**50  # where latency is nothing


def transport_refusal(cluster: Cluster, kind: CollectiveKind, ranks: int, engine: Engine) -> str | None:
    """Why an engine cannot run a collective on the first `ranks` devices; None where it can.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_cluster
    >>> transport_refusal(load_cluster("a100-sxm8"), "all_reduce", 8, "nvls")
    'a100-sxm8 has no switch that reduces: NVLS needs an NVSwitch of Hopper or later'
    """
    node = cluster.node
    if engine == "kernel" or ranks == 1:
        return None
    title = "NVLS" if engine == "nvls" else "copy engines"
    able = CATALOGUE["nvls"].kinds if engine == "nvls" else frozenset(KINDS)
    if kind not in able:
        verb = "does" if engine == "nvls" else "do"
        return f"{title} {verb} not run {kind}, only {', '.join(sorted(able))}"
    if num_nodes(cluster, ranks) > 1:
        return f"{title} stay inside one node; {ranks} ranks span {num_nodes(cluster, ranks)} of {cluster.name}"
    if engine == "nvls" and not node.switch_reduction:
        return f"{node.name} has no switch that reduces: NVLS needs an NVSwitch of Hopper or later"
    if engine == "copy_engine" and not node.p2p:
        return f"GPUs of {node.name} have no peer-to-peer access: copy engines cannot reach a peer's memory"
    return None


class TransportModel:
    """Time and demands of one kind of collective by copy engines or NVLS, for any size.

    Copy engines: `copy_engine_seconds`. NVLS: the platform's fitted branch for an all_reduce, else latency and the
    share of the link that NVLS reaches (`choice.algorithm_seconds`). HBM carries ``hbm_per_wire_byte`` for each byte
    that passes the GPU's port, the mean of both directions. The interface is that of `CollectiveModel`.

    Parameters
    ----------
    cluster, kind, ranks : machine, collective, ranks on the first devices
    engine : ``copy_engine`` or ``nvls``

    Raises
    ------
    UsageError
        If the engine cannot run the collective here (`transport_refusal`).
    """

    def __init__(self, cluster: Cluster, kind: CollectiveKind, ranks: int, engine: Engine) -> None:
        reason = transport_refusal(cluster, kind, ranks, engine)
        if reason is not None:
            raise UsageError(f"{reason}; choose another engine or collective")
        self.cluster, self.kind, self.ranks, self.engine = cluster, kind, ranks, engine
        self._bound_s_per_byte = (
            0.0 if ranks == 1 else wire_lower_bound_s(cluster, ranks, kind, _REFERENCE) / _REFERENCE
        )
        self._per_byte = () if ranks == 1 else self._loads()

    def seconds(self, size_bytes: ArrayLike) -> FloatArray:
        """Times of nccl-tests sizes, any shape; 0 for one rank.

        Raises
        ------
        UsageError
            If a size is negative or not finite.
        """
        sizes = checked_sizes(size_bytes)
        if self.ranks == 1:
            return np.zeros_like(sizes)
        if self.engine == "nvls":
            return algorithm_seconds(self.cluster, self.kind, self.ranks, "nvls", sizes)
        return self._copies(sizes)

    def bandwidth_seconds(self, size_bytes: ArrayLike) -> FloatArray:
        """Times of sizes without latency."""
        sizes = checked_sizes(size_bytes)
        if self.ranks == 1:
            return np.zeros_like(sizes)
        if self.engine == "nvls":
            return np.asarray(sizes * (float(self.seconds(_HUGE)) / _HUGE))
        return self._copies(sizes, base=False, pieces=0)

    def seconds_at(self, size_bytes: ArrayLike, end: Literal["low", "high"]) -> FloatArray:
        """Times of sizes at one end of their spread; the low end stays above what the wires allow."""
        sizes = checked_sizes(size_bytes)
        if self.ranks == 1:
            return np.zeros_like(sizes)
        if self.engine == "nvls":
            factor = NVLS.low if end == "low" else NVLS.high
            return np.maximum(self.seconds(sizes) * factor, sizes * self._bound_s_per_byte)
        return self._copies(sizes, end)

    def piece_seconds(self, size_bytes: float, pieces: int, end: Literal["low", "high"] | None = None) -> float:
        """Time of one of `pieces` equal copies of a collective by copy engines, without the collective's base."""
        assert self.engine == "copy_engine", "only copy engines move whole pieces"
        sizes = checked_sizes(size_bytes)
        return float(self._copies(sizes, end, base=False, pieces=pieces)) / pieces

    def _copies(
        self,
        sizes: FloatArray,
        end: Literal["low", "high"] | None = None,
        *,
        base: bool = True,
        pieces: int | None = None,
    ) -> FloatArray:
        """Copy engines at what was published of them, or at one end of it."""
        piece_s, share = PIECE_S.typical, NVLINK_SHARE.typical
        if end is not None:
            piece_s, share = (PIECE_S.low, NVLINK_SHARE.high) if end == "low" else (PIECE_S.high, NVLINK_SHARE.low)
        return copy_engine_seconds(
            self.cluster, self.kind, self.ranks, sizes, piece_s=piece_s, share=share, base=base, pieces=pieces
        )

    def cost(self, size_bytes: float, device: int | None = None) -> Cost:
        """Cost of one collective; SMs are those of the engine."""
        if self.ranks == 1:
            return Cost(0.0, 0, "collective", FREE, Source("derived", "one rank moves nothing"))
        duration = float(self.seconds(size_bytes))
        low, high = (float(self.seconds_at(size_bytes, end)) / duration for end in ("low", "high"))
        return Cost(
            duration_s=duration,
            sm=engine_sms(self.cluster, self.engine),
            family="collective",
            spread=Spread(min(low, 1.0), max(high, 1.0), "prior"),
            source=Source("derived", "NC-NVLS" if self.engine == "nvls" else "PK", "medium"),
            demands=self.demands(size_bytes, device, duration),
            in_range=False,
        )

    def demands(
        self, size_bytes: float, device: int | None = None, duration_s: float | None = None
    ) -> tuple[Demand, ...]:
        """Bytes on links and in HBM, of all devices or of one; at most what each moves in the time."""
        duration = float(self.seconds(size_bytes)) if duration_s is None else duration_s
        return tuple(
            Demand(name, min(amount * size_bytes, duration * rate), rate)
            for name, amount, rate in self._per_byte
            if device is None or carries(device, name)
        )

    def _loads(self) -> tuple[tuple[str, float, float], ...]:
        """Resource, bytes for each byte of size, and capacity: that which library collectives have on it."""
        cluster = self.cluster
        algorithm = "nvls" if self.engine == "nvls" else "pairwise" if self.kind != "all_gather" else "ring"
        wire = wire_bytes(cluster, self.ranks, algorithm, self.kind, _REFERENCE)
        rates, reached = links(cluster), cluster.collectives.wire_efficiency
        loads = [(link, amount / _REFERENCE, rates[link] * reached) for link, amount in wire.items()]
        per_wire = hbm_per_wire_byte(self.kind, self.engine).typical
        for device in range(self.ranks):
            ports = ("nvlink_out", "nvlink_in", "pcie_up", "pcie_down")
            passed = sum(wire.get(f"{port}[{device}]", 0.0) for port in ports) / 2
            if not passed:
                passed = sum(amount for link, amount in wire.items() if link.startswith(f"nvlink[{device}>"))
            loads.append((hbm_name(device), per_wire * passed / _REFERENCE, hbm_rate(cluster.device)))
        return tuple(load for load in loads if load[1] > 0)


def engine_sms(cluster: Cluster, engine: Engine) -> int:
    """SMs that a collective by copy engines or NVLS holds."""
    return round(stolen_sms(cluster.device, engine).typical)

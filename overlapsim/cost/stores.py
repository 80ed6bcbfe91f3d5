"""Bytes that a kernel stores into peers' memory itself, tile by tile: rate, what they cost its SMs, flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from overlapsim.cost.algorithms import wire_bytes
from overlapsim.cost.base import Demand, hbm_name, hbm_rate
from overlapsim.cost.gemm import L2_BYTES_PER_CLOCK
from overlapsim.errors import UsageError
from overlapsim.hardware.profile import Cluster, DeviceSpec
from overlapsim.hardware.topology import carries, links
from overlapsim.hardware.wire import bottleneck
from overlapsim.workload.operators import CollectiveKind

Mechanism = Literal["tma", "registers"]
# Share of NVLink that stores reach, and SMs that are needed for it, one SM a CTA (hwprofiles/SOURCES.md, PK).
SHARE: Final[Mapping[Mechanism, float]] = {"tma": 0.78, "registers": 0.76}
TMA_SMS: Final = 15
FLAG_S: Final = 832e-9
"""From a flag's write in HBM to another SM seeing it (PK)."""
_TMA: Final = ("hopper", "blackwell")
_REFERENCE: Final = 2.0**30


@dataclass(frozen=True)
class Stores:
    """What it takes to store bytes in peers' memory.

    Attributes
    ----------
    seconds : at the rate of the busiest link
    sm_seconds : time of one SM, beyond storing them at home, in which it can do nothing else
    demands : of one device on links and HBM
    """

    seconds: float
    sm_seconds: float
    demands: tuple[Demand, ...]


def mechanism(device: DeviceSpec) -> Mechanism:
    """How a GEMM's epilogue stores: by TMA from Hopper on, from registers before."""
    return "tma" if device.architecture.startswith(_TMA) else "registers"


def peer_stores(
    cluster: Cluster, ranks: int, size_bytes: float, device: int = 0, *, ring: CollectiveKind | None = None
) -> Stores:
    """Price of storing each rank's share of `size_bytes` bytes in that rank's memory, as fused epilogues do.

    Model: an all-to-all of ``size_bytes``, every link at the mechanism's share of NVLink or at a PCIe link's rate;
    each byte received is written once, what is sent comes from registers. Kernels with TMA keep one CTA on an SM, so
    nothing computes while it stores at its share of what 15 SMs saturate; earlier ones hide that behind other CTAs.

    Parameters
    ----------
    ranks : 2 or more, on the first devices of one node
    size_bytes : of the whole output, the own share included
    device : whose demands
    ring : a gather or sum that goes from neighbour to neighbour instead, as it does best where ranks share links

    Raises
    ------
    UsageError
        If the GPUs cannot reach each other's memory, or are not in one node.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_cluster
    >>> priced = peer_stores(load_cluster("h100-sxm8"), 8, 8e9)
    >>> round(7e9 / priced.seconds / 1e9), round(priced.sm_seconds / priced.seconds, 1)
    (351, 13.0)
    """
    node = cluster.node
    if not node.p2p or ranks > node.num_devices:
        raise UsageError(f"{ranks} ranks of {cluster.name} cannot store into each other's memory; expected one node")
    how = mechanism(cluster.device)
    wire = wire_bytes(cluster, ranks, "ring" if ring else "pairwise", ring or "all_to_all", _REFERENCE)
    worst = bottleneck(cluster, wire)
    reach = SHARE[how] if worst.link.startswith("nvlink") else 1.0
    seconds = worst.time_s / reach * size_bytes / _REFERENCE
    sent = size_bytes * (ranks - 1) / ranks
    rates, reached = links(cluster), cluster.collectives.wire_efficiency
    demands = [
        Demand(link, min(amount * size_bytes / _REFERENCE, seconds * rates[link] * reached), rates[link] * reached)
        for link, amount in wire.items()
        if carries(device, link)
    ]
    demands.append(Demand(hbm_name(device), sent, hbm_rate(cluster.device)))
    return Stores(seconds, _sm_seconds(cluster, how, sent), tuple(demands))


def _sm_seconds(cluster: Cluster, how: Mechanism, sent_bytes: float) -> float:
    """Time of one SM for all bytes, less what storing them in the own L2 takes, which is in any kernel's time."""
    node, device = cluster.node, cluster.device
    if how != "tma" or not node.nvlink_bandwidth_bytes_per_s:
        return 0.0
    a_byte_s = TMA_SMS / (SHARE[how] * node.nvlink_bandwidth_bytes_per_s)
    home_s = 1 / (device.boost_clock_hz * L2_BYTES_PER_CLOCK)
    return sent_bytes * max(0.0, a_byte_s - home_s)

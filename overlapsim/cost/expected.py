"""What a machine should show and what binds it: figures to hold a measurement against, and a cap behind several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapsim.cost.collective import CollectiveModel, busbw_bytes_per_s, num_nodes
from overlapsim.cost.fitted import fabric_model
from overlapsim.cost.structural import bus_factor
from overlapsim.errors import LayoutError, UsageError
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import Finding
from overlapsim.workload.operators import CollectiveKind

# Bytes/s of NIC traffic that one SM feeds, derived from latency at 12 and 24 SMs over 2 x 8 B300 (8192 tokens of 7168,
# top-8; SOURCES.md, P6B): time^2 = (bytes / NIC)^2 + (bytes / (SMs x rate))^2.
DISPATCH_PER_SM: Final = 5.7e9
COMBINE_PER_SM: Final = 3.7e9
# Bytes over NVLink for each byte over the NIC in a two-level dispatch of 2 x 8 GPUs, top-8 (84 to 25.8 GB/s in the
# report of deepseek-ai/DeepEP issue 155).
NVLINK_PER_NIC_BYTE: Final = 3.26
# Per-rail rates closer together than this are one cap.
_SAME: Final = 1.3


@dataclass(frozen=True)
class Expected:
    """What one collective should reach.

    Attributes
    ----------
    bytes_per_s : bus bandwidth (of the NIC for a dispatch)
    low, high : its central 90 %
    binding : ``nic``, ``nvlink`` or ``sm``: what sets it
    bounds : rate that each of them alone would allow, in the same measure
    """

    bytes_per_s: float
    low: float
    high: float
    binding: str
    bounds: Mapping[str, float]


def expected_busbw(cluster: Cluster, kind: CollectiveKind, ranks: int, size_bytes: float) -> Expected:
    """Bus bandwidth that a collective should show at a size, and whether NICs or NVLink set it.

    Raises
    ------
    LayoutError, ProfileError
        As `CollectiveModel`.
    """
    model = CollectiveModel(cluster, kind, ranks)
    seconds = float(model.seconds(size_bytes))
    low, high = (float(model.seconds_at(size_bytes, end)) for end in ("low", "high"))
    nodes = num_nodes(cluster, ranks)
    bounds = {"nvlink": cluster.node.nvlink_bandwidth_bytes_per_s * cluster.collectives.wire_efficiency}
    if nodes > 1:
        fabric, _ = fabric_model(cluster, ranks, nodes)
        rates = fabric.bounds(kind)
        bounds = {"nic": rates["nic"], **({"nvlink": rates["node"]} if "node" in rates else {})}
    return Expected(
        busbw_bytes_per_s(kind, ranks, size_bytes, seconds),
        busbw_bytes_per_s(kind, ranks, size_bytes, high),
        busbw_bytes_per_s(kind, ranks, size_bytes, low),
        _least(bounds),
        bounds,
    )


def rail_bytes_per_s(cluster: Cluster, kind: CollectiveKind, ranks: int, busbw_bytes_per_s: float) -> float:
    """What one NIC moved each way while a collective showed this bus bandwidth.

    A ring (all-gather, reduce-scatter, broadcast) puts its bus bytes once through a node's NICs, an all-reduce by
    trees ``2 (nodes - 1) / nodes`` of the size, all-to-all the remote share of every GPU, send/recv each rank's size.

    Examples
    --------
    >>> from overlapsim.hardware.loading import load_cluster
    >>> pod = load_cluster("h100-sxm8").with_nodes(2)
    >>> round(rail_bytes_per_s(pod, "all_gather", 16, 101e9) / 1e9, 2)
    12.62
    """
    nodes, nics = num_nodes(cluster, ranks), cluster.node.num_nics
    if nodes < 2 or not nics:
        raise LayoutError(f"{ranks} ranks on {nodes} node(s) with {nics} NICs cross no rail; give ranks on two nodes")
    size_per_s = busbw_bytes_per_s / bus_factor(kind, ranks)
    inside = ranks / nodes
    if kind == "all_reduce":
        return size_per_s * 2 * (nodes - 1) / nodes / nics
    if kind == "all_to_all":
        return size_per_s * (ranks - inside) / ranks * inside / nics
    if kind == "send_recv":
        return busbw_bytes_per_s
    return size_per_s * bus_factor(kind, ranks) / nics


def common_cap(
    cluster: Cluster, ranks: int, busbw: Mapping[CollectiveKind, float]
) -> tuple[float, tuple[Finding, ...]]:
    """Per-rail rate behind several measured bus bandwidths, and whether one cap explains them all.

    Parameters
    ----------
    ranks : of the collectives, on two nodes or more
    busbw : measured bus bandwidth of large messages in bytes/s by collective; send_recv is of one pair on one rail

    Returns
    -------
    rate : median of the per-rail rates, bytes/s
    findings : ``common_cap`` where the rates agree and lie well below the NIC's, else ``no_common_cap`` or nothing

    Raises
    ------
    UsageError
        With fewer than two collectives.
    """
    if len(busbw) < 2:
        raise UsageError(f"a common cap needs two collectives or more; {len(busbw)} given")
    rails = {kind: rail_bytes_per_s(cluster, kind, ranks, rate) for kind, rate in busbw.items()}
    median = float(np.median(list(rails.values())))
    shown = ", ".join(f"{kind} {rate / 1e9:.3g}" for kind, rate in rails.items())
    nic = cluster.node.nic_bandwidth_bytes_per_s
    if max(rails.values()) > _SAME * min(rails.values()):
        return median, (Finding("no_common_cap", f"GB/s on each rail differ ({shown}): no single cap explains them"),)
    if median > 0.75 * nic:
        return median, ()
    message = (
        f"every collective moves about {median / 1e9:.3g} GB/s on each rail ({shown}) of {nic / 1e9:.3g}: a cap per "
        "connection, not a collective's fault; look at queue pairs, flow hashing and congestion control of one rail"
    )
    return median, (Finding("common_cap", message),)


def expected_dispatch(
    cluster: Cluster,
    ranks: int,
    num_sms: int,
    *,
    combine: bool = False,
    put_bytes_per_s: float | None = None,
    nvlink_per_nic_byte: float = NVLINK_PER_NIC_BYTE,
) -> Expected:
    """NIC bandwidth that a two-level dispatch (or combine) should reach on each GPU, and what binds it.

    Parameters
    ----------
    num_sms : SMs that the kernel holds
    combine : the way back, whose reduction costs SMs more
    put_bytes_per_s : measured rate of plain puts over one NIC; 0.94 of the sheet when None
    nvlink_per_nic_byte : bytes over NVLink for each byte over the NIC

    Raises
    ------
    LayoutError
        If the ranks are on one node.
    """
    nodes = num_nodes(cluster, ranks)
    if nodes < 2:
        raise LayoutError(f"{ranks} ranks are on one node: a two-level dispatch needs ranks on two")
    per_gpu = cluster.node.num_nics * cluster.node.nic_bandwidth_bytes_per_s / cluster.node.num_devices
    nvlink = cluster.node.nvlink_bandwidth_bytes_per_s * cluster.collectives.wire_efficiency
    bounds = {
        "nic": 0.94 * per_gpu if put_bytes_per_s is None else put_bytes_per_s,
        "nvlink": nvlink / nvlink_per_nic_byte,
        "sm": num_sms * (COMBINE_PER_SM if combine else DISPATCH_PER_SM),
    }
    rate = float((bounds["nic"] ** -2 + bounds["sm"] ** -2) ** -0.5)
    rate = min(rate, bounds["nvlink"])
    return Expected(rate, 0.85 * rate, min(1.1 * rate, min(bounds.values())), _least(bounds), bounds)


def dispatch_seconds(nic_bytes: float, nic_bytes_per_s: float, num_sms: int, *, combine: bool = False) -> float:
    """Time of a two-level dispatch or combine against the SMs it holds.

    Examples
    --------
    >>> [round(dispatch_seconds(58.7e6, 96e9, sms) * 1e6) for sms in (12, 24)]
    [1054, 747]
    """
    if num_sms < 1:
        raise UsageError(f"a dispatch on {num_sms} SMs; expected at least 1")
    feed = num_sms * (COMBINE_PER_SM if combine else DISPATCH_PER_SM)
    return float(nic_bytes * (nic_bytes_per_s**-2 + feed**-2) ** 0.5)


def crossover_top_k(gather: CollectiveModel, exchange: CollectiveModel, gathered_bytes: float) -> float:
    """Top-k at which all-to-all dispatch takes as long as gathering all tokens.

    Tokens of ``gathered_bytes / ranks`` a rank go to k experts each: an all-to-all of k times that size, against one
    all-gather of ``gathered_bytes``. Infinite if the all-to-all is faster up to four times the ranks.

    Examples
    --------
    On one H100 node, 112 MiB: between 6 and 8.
    """
    if gather.ranks != exchange.ranks:
        raise UsageError(f"all-gather of {gather.ranks} and all-to-all of {exchange.ranks} ranks; expected the same")
    tops = np.linspace(0.0, 4.0 * gather.ranks, 4001)[1:]
    slower = exchange.seconds(tops * gathered_bytes / gather.ranks) >= float(gather.seconds(gathered_bytes))
    return float(tops[np.argmax(slower)]) if slower.any() else float("inf")


def _least(bounds: Mapping[str, float]) -> str:
    return min(bounds, key=lambda name: bounds[name])

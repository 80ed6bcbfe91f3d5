"""Fitted collective times of a cluster: the structural fit inside a node, the fabric's across nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np

from overlapsim.cost.base import Spread
from overlapsim.cost.fabric import FABRIC_PARAMETERS, FabricModel, fabric_prior, group_of
from overlapsim.cost.structural import OneNodeModel
from overlapsim.cost.tuner import FloatArray
from overlapsim.hardware.profile import Cluster, Fit, Source

NCCL_KEY: Final = "collective.nccl"
FABRIC_KEY: Final = "collective.fabric"
# Where a fit carries no range of its own: unseen rank counts and collectives of the five 8-GPU platforms.
FIT_PRIOR: Final = Spread(0.82, 1.18, "prior")
# Another site of the same fabric, from 64 KiB (four runs of one cloud differ by up to 27 % at the switches).
FABRIC_FITTED: Final = Spread(0.75, 1.35, "prior")
# A fabric of which the hop and the NICs are known only: six two-node tables, from 64 KiB (90 % of 160 rows).
FABRIC_PRIOR: Final = Spread(0.65, 2.0, "prior")
REGIMES: Final[tuple[tuple[str, float], ...]] = (("small", 0.0), ("middle", 2.0**16), ("large", 2.0**26))
"""Size regimes of ranges: below 64 KiB, to 64 MiB, above."""


class Fitted(NamedTuple):
    """A price made by a fit: time of sizes, its range by regime, and where the constants come from."""

    seconds: Callable[[FloatArray], FloatArray]
    spreads: tuple[Spread, ...]
    source: Source


def fitted_price(cluster: Cluster, kind: str, ranks: int, nodes: int) -> Fitted | None:
    """Price of a collective by the cluster's fits; None where they do not hold it."""
    if nodes > 1:
        return _across(cluster, kind, ranks, nodes)
    fit = cluster.fits.get(NCCL_KEY)
    model = one_node_model(cluster)
    if fit is None or model is None or not model.prices(kind):
        return None
    return Fitted(lambda sizes: model.seconds(kind, ranks, sizes), spreads_of(fit, FIT_PRIOR), fit.source)


def one_node_model(cluster: Cluster) -> OneNodeModel | None:
    """The structural model of the cluster's nodes, if one was fitted and they have NVLink."""
    fit, node = cluster.fits.get(NCCL_KEY), cluster.node
    if fit is None or node.scale_up == "pcie":
        return None
    return OneNodeModel(
        fit.parameters, cluster.device.architecture, node.nvlink_bandwidth_bytes_per_s, node.switch_reduction
    )


def fabric_model(cluster: Cluster, ranks: int, nodes: int) -> tuple[FabricModel, Fit | None]:
    """The fabric's model over these ranks: fitted constants where there are some, the prior for the rest."""
    fit = cluster.fits.get(FABRIC_KEY)
    known: Mapping[str, float] = {} if fit is None else fit.parameters
    base, hop = latency_constants(cluster)
    node = cluster.node
    # A node that is not full uses the NICs of its own GPUs.
    nics = node.num_nics * node.nic_bandwidth_bytes_per_s * min(1.0, ranks / nodes / node.num_devices)
    return FabricModel({**fabric_prior(cluster), **known}, base, hop, ranks, nodes, nics), fit


def latency_constants(cluster: Cluster) -> tuple[float, float]:
    """Base and hop of the smallest message inside a node: fitted, else the profile's."""
    fit = cluster.fits.get(NCCL_KEY)
    if fit is not None and "small_base" in fit.parameters:
        return fit.parameters["small_base"], fit.parameters["small_hop"]
    return cluster.collectives.base_s, cluster.collectives.hop_s


def spreads_of(fit: Fit, prior: Spread) -> tuple[Spread, ...]:
    """Ranges of the three size regimes, from the fit or the prior."""
    found = []
    for name, _ in REGIMES:
        low, high = fit.spread.get(name, (prior.low, prior.high))
        found.append(Spread(low, high, "residual" if name in fit.spread else "prior"))
    return tuple(found)


def regime_of(sizes: FloatArray) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    """Index into `REGIMES` of each size."""
    return np.searchsorted(np.array([start for _, start in REGIMES[1:]]), sizes, side="right")


def _across(cluster: Cluster, kind: str, ranks: int, nodes: int) -> Fitted | None:
    model, fit = fabric_model(cluster, ranks, nodes)
    group = group_of(kind)
    if fit is not None and any(name.startswith(f"{group}_") for name in fit.parameters if name in FABRIC_PARAMETERS):
        return Fitted(lambda sizes: model.seconds(kind, sizes), spreads_of(fit, FABRIC_FITTED), fit.source)
    if NCCL_KEY not in cluster.fits or not cluster.node.num_nics:
        return None
    source = Source("prior", f"two-node tables of other fabrics, at the hop and NICs of {cluster.name}", "low")
    return Fitted(lambda sizes: model.seconds(kind, sizes), (FABRIC_PRIOR,) * len(REGIMES), source)

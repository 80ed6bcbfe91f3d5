"""Where the ranks of a measured collective lie on a cluster, and what its links and models say of it."""

from __future__ import annotations

import warnings
from typing import Final

import numpy as np
from numpy.typing import NDArray

from overlapsim.cost.collective import CollectiveModel
from overlapsim.errors import CalibrationError, OverlapSimError
from overlapsim.hardware.bounds import wire_lower_bound_s
from overlapsim.hardware.profile import Cluster, CurveKey
from overlapsim.workload.operators import COLLECTIVES

FloatArray = NDArray[np.float64]

_REFERENCE_BYTES: Final = float(2**30)


def base_seconds(key: CurveKey, size_bytes: FloatArray, cluster: Cluster) -> FloatArray:
    """What `cluster` prices the collective at.

    Raises
    ------
    CalibrationError
        If it cannot: an unknown collective, or ranks that do not fit the nodes.
    """
    if key.collective not in COLLECTIVES:
        raise CalibrationError(f"collective {key.collective!r} is not known; expected one of {', '.join(COLLECTIVES)}")
    devices(key, cluster)
    if not fills_nodes(key, cluster):
        # The models fill each node before the next; for ranks that are spread, the links alone can be asked, and a
        # rank has its share of the NICs.
        share = key.ranks / key.nodes / cluster.node.num_devices
        reached = bound_seconds(key, size_bytes, cluster) / cluster.collectives.wire_efficiency / share
        return np.asarray(cluster.collectives.base_s + key.ranks * cluster.net_latency_s + reached)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.asarray(CollectiveModel(cluster, key.collective, key.ranks).seconds(size_bytes))
    except OverlapSimError as error:
        raise CalibrationError(
            f"{cluster.name} cannot price {key.collective} over {key.ranks} ranks: {error}"
        ) from None


def fills_nodes(key: CurveKey, cluster: Cluster) -> bool:
    """Whether the ranks lie as the models put them: each node filled before the next."""
    return -(-key.ranks // cluster.node.num_devices) == key.nodes


def bound_seconds(key: CurveKey, size_bytes: FloatArray, cluster: Cluster) -> FloatArray:
    """What no algorithm can beat on `cluster`'s links."""
    bound = wire_lower_bound_s(cluster, devices(key, cluster), key.collective, _REFERENCE_BYTES)
    return size_bytes * (bound / _REFERENCE_BYTES)


def devices(key: CurveKey, cluster: Cluster) -> list[int]:
    """Devices that the ranks use: the first of each node.

    Raises
    ------
    CalibrationError
        If a node has fewer GPUs than ranks lie on it.
    """
    inside, rest = divmod(key.ranks, key.nodes)
    per_node = cluster.node.num_devices
    if rest or inside > per_node or key.nodes > cluster.num_nodes:
        raise CalibrationError(
            f"{key.ranks} ranks on {key.nodes} nodes do not fit {cluster.name}, whose nodes have {per_node} GPUs; "
            "check --ranks-per-node and --cluster"
        )
    return [node * per_node + local for node in range(key.nodes) for local in range(inside)]

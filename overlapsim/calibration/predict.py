"""What a cluster's profile says of one record: the price of the same work alone, as the cost models give it."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from overlapsim.calibration.gemm_shapes import profile_seconds
from overlapsim.calibration.placement import devices, fills_nodes
from overlapsim.calibration.records import Record
from overlapsim.cost.collective import CollectiveModel
from overlapsim.cost.curve import Curve
from overlapsim.cost.gemm import gemm_cost
from overlapsim.cost.memory_bound import memory_seconds
from overlapsim.errors import OverlapSimError
from overlapsim.hardware.profile import Cluster, CurveKey
from overlapsim.units import DTYPE_BYTES
from overlapsim.workload.operators import COLLECTIVES, GemmOp

FloatArray = NDArray[np.float64]


def predict(records: Sequence[Record], cluster: Cluster) -> FloatArray:
    """Seconds of each record's work alone; NaN where no model prices it.

    A collective is priced with its curve over the nodes that the record names where the cluster has one, else as
    the cluster's models do. A GEMM gets the SMs that were left to it.

    Parameters
    ----------
    records : any kinds
    cluster : with at least as many nodes as the records
    """
    seconds = np.full(len(records), np.nan)
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, record in enumerate(records):
        if record.kind == "collective":
            groups["collective", record.op, str(record.ranks), str(record.nodes)].append(place)
        elif record.kind == "memory":
            groups["memory", record.op, record.dtype].append(place)
        elif record.kind == "gemm" and record.sms_left is None:
            groups["gemm", record.dtype].append(place)
        elif record.kind == "gemm":
            seconds[place] = _gemm(record, cluster)
    for key, places in groups.items():
        mine = [records[place] for place in places]
        try:
            seconds[places] = _PRICES[key[0]](mine, cluster)
        except OverlapSimError:
            continue
    return seconds


def solo_seconds(record: Record, cluster: Cluster) -> float | None:
    """As `predict`, for one record; None where no model prices it."""
    value = float(predict([record], cluster)[0])
    return None if np.isnan(value) else value


def _gemm(record: Record, cluster: Cluster) -> float:
    assert record.m is not None and record.n is not None and record.k is not None
    try:
        op = GemmOp(record.m, record.n, record.k, record.dtype)
        return gemm_cost(op, cluster.device, sms=record.sms_left).duration_s
    except OverlapSimError:
        return float("nan")


def _gemms(records: Sequence[Record], cluster: Cluster) -> FloatArray:
    if records[0].dtype not in DTYPE_BYTES:
        return np.full(len(records), np.nan)
    shapes = np.array([(record.m, record.n, record.k) for record in records], dtype=np.int64)
    return profile_seconds(cluster.device, records[0].dtype, shapes)


def _collectives(records: Sequence[Record], cluster: Cluster) -> FloatArray:
    first = records[0]
    assert first.ranks is not None and first.nodes is not None
    key = CurveKey(first.op, first.ranks, first.nodes)
    sizes = np.array([record.size_bytes for record in records], dtype=np.float64)
    wide = cluster.with_nodes(max(cluster.num_nodes, key.nodes))
    table = cluster.curves.get(key)
    if first.op not in COLLECTIVES or (table is None and not fills_nodes(key, wide)):
        return np.full(sizes.size, np.nan)
    devices(key, wide)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = CollectiveModel(wide, first.op, first.ranks, None if table is None else Curve(table))
        return np.asarray(model.seconds(sizes))


def _memory(records: Sequence[Record], cluster: Cluster) -> FloatArray:
    rows, columns = (np.array([getattr(record, key) for record in records], dtype=np.int64) for key in ("m", "n"))
    return np.asarray(memory_seconds(records[0].op, rows, columns, cluster.device, dtype=records[0].dtype))


_PRICES: Final[Mapping[str, Callable[[Sequence[Record], Cluster], FloatArray]]] = {
    "collective": _collectives,
    "gemm": _gemms,
    "memory": _memory,
}

"""Fit of a fabric's constants (`overlapsim.cost.fabric`) to collectives measured across nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from overlapsim.calibration.fit_collective import SOFT_SCALE, CollectiveRow, FloatArray, curves, split_spikes
from overlapsim.cost.fabric import FABRIC_PARAMETERS, GROUPS, FabricModel, nic_bus_bytes_per_s
from overlapsim.cost.structural import bus_factor
from overlapsim.errors import CalibrationError
from overlapsim.hardware.profile import Fit, Source

_PULL: Final = 0.02
_HOPS: Final = ("net", "net_ll128", "net_simple")
# One start per class of fabric: InfiniBand, EFA and TCP-like hops differ by factors.
_STARTS: Final = (0.5, 2.0, 8.0)


def fit_fabric(
    rows: Iterable[CollectiveRow],
    *,
    base_s: float,
    hop_s: float,
    nic_bytes_per_s: float,
    source: Source,
    key: str = "fabric",
    notes: str = "",
) -> Fit:
    """Fit the constants of one fabric to rows of two nodes or more.

    All-reduce (a tree), all-gather and reduce-scatter (a ring) and all-to-all (pairs) have constants of their own;
    a group without rows is left out and stays a prior.

    Parameters
    ----------
    rows : measured across nodes
    base_s, hop_s : smallest message inside a node, from the fit of one node or the profile
    nic_bytes_per_s : rate of one node's NICs together, per direction
    source, key, notes : of the fit

    Raises
    ------
    CalibrationError
        If a row does not span nodes, there is no NIC, or a group has fewer than four rows.
    """
    kept, _ = split_spikes(rows)
    if nic_bytes_per_s <= 0:
        raise CalibrationError("the node has no NIC; give num_nics and nic_bandwidth of the base profile")
    if near := [row for row in kept if row.nodes < 2]:
        raise CalibrationError(f"{len(near)} rows are of one node; fit_fabric takes rows of two nodes or more")
    parameters: dict[str, float] = {}
    count = 0
    for group, kinds in GROUPS.items():
        mine = [row for row in kept if row.kind in kinds]
        if not mine:
            continue
        if len(mine) < 4:
            raise CalibrationError(f"{len(mine)} rows of {', '.join(kinds)} across nodes; expected 4 or more")
        count += len(mine)
        parameters |= _fit_group(group, mine, base_s, hop_s, nic_bytes_per_s)
    if not count:
        raise CalibrationError("no rows to fit a fabric on")
    return Fit("collective", key, parameters, source, count, {}, notes)


def _fit_group(group: str, rows: Sequence[CollectiveRow], base_s: float, hop_s: float, nic: float) -> dict[str, float]:
    names = [name for name in FABRIC_PARAMETERS if name.startswith(f"{group}_")]
    start, low, high = (np.log([FABRIC_PARAMETERS[name][i] for name in names]) for i in (1, 2, 3))
    data = [
        (FabricModel({}, base_s, hop_s, ranks, nodes, nic), kind, np.array([r.size_bytes for r in curve]), curve)
        for (kind, ranks, nodes), curve in curves(rows).items()
    ]
    reached = max(row.size_bytes * bus_factor(row.kind, row.ranks) / row.time_s for row in rows)
    nics = max(nic_bus_bytes_per_s(row.kind, row.ranks, row.nodes, nic) for row in rows)
    if f"{group}_node_rate" in names:
        # What was reached is a little below the slope; the NICs' share stays at its start unless it must bind.
        start[names.index(f"{group}_node_rate")] = np.log(1.05 * reached)
        if reached > 0.9 * nics:
            start[names.index(f"{group}_node_rate")] = np.log(1.5 * nics)
    best: tuple[float, FloatArray] | None = None
    for factor in _STARTS:
        first = start + np.array([np.log(factor) if name.removeprefix(f"{group}_") in _HOPS else 0.0 for name in names])

        def off(x: FloatArray) -> FloatArray:
            values = dict(zip(names, np.exp(x).tolist(), strict=True))
            parts = [_PULL * (x - start)]
            for shape, kind, sizes, curve in data:
                model = FabricModel(values, shape.base_s, shape.hop_s, shape.ranks, shape.nodes, nic)
                parts.append(np.log(model.seconds(kind, sizes)) - np.log([row.time_s for row in curve]))
            return np.concatenate(parts)

        inside = np.clip(first, low + 1e-6, high - 1e-6)
        found = least_squares(off, inside, bounds=(low, high), loss="soft_l1", f_scale=SOFT_SCALE, max_nfev=300)
        if best is None or found.cost < best[0]:
            best = (float(found.cost), np.asarray(found.x))
    assert best is not None
    return dict(zip(names, np.exp(best[1]).tolist(), strict=True))

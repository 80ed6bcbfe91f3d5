"""The FlashOverlap artifact's own conventions, for golden comparisons; not how this package prices anything."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"
A800_SMS, COMM_SMS, RANKS = 108, 2, 2


@dataclass(frozen=True)
class StoredPlan:
    """A plan found on two A800: kernel time alone, tile, tile order seen on the device, chosen groups."""

    m: int
    n: int
    k: int
    bm: int
    bn: int
    gemm_ms: float
    kernel: int
    group_tiles: tuple[int, ...]
    order: tuple[int, ...]


def stored_plans() -> list[StoredPlan]:
    plans = json.loads((DATA / "flashoverlap_plans.json").read_text())["plans"]
    return [
        StoredPlan(**{**plan, "group_tiles": tuple(plan["group_tiles"]), "order": tuple(plan["order"])})
        for plan in plans
    ]


def bandwidth_table() -> np.ndarray:
    """Columns: fp16 elements, bandwidth as stored, time in us, algorithm bandwidth in GB/s (127 rows)."""
    path = DATA / "flashoverlap_bandwidth_allreduce_2gpu_a800.csv"
    return np.loadtxt(path, delimiter=",", skiprows=3)


def published_tau_s(elements: float, *, ranks: int = RANKS, passes: int = 2) -> float:
    """Time of a collective of fp16 `elements` as the artifact computes it.

    Bandwidth is linear in elements between the table's points and clamped at
    both ends; `passes` is 2 for all_reduce and 1 for reduce_scatter.  The
    stored bandwidth is summed over ranks and off by a power of ten, which
    the same formula undoes.
    """
    table = bandwidth_table()
    bandwidth = np.interp(elements, table[:, 0], table[:, 1])
    milliseconds = 2 * elements * passes * (ranks - 1) / (bandwidth * 2**30)
    return float(milliseconds) * 1e-3

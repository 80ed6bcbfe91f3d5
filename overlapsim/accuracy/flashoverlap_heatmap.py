"""The published heat map of GEMM + ReduceScatter on two RTX 4090: speed-up by size, from the profile alone."""

from __future__ import annotations

import csv
import io
from typing import Any, Final

import numpy as np
from scipy.stats import spearmanr

from overlapsim.accuracy.suite import Row
from overlapsim.cost.prices import PriceBook
from overlapsim.hardware.catalogue import bundled
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.operator import plan_operator
from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategies
from overlapsim.workload.operators import GemmOp, gemm_and_collective

CLUSTER: Final = "rtx4090-pcie8"
PANEL: Final = "speedup_4090_gemm_rs_tp2"
GROUP: Final = "heatmap reduce_scatter 2 GPUs"
# The map's axes are M N and K; its shapes keep N at the artifact's 8192.
N: Final = 8192
TILE: Final = (256, 128, 32)
MI: Final = 2**20
KI: Final = 2**10


def heatmap_rows() -> tuple[list[Row], dict[str, Any]]:
    """Predict every cell of the map; nothing is fitted on it.

    Returns
    -------
    rows : one per cell, speed-ups as ratios
    notes : mean absolute error beside that of the best constant, rank correlation, the fall at small sizes
    """
    text = (bundled() / "tables" / "flashoverlap" / "paper_heatmap.csv").read_text()
    cells = [row for row in csv.DictReader(io.StringIO(text)) if row["panel"] == PANEL]
    cluster = load_cluster(CLUSTER)
    strategies = load_strategies(("serial", "wave_group"))
    rows = []
    for cell in cells:
        mn, k = int(cell["MN_x1024sq"]), int(cell["K_x1024"])
        gemm = GemmOp(mn * MI // N, N, k * KI, "fp16", "fp16")
        prices = PriceBook(cluster, 2, gemm=gemm, kind="reduce_scatter", tile=TILE)
        result = plan_operator(Context(gemm_and_collective(gemm, "reduce_scatter", 2), prices), strategies)
        entry = next(r for r in result.results if r.strategy.overlaps)
        measured = float(cell["value"])
        sign = int((entry.speedup > 1) == (measured > 1))
        low, high = entry.speedup_low, entry.speedup_high
        rows.append(Row(f"heatmap-MN{mn}Mi-K{k}Ki", GROUP, measured, entry.speedup, low, high, "ratio", None, sign))
    measured_all = np.array([row.measured for row in rows])
    predicted = np.array([row.predicted for row in rows])
    constants = np.linspace(measured_all.min(), measured_all.max(), 1001)
    best_constant = min(float(np.mean(np.abs(c / measured_all - 1))) for c in constants)
    small = np.array([row.id.startswith("heatmap-MN16Mi") for row in rows])
    notes = {
        "heatmap mean abs error, best constant's": (
            round(float(np.mean(np.abs(predicted / measured_all - 1))), 4), round(best_constant, 4),
        ),
        "heatmap rank correlation (Spearman)": round(float(spearmanr(measured_all, predicted).statistic), 3),
        "heatmap speed-up at M N = 16 Mi over the rest, measured and predicted": tuple(
            round(float(v[small].mean() / v[~small].mean()), 3) for v in (measured_all, predicted)
        ),
    }  # fmt: skip
    return rows, notes

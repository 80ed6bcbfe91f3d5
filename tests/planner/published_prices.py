"""A PriceBook that prices collectives as the FlashOverlap artifact does, with no cost per group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from overlapsim.cost.base import Cost
from overlapsim.cost.prices import PriceBook
from overlapsim.hardware.loading import load_cluster
from overlapsim.strategy.base import Context
from overlapsim.workload.operators import CollectiveOp, GemmOp, gemm_and_collective
from tests.cost.published import bandwidth_table

TABLE = bandwidth_table()


def tau_s(elements: np.ndarray) -> np.ndarray:
    """All-reduce over two ranks: bandwidth linear in elements, clamped."""
    return 4 * elements / (np.interp(elements, TABLE[:, 0], TABLE[:, 1]) * 2**30) * 1e-3


class PublishedPrices(PriceBook):
    def collective_seconds(self, kind, size_bytes, ranks):
        return tau_s(np.asarray(size_bytes, float) / 2)

    def collective(self, op: CollectiveOp, device: int = 0) -> Cost:
        seconds = float(tau_s(np.array([op.size_bytes / 2]))[0])
        return replace(super().collective(op, device), duration_s=seconds)

    def flow(self, op: CollectiveOp, device: int = 0):
        return self.collective(op).duration_s, super().flow(op, device)[1]

    @property
    def signal_wait_s(self) -> float:
        return 0.0


def published_context(m: int, kernel_s: float) -> Context:
    gemm = GemmOp(m, 8192, 4096, "fp16", "fp16")
    prices = PublishedPrices(
        load_cluster("a800-sxm8"),
        2,
        gemm=gemm,
        kind="all_reduce",
        kernel_time_s={"wave_group": kernel_s},
        tile=(256, 128, 32),
        collective_sms=2,
    )
    return Context(gemm_and_collective(gemm, "all_reduce", 2), prices)

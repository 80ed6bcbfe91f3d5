"""How long a large grid takes to calibrate; printed beside the target, never asserted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from overlapsim.calibration.fit import calibrate
from overlapsim.calibration.records import Record
from overlapsim.cost.gemm_fitted import bundled_rows
from overlapsim.hardware.loading import load_cluster


def grid() -> list[Record]:
    """10,000 GEMM records: published B300 times, and n moved by 64 with a little noise."""
    random = np.random.default_rng(0)
    records: list[Record] = []
    for shift in (0, 64, 128, 192):
        rows = bundled_rows("gemm/b300-sxm-288gb.csv", "bf16")
        assert rows is not None
        noisy = rows.time_s * random.lognormal(0, 0.01, len(rows))
        for m, n, k, time in zip(rows.m, rows.n, rows.k, noisy, strict=True):
            records.append(Record("gemm", "gemm", float(time), m=int(m), n=int(n) + shift, k=int(k), dtype="bf16"))
    return records[:10_000]


@pytest.mark.benchmark
def test_ten_thousand_gemms(benchmark: Any) -> None:
    """Target: 60 s on 2 cores."""
    records, base = grid(), load_cluster("b200-sxm8")
    result = benchmark.pedantic(lambda: calibrate(records, base, "b200-sxm8"), rounds=1, warmup_rounds=1)
    assert result.num_accepted == 1

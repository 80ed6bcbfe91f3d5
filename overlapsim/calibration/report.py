"""A calibration as plain data: for ``report.json``, ``--json`` and tables."""

from __future__ import annotations

from typing import Any

import msgspec

from overlapsim.calibration.fit import Calibration
from overlapsim.calibration.fit_curve import CurveFit
from overlapsim.calibration.fit_device import KernelFit


def report_of(calibration: Calibration) -> dict[str, Any]:
    """Everything a reader needs to judge a calibrated profile; errors are fractions, see docs/records.md."""
    structural = calibration.structural
    return {
        "base": calibration.base.name,
        "base_sha256": calibration.base.digest,
        "num_records": len(calibration.records),
        "num_accepted": calibration.num_accepted,
        "header": msgspec.to_builtins(calibration.header),
        "curves": [_curve(curve) for curve in calibration.curves],
        "kernels": [_kernel(kernel) for kernel in calibration.kernels],
        "structural": structural
        and {
            "accepted": structural.accepted,
            "num_points": structural.fit.num_points,
            "regimes": msgspec.to_builtins(structural.regimes),
        },
        "contention": msgspec.to_builtins(calibration.contention),
        "findings": msgspec.to_builtins(calibration.findings),
    }


def _curve(curve: CurveFit) -> dict[str, Any]:
    return {
        "collective": curve.key.collective,
        "ranks": curve.key.ranks,
        "nodes": curve.key.nodes,
        "dtype": curve.dtype,
        "algo": curve.algo,
        "proto": curve.proto,
        "accepted": curve.accepted,
        "num_points": len(curve.points),
        "latency_s": curve.latency_s,
        "algbw_bytes_per_s": curve.bytes_per_s,
        "noise": curve.noise,
        "disagreement": curve.disagreement,
        "over_base": curve.over_base,
        "split": "thirds by position in rising size; the ends are always fitted",
        "regimes": msgspec.to_builtins(curve.regimes),
        "outliers": msgspec.to_builtins(curve.left_out),
        "points": msgspec.to_builtins(curve.points),
    }


def _kernel(kernel: KernelFit) -> dict[str, Any]:
    return {
        "name": kernel.table.name,
        "accepted": kernel.accepted,
        "num_points": int(kernel.used.sum()),
        "num_left_out": int((~kernel.used).sum()),
        "noise": kernel.table.noise,
        "over_base": kernel.over_base,
        "split": "every third shape in rising order of its sizes is held out to judge; the kept fit takes all",
        "regimes": msgspec.to_builtins(kernel.regimes),
        "parameters": None if kernel.fit is None else dict(kernel.fit.parameters),
        "spread": None if kernel.fit is None else {name: list(ends) for name, ends in kernel.fit.spread.items()},
    }

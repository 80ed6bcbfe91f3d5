"""No overlap: the vendor library's GEMM, then the collective; the reference of every speed-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.strategy.base import (
    YES,
    Applicability,
    Context,
    NoParameters,
    Parameters,
    ParameterSpace,
    Strategy,
    StrategyInfo,
)
from overlapsim.strategy.tasks import Gpu


class Serial(Strategy):
    """One operator after the other on one stream."""

    name = "serial"
    overlaps = False
    parameter_type = NoParameters
    info = StrategyInfo(
        summary="vendor GEMM, then the library's collective",
        granularity="op",
        hides="nothing",
        cost="nothing",
        frameworks=("all: overlap switched off",),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Serial execution is always possible."""
        context.gemm_and_collective()
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Nothing is left open."""
        return ParameterSpace()

    def rewrite(self, context: Context, parameters: Parameters, builder: ProgramBuilder) -> None:
        """Put both operators on the compute stream."""
        gemm, collective = context.gemm_and_collective()
        gpu = Gpu(builder, context.prices)
        gpu.add_gemm(gemm, context.prices.vendor_gemm(gemm))
        gpu.add_collective(
            collective,
            sms=context.prices.comm_sms(collective.kind),
            stream=gpu.compute_stream,
        )

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return the collective and the types: vendor kernels choose the rest."""
        gemm, collective = context.gemm_and_collective()
        return {
            "collective": collective.kind,
            "ranks": collective.ranks,
            "dtype": gemm.dtype,
            "accumulate": gemm.accumulate,
            "kernel": "vendor",
        }


STRATEGY = Serial()

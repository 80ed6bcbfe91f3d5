"""No overlap: the vendor library's GEMM, then the collective; the reference of every speed-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from overlapsim.strategy.chains import read_chain
from overlapsim.strategy.compose import lower
from overlapsim.strategy.tasks import Placement, Site
from overlapsim.workload.operators import GemmOp, GroupedGemmOp, OperatorGraph


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
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Nothing is left open."""
        return ParameterSpace()

    def degenerate(self, context: Context) -> Parameters:
        """Serial execution is its own reference."""
        return {}

    def rewrite(self, context: Context, parameters: Parameters, site: Site) -> Placement:
        """Put all operators on the compute stream, in order."""
        graph = OperatorGraph(context.graph.operators, context.graph.dependencies)
        return lower(Context(graph, context.prices), site)

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return the collective and the types: vendor kernels choose the rest."""
        chain = read_chain(context.graph)
        gemm = chain.gemm if isinstance(chain.gemm, GemmOp) else chain.gemm.work
        assert isinstance(gemm, GemmOp | GroupedGemmOp), "chains hold one of both"
        return {
            "collective": chain.collective.kind,
            "ranks": chain.collective.ranks,
            "dtype": gemm.dtype,
            "accumulate": gemm.accumulate,
            "kernel": "vendor",
        }


STRATEGY = Serial()

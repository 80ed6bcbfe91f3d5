"""A worked example of a third-party strategy: columns in two halves, the first half's collective under the second.

The package's ``pyproject.toml`` names it in the entry-point group
``overlapsim.strategies``; once installed, ``overlapsim strategies list`` and
``overlapsim operator`` know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from overlapsim.strategy.base import (
    YES,
    Applicability,
    Context,
    Parameters,
    ParameterSpace,
    Strategy,
    StrategyInfo,
    refuse_relation,
)
from overlapsim.strategy.tasks import Placement, Site
from overlapsim.units import ps_from_s


@dataclass(frozen=True)
class HalvesParameters:
    """Columns of the first piece; all of them leaves nothing to overlap."""

    first_columns: Annotated[int, Meta(ge=1)]


class Halves(Strategy):
    """Two vendor GEMMs by columns; the first one's collective runs beside the second GEMM."""

    name = "halves"
    parameter_type = HalvesParameters
    info = StrategyInfo(
        summary="vendor GEMM in two pieces by columns",
        granularity="half",
        hides="the collective of the first columns under the GEMM of the rest",
        cost="one more launch and collective; smaller GEMMs",
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse what has no columns to split or nothing to communicate."""
        pair = context.pair()
        if refusal := refuse_relation(pair, self.relations):
            return refusal
        if pair.collective.ranks < 2:
            return Applicability(False, ("one rank has nothing to communicate",), "little_to_hide")
        if pair.gemm.n < 256:
            return Applicability(False, (f"{pair.gemm.n} columns are not worth splitting",), "few_tiles")
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Try an even split and an uneven one."""
        n = context.pair().gemm.n
        return ParameterSpace({"first_columns": (n // 2, 3 * n // 4)})

    def degenerate(self, context: Context) -> Parameters:
        """All columns in the first piece."""
        return {"first_columns": context.pair().gemm.n}

    def rewrite(self, context: Context, parameters: Parameters, site: Site) -> Placement:
        """Put the GEMMs on one stream and the collectives on another; each waits for its piece."""
        pair, prices, gpu = context.pair(), context.prices, site.gpu()
        gemm, whole = pair.gemm, pair.collective
        first = min(parameters["first_columns"], gemm.n)
        kernels, flows = [], []
        for columns in (first, gemm.n - first):
            if not columns:
                continue
            piece = replace(gemm, n=columns)
            part = replace(whole, size_bytes=whole.size_bytes * columns / gemm.n)
            kernels.append(gpu.add_gemm(piece, prices.vendor_gemm(piece)))
            flows.append(gpu.add_collective(part, sms=prices.comm_sms(part.kind)))
            site.builder.add_edge(kernels[-1], flows[-1], lag_ps=ps_from_s(prices.signal_wait_s))
        return pair.placement(((kernels[0],), (kernels[-1],)), ((flows[0],), (flows[-1],)))

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return the columns of each piece."""
        pair = context.pair()
        first = min(parameters["first_columns"], pair.gemm.n)
        return {"collective": pair.collective.kind, "chunk_columns": [first, pair.gemm.n - first]}


STRATEGY = Halves()

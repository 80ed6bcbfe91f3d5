"""Decomposition by rows: the vendor's GEMM in n pieces, each piece's collective under another piece's GEMM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from msgspec import Meta

from overlapsim.plan import Finding
from overlapsim.strategy.base import (
    YES,
    Applicability,
    Context,
    Pair,
    Parameters,
    ParameterSpace,
    Strategy,
    StrategyInfo,
    refuse_relation,
)
from overlapsim.strategy.shards import ROW_STEP, chunk_rows, refuse_one_rank, refuse_one_wave
from overlapsim.strategy.tasks import COMM_PRIORITY, Placement, Site
from overlapsim.units import ps_from_s
from overlapsim.workload.operators import CollectiveOp, GemmOp

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
CHUNKS = (2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class ChunkedParameters:
    """Pieces the rows are cut into."""

    chunks: Annotated[int, Meta(ge=1, le=65536)]


class Chunked(Strategy):
    """n vendor GEMMs one after another; the collective of a piece runs beside the GEMM of its neighbour."""

    name = "chunked"
    relations = ("after", "before")
    traits = frozenset({"split_gemm"})
    parameter_type = ChunkedParameters
    info = StrategyInfo(
        summary="vendor GEMM in n pieces by rows, one library collective per piece",
        granularity="chunk",
        hides="the collective of a piece under the GEMM of the next (all_gather: of the one before)",
        cost="SMs of the collective, n launches, wave quantisation of smaller GEMMs, n collective latencies",
        frameworks=("TransformerEngine pipeline (num_splits)", "any framework with two streams"),
        references=("Jangda et al., ASPLOS'22 (CoCoNet)",),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse one rank, one wave, and outputs without rows to split."""
        pair = context.pair()
        if refusal := refuse_relation(pair, self.relations):
            return refusal
        gemm, collective = pair.gemm, pair.collective
        if collective.kind not in KINDS:
            return Applicability(False, (f"{collective.kind} is not cut by rows: {', '.join(KINDS)} are",))
        if refusal := refuse_one_rank(collective):
            return refusal
        num_sms = context.prices.cluster.device.num_sms
        if context.prices.comm_sms(collective.kind) > num_sms:
            return Applicability(False, ("the collective needs more SMs than there are",), "contention")
        if refusal := refuse_one_wave(context.prices, gemm):
            return refusal
        if gemm.m <= ROW_STEP:
            return Applicability(False, (f"{gemm.m} rows are not worth splitting",), "few_tiles")
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open the number of pieces."""
        pair, prices = context.pair(), context.prices

        def pipeline_s(point: Parameters) -> float:
            """First piece of the leading side, then whichever side is slower, then the last of the other."""
            gemm, part = pieces(pair, point["chunks"])[0]
            compute_s = prices.vendor_gemm(gemm).duration_s
            part_s = prices.flow(part)[0] + prices.signal_wait_s
            beside: int = point["chunks"] - 1
            return compute_s + beside * max(compute_s, part_s) + part_s

        chunks = tuple(n for n in CHUNKS if pair.gemm.m >= n * ROW_STEP) or (2,)
        return ParameterSpace({"chunks": chunks}, screen=pipeline_s)

    def degenerate(self, context: Context) -> Parameters:
        """One piece."""
        return {"chunks": 1}

    def rewrite(self, context: Context, parameters: Parameters, site: Site) -> Placement:
        """Put the GEMMs on one stream and the collectives on another; the later side of each piece waits for it."""
        pair, prices, gpu = context.pair(), context.prices, site.gpu()
        wait_ps = ps_from_s(prices.signal_wait_s)
        gemms, collectives = [], []
        parts = pieces(pair, parameters["chunks"])
        for number, (gemm, part) in enumerate(parts, start=1):
            label = f"chunk {number}/{len(parts)}"
            kernel = partial(gpu.add_gemm, gemm, prices.vendor_gemm(gemm), tag=f"{gemm.pass_} gemm {label}")
            flow = partial(
                gpu.add_collective, part, sms=prices.comm_sms(part.kind), tag=f"{part.pass_} {part.kind} {label}"
            )
            if pair.relation == "before":
                collectives.append(flow())
                gemms.append(kernel())
                site.builder.add_edge(collectives[-1], gemms[-1])
            else:
                gemms.append(kernel())
                collectives.append(flow())
                site.builder.add_edge(gemms[-1], collectives[-1], lag_ps=wait_ps)
        return pair.placement(((gemms[0],), (gemms[-1],)), ((collectives[0],), (collectives[-1],)))

    def hides(self, context: Context, parameters: Parameters) -> bool:
        """More than one piece."""
        hides: bool = parameters["chunks"] > 1
        return hides

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return the rows of each piece; vendor kernels choose the rest."""
        pair = context.pair()
        gemm, collective = pair.gemm, pair.collective
        return {
            "collective": collective.kind,
            "ranks": collective.ranks,
            "dtype": gemm.dtype,
            "accumulate": gemm.accumulate,
            "kernel": "vendor",
            "chunk_rows": list(chunk_rows(gemm.m, parameters["chunks"])),
            "comm_stream_priority": COMM_PRIORITY,
        }

    def findings(self, context: Context, parameters: Parameters) -> tuple[Finding, ...]:
        """Say that pieces of a reduce_scatter or all_gather hold rows of every rank."""
        collective = context.pair().collective
        if collective.kind not in ("reduce_scatter", "all_gather"):
            return ()
        message = (
            f"chunked {collective.kind} works on each rank's share of every piece, not on one block of rows: producer "
            "and consumer must use the same pieces"
        )
        return (Finding("rows_by_piece", message),)


def pieces(pair: Pair, chunks: int) -> list[tuple[GemmOp, CollectiveOp]]:
    """GEMM and collective of each piece; the collective's size in proportion to its rows."""
    gemm, whole = pair.gemm, pair.collective
    return [
        (replace(gemm, m=rows), replace(whole, size_bytes=whole.size_bytes * rows / gemm.m))
        for rows in chunk_rows(gemm.m, chunks)
    ]


STRATEGY = Chunked()

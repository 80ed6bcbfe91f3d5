"""Decomposition by rows: the vendor's GEMM in n pieces, each piece's collective under the next piece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from overlapsim.errors import StrategyError
from overlapsim.plan import Finding
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.strategy.base import YES, Applicability, Context, Parameters, ParameterSpace, Strategy, StrategyInfo
from overlapsim.strategy.tasks import COMM_PRIORITY, Gpu
from overlapsim.units import ps_from_s
from overlapsim.workload.operators import CollectiveOp

KINDS = ("all_reduce", "reduce_scatter", "all_to_all")
CHUNKS = (2, 3, 4, 6, 8, 12, 16)
# Pieces are cut at multiples of the tallest common tile, so that no piece but the last has a ragged row of tiles.
ROW_STEP = 128


@dataclass(frozen=True)
class ChunkedParameters:
    """Pieces the rows are cut into."""

    chunks: Annotated[int, Meta(ge=1, le=65536)]


class Chunked(Strategy):
    """n vendor GEMMs one after another; the collective of a piece runs while the next piece is computed."""

    name = "chunked"
    parameter_type = ChunkedParameters
    info = StrategyInfo(
        summary="vendor GEMM in n pieces by rows, one library collective per piece",
        granularity="chunk",
        hides="the collective of a piece under the GEMM of the next",
        cost="SMs of the collective, n launches, wave quantisation of smaller GEMMs, n collective latencies",
        frameworks=("TransformerEngine pipeline (num_splits)", "any framework with two streams"),
        references=("Jangda et al., ASPLOS'22 (CoCoNet)",),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse one rank, one wave, and outputs without rows to split."""
        gemm, collective = context.gemm_and_collective()
        if collective.kind not in KINDS:
            return Applicability(False, (f"the output of a GEMM is not {collective.kind}: {', '.join(KINDS)} are",))
        if collective.ranks < 2:
            return Applicability(False, ("one rank has nothing to communicate",), "little_to_hide")
        num_sms = context.prices.cluster.device.num_sms
        if context.prices.comm_sms(collective.kind) > num_sms:
            return Applicability(False, ("the collective needs more SMs than there are",), "contention")
        grid = context.prices.vendor_gemm(gemm).grid
        if grid.num_tiles <= num_sms:
            reason = (
                f"{grid.num_tiles} tiles on {num_sms} SMs are one wave: every piece would take as long as the whole"
            )
            return Applicability(False, (reason,), "under_one_wave")
        if gemm.m <= ROW_STEP:
            return Applicability(False, (f"{gemm.m} rows are not worth splitting",), "few_tiles")
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open the number of pieces."""
        gemm, collective = context.gemm_and_collective()
        prices = context.prices

        def pipeline_s(point: Parameters) -> float:
            """First piece, then whichever side is slower, then the last collective."""
            rows = chunk_rows(gemm.m, point["chunks"])
            piece = replace(gemm, m=rows[0])
            compute_s = prices.vendor_gemm(piece).duration_s
            part_s = float(prices.collective_seconds(collective.kind, piece.output_bytes)) + prices.signal_wait_s
            return compute_s + (len(rows) - 1) * max(compute_s, part_s) + part_s

        chunks = tuple(n for n in CHUNKS if gemm.m >= n * ROW_STEP) or (2,)
        return ParameterSpace({"chunks": chunks}, screen=pipeline_s)

    def rewrite(self, context: Context, parameters: Parameters, builder: ProgramBuilder) -> None:
        """Put the GEMMs on one stream and the collectives on another; each waits for its piece."""
        gemm, collective = context.gemm_and_collective()
        prices = context.prices
        gpu = Gpu(builder, prices)
        rows = chunk_rows(gemm.m, parameters["chunks"])
        wait_ps = ps_from_s(prices.signal_wait_s)
        for number, count in enumerate(rows, start=1):
            piece = replace(gemm, m=count)
            part = CollectiveOp(
                collective.kind,
                piece.output_bytes,
                collective.ranks,
                collective.dtype,
                collective.name,
                collective.pass_,
            )
            label = f"chunk {number}/{len(rows)}"
            source = gpu.add_gemm(piece, prices.vendor_gemm(piece), tag=f"{gemm.pass_} gemm {label}")
            task = gpu.add_collective(
                part,
                sms=prices.comm_sms(part.kind),
                tag=f"{part.pass_} {part.kind} {label}",
            )
            builder.add_edge(source, task, lag_ps=wait_ps)

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return the rows of each piece; vendor kernels choose the rest."""
        gemm, collective = context.gemm_and_collective()
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
        """Say that a reduce_scatter by pieces gives each rank rows of every piece."""
        _, collective = context.gemm_and_collective()
        if collective.kind != "reduce_scatter":
            return ()
        message = (
            "chunked reduce_scatter gives each rank its share of every piece, not one block of rows: the consumer and "
            "the later all_gather must use the same pieces"
        )
        return (Finding("rows_by_piece", message),)


def chunk_rows(m: int, chunks: int) -> tuple[int, ...]:
    """Rows of each piece: multiples of 128 as equal as they can be, where there are enough rows; larger ones first.

    Raises
    ------
    StrategyError
        If there are fewer rows than pieces.

    Examples
    --------
    >>> chunk_rows(1000, 3)
    (384, 384, 232)
    """
    if not 1 <= chunks <= m:
        raise StrategyError(f"{m} rows in {chunks} pieces; expected 1 to {m} pieces")
    step = ROW_STEP if m > (chunks - 1) * ROW_STEP else 1
    blocks = -(-m // step)
    ends = [min(m, step * (blocks * (i + 1) // chunks)) for i in range(chunks)]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return (*tuple(sorted(sizes[:-1], reverse=True)), sizes[-1])


STRATEGY = Chunked()

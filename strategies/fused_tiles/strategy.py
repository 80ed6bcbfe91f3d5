"""One GEMM kernel that communicates tile by tile: rows arrive under flags, or finished tiles go to their owners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from overlapsim.strategies.fused_tiles.kernel import (
    NAME,
    FusedTilesParameters,
    candidates,
    checked_pieces,
    closed_form_s,
    comm_row_choices,
    tiles_text,
)
from overlapsim.strategies.fused_tiles.tasks import gather_then_multiply, multiply_then_scatter

from overlapsim.plan import Cause, Finding
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
from overlapsim.strategy.fused import FLAG_BYTES, SLOWDOWN, refuse_no_peers
from overlapsim.strategy.shards import refuse_one_rank
from overlapsim.strategy.tasks import Placement, Site

KINDS: Final = {"before": ("all_gather",), "after": ("reduce_scatter", "all_reduce")}
KERNELS: Final = 3


class FusedTiles(Strategy):
    """Tiles wait for arrival flags (all_gather) or are stored to the rank that owns their rows (reduce_scatter)."""

    name = NAME
    relations = ("after", "before")
    parameter_type = FusedTilesParameters
    own_kernel = True
    traits = frozenset({"tensor_parallel", "whole_gemm"})
    info = StrategyInfo(
        summary="one fused GEMM: tiles wait for arriving rows, or go to their owner as they are done",
        granularity="tile (comm tiles of their own size)",
        hides="the gather under tiles of rows that are there; the scatter under the tiles that follow",
        cost="a templated kernel, symmetric buffers and flags, SM time of remote stores, a local sum",
        frameworks=("FLUX", "Triton-distributed", "cuBLASMp (ATOMIC_*)", "overlapsim.validate (all_gather)"),
        references=("Chang et al., arXiv 2406.06858 (FLUX)", "arXiv 2511.13940 (ParallelKittens)"),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse other collectives, one rank, several nodes, one wave before a scatter, GPUs without peer access."""
        pair, prices = context.pair(), context.prices
        op, node = pair.collective, prices.cluster.node
        if refusal := refuse_relation(pair, self.relations) or refuse_one_rank(op):
            return refusal
        if op.kind not in KINDS[pair.relation]:
            known = " or ".join(kind for kinds in KINDS.values() for kind in kinds)
            return Applicability(False, (f"no fused kernel for {op.kind}: {known} has one",))
        far = refuse_no_peers(prices.cluster, op.ranks)
        if far is not None and op.ranks > node.num_devices:
            return far
        num_sms, kernels = prices.cluster.device.num_sms, candidates(prices, pair.gemm)
        reasons: list[str] = []
        one_wave = pair.relation == "after" and all(kernel.grid.waves(num_sms) < 2 for kernel in kernels)
        if one_wave:
            reasons.append(f"{tiles_text(kernels, num_sms)} are one wave: no tile is sent before all are done")
        if far is not None:
            reasons += far.reasons
        if pair.gemm.m < op.ranks:
            reasons.append(f"{pair.gemm.m} rows over {op.ranks} ranks leave ranks without rows")
        if reasons:
            few: Cause = "few_tiles" if pair.gemm.m < op.ranks else "none"
            return Applicability(False, tuple(reasons), "under_one_wave" if one_wave else few)
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open tile, comm tile, and for a scatter what moves the bytes."""
        pair, prices = context.pair(), context.prices
        tiles = tuple(kernel.tile for kernel in candidates(prices, pair.gemm)[:KERNELS])
        transports = ("copy_engine",) if pair.relation == "before" else ("stores", "copy_engine")
        grid = {"tile": tiles, "comm_rows": comm_row_choices(pair), "transport": transports}
        return ParameterSpace(grid, screen=lambda point: closed_form_s(prices, pair, point))

    def rewrite(self, context: Context, parameters: Parameters, site: Site) -> Placement:
        """Add the kernel, what moves the bytes, and the waits of the ranks for each other."""
        pair = context.pair()
        add = gather_then_multiply if pair.relation == "before" else multiply_then_scatter
        return add(site.gpu(), pair, parameters)

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return what the kernel is built from and how rows are cut."""
        pair = context.pair()
        gemm, op = pair.gemm, pair.collective
        bm, bn, bk = parameters["tile"]
        return {
            "collective": op.kind,
            "ranks": op.ranks,
            "dtype": gemm.dtype,
            "accumulate": gemm.accumulate,
            "kernel": "fused_gemm",
            "template": parameters.get("template", "cutlass"),
            "bm": bm,
            "bn": bn,
            "bk": bk,
            "comm_rows": parameters["comm_rows"],
            "comm_tiles": checked_pieces(pair, parameters),
            "transport": parameters["transport"],
            "row_order": "own_first" if pair.relation == "before" else "own_last",
            "keep_gathered": parameters.get("keep_gathered", False),
        }

    def extra_memory_bytes(self, context: Context, parameters: Parameters) -> float:
        """Own rows once more in the gathered buffer, the buffer itself if rows are copied out of it, and flags.

        Parts of a scatter arrive in a buffer of the size of C, which no rank keeps.
        """
        pair = context.pair()
        flags = FLAG_BYTES * checked_pieces(pair, parameters)
        if pair.relation == "after":
            return float(flags)
        size = pair.collective.size_bytes
        return flags + size / pair.collective.ranks + (size if parameters.get("keep_gathered", False) else 0.0)

    def findings(self, context: Context, parameters: Parameters) -> tuple[Finding, ...]:
        """Say what the kernel was priced at, and what was believed of copies and stores."""
        prices, found = context.prices, []
        if self.name not in prices.kernel_time_s and not prices.vendor_kernels:
            slowdown = SLOWDOWN[parameters.get("template", "cutlass")]
            message = (
                f"{self.name} kernel priced at {slowdown:.3g} x the vendor GEMM, as tuned templates of its "
                f"architecture are: measure it with --kernel-time {self.name}=S"
            )
            found.append(Finding("kernel_time_assumed", message))
        what = "copy engines" if parameters["transport"] == "copy_engine" else "stores into peers' memory"
        message = f"{what} priced by published rates of H100 and B200, not by a measurement of {prices.cluster.name}"
        found.append(Finding("transport_assumed", message))
        return tuple(found)


STRATEGY = FusedTiles()

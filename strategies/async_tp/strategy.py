"""Asynchronous tensor parallelism on symmetric memory: one of three ways by rows, and pulls before a final sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from overlapsim.strategies.async_tp.tasks import (
    NAME,
    flag_kernel,
    gather_by_pieces,
    gather_by_switch,
    gather_under_flags,
    pulls_of,
    scatter_by_pieces,
    switch_s,
)

from overlapsim.cost.decomposed import EAGER_STEP_S
from overlapsim.cost.prices import PriceBook
from overlapsim.errors import StrategyError
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
from overlapsim.strategy.shards import (
    few_tiles_finding,
    refuse_far_peers,
    refuse_mesh,
    refuse_one_rank,
    refuse_one_wave,
    shard_rows,
)
from overlapsim.strategy.tasks import Placement, Site
from overlapsim.units import format_time

Method = Literal["nvls_gather", "flag_gemm", "decomposed"]
KINDS: Final = {"before": "all_gather", "after": "reduce_scatter"}
# Gathered rows up to which the framework changes its way (github.com/pytorch/pytorch, _symmetric_memory).
SWITCH_ROWS: Final = 2048
FLAG_ROWS: Final = 4096


@dataclass(frozen=True)
class AsyncTpParameters:
    """The way, and whether GEMMs of two streams run together (accepted and not proposed: measured ones do not)."""

    method: Method
    co_run: bool


class AsyncTp(Strategy):
    """Rows decide: the switch gathers few, a GEMM that waits for flags may take a few more, the rest goes in pieces."""

    name = NAME
    relations = ("before", "after")
    own_kernel = True
    parameter_type = AsyncTpParameters
    traits = frozenset({"tensor_parallel", "split_gemm"})
    needs = ("sequence_parallel",)
    info = StrategyInfo(
        summary="shards pulled from every peer's memory by copy engines, multiplied on two alternating streams; few "
        "rows are gathered by the switch instead",
        granularity="shard (rows / ranks)",
        hides="the pull of a shard under the GEMM of the one before; nothing up to 2048 rows on a reducing switch",
        cost="GEMMs of rows / ranks, a step's launches, barriers of all ranks, a shard (or two products) of buffer",
        frameworks=(
            "PyTorch (_micro_pipeline_tp)",
            "torchtitan (enable_async_tensor_parallel)",
            "vLLM (fuse_gemm_comms)",
        ),
        references=("github.com/pytorch/pytorch, torch.distributed._symmetric_memory", "pytorch pull request 143160"),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse other collectives, peers out of reach, and one wave where pieces would be multiplied."""
        pair, prices = context.pair(), context.prices
        if refusal := refuse_relation(pair, self.relations):
            return refusal
        if pair.collective.kind != KINDS[pair.relation]:
            reason = f"it gathers rows before or scatters sums after a GEMM; it does not run {pair.collective.kind}"
            return Applicability(False, (reason,))
        if refusal := (refuse_one_rank(pair.collective) or refuse_far_peers(prices, pair) or refuse_mesh(prices, pair)):
            return refusal
        if methods_of(prices, pair) == ("nvls_gather",):
            return YES
        return refuse_one_wave(prices, pair.gemm) or YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open the way where the framework does."""
        pair, prices = context.pair(), context.prices

        def seconds(point: Parameters) -> float:
            return closed_form_s(prices, pair, point["method"])

        return ParameterSpace({"method": methods_of(prices, pair), "co_run": (False,)}, screen=seconds)

    def rewrite(self, context: Context, parameters: Parameters, site: Site) -> Placement:
        """Add the tasks of the way.

        Raises
        ------
        StrategyError
            If it cannot be used here: a gather's way for a reduce_scatter, or a switch that does not reduce.
        """
        pair, gpu, method = context.pair(), site.gpu(), parameters["method"]
        if pair.relation == "after":
            if method != "decomposed":
                raise StrategyError(f"{method} gathers rows; a reduce_scatter takes method decomposed")
            return scatter_by_pieces(gpu, pair, co_run=parameters["co_run"])
        if method == "nvls_gather":
            if refusal := context.prices.refusal(replace(pair.collective, engine="nvls")):
                raise StrategyError(f"nvls_gather cannot be used: {refusal}; expected method decomposed")
            return gather_by_switch(gpu, pair)
        if method == "flag_gemm":
            return gather_under_flags(gpu, pair)
        return gather_by_pieces(gpu, pair, co_run=parameters["co_run"])

    def hides(self, context: Context, parameters: Parameters) -> bool:
        """All ways but the switch's, which gathers all rows first."""
        hides: bool = parameters["method"] != "nvls_gather"
        return hides

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return the way and the rows of each piece."""
        pair = context.pair()
        method = parameters["method"]
        return {
            "method": self.name,
            "way": method,
            "collective": pair.collective.kind,
            "ranks": pair.collective.ranks,
            "dtype": pair.gemm.dtype,
            "accumulate": pair.gemm.accumulate,
            "kernel": "flag_gemm" if method == "flag_gemm" else "vendor",
            "comm_engine": "nvls" if method == "nvls_gather" else "copy_engine",
            "step_rows": list(shard_rows(pair.gemm.m, pair.collective.ranks)) if method == "decomposed" else [],
            "compute_streams": 2 if method == "decomposed" else 1,
        }

    def extra_memory_bytes(self, context: Context, parameters: Parameters) -> float:
        """Own rows once more where peers pull them; two products of a shard and the parts before the sum."""
        pair = context.pair()
        if pair.relation == "after":
            return pair.collective.size_bytes * (1 + 2 / pair.collective.ranks)
        return pair.collective.size_bytes / pair.collective.ranks

    def findings(self, context: Context, parameters: Parameters) -> tuple[Finding, ...]:
        """Say what is gained without overlap, what small pieces cost, and what launching from Python costs."""
        pair, prices, method = context.pair(), context.prices, parameters["method"]
        if method == "nvls_gather":
            message = (
                f"{pair.gemm.m} rows are gathered by the switch, then multiplied: what is gained is the transport's"
            )
            return (Finding("nothing_overlaps", message),)
        if method == "flag_gemm":
            return prices.kernel_findings(self.name)
        step_s = EAGER_STEP_S.low if pair.relation == "before" else EAGER_STEP_S.high
        message = (
            f"launched call by call from Python, {pair.collective.ranks} steps take at least "
            f"{format_time(pair.collective.ranks * step_s)} on the host, which is not charged: a CUDA graph, or a host "
            "that runs ahead, avoids it"
        )
        pieces = [
            prices.shard_gemm(replace(pair.gemm, m=rows)) for rows in shard_rows(pair.gemm.m, pair.collective.ranks)
        ]
        found = few_tiles_finding(self.name, prices, prices.vendor_gemm(pair.gemm), pieces)
        return (*(() if prices.launch_s else (Finding("host_steps_not_charged", message),)), *found)


def methods_of(prices: PriceBook, pair: Pair) -> tuple[Method, ...]:
    """Ways that the framework may take for these rows, its own choice first."""
    m, ranks = pair.gemm.m, pair.collective.ranks
    if pair.relation == "after":
        return ("decomposed",)
    if m <= SWITCH_ROWS and prices.refusal(replace(pair.collective, engine="nvls")) is None:
        return ("nvls_gather",)
    if SWITCH_ROWS < m <= FLAG_ROWS and m % (ranks * ranks) == 0:
        return ("decomposed", "flag_gemm")
    return ("decomposed",)


def closed_form_s(prices: PriceBook, pair: Pair, method: Method) -> float:
    """Time of a way without contention, GEMMs one after another.

    Gather in pieces: own rows are copied between two barriers; pull s waits for the one before it and for the GEMM two
    steps before (its stream), GEMM s for its pull and, `step_gap_s` later, the GEMM before; a barrier ends it.
    """
    op, ranks = pair.collective, pair.collective.ranks
    if method == "nvls_gather":
        return switch_s(prices, op) + prices.vendor_gemm(pair.gemm).duration_s
    pull_s, barrier_s, gap_s = prices.copies(pulls_of(op), ranks - 1)[0], prices.barrier_s, prices.step_gap_s
    begin = 2 * barrier_s + prices.hbm_pass(2 * op.size_bytes / ranks)[0]
    if method == "flag_gemm":
        return begin + max(flag_kernel(prices, pair.gemm).duration_s, (ranks - 1) * pull_s) + barrier_s
    shards = shard_rows(pair.gemm.m, ranks)
    gemms = [prices.shard_gemm(replace(pair.gemm, m=rows)).duration_s for rows in shards]
    if pair.relation == "before":
        computed, pulled = [begin + gemms[0]], begin
        for step in range(1, ranks):
            pulled = max(pulled, computed[step - 2] if step >= 2 else 0.0) + pull_s
            computed.append(max(computed[-1] + gap_s, pulled) + gemms[step])
        return computed[-1] + barrier_s
    # Ends of a stream's last barrier, of the last GEMM and of the last pull.
    streams, computed_s, pulled = [barrier_s, barrier_s], barrier_s - gap_s, 0.0
    for step in range(1, ranks):
        computed_s = max(computed_s + gap_s, streams[step % 2]) + gemms[step]
        pulled = max(computed_s + barrier_s, pulled) + pull_s
        streams[step % 2] = pulled + barrier_s
    last = max(computed_s + gap_s, streams[0]) + gemms[0]
    return max(last, streams[1]) + barrier_s + prices.hbm_pass(op.size_bytes * (1 + 1 / ranks))[0]


STRATEGY = AsyncTp()

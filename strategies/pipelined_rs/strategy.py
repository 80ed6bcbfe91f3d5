"""GEMM split by rows on fewer SMs; the reduce-scatter of a split runs on the others under the next split's GEMM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from msgspec import Meta

from overlapsim.cost.gemm import GemmCost
from overlapsim.cost.sm_feed import feed_finding
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
    ROW_STEP,
    chunk_rows,
    refuse_far_peers,
    refuse_one_rank,
    refuse_one_wave,
)
from overlapsim.strategy.tasks import COMM_PRIORITY, Placement, Site
from overlapsim.units import ps_from_s
from overlapsim.workload.operators import CollectiveOp, GemmOp

SPLITS: Final = (4, 2, 3, 6, 8)
# Shares of the SMs that the collective was priced on.
SM_SHARES: Final = (1.0, 0.75, 0.5, 0.25)


@dataclass(frozen=True)
class PipelinedRsParameters:
    """Splits of the rows, SMs of the reduce-scatter beside a GEMM, whether the first GEMM keeps off them as well."""

    num_splits: Annotated[int, Meta(ge=1, le=65536)]
    comm_sms: Annotated[int, Meta(ge=1, le=65536)]
    overlap_first_gemm: bool


class PipelinedRs(Strategy):
    """Two stages: the GEMM of a split with a margin of SMs, then its reduce-scatter; the last has no GEMM beside it.

    With ``overlap_first_gemm`` the first split's GEMM keeps the margin too, so
    that communication of the operator before can run beside it; without, it
    runs on all SMs and its end is exposed to nothing.
    """

    name = "pipelined_rs"
    parameter_type = PipelinedRsParameters
    traits = frozenset({"tensor_parallel", "split_gemm"})
    needs = ("sequence_parallel", "one_queue_before_blackwell")
    info = StrategyInfo(
        summary="GEMM in splits by rows on all SMs but a margin, the reduce-scatter of each split on the margin",
        granularity="split",
        hides="the reduce-scatter of a split under the GEMM of the next; the last one is exposed",
        cost="a margin of SMs (8 to 32 in published settings), launches and wave quantisation of smaller GEMMs",
        frameworks=("TransformerEngine pipeline (num_splits, num_sm, set_sm_margin)", "Megatron-LM (tp-comm-overlap)"),
        references=("TransformerEngine userbuffers",),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse all but a reduce-scatter on the output inside one node, one wave, and few rows."""
        pair, prices = context.pair(), context.prices
        if refusal := refuse_relation(pair, self.relations):
            return refusal
        if pair.collective.kind != "reduce_scatter":
            return Applicability(False, (f"only a reduce_scatter is pipelined by splits, not {pair.collective.kind}",))
        if refusal := (
            refuse_one_rank(pair.collective) or refuse_far_peers(prices, pair) or refuse_one_wave(prices, pair.gemm)
        ):
            return refusal
        if pair.gemm.m <= ROW_STEP:
            return Applicability(False, (f"{pair.gemm.m} rows are not worth splitting",), "few_tiles")
        if not 1 <= _full_sms(context) < prices.cluster.device.num_sms:
            return Applicability(False, ("the collective's SMs are none or all of the GPU's",), "contention")
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open the splits and the SMs; the first GEMM has all SMs, since nothing is known of what came before."""
        pair, prices = context.pair(), context.prices
        full = _full_sms(context)
        sms = tuple(dict.fromkeys(max(1, round(full * share)) for share in SM_SHARES))
        splits = tuple(n for n in SPLITS if pair.gemm.m >= n * ROW_STEP) or (2,)

        def pipeline_s(point: Parameters) -> float:
            computed = done = 0.0
            for split in split_pair(context, point):
                computed += split.gemm_s(prices.cluster.device.num_sms)
                comm_s = prices.flow(split.collective)[0] * prices.sm_slowdown(split.collective, split.comm_sms)
                done = max(done, computed + prices.signal_wait_s) + comm_s
            return done

        return ParameterSpace(
            {"num_splits": splits, "comm_sms": sms, "overlap_first_gemm": (False,)}, screen=pipeline_s
        )

    def degenerate(self, context: Context) -> Parameters:
        """One split: the whole GEMM on all SMs, then the whole collective on its own."""
        return {"num_splits": 1, "comm_sms": _full_sms(context), "overlap_first_gemm": False}

    def rewrite(self, context: Context, parameters: Parameters, site: Site) -> Placement:
        """Put the GEMMs on one stream and the collectives on another, each behind its GEMM."""
        pair, gpu = context.pair(), site.gpu()
        wait_ps = ps_from_s(context.prices.signal_wait_s)
        gemms, flows = [], []
        splits = split_pair(context, parameters)
        for number, split in enumerate(splits, start=1):
            label = f"split {number}/{len(splits)}"
            tag = f"{split.gemm.pass_} gemm {label}"
            gemms.append(gpu.add_gemm(split.gemm, split.cost, sms=gpu.num_sms - split.margin, tag=tag))
            tag = f"{split.gemm.pass_} {split.collective.kind} {label}"
            flows.append(gpu.add_collective(split.collective, sms=split.comm_sms, tag=tag))
            site.builder.add_edge(gemms[-1], flows[-1], lag_ps=wait_ps)
        return pair.placement(((gemms[0],), (gemms[-1],)), ((flows[0],), (flows[-1],)))

    def hides(self, context: Context, parameters: Parameters) -> bool:
        """More than one split."""
        hides: bool = parameters["num_splits"] > 1
        return hides

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return the rows of each split, the SMs and the margin."""
        pair = context.pair()
        return {
            "method": self.name,
            "collective": pair.collective.kind,
            "ranks": pair.collective.ranks,
            "dtype": pair.gemm.dtype,
            "accumulate": pair.gemm.accumulate,
            "kernel": "vendor",
            "num_splits": parameters["num_splits"],
            "split_rows": list(chunk_rows(pair.gemm.m, parameters["num_splits"])),
            "comm_engine": pair.collective.engine,
            "comm_sms": parameters["comm_sms"],
            "sm_margin": parameters["num_splits"] > 1,
            "overlap_first_gemm": parameters["overlap_first_gemm"],
            "comm_stream_priority": COMM_PRIORITY,
        }

    def extra_memory_bytes(self, context: Context, parameters: Parameters) -> float:
        """The buffer that peers read splits from while the output of serial execution would be freed: one split's."""
        pair = context.pair()
        return float(pair.gemm.output_bytes) / parameters["num_splits"] if parameters["num_splits"] > 1 else 0.0

    def findings(self, context: Context, parameters: Parameters) -> tuple[Finding, ...]:
        """Say what is believed of fewer SMs, and that splits hold rows of every rank."""
        sms, full = parameters["comm_sms"], _full_sms(context)
        message = (
            "pipelined_rs scatters each rank's share of every split, not one block of rows: producer and consumer must "
            "use the same splits"
        )
        rows = (Finding("rows_by_piece", message),) if parameters["num_splits"] > 1 else ()
        return (*((feed_finding(context.prices.cluster.device, sms, full),) if sms < full else ()), *rows)


@dataclass(frozen=True)
class Split:
    """One split: its GEMM and collective, and the SMs that the GEMM keeps off (`margin`) and the collective takes."""

    gemm: GemmOp
    cost: GemmCost
    collective: CollectiveOp
    margin: int
    comm_sms: int

    def gemm_s(self, num_sms: int) -> float:
        """Time of the GEMM on the SMs that it has."""
        ctas = self.cost.grid.num_tiles * self.cost.split_k
        return self.cost.duration_s / -(-ctas // num_sms) * -(-ctas // (num_sms - self.margin))


def split_pair(context: Context, parameters: Parameters) -> list[Split]:
    """Splits in order; the last reduce-scatter has no GEMM beside it, hence the SMs it was priced on.

    Raises
    ------
    StrategyError
        If there are more splits than rows, or the collective leaves the GEMM no SM.
    """
    pair: Pair = context.pair()
    num_splits, sms, full = parameters["num_splits"], parameters["comm_sms"], _full_sms(context)
    num_sms = context.prices.cluster.device.num_sms
    if sms >= num_sms:
        raise StrategyError(f"the reduce_scatter is given {sms} of {num_sms} SMs; expected to leave some")
    splits = []
    for number, rows in enumerate(chunk_rows(pair.gemm.m, num_splits)):
        gemm = replace(pair.gemm, m=rows)
        part = replace(pair.collective, size_bytes=pair.collective.size_bytes * rows / pair.gemm.m)
        first, last = number == 0, number == num_splits - 1
        alone = first and not (parameters["overlap_first_gemm"] and num_splits > 1)
        splits.append(
            Split(gemm, context.prices.vendor_gemm(gemm), part, 0 if alone else sms, max(sms, full) if last else sms)
        )
    return splits


def _full_sms(context: Context) -> int:
    collective = context.pair().collective
    return context.prices.comm_sms(collective.kind, collective.engine)


STRATEGY = PipelinedRs()

"""Collective matmul: shards go round a ring of ranks, and each is multiplied while the next one is on its way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from msgspec import Meta
from overlapsim.strategies.ring_exchange.steps import Step, busy_s, gather_s, scatter_s, steps_of

from overlapsim.cost.prices import PriceBook
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
)
from overlapsim.strategy.tasks import COMM_PRIORITY, Gpu, Placement, Site
from overlapsim.units import format_time, ps_from_s
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import COMPUTE, CollectiveOp, GemmOp, KernelOp

PROPOSED: Final = ("unidirectional",)
"""Other forms are accepted and not proposed: published settings leave pairs of shards off, both directions share the
port of a switch, and no measurement of either is at hand."""
TRANSPORTS: Final = ("copy_engine", "kernel")
STREAMS: Final = (1,)
"""Two and more are accepted and not proposed: shards of a fifth of the SMs on two streams were measured to follow one
another (hwprofiles/SOURCES.md, DECOMPOSED-STEP)."""
KINDS: Final = {"before": "all_gather", "after": "reduce_scatter"}


@dataclass(frozen=True)
class RingExchangeParameters:
    """How shards go round, what moves them, and streams on which GEMMs of consecutive shards may run together."""

    form: Literal["unidirectional", "bidirectional", "aggregate"]
    transport: Literal["copy_engine", "kernel"]
    compute_streams: Annotated[int, Meta(ge=1, le=8)]


class RingExchange(Strategy):
    """A GEMM for each shard of rows; transfers between neighbours hide under the GEMM of the shard at hand."""

    name = "ring_exchange"
    relations = ("before", "after")
    parameter_type = RingExchangeParameters
    traits = frozenset({"tensor_parallel", "split_gemm"})
    needs = ("sequence_parallel", "one_queue_before_blackwell")
    info = StrategyInfo(
        summary="a vendor GEMM for each rank's rows, shards (or partial sums) passed between neighbours meanwhile",
        granularity="shard (rows / ranks)",
        hides="the transfer of the next shard under the GEMM of this one; the first GEMM starts at once",
        cost="wave quantisation of GEMMs of rows / ranks, a launch and a transfer's latency a step, two buffers",
        frameworks=(
            "TransformerEngine ring_exchange (use_ce, aggregate)",
            "Megatron-LM (tp-comm-overlap)",
            "XLA collective einsum",
        ),
        references=("Wang et al., ASPLOS'23, doi 10.1145/3567955.3567959",),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse what is no gather before or reduce-scatter after a GEMM, peers out of reach, and one wave."""
        pair, prices = context.pair(), context.prices
        if refusal := refuse_relation(pair, self.relations):
            return refusal
        if pair.collective.kind != KINDS[pair.relation]:
            reason = f"a ring gathers rows before or scatters sums after a GEMM; it does not run {pair.collective.kind}"
            return Applicability(False, (reason,))
        return (
            refuse_one_rank(pair.collective)
            or refuse_far_peers(prices, pair)
            or refuse_mesh(prices, pair)
            or refuse_one_wave(prices, pair.gemm)
            or YES
        )

    def transports(self, prices: PriceBook) -> tuple[str, ...]:
        """What may move shards: kernels only where they leave SMs to the GEMM."""
        free = prices.comm_sms("send_recv") < prices.cluster.device.num_sms
        return TRANSPORTS if free else TRANSPORTS[:1]

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open the form, the transport and the streams."""
        pair, prices = context.pair(), context.prices
        num_sms = prices.cluster.device.num_sms

        def ring_s(point: Parameters) -> float:
            steps = steps_of(pair, point["form"])
            transfers = [_transfer(pair, step, point) for step in steps]
            moves = [0.0 if op is None else prices.flow(op)[0] for op in transfers]
            held = next((prices.comm_sms(op.kind, op.engine) for op in transfers if op is not None), 0)
            co_run = point["compute_streams"] > 1
            costs = [prices.shard_gemm(replace(pair.gemm, m=step.rows)) for step in steps]
            gemms = [busy_s(cost, num_sms, num_sms - held, co_run=co_run) for cost in costs]
            if pair.relation == "before":
                return gather_s(gemms, moves, prices.step_gap_s)
            adds = [prices.kernel(_add(pair.gemm, step)).duration_s if step.moved_rows else 0.0 for step in steps]
            waits = [move and move + prices.signal_wait_s for move in moves]
            return scatter_s(gemms, waits, adds, prices.step_gap_s, point["compute_streams"])

        return ParameterSpace(
            {"form": PROPOSED, "transport": self.transports(prices), "compute_streams": STREAMS}, screen=ring_s
        )

    def rewrite(self, context: Context, parameters: Parameters, site: Site) -> Placement:
        """Add the transfers on one stream and the GEMMs in turn on the others.

        Raises
        ------
        StrategyError
            If the form does not fit the collective.
        """
        pair, gpu = context.pair(), site.gpu()
        steps = steps_of(pair, parameters["form"])
        streams = [gpu.stream(_stream_name(number)) for number in range(parameters["compute_streams"])]
        if pair.relation == "before":
            return self._gather(pair, parameters, gpu, steps, streams)
        return self._scatter(pair, parameters, gpu, steps, streams)

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return the form and the rows of each step."""
        pair = context.pair()
        steps = steps_of(pair, parameters["form"])
        kernel = parameters["transport"] == "kernel"
        return {
            "method": self.name,
            "collective": pair.collective.kind,
            "ranks": pair.collective.ranks,
            "dtype": pair.gemm.dtype,
            "accumulate": pair.gemm.accumulate,
            "kernel": "vendor",
            "form": parameters["form"],
            "comm_engine": parameters["transport"],
            "comm_sms": context.prices.comm_sms("send_recv") if kernel else 0,
            "sm_margin": False,
            "compute_streams": parameters["compute_streams"],
            "step_rows": [step.rows for step in steps],
            "comm_stream_priority": COMM_PRIORITY,
        }

    def extra_memory_bytes(self, context: Context, parameters: Parameters) -> float:
        """A reduce-scatter receives partial sums in two buffers; gathered rows are held by serial execution too."""
        pair = context.pair()
        if pair.relation == "before":
            return 0.0
        rows = max(step.moved_rows for step in steps_of(pair, parameters["form"]))
        return 2.0 * rows / pair.gemm.m * pair.gemm.output_bytes

    def findings(self, context: Context, parameters: Parameters) -> tuple[Finding, ...]:
        """Say what a transfer between neighbours and a step were priced as, and what small pieces cost."""
        pair, prices = context.pair(), context.prices
        how = "copy engines" if parameters["transport"] == "copy_engine" else "the library's send and receive"
        message = (
            f"each transfer between neighbours is priced as one by {how}, latency included, and each step loses "
            f"{format_time(prices.step_gap_s)} (3 to 16 us in measurements of one framework); kernels with flags in "
            "user buffers start sooner"
        )
        steps = steps_of(pair, parameters["form"])
        pieces = [prices.shard_gemm(replace(pair.gemm, m=step.rows)) for step in steps]
        found = few_tiles_finding(self.name, prices, prices.vendor_gemm(pair.gemm), pieces)
        return (Finding("transfer_price_assumed", message), *found)

    def _gather(
        self, pair: Pair, parameters: Parameters, gpu: Gpu, steps: tuple[Step, ...], streams: list[int]
    ) -> Placement:
        gap_ps = ps_from_s(gpu.prices.step_gap_s)
        gemms: list[int] = []
        flows: list[int | None] = []
        for number, step in enumerate(steps):
            transfer = _transfer(pair, step, parameters)
            flow = None if transfer is None else gpu.add_collective(transfer, tag=_tag(pair, "receive", number, steps))
            if flow is not None and number >= 2 and flows[number - 2] is not None:
                # Two buffers: the rows of two steps ago must have been multiplied.
                gpu.builder.add_edge(gemms[number - 2], flow)
            flows.append(flow)
            gemms.append(_gemm(pair, gpu, step, streams[number % len(streams)], number, steps))
            if number >= len(streams):
                gpu.builder.add_edge(gemms[number - len(streams)], gemms[-1], lag_ps=gap_ps)
            if flow is not None:
                gpu.builder.add_edge(flow, gemms[-1])
        heads, tails = tuple(gemms[: len(streams)]), tuple(gemms[-len(streams) :])
        moved = [flow for flow in flows if flow is not None]
        # The first GEMM reads the rank's own rows: it waits for whatever the gather waits for.
        return pair.placement((heads, tails), ((moved[0], gemms[0]), (moved[-1],)))

    def _scatter(
        self, pair: Pair, parameters: Parameters, gpu: Gpu, steps: tuple[Step, ...], streams: list[int]
    ) -> Placement:
        wait_ps = ps_from_s(gpu.prices.signal_wait_s)
        gap_ps = ps_from_s(gpu.prices.step_gap_s)
        gemms: list[int] = []
        flows: list[int] = []
        sums: list[int] = []
        for number, step in enumerate(steps):
            stream = streams[number % len(streams)]
            transfer = _transfer(pair, step, parameters)
            if transfer is not None:
                flows.append(gpu.add_collective(transfer, tag=_tag(pair, "send", number - 1, steps)))
                gpu.builder.add_edge(sums[-1], flows[-1], lag_ps=wait_ps)
            gemms.append(_gemm(pair, gpu, step, stream, number, steps))
            if number >= len(streams):
                gpu.builder.add_edge(sums[number - len(streams)], gemms[-1], lag_ps=gap_ps)
            sums.append(gemms[-1])
            if transfer is not None:
                add = _add(pair.gemm, step)
                sums[-1] = gpu.add_kernel(add, gpu.prices.kernel(add), stream=stream)
                gpu.builder.add_edge(flows[-1], sums[-1])
        heads, tails = tuple(gemms[: len(streams)]), tuple(gemms[-len(streams) :])
        return pair.placement((heads, tails), ((flows[0],), (sums[-1],)))


def _stream_name(number: int) -> str:
    return COMPUTE if number == 0 else f"{COMPUTE} {number}"


def _tag(pair: Pair, what: str, number: int, steps: tuple[Step, ...]) -> str:
    return f"{pair.gemm.pass_} {what} {number + 1}/{len(steps)}"


def _gemm(pair: Pair, gpu: Gpu, step: Step, stream: int, number: int, steps: tuple[Step, ...]) -> int:
    piece = replace(pair.gemm, m=step.rows)
    return gpu.add_gemm(piece, gpu.prices.shard_gemm(piece), stream=stream, tag=_tag(pair, "gemm", number, steps))


def _transfer(pair: Pair, step: Step, parameters: Parameters) -> CollectiveOp | None:
    """What one rank receives in a step; every rank sends as much to the next one."""
    if not step.moved_rows:
        return None
    whole = pair.collective
    size_bytes = whole.size_bytes * step.moved_rows / pair.gemm.m
    return replace(whole, kind="send_recv", size_bytes=size_bytes, engine=parameters["transport"])


def _add(gemm: GemmOp, step: Step) -> KernelOp:
    """The kernel that adds a received partial sum to the rows of a step."""
    return KernelOp(MemoryOp("add", step.moved_rows, gemm.n, gemm.dtype), gemm.name, gemm.pass_)


STRATEGY = RingExchange()

"""A whole collective beside a whole GEMM that needs nothing of it: the SMs it takes are chosen by a 1-D search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    Parameters,
    ParameterSpace,
    Strategy,
    StrategyInfo,
    refuse_relation,
)
from overlapsim.strategy.shards import refuse_one_rank
from overlapsim.strategy.tasks import COMM_PRIORITY, Placement, Site

MARGINS: Final = (False, True)


@dataclass(frozen=True)
class BulkParameters:
    """SMs of the collective (0: it takes none), and whether the GEMM keeps off them for the whole run."""

    comm_sms: Annotated[int, Meta(ge=0, le=65536)]
    sm_margin: bool


class Bulk(Strategy):
    """The collective first and the GEMM beside it: too many SMs slow the GEMM, too few leave communication exposed."""

    name = "bulk"
    relations = ("independent",)
    parameter_type = BulkParameters
    traits = frozenset({"tensor_parallel", "bulk"})
    needs = ("sequence_parallel", "weight_gradients", "one_queue_before_blackwell")
    info = StrategyInfo(
        summary="a whole collective beside a whole GEMM that does not need it",
        granularity="op",
        hides="the gather of a layer's input under its dgrad, the reduce-scatter of dgrad under wgrad",
        cost="SMs of the collective (2 to 32 in published settings); a gathered copy while the GEMM runs",
        frameworks=("TransformerEngine bulk (num_sm)", "Megatron-LM (tp-comm-overlap)"),
        references=("Korthikanti et al., arXiv 2205.05198", "TransformerEngine userbuffers"),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse pairs that depend on one another, and one rank."""
        pair = context.pair()
        return refuse_relation(pair, self.relations) or refuse_one_rank(pair.collective) or YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open the SMs, every number up to those the collective was priced on, and the margin."""
        pair, prices = context.pair(), context.prices
        gemm, num_sms = prices.vendor_gemm(pair.gemm), prices.cluster.device.num_sms
        full_s = prices.flow(pair.collective)[0]
        most = min(prices.comm_sms(pair.collective.kind, pair.collective.engine), num_sms - 1)

        def both_s(point: Parameters) -> float:
            sms = point["comm_sms"]
            comm_s = full_s * prices.sm_slowdown(pair.collective, sms)
            return max(comm_s, gemm_beside_s(gemm, num_sms, sms, comm_s, margin=point["sm_margin"]))

        return ParameterSpace({"comm_sms": tuple(range(most, 0, -1)) or (0,), "sm_margin": MARGINS}, screen=both_s)

    def rewrite(self, context: Context, parameters: Parameters, site: Site) -> Placement:
        """Launch the collective, then the GEMM on another stream."""
        pair, gpu = context.pair(), site.gpu()
        sms = parameters["comm_sms"]
        if sms >= gpu.num_sms:
            raise StrategyError(f"the collective is given {sms} of {gpu.num_sms} SMs; expected to leave some")
        flow = gpu.add_collective(pair.collective, sms=sms)
        left = gpu.num_sms - sms if parameters["sm_margin"] else gpu.num_sms
        kernel = gpu.add_gemm(pair.gemm, context.prices.vendor_gemm(pair.gemm), sms=left)
        return pair.placement(((kernel,), (kernel,)), ((flow,), (flow,)))

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return the SMs; the kernels are the libraries'."""
        pair = context.pair()
        return {
            "method": self.name,
            "collective": pair.collective.kind,
            "ranks": pair.collective.ranks,
            "dtype": pair.gemm.dtype,
            "accumulate": pair.gemm.accumulate,
            "kernel": "vendor",
            "comm_engine": pair.collective.engine,
            "comm_sms": parameters["comm_sms"],
            "sm_margin": parameters["sm_margin"],
            "comm_stream_priority": COMM_PRIORITY,
        }

    def extra_memory_bytes(self, context: Context, parameters: Parameters) -> float:
        """What is gathered is held while the GEMM runs; what is scattered was there anyway."""
        collective = context.pair().collective
        return collective.size_bytes if collective.kind == "all_gather" else 0.0

    def findings(self, context: Context, parameters: Parameters) -> tuple[Finding, ...]:
        """Say where the collective's speed on fewer SMs is believed."""
        prices, collective = context.prices, context.pair().collective
        full = prices.comm_sms(collective.kind, collective.engine)
        sms = parameters["comm_sms"]
        return (feed_finding(prices.cluster.device, sms, full),) if 0 < sms < full else ()


def gemm_beside_s(gemm: GemmCost, num_sms: int, sms: int, comm_s: float, *, margin: bool) -> float:
    """Time of the GEMM beside a collective that holds `sms` SMs for `comm_s`, contention aside.

    With a margin it has the rest for the whole run; without, all SMs from the wave on at which the collective ends.
    """
    ctas, left = gemm.grid.num_tiles * gemm.split_k, num_sms - sms
    wave_s = gemm.duration_s / -(-ctas // num_sms)
    waves = -(-ctas // left)
    if not margin and waves * wave_s > comm_s:
        beside = int(-(-comm_s // wave_s))
        waves = beside + -(-max(0, ctas - beside * left) // num_sms)
    return waves * wave_s


STRATEGY = Bulk()

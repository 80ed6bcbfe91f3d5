"""GEMM and all_to_all in one kernel: tiles go to their owners, or wait for the depth that others bring."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from overlapsim.strategies.fused_exchange.kernel import (
    COMM_SMS,
    NAME,
    SPLITS,
    FusedExchangeParameters,
    candidates,
    checked_sms,
    closed_form_s,
    gemm_of,
)
from overlapsim.strategies.fused_exchange.tasks import exchange_then_multiply, multiply_then_exchange

from overlapsim.plan import Finding
from overlapsim.strategy.base import (
    YES,
    Applicability,
    Context,
    Parameters,
    ParameterSpace,
    Relation,
    Strategy,
    StrategyInfo,
)
from overlapsim.strategy.chains import find_chain, read_chain
from overlapsim.strategy.fused import FLAG_BYTES, SLOWDOWN, refuse_no_peers
from overlapsim.strategy.shards import refuse_one_rank
from overlapsim.strategy.tasks import Placement, Site
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import GemmOp, KernelOp, OperatorGraph

KINDS: Final[Mapping[Relation, tuple[Any, ...]]] = {"after": ("all_to_all",), "before": ("all_to_all",)}
ELEMENT_WISE: Final = ("rope", "torch_rope", "bias_add")
"""Kernels that cost the same on either side of an exchange of sequence for heads: all elements, each once."""
KERNELS: Final = 2


class FusedExchange(Strategy):
    """Sequence parallelism's all_to_all inside the projection before or after it."""

    name = NAME
    relations = ("after", "before")
    parameter_type = FusedExchangeParameters
    own_kernel = True
    traits = frozenset({"whole_gemm"})
    info = StrategyInfo(
        summary="one fused GEMM: tiles are stored to the rank of their heads, or wait for the heads of others",
        granularity="tile, and slices of its depth",
        hides="the exchange under the tiles that follow, or under the own slice and those that are there",
        cost="a templated kernel, symmetric buffers and flags, SM time of remote stores, or a few SMs that pull",
        frameworks=("FLUX", "MegaScale-MoE (closed)"),
        references=("Jin et al., arXiv 2505.11432 (MegaScale-MoE), section 4.2", "arXiv 2406.06858 (FLUX)"),
        takes="all_to_all, then GEMM; GEMM, then all_to_all",
    )

    def piece(self, graph: OperatorGraph, gemm: int, taken: Collection[int] = ()) -> tuple[int, ...] | None:
        """Return GEMM, all_to_all and the element-wise kernels between them; a weight gradient sums over all rows."""
        op = graph.operators[gemm]
        if not isinstance(op, GemmOp) or op.pass_ == "wgrad":
            return None
        return find_chain(graph, gemm, KINDS, near=_element_wise, far=lambda op: False, taken=taken)

    def applies_to(self, context: Context) -> Applicability:
        """Refuse other collectives and kernels between, one rank, several nodes, one wave before an exchange."""
        chain, prices = read_chain(context.graph), context.prices
        op, num_sms = chain.collective, prices.cluster.device.num_sms
        if not isinstance(chain.gemm, GemmOp):
            return Applicability(False, (f"{chain.gemm.name} is a grouped GEMM; the strategy takes plain ones",))
        if op.kind not in KINDS.get(chain.relation, ()):
            reason = f"this is {op.kind} {chain.relation} the GEMM; the strategy takes all_to_all after or before it"
            return Applicability(False, (reason,))
        if refusal := refuse_one_rank(op) or refuse_no_peers(prices.cluster, op.ranks):
            return refusal
        between = [context.graph.operators[position] for position in (*chain.near, *chain.far)]
        if chain.far or not all(isinstance(kernel, KernelOp) and _element_wise(kernel) for kernel in between):
            names = ", ".join(dict.fromkeys(kernel.name for kernel in between))
            return Applicability(False, (f"{names} on the way cannot change sides with an exchange",))
        if op.rank_rows:
            return Applicability(False, ("ranks bring different rows; shares of the fused kernel are equal",))
        kernels = candidates(prices, chain.gemm)
        if chain.relation == "after" and all(kernel.grid.waves(num_sms) < 2 for kernel in kernels):
            tiles = kernels[0].grid.num_tiles
            reason = f"{tiles} tiles on {num_sms} SMs are one wave: no tile is sent before all are done"
            return Applicability(False, (reason,), "under_one_wave")
        if min(chain.gemm.n, chain.gemm.k) < op.ranks:
            return Applicability(False, (f"fewer columns than {op.ranks} ranks leave ranks without",), "few_tiles")
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open tile, pieces of a share, and what moves the bytes."""
        chain, prices = read_chain(context.graph), context.prices
        tiles = tuple(kernel.tile for kernel in candidates(prices, gemm_of(chain))[:KERNELS])
        grid: dict[str, tuple[Any, ...]] = {"tile": tiles, "pieces": SPLITS}
        if chain.relation == "before":
            grid["comm_sms"] = (*(sms for sms in COMM_SMS if sms < prices.cluster.device.num_sms), 0)
        else:
            grid["transport"] = ("stores", "copy_engine")
        return ParameterSpace(grid, screen=lambda point: closed_form_s(prices, chain, point))

    def rewrite(self, context: Context, parameters: Parameters, site: Site) -> Placement:
        """Add the kernel, what moves the bytes, and the waits of the ranks for each other."""
        chain = read_chain(context.graph)
        add = exchange_then_multiply if chain.relation == "before" else multiply_then_exchange
        return add(site.gpu(), context, chain, parameters)

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return what the kernel is built from and how shares are cut."""
        chain = read_chain(context.graph)
        gemm, op = gemm_of(chain), chain.collective
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
            "comm_tiles": parameters["pieces"] * (op.ranks - 1),
            "transport": _transport(parameters),
            "sm_reserve": checked_sms(context.prices, chain, parameters),
            "tile_order": "own_depth_first" if chain.relation == "before" else "own_columns_last",
        }

    def extra_memory_bytes(self, context: Context, parameters: Parameters) -> float:
        """Flags: what arrives is kept where serial execution receives it."""
        chain = read_chain(context.graph)
        return float(FLAG_BYTES * parameters["pieces"] * (chain.collective.ranks - 1))

    def findings(self, context: Context, parameters: Parameters) -> tuple[Finding, ...]:
        """Say what the kernel was priced at, and what was believed of copies, stores and pulls."""
        prices, found = context.prices, []
        if self.name not in prices.kernel_time_s and not prices.vendor_kernels:
            slowdown = SLOWDOWN[parameters.get("template", "cutlass")]
            message = (
                f"{self.name} kernel priced at {slowdown:.3g} x the vendor GEMM, as tuned templates of its "
                f"architecture are: measure it with --kernel-time {self.name}=S"
            )
            found.append(Finding("kernel_time_assumed", message))
        what = {"copy_engine": "copy engines", "stores": "stores into peers' memory", "sms": "pulls by SMs"}
        message = (
            f"{what[_transport(parameters)]} priced by published rates of H100 and B200, not by a measurement of "
            f"{prices.cluster.name}"
        )
        return (*found, Finding("transport_assumed", message))


def _transport(parameters: Parameters) -> str:
    return "sms" if parameters.get("comm_sms", 0) else str(parameters.get("transport", "copy_engine"))


def _element_wise(op: KernelOp) -> bool:
    return isinstance(op.work, MemoryOp) and op.work.kind in ELEMENT_WISE


STRATEGY = FusedExchange()

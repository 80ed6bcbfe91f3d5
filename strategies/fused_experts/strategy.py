"""The grouped GEMM of experts and the collective of their tokens in one kernel; tokens are found by index."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from overlapsim.strategies.fused_experts.kernel import (
    NAME,
    FusedExpertsParameters,
    by_copies,
    candidates,
    checked_sms,
    closed_form_s,
    goes_along,
    kernel_of,
    most_stages,
    moves_rows,
    num_pieces,
    orders,
    staged,
    work_of,
)
from overlapsim.strategies.fused_experts.tasks import fetch_then_multiply, multiply_then_send

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
from overlapsim.strategy.chains import find_chain, is_grouped, read_chain
from overlapsim.strategy.fused import FLAG_BYTES, SLOWDOWN, refuse_no_peers, reserves
from overlapsim.strategy.shards import refuse_one_rank
from overlapsim.strategy.tasks import Placement, Site
from overlapsim.workload.operators import CollectiveKind, KernelOp, OperatorGraph

KINDS: Final[Mapping[Relation, tuple[CollectiveKind, ...]]] = {
    "before": ("all_gather", "all_to_all"),
    "after": ("reduce_scatter", "all_to_all"),
}
KERNELS: Final = 2
PANELS: Final = (2, 4, 8, 16)


class FusedExperts(Strategy):
    """Tiles of experts wait for the ranks that send them tokens, or send theirs back as they are done."""

    name = NAME
    relations = ("before", "after")
    experts = True
    parameter_type = FusedExpertsParameters
    own_kernel = True
    traits = frozenset({"fused_experts"})
    info = StrategyInfo(
        summary="one grouped GEMM that fetches tokens by index and sends results back tile by tile",
        granularity="stage: tiles of tokens of a few ranks, or a panel of columns",
        hides="gather or dispatch under tiles whose tokens are there; combine or scatter under the tiles that follow",
        cost="a templated kernel, symmetric buffers, wait lists, weights read once a stage, SMs that communicate",
        frameworks=("FLUX (MoE layers, COMET)", "MegaScale-MoE (closed)"),
        references=(
            "Jin et al., arXiv 2505.11432 (MegaScale-MoE), section 4.2",
            "Zhang et al., arXiv 2502.19811 (COMET)",
        ),
        takes="gather or all_to_all, then experts; experts, then scatter or all_to_all",
    )

    def piece(self, graph: OperatorGraph, gemm: int, taken: Collection[int] = ()) -> tuple[int, ...] | None:
        """Return experts, the collective beside them, and what orders tokens; a weight gradient sums over all rows."""
        op = graph.operators[gemm]
        if not is_grouped(op) or op.pass_ == "wgrad":
            return None
        return find_chain(graph, gemm, KINDS, near=goes_along, far=moves_rows, taken=taken)

    def applies_to(self, context: Context) -> Applicability:
        """Refuse other GEMMs, collectives and kernels between, one rank, several nodes, one wave before a send."""
        chain, prices = read_chain(context.graph), context.prices
        op = chain.collective
        if not is_grouped(chain.gemm):
            return Applicability(False, (f"{chain.gemm.name} is a plain GEMM; the strategy takes experts",))
        if op.kind not in KINDS.get(chain.relation, ()):
            known = "; ".join(f"{' or '.join(kinds)} {where} it" for where, kinds in KINDS.items())
            return Applicability(False, (f"this is {op.kind} {chain.relation} the GEMM; the strategy takes {known}",))
        if refusal := refuse_one_rank(op) or refuse_no_peers(prices.cluster, op.ranks):
            return refusal
        near, far = ([context.graph.operators[i] for i in some] for some in (chain.near, chain.far))
        others = [k.name for k in near if not (isinstance(k, KernelOp) and goes_along(k))]
        others += [k.name for k in far if not (isinstance(k, KernelOp) and moves_rows(k))]
        if others:
            return Applicability(False, (f"{', '.join(others)} on the way does more than to move rows",))
        if op.rank_rows:
            return Applicability(False, ("ranks bring different rows; tokens of the fused kernel are spread evenly",))
        work, num_sms = work_of(chain), prices.cluster.device.num_sms
        bm, bn = 64, 128
        smallest = sum(-(-rows // bm) for rows in work.rows) * -(-work.n // bn)
        if chain.relation == "after" and smallest <= num_sms:
            reason = f"{smallest} tiles of {bm}x{bn} on {num_sms} SMs are one wave: no tile is sent before all are done"
            return Applicability(False, (reason,), "under_one_wave")
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open tile, stages, order, and the SMs that communicate: those that leave whole waves to the GEMM."""
        chain, prices = read_chain(context.graph), context.prices
        work, num_sms, ranks = work_of(chain), prices.cluster.device.num_sms, chain.collective.ranks
        tiles = tuple(candidates(prices, work)[:KERNELS])
        whole = staged(work, chain, {"tile": tiles[0], "stages": 1})
        sms = ((0,) if by_copies(chain) else ()) + reserves(whole.ends[-1], num_sms)
        known = orders(chain)
        counts = [-(-ranks // parts) for parts in (1, 2, 4)] + [stages for stages in PANELS if len(known) > 1]
        grid: dict[str, tuple[Any, ...]] = {"tile": tiles, "stages": tuple(dict.fromkeys(counts)), "comm_sms": sms}
        if len(known) > 1:
            grid["order"] = known

        def screen(point: Parameters) -> float:
            most = most_stages(work, ranks, point.get("order", "ranks"), point["tile"][1])
            return closed_form_s(prices, chain, point) if point["stages"] <= most else float("inf")

        return ParameterSpace(grid, screen=screen)

    def rewrite(self, context: Context, parameters: Parameters, site: Site) -> Placement:
        """Add the kernel, what moves the rows, and the waits of the ranks for each other."""
        chain = read_chain(context.graph)
        add = fetch_then_multiply if chain.relation == "before" else multiply_then_send
        return add(site.gpu(), context, chain, parameters)

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return what the kernel is built from, its order of tiles, and what moves the rows."""
        chain = read_chain(context.graph)
        work, op = work_of(chain), chain.collective
        bm, bn = parameters["tile"]
        return {
            "collective": op.kind,
            "ranks": op.ranks,
            "dtype": work.dtype,
            "accumulate": work.accumulate,
            "kernel": "fused_grouped_gemm",
            "template": parameters.get("template", "cutlass"),
            "bm": bm,
            "bn": bn,
            "stages": parameters["stages"],
            "comm_tiles": num_pieces(chain, parameters),
            "transport": "sms" if parameters["comm_sms"] else "copy_engine",
            "sm_reserve": checked_sms(context.prices, chain, parameters),
            "token_order": "expert_then_rank",
            "tile_order": parameters.get("order", "ranks"),
        }

    def extra_memory_bytes(self, context: Context, parameters: Parameters) -> float:
        """Buffers that peers write or read, and flags: own rows once more in front, all parts behind the GEMM."""
        chain = read_chain(context.graph)
        op, stages = chain.collective, int(parameters["stages"])
        flags = FLAG_BYTES * stages * op.ranks
        if chain.relation == "after":
            return flags + op.size_bytes
        return flags + (op.size_bytes / op.ranks if by_copies(chain) else 0.0)

    def findings(self, context: Context, parameters: Parameters) -> tuple[Finding, ...]:
        """Say what the kernel was priced at, and what was believed of copies and of SMs that communicate."""
        chain, prices = read_chain(context.graph), context.prices
        work = work_of(chain)
        kernel = kernel_of(prices, work, staged(work, chain, parameters), parameters)
        slowdown = SLOWDOWN[parameters.get("template", "cutlass")]
        priced = (
            f"{self.name} kernel priced at {slowdown:.3g} x the library's grouped GEMM of its tile, rows found by "
            f"index as fast as rows that stand together ({kernel.padding:.0%} are padding): it was not measured"
        )
        what = "SMs that only communicate" if parameters["comm_sms"] else "copy engines"
        moved = f"{what} priced by published rates of H100 and B200, not by a measurement of {prices.cluster.name}"
        return (Finding("kernel_time_assumed", priced), Finding("transport_assumed", moved))


STRATEGY = FusedExperts()

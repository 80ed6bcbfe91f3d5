"""Operators that bring tokens to their experts and results home, by each dispatcher, and the rows that arrive."""

from __future__ import annotations

from functools import lru_cache

from overlapsim.workload.build_compressed import compresses, gather_narrow, scatter_sum
from overlapsim.workload.build_part import Part
from overlapsim.workload.dispatchers import route_of
from overlapsim.workload.layout import Layout
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.model import MoE
from overlapsim.workload.operators import CollectiveKind, CollectiveOp
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recorder import Recorder
from overlapsim.workload.routing import Routing

FLIGHT = "comm flight"
"""Stream of what is under way by RDMA: no SM holds it, and no kernel waits for it before the one that receives."""
FP8_BYTES = 1 + 4 / 128
"""Bytes of an element in fp8 with a four-byte scale for each 128 of them."""


@lru_cache(maxsize=512)
def rank_rows(
    moe: MoE, layout: Layout, recipe: Recipe, routing: Routing, local_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """Rows of every rank's experts where routing is not even; `local_tokens` are those of one rank."""
    return routing.rank_rows(
        moe.num_experts,
        moe.top_k,
        local_tokens * layout.ep * layout.etp,
        layout.ep,
        capacity_factor=moe.capacity_factor,
        capacity_per=recipe.dispatch.capacity,
        balanced=recipe.dispatch.balanced,
    )


def fullest_share(moe: MoE, layout: Layout, recipe: Recipe, routing: Routing, local_tokens: int) -> float:
    """Rows of the fullest rank over the even share of all routed copies."""
    if routing.even:
        return 1.0
    fullest = max(map(sum, rank_rows(moe, layout, recipe, routing, local_tokens)))
    return fullest / (local_tokens * moe.top_k * layout.etp)


def expert_rows(part: Part, moe: MoE) -> tuple[int, ...]:
    """Rows of each expert of the fullest rank: an even share of all routed copies, times the part's imbalance.

    Every rank of the ``etp`` group holds all rows of its experts. Where tokens are few, some experts have none: each
    token picks `top_k` at random, so an expert is idle with ``(1 - top_k / experts) ** tokens``. Routing that is not
    even says it for every expert (`Routing.rank_rows`).
    """
    layout, t = part.layout, part.tokens
    if not part.routing.even:
        fullest = max(rank_rows(moe, layout, part.recipe, part.routing, t.local), key=sum)
        return fullest if any(fullest) else (1, *fullest[1:])
    experts = moe.num_experts // layout.ep
    idle = (1 - moe.top_k / moe.num_experts) ** (t.local * layout.ep * layout.etp)
    copies = t.local * moe.top_k * layout.etp
    if moe.capacity_factor is not None:
        copies = round(copies * min(1.0, moe.capacity_factor))
    busy = max(1, round(experts * (1 - idle)))
    each = max(1, round(copies * part.imbalance / busy))
    return (each,) * busy + (0,) * (experts - busy)


def exchange_rows(part: Part, moe: MoE) -> tuple[float, tuple[int, ...]]:
    """Copies that the busiest rank sends or gets, and those that each rank gets where they differ."""
    copies = part.tokens.local * moe.top_k
    if part.routing.even:
        return copies * part.imbalance, ()
    rows = [sum(row) for row in rank_rows(moe, part.layout, part.recipe, part.routing, part.tokens.local)]
    kept = sum(rows) / (copies * part.layout.ep * part.layout.etp)
    got = tuple(max(1, round(count / part.layout.etp)) for count in rows)
    return max(1.0, copies * kept, *got), got if len(set(got)) > 1 else ()


def dispatch(r: Recorder, part: Part, moe: MoE, name: str, pass_: str, *, back: bool) -> None:
    """Bring tokens to their experts, or results home (`back`)."""
    layout, hidden, options = part.layout, part.model.hidden, part.recipe.dispatch
    element = float(part.element_bytes)
    narrow = options.dtype == "fp8" and name == "moe.dispatch" and not back and layout.ep * layout.etp > 1
    if narrow:
        element = FP8_BYTES
    latency = part.recipe.dispatcher == "deepep_low_latency" and layout.ep > 1
    if narrow and not latency:
        r.kernel(name, MemoryOp("quantize_fp8", part.tokens.local, hidden, part.model.dtype), pass_=pass_)
    if part.recipe.dispatcher == "all_gather":
        ranks = layout.ep * layout.etp
        kind: CollectiveKind = "reduce_scatter" if back else "all_gather"
        size = part.tokens.local * hidden * element * ranks
        if layout.ep == 1:
            _within_experts(r, part, kind, name, size, ranks, group="etp_ep", pass_=pass_)
        else:
            r.collective(kind, name, size, ranks, group="etp_ep", pass_=pass_)
        return
    rows, _ = exchange_rows(part, moe)
    gathered = rows * hidden * element * layout.etp
    if back:
        _within_experts(r, part, "reduce_scatter", name, gathered, layout.etp, group="etp", pass_=pass_)
    if layout.ep > 1:
        _exchange(r, part, moe, name, pass_, element, back=back)
    if not back:
        _within_experts(r, part, "all_gather", name, gathered, layout.etp, group="etp", pass_=pass_)


def _within_experts(
    r: Recorder, part: Part, kind: CollectiveKind, name: str, size: float, ranks: int, *, group: str, pass_: str
) -> None:
    """Sum or gather over the ranks of split experts; outputs, and their gradients, as narrow as the recipe has them."""
    if compresses(part) and name == "moe.combine":
        narrowed = scatter_sum if kind == "reduce_scatter" else gather_narrow
        narrowed(r, part, name, size, ranks, group=group, pass_=pass_)
    else:
        r.collective(kind, name, size, ranks, group=group, pass_=pass_)


def _exchange(r: Recorder, part: Part, moe: MoE, name: str, pass_: str, element: float, *, back: bool) -> None:
    recipe, hidden, t, ep = part.recipe, part.model.hidden, part.tokens, part.layout.ep
    rows, got = exchange_rows(part, moe)
    route = route_of(recipe.dispatcher, recipe.dispatch, moe)
    op = CollectiveOp(
        "all_to_all", rows * hidden * element, ep, r.dtype, name, pass_, rank_rows=got, group="ep", route=route
    )
    if recipe.dispatcher == "hybrid_ep" and name == "moe.dispatch" and not back:
        # Each rank's kernels need to know the experts of every token, a byte for each (token, expert), before they
        # know where rows go; combine and the backward pass keep it.
        r.collective("all_gather", name, float(t.local * ep * moe.num_experts), ep, group="ep", pass_=pass_)
    if recipe.dispatcher != "deepep_low_latency":
        r.add(op)
        return
    # Issue: casts or copies what goes out, copy by copy on the way home, and starts the RDMA; receive: brings what came
    # into the order of the experts, or sums a token's results.
    fp8 = "fp8" if element == FP8_BYTES else part.model.dtype
    issue = MemoryOp("quantize_fp8" if fp8 == "fp8" else "copy", t.local, hidden, part.model.dtype)
    receive = MemoryOp("copy", max(1, round(rows)), hidden, fp8)
    if back:
        issue = MemoryOp("copy", max(1, round(rows)), hidden, part.model.dtype)
        receive = MemoryOp("copy", t.local * moe.top_k, hidden, part.model.dtype)
    r.kernel(name, issue, pass_=pass_)
    r.add(op, stream=FLIGHT)
    r.kernel(name, receive, pass_=pass_)

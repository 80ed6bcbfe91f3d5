"""A time below which no order of operators is: one machine with heads and tails, preempted at will, for each line.

A line runs one operator at a time. Of operators with a release (the longest way before it, its head) and a delivery
(the longest way behind it, its tail) the preemptive schedule by longest tail ends first (Jackson; Carlier, 1982), so
that end is a bound for every order. Heads and tails count not only chains: before an operator runs all that its line
must have run before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from overlapsim.cost.prices import PriceBook
from overlapsim.strategy.ordering import Lines
from overlapsim.workload.operators import CollectiveOp, GemmOp, Operator, OperatorGraph


@dataclass(frozen=True)
class Load:
    """What computation's line must do, in one way of counting.

    Attributes
    ----------
    seconds : of each operator on it; whatever for others
    lost_s : computation time that each collective costs at least, whatever runs beside it; 0 for others
    """

    seconds: tuple[float, ...]
    lost_s: tuple[float, ...]


def loads_of(graph: OperatorGraph, prices: PriceBook, *, contention: bool = True) -> tuple[Load, ...]:
    """Both ways to count what collectives cost the kernels beside them, each a bound.

    By time: a kernel takes its time alone, and loses what memory and links
    cost while a collective moves. By SMs: a kernel takes the time in which all
    SMs together do its thread blocks, and loses the collective's SMs too; on
    the number of SMs at which that is least.
    """
    kept = prices.overlap.gemm_speed if contention else 1.0
    alone = tuple(prices.operator_s(op) for op in graph.operators)
    by_time = tuple(
        (1 - kept) * s if _on_sms(op, prices) else 0.0 for op, s in zip(graph.operators, alone, strict=True)
    )
    filled = tuple(_filled_s(op, prices) for op in graph.operators)
    by_sms = tuple(_least_lost_s(op, s, prices, kept) for op, s in zip(graph.operators, alone, strict=True))
    return Load(alone, by_time), Load(filled, by_sms)


def _on_sms(op: Operator, prices: PriceBook) -> bool:
    if not isinstance(op, CollectiveOp) or op.ranks < 2 or op.engine == "copy_engine":
        return False
    return prices.held_sms(op) > 0


def _filled_s(op: Operator, prices: PriceBook) -> float:
    """SM-seconds of a kernel's thread blocks over all SMs, as `strategy.tasks.Gpu` adds them."""
    num_sms = prices.cluster.device.num_sms
    if isinstance(op, CollectiveOp):
        return 0.0
    if isinstance(op, GemmOp):
        cost = prices.vendor_gemm(op)
        ctas = cost.grid.num_tiles * cost.split_k
        return (
            ctas * cost.tile_time_s if cost.split_k == 1 else cost.duration_s * ctas / -(-ctas // num_sms)
        ) / num_sms
    kernel = prices.kernel(op)
    return kernel.duration_s * min(kernel.sm or num_sms, num_sms) / num_sms


def _least_lost_s(op: Operator, alone_s: float, prices: PriceBook, kept: float) -> float:
    if not isinstance(op, CollectiveOp) or not _on_sms(op, prices):
        return 0.0
    num_sms = prices.cluster.device.num_sms
    return min(
        alone_s * prices.sm_slowdown(op, sms) * (1 - kept * (1 - sms / num_sms))
        for sms in range(1, prices.held_sms(op) + 1)
    )


def order_bound_s(lines: Lines, loads: Sequence[Load] = ()) -> float:
    """Least time of any order of `lines`, seconds; at least their fullest line and their longest chain.

    A collective that moves for t while computation keeps a share d of its
    speed takes (1 - d) t of computation's time, whatever runs beside it.
    Collectives of one line never move at once, so their losses add up; of
    several lines the worst is taken.

    Parameters
    ----------
    lines : what is to be ordered
    loads : what computation loses to collectives, in several ways (`loads_of`); none: nothing

    Examples
    --------
    A chain 1 - 2 - 1 with a piece of 1 that fits under the 2:

    >>> order_bound_s(Lines((1.0, 2.0, 1.0, 1.0), (0, 1, 0, 0), ((), (0,), (1,), (0,)), ("compute", "comm")))
    4.0

    The piece must run before the chain goes on, or after it:

    >>> order_bound_s(Lines((1.0, 2.0, 1.0, 3.0), (0, 1, 0, 0), ((), (0,), (1,), (0,)), ("compute", "comm")))
    5.0
    """
    count = len(lines.seconds)
    if not count:
        return 0.0
    heads, tails = heads_and_tails(lines)
    best = max(head + seconds + tail for head, seconds, tail in zip(heads, lines.seconds, tails, strict=True))
    for line in range(len(lines.names)):
        own = [i for i in range(count) if lines.line[i] == line]
        best = max(best, _machine_s([(heads[i], lines.seconds[i], tails[i]) for i in own]))
    computed = [i for i in range(count) if lines.line[i] == 0]
    for load in loads:
        busy = [(heads[i], load.seconds[i], tails[i]) for i in computed]
        for line in range(1, len(lines.names)):
            lost = [(heads[i], load.lost_s[i], tails[i]) for i in range(count) if lines.line[i] == line]
            best = max(best, _machine_s([*busy, *lost]))
    return best


def heads_and_tails(lines: Lines) -> tuple[list[float], list[float]]:
    """Least time before each operator starts, and after it ends, in any order."""
    count = len(lines.seconds)
    after: list[list[int]] = [[] for _ in range(count)]
    for position, before in enumerate(lines.before):
        for producer in before:
            after[producer].append(position)
    # Positions rise along dependencies.
    return _heads(lines, range(count), lines.before), _heads(lines, range(count - 1, -1, -1), after)


def _heads(lines: Lines, order: Sequence[int], before: Sequence[Sequence[int]]) -> list[float]:
    """Least time before each operator starts; with the graph turned round, after each ends."""
    heads = [0.0] * len(lines.seconds)
    above: list[set[int]] = [set() for _ in lines.seconds]
    for position in order:
        for producer in before[position]:
            above[position] |= above[producer] | {producer}
            heads[position] = max(heads[position], heads[producer] + lines.seconds[producer])
        for line in range(len(lines.names)):
            own = sorted((heads[i], lines.seconds[i]) for i in above[position] if lines.line[i] == line)
            # All of a line that stands before it has run: since the first of it could, and since each later one could.
            end = 0.0
            for head, seconds in own:
                end = max(end, head) + seconds
            heads[position] = max(heads[position], end)
    return heads


def _machine_s(jobs: Sequence[tuple[float, float, float]]) -> float:
    """End of the preemptive schedule of (head, seconds, tail) on one machine, the longest tail first."""
    waiting = sorted((job for job in jobs if job[1] > 0), key=lambda job: job[0])
    open_: list[tuple[float, float]] = []
    now = best = 0.0
    at = 0
    while at < len(waiting) or open_:
        if not open_:
            now = max(now, waiting[at][0])
        while at < len(waiting) and waiting[at][0] <= now:
            heapq.heappush(open_, (-waiting[at][2], waiting[at][1]))
            at += 1
        tail, left = heapq.heappop(open_)
        until = waiting[at][0] if at < len(waiting) else now + left
        if now + left <= until:
            now += left
            best = max(best, now - tail)
        else:
            heapq.heappush(open_, (tail, left - (until - now)))
            now = until
    return best

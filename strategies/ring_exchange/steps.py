"""Steps of a ring: rows that each one receives and multiplies, and the closed form of their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from overlapsim.cost.gemm import GemmCost
from overlapsim.errors import StrategyError
from overlapsim.strategy.base import Pair
from overlapsim.strategy.shards import shard_rows

Form = Literal["unidirectional", "bidirectional", "aggregate"]


@dataclass(frozen=True)
class Step:
    """One step of the ring on one rank.

    Attributes
    ----------
    rows : multiplied in it
    moved_rows : received for it (all_gather: rows of A before the GEMM) or added in it (reduce_scatter: rows of the
        partial sum that the step before sent on); 0 in a first step that has all it needs
    """

    rows: int
    moved_rows: int


def steps_of(pair: Pair, form: Form) -> tuple[Step, ...]:
    """Steps in order; together they multiply all rows and move those of all ranks but one.

    ``unidirectional``: a shard a step, the local one first (reduce_scatter: the local one last). ``bidirectional``:
    a shard from each side a step. ``aggregate``: neighbours exchange a shard, then pairs of shards go round.

    Raises
    ------
    StrategyError
        If pairs of shards are asked for where there is no such form.

    Examples
    --------
    >>> from overlapsim.workload.operators import CollectiveOp, GemmOp
    >>> pair = Pair(GemmOp(80, 32, 16), CollectiveOp("all_gather", 2560.0, 8), "before", 1, 0)
    >>> [(step.rows, step.moved_rows) for step in steps_of(pair, "bidirectional")]
    [(10, 0), (20, 20), (20, 20), (20, 20), (10, 10)]
    >>> [(step.rows, step.moved_rows) for step in steps_of(pair, "aggregate")]
    [(20, 10), (20, 20), (20, 20), (20, 20)]
    """
    ranks = pair.collective.ranks
    shards = shard_rows(pair.gemm.m, ranks)
    if form == "aggregate":
        if pair.relation != "before" or ranks % 2:
            raise StrategyError(
                f"aggregate moves pairs of shards of an all_gather; {pair.collective.kind} over {ranks} ranks has "
                "another form or no pairs: expected an all_gather over an even number of ranks"
            )
        pairs = [(first, second) for first, second in zip(shards[::2], shards[1::2], strict=True)]
        return (Step(sum(pairs[0]), pairs[0][1]), *(Step(sum(two), sum(two)) for two in pairs[1:]))
    width = 2 if form == "bidirectional" else 1
    groups = [shards[0], *(sum(shards[i : i + width]) for i in range(1, ranks, width))]
    if pair.relation == "before":
        return (Step(groups[0], 0), *(Step(rows, rows) for rows in groups[1:]))
    groups.reverse()
    return tuple(Step(rows, sent) for rows, sent in zip(groups, (0, *groups), strict=False))


def gather_s(gemms: Sequence[float], moves: Sequence[float], gap_s: float = 0.0) -> float:
    """Time of an all_gather ring: each GEMM starts when its rows are there and the GEMM before it is done.

    A transfer waits for the one before it and for its buffer, which the GEMM two steps before has read. With equal
    steps this is ``g + (steps - 1) max(gap + g, x)``.

    Parameters
    ----------
    gemms, moves : seconds a step; a move of 0 brings nothing
    gap_s : lost between two GEMMs

    Examples
    --------
    >>> gather_s([2.0] * 8, [0.0] + [3.0] * 7), gather_s([3.0] * 8, [0.0] + [2.0] * 7)
    (23.0, 24.0)
    """
    computed: list[float] = []
    moved = 0.0
    for number, (gemm_s, move_s) in enumerate(zip(gemms, moves, strict=True)):
        if move_s:
            free = computed[number - 2] if number >= 2 and moves[number - 2] else 0.0
            moved = max(moved, free) + move_s
        computed.append(max(computed[-1] + gap_s if computed else 0.0, moved) + gemm_s)
    return computed[-1]


def scatter_s(
    gemms: Sequence[float], moves: Sequence[float], adds: Sequence[float], gap_s: float = 0.0, streams: int = 1
) -> float:
    """Time of a reduce_scatter ring: the partial sum of a step is sent on, and added to what the next step computes.

    On one stream a GEMM waits for the add before it: with equal steps ``g + (steps - 1) (max(gap + g, x) + a)``. On
    more, GEMMs run ahead of the adds by as many steps as there are further streams.

    Examples
    --------
    >>> scatter_s([2.0] * 8, [0.0] + [3.0] * 7, [0.0] + [0.5] * 7)
    26.5
    """
    computed, done = gemms[0], [gemms[0]]
    for number, (gemm_s, move_s, add_s) in enumerate(zip(gemms[1:], moves[1:], adds[1:], strict=True), start=1):
        before = done[number - streams] + gap_s if number >= streams else 0.0
        computed = max(computed, before) + gemm_s
        done.append(max(computed, done[-1] + move_s) + add_s)
    return done[-1]


def busy_s(cost: GemmCost, num_sms: int, sms: int, *, co_run: bool) -> float:
    """Time of a shard's GEMM on `sms` of `num_sms` SMs; with `co_run` the next shard fills its last wave."""
    ctas = cost.grid.num_tiles * cost.split_k
    wave_s = cost.duration_s / -(-ctas // num_sms)
    return wave_s * (ctas / sms if co_run else -(-ctas // sms))

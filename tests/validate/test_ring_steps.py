from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from overlapsim.strategies.ring_exchange.steps import steps_of
from overlapsim.validate.runners.ring_steps import FORMS, gather_steps, pull_steps, scatter_steps

from overlapsim.errors import PlanError
from overlapsim.strategy.base import Pair
from overlapsim.strategy.shards import shard_rows
from overlapsim.workload.operators import CollectiveOp, GemmOp


@given(st.integers(2, 12), st.sampled_from((*FORMS, "pull")))
def test_a_gather_brings_every_shard_once_and_only_what_the_sender_has(ranks: int, form: str) -> None:
    if form == "aggregate" and ranks % 2:
        with pytest.raises(PlanError, match="pairs"):
            gather_steps(0, ranks, form)
        return
    every = [pull_steps(rank, ranks) if form == "pull" else gather_steps(rank, ranks, form) for rank in range(ranks)]
    for rank, steps in enumerate(every):
        assert sorted(shard for step in steps for shard in step.shards) == list(range(ranks))
        has = {rank}
        for number, step in enumerate(steps):
            for peer, shard in step.received:
                assert (rank, shard) in every[peer][number].sent
            for peer, shard in step.sent:
                assert shard in has
                assert (rank, shard) in every[peer][number].received
            has |= {shard for _, shard in step.received}
        assert has == set(range(ranks))


@given(st.integers(2, 12), st.sampled_from(("unidirectional", "bidirectional")))
def test_a_scatter_sums_every_rank_once(ranks: int, form: str) -> None:
    every = [scatter_steps(rank, ranks, form) for rank in range(ranks)]
    # Contributions to each shard's sum at each rank, as multisets of ranks.
    sums: list[dict[int, list[int]]] = [{} for _ in range(ranks)]
    for number in range(len(every[0])):
        moved = {(rank, move): sums[rank].pop(move[1]) for rank in range(ranks) for move in every[rank][number].sent}
        for rank in range(ranks):
            for shard in every[rank][number].shards:
                sums[rank][shard] = [rank]
            for peer, shard in every[rank][number].received:
                sums[rank][shard] += moved.pop((peer, (rank, shard)))
        assert not moved, "what is sent is received in the same step"
    assert [sorted(sums[rank][rank]) for rank in range(ranks)] == [list(range(ranks))] * ranks


@given(st.integers(2, 10), st.sampled_from(FORMS), st.sampled_from(("before", "after")), st.integers(10, 100))
def test_steps_are_the_strategy_s(ranks: int, form: str, relation: str, m: int) -> None:
    """Rank 0's steps multiply as many rows as the plan's strategy priced."""
    if form == "aggregate" and (ranks % 2 or relation == "after"):
        return
    kind = "all_gather" if relation == "before" else "reduce_scatter"
    pair = Pair(GemmOp(m * ranks, 32, 16), CollectiveOp(kind, 2560.0, ranks), relation, 0, 1)  # type: ignore[arg-type]
    make = gather_steps if relation == "before" else scatter_steps
    rows = shard_rows(m * ranks, ranks)
    mine = [sum(rows[shard] for shard in step.shards) for step in make(0, ranks, form)]
    assert mine == [step.rows for step in steps_of(pair, form)]  # type: ignore[arg-type]

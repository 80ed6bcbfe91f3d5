"""The all_to_all map: token pools by destination, unbalanced routing, ranks without tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import StrategyError
from overlapsim.schedule.reorder import collective_map, even_counts, scale_groups, subtoken_map
from tests.schedule.collectives import Work, all_to_all, draw_work, garbage, matrix, split

seeds = st.integers(0, 2**32 - 1)
ranks_of = st.integers(2, 8)


def check_all_to_all(seed: int, ranks: int, *, by_counts: bool) -> bool:
    """Compare with an all_to_all of whole rows; return whether a rank had no tokens."""
    rng = np.random.default_rng(seed)
    bm, bn = (int(x) for x in rng.integers(1, 17, 2))
    n = int(rng.integers(1, 41))
    rows = rng.integers(0, 41, ranks) * (rng.random(ranks) < 0.85)
    # Unbalanced: some destinations get most, some nothing.
    share = rng.dirichlet(np.full(ranks, 0.3))
    routing = [rng.choice(ranks, int(count), p=share) for count in rows]
    if by_counts:
        routing = [np.sort(destination) for destination in routing]
    works = []
    num_groups = int(rng.integers(1, 7))
    for count in rows.tolist():
        if not count:
            works.append(None)
            continue
        grid = TileGrid(count, n, bm, bn)
        order = rng.permutation(grid.num_tiles)
        filled = min(num_groups, grid.num_tiles)
        groups = np.zeros(num_groups, np.int64)
        groups[np.sort(rng.choice(num_groups, filled, replace=False))] = split(rng, grid.num_tiles, filled)
        works.append(Work(grid, order, tuple(groups.tolist())))
    given_routing = (
        {"counts": [np.bincount(d, minlength=ranks).tolist() for d in routing]}
        if by_counts
        else {"destinations": routing}
    )
    reorder = subtoken_map(
        n,
        bm,
        bn,
        [work.groups if work else (0,) * num_groups for work in works],
        orders=[work.order if work else [] for work in works],
        **given_routing,
    )
    outputs = [matrix(rng, int(count), n) for count in rows]
    send = [garbage(rng, output.size) for output in outputs]
    taken = [sum(int((destination == rank).sum()) for destination in routing) * n for rank in range(ranks)]
    receive = [garbage(rng, size) for size in taken]
    for group in range(num_groups):
        for rank, work in enumerate(works):
            for tile in work.members()[group] if work else ():
                at_rows, at_columns = work.rows(tile), work.columns(tile)
                at = reorder.send_offset(rank, np.arange(work.grid.m)[at_rows, None], np.arange(n)[at_columns])
                send[rank][at] = outputs[rank][at_rows, at_columns]
        begin, size = reorder.send_start[group], reorder.counts[group]
        moved = all_to_all(
            [[send[s][begin[s, d] : begin[s, d] + size[s, d]] for d in range(ranks)] for s in range(ranks)]
        )
        for d in range(ranks):
            for s in range(ranks):
                place = int(reorder.receive_start[group, s, d])
                receive[d][place : place + int(size[s, d])] = moved[d][s]
    for rank in range(ranks):
        whole = [output[destination == rank] for output, destination in zip(outputs, routing, strict=True)]
        expected = np.concatenate(whole)
        found = receive[rank][reorder.receive_offset(rank, np.arange(len(expected))[:, None], np.arange(n))]
        assert found.shape == expected.shape and (found == expected).all()
        source, row = reorder.tokens(rank)
        assert [int(reorder.sources[s].token[i]) for s, i in zip(source, row, strict=True)] == list(range(len(row)))
    return 0 in rows


@settings(deadline=None, max_examples=150)
@given(seeds, ranks_of, st.booleans())
def test_all_to_all_delivers_every_token(seed, ranks, by_counts):
    check_all_to_all(seed, ranks, by_counts=by_counts)


@settings(deadline=None, max_examples=60)
@given(seeds, ranks_of)
def test_pools_hold_the_rows_of_each_destination_in_slot_order(seed, ranks):
    rng = np.random.default_rng(seed)
    work = draw_work(rng, multiple=False)
    grid = work.grid
    destination = rng.integers(0, ranks, grid.m)
    others = [(0,) * len(work.groups)] * (ranks - 1)
    reorder = subtoken_map(
        grid.n,
        grid.bm,
        grid.bn,
        [work.groups, *others],
        destinations=[destination, *[[]] * (ranks - 1)],
        orders=[work.order, *[[]] * (ranks - 1)],
    )
    output = matrix(rng, grid.m, grid.n)
    packed = garbage(rng, output.size)
    packed[reorder.send_offset(0, *work.elements())] = output
    expected, counts = [], np.zeros((len(work.groups), ranks), int)
    for rank in range(ranks):
        for group, tiles in enumerate(work.members()):
            for tile in tiles:
                rows = np.arange(grid.m)[work.rows(tile)]
                values = output[rows[destination[rows] == rank], work.columns(tile)].ravel().tolist()
                counts[group, rank] += len(values)
                expected += values
    assert packed.tolist() == expected
    assert (reorder.counts[:, 0] == counts).all() and not reorder.counts[:, 1:].any()


def test_groups_are_scaled_to_unequal_ranks():
    assert scale_groups((2, 2, 4), 8) == (2, 2, 4)
    assert scale_groups((212,) * 9 + (140,), 1024) == (106,) * 9 + (70,)
    assert scale_groups((1, 1, 1), 0) == (0, 0, 0)
    assert even_counts(8192, 8).tolist() == [[1024] * 8] * 8
    counts = [[30, 10], [0, 8]]
    reorder = collective_map("all_to_all", TileGrid(40, 8, 4, 8), (2, 8), ranks=2, counts=counts)
    assert [source.group_tiles for source in reorder.sources] == [(2, 8), (0, 2)]
    assert reorder.num_groups == 2
    assert reorder.counts.tolist() == [[[64, 0], [0, 0]], [[176, 80], [0, 64]]]
    empty = collective_map("all_to_all", TileGrid(6, 8, 4, 8), (1, 1), ranks=2, counts=[[0, 0], [0, 0]])
    assert not empty.counts.any() and empty.tokens(1)[0].size == 0


ROUTING = {"n": 4, "bm": 2, "bn": 2}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: subtoken_map(**ROUTING, group_tiles=[(2,), (1, 1)], counts=[[1, 1], [1, 1]]), "same number of groups"),
        (lambda: subtoken_map(**ROUTING, group_tiles=[(2,)], counts=[[1, 1], [1, 1]]), "groups of 1 ranks"),
        (lambda: subtoken_map(**ROUTING, group_tiles=[(2,), (3,)], counts=[[1, 1], [1, 1]]), "adding up to 2"),
        (lambda: subtoken_map(**ROUTING, group_tiles=[(2,)] * 2, counts=[[1, 1]]), "one column a rank"),
        (lambda: subtoken_map(**ROUTING, group_tiles=[(2,)] * 2, counts=[[3, -1], [1, 1]]), "rows >= 0"),
        (lambda: subtoken_map(**ROUTING, group_tiles=[(2,)] * 2), "exactly one"),
        (lambda: subtoken_map(**ROUTING, group_tiles=[(2,)] * 2, destinations=[[0, 2], [1]]), "ranks 0 .. 1"),
        (lambda: subtoken_map(**ROUTING, group_tiles=[(2,)] * 2, destinations=[[0.5, 1], [1]]), "one rank a row"),
        (lambda: subtoken_map(**ROUTING, group_tiles=[], destinations=[]), "no ranks"),
        (lambda: scale_groups((0, 1), 4), ">= 1"),
    ],
)
def test_errors_say_what_was_expected(call, words):
    with pytest.raises(StrategyError, match=words):
        call()

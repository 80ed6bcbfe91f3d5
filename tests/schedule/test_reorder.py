"""Reorder maps against the collectives they serve: map, collective, inverse give what no reordering gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import StrategyError
from overlapsim.schedule.reorder import (
    choose_row_order,
    collective_map,
    scale_groups,
    subtile_map,
    tile_map,
)
from tests.cost.published import stored_plans
from tests.schedule.collectives import (
    Work,
    all_gather,
    all_reduce,
    draw_work,
    garbage,
    matrix,
    reduce_scatter,
)
from tests.schedule.test_reorder_tokens import check_all_to_all

seeds = st.integers(0, 2**32 - 1)
ranks_of = st.integers(2, 8)
row_orders = st.sampled_from(["slab", "interleaved", "auto"])


# all_reduce: whole tiles


def check_all_reduce(seed: int, ranks: int, *, multiple: bool) -> Work:
    rng = np.random.default_rng(seed)
    work = draw_work(rng, multiple=multiple)
    grid = work.grid
    reorder = tile_map(grid, work.order, work.groups)
    outputs = [matrix(rng, grid.m, grid.n) for _ in range(ranks)]
    buffers = [garbage(rng, grid.m * grid.n) for _ in range(ranks)]
    for number, tiles in enumerate(work.members()):
        for buffer, output in zip(buffers, outputs, strict=True):
            for tile in tiles:
                rows, columns = work.rows(tile), work.columns(tile)
                at = reorder.offset(np.arange(grid.m)[rows, None], np.arange(grid.n)[columns])
                buffer[at] = output[rows, columns]
        # Only what is stored by now may be summed: later groups' ranges still hold garbage.
        all_reduce(buffers, *reorder.group_start[number : number + 2].tolist())
    expected = np.sum(outputs, axis=0)
    for buffer in buffers:
        assert (buffer[reorder.offset(*work.elements())] == expected).all()
    return work


@settings(deadline=None, max_examples=150)
@given(seeds, ranks_of, st.booleans())
def test_all_reduce_is_the_sum(seed, ranks, multiple):
    check_all_reduce(seed, ranks, multiple=multiple)


@settings(deadline=None, max_examples=100)
@given(seeds, st.booleans())
def test_packed_buffer_is_the_tiles_one_after_another(seed, multiple):
    rng = np.random.default_rng(seed)
    work = draw_work(rng, multiple=multiple)
    reorder = tile_map(work.grid, work.order, work.groups)
    output = matrix(rng, work.grid.m, work.grid.n)
    packed = garbage(rng, output.size)
    packed[reorder.offset(*work.elements())] = output
    tiles = [output[work.rows(tile), work.columns(tile)].ravel() for tile in work.order.tolist()]
    assert (packed == np.concatenate(tiles)).all()
    assert np.diff(reorder.slot_start).tolist() == [tile.size for tile in tiles]
    assert reorder.slot_tile.tolist() == work.order.tolist()
    assert (reorder.tile_slot[reorder.slot_tile] == np.arange(len(tiles))).all()
    ends = np.cumsum(work.groups)
    sizes = [sum(tile.size for tile in tiles[end - count : end]) for count, end in zip(work.groups, ends, strict=True)]
    assert np.diff(reorder.group_start).tolist() == sizes
    assert [int(reorder.group_start[0]), int(reorder.group_start[-1])] == [0, output.size]


@settings(deadline=None, max_examples=50)
@given(seeds)
def test_consumer_of_whole_tiles_reads_by_the_published_formula(seed):
    rng = np.random.default_rng(seed)
    work = draw_work(rng, multiple=True)
    grid, reorder = work.grid, tile_map(work.grid, work.order, work.groups)
    for i, j in zip(rng.integers(0, grid.m, 30).tolist(), rng.integers(0, grid.n, 30).tolist(), strict=True):
        slot = int(reorder.tile_slot[(i // grid.bm) * (grid.n // grid.bn) + j // grid.bn])
        expected = slot * grid.bm * grid.bn + (i % grid.bm) * grid.bn + j % grid.bn
        assert int(reorder.offset(i, j)) == expected


@pytest.mark.parametrize("plan", stored_plans(), ids=lambda plan: f"m{plan.m}")
def test_stored_plan_gives_groups_of_whole_tiles(plan):
    grid = TileGrid(plan.m, plan.n, plan.bm, plan.bn)
    recorded = tile_map(grid, plan.order, plan.group_tiles)
    assert np.diff(recorded.group_start).tolist() == [g * 256 * 128 for g in plan.group_tiles]
    ruled = collective_map("all_reduce", grid, plan.group_tiles, ranks=2, swizzle=4)
    # Inside a group the device's order differs from the rule's; which group a tile is in does not.
    ends = recorded.group_slot[1:]
    assert (np.searchsorted(ends, recorded.tile_slot, "right") == np.searchsorted(ends, ruled.tile_slot, "right")).all()


# reduce_scatter: rows of tiles


def check_reduce_scatter(seed: int, ranks: int, row_order: str, *, multiple: bool) -> Work:
    rng = np.random.default_rng(seed)
    work = draw_work(rng, multiple=multiple)
    grid = work.grid
    reorder = subtile_map(grid, work.order, work.groups, ranks, row_order)
    outputs = [matrix(rng, grid.m, grid.n) for _ in range(ranks)]
    send = [garbage(rng, int(reorder.group_start[-1])) for _ in range(ranks)]
    receive = [garbage(rng, int(reorder.part_start[-1])) for _ in range(ranks)]
    for number, tiles in enumerate(work.members()):
        for buffer, output in zip(send, outputs, strict=True):
            for tile in tiles:
                rows, columns = work.rows(tile), work.columns(tile)
                at = reorder.send_offset(np.arange(grid.m)[rows, None], np.arange(grid.n)[columns])
                buffer[at] = output[rows, columns]
        start, stop = reorder.group_start[number : number + 2].tolist()
        parts = reduce_scatter([buffer[start:stop] for buffer in send])
        assert parts[0].size == reorder.part_elements[number]
        for buffer, part in zip(receive, parts, strict=True):
            buffer[reorder.part_start[number] : reorder.part_start[number + 1]] = part

    expected = np.sum(outputs, axis=0)
    local = []
    for rank in range(ranks):
        mine = reorder.global_row[rank * reorder.rows_per_rank : (rank + 1) * reorder.rows_per_rank]
        rows = mine[mine >= 0]
        assert len(rows) == reorder.rank_rows[rank] and (reorder.row_rank[rows] == rank).all()
        assert (np.diff(rows) > 0).all(), "a rank's rows keep their order"
        # The rank's element-wise kernel: whole rows from its own receive buffer alone, into an ordinary matrix.
        normed = garbage(rng, reorder.rows_per_rank * grid.n).reshape(reorder.rows_per_rank, grid.n)
        normed[: len(rows)] = receive[rank][reorder.receive_offset(rows[:, None], np.arange(grid.n))]
        assert (normed[: len(rows)] == expected[rows]).all()
        local.append(normed)
    gathered = all_gather(local)
    assert (gathered[reorder.gathered_row] == expected).all()
    return work


@settings(deadline=None, max_examples=200)
@given(seeds, ranks_of, row_orders, st.booleans())
def test_reduce_scatter_then_all_gather_is_the_sum(seed, ranks, row_order, multiple):
    check_reduce_scatter(seed, ranks, row_order, multiple=multiple)


def owner(row_order: str, row: int, height: int, ranks: int) -> int:
    """Rank of a row of a tile, by counting: the k-th slab ends at or after k + 1 of `ranks` equal shares."""
    if row_order == "interleaved":
        return row % ranks
    return next(k for k in range(ranks) if row * ranks < (k + 1) * height)


@settings(deadline=None, max_examples=100)
@given(seeds, ranks_of, st.sampled_from(["slab", "interleaved"]), st.booleans())
def test_parts_are_the_rows_of_each_rank_in_slot_order(seed, ranks, row_order, multiple):
    rng = np.random.default_rng(seed)
    work = draw_work(rng, multiple=multiple)
    grid = work.grid
    reorder = subtile_map(grid, work.order, work.groups, ranks, row_order)
    output = matrix(rng, grid.m, grid.n)
    packed = np.full(int(reorder.group_start[-1]), -(2**60))
    packed[reorder.send_offset(*work.elements())] = output
    expected: list[int] = []
    for tiles in work.members():
        parts: list[list[int]] = [[] for _ in range(ranks)]
        for tile in tiles:
            block = output[work.rows(tile), work.columns(tile)]
            for row, line in enumerate(block.tolist()):
                parts[owner(row_order, row, len(block), ranks)] += line
        longest = max(map(len, parts))
        expected += [value for part in parts for value in part + [-(2**60)] * (longest - len(part))]
    assert packed.tolist() == expected


@pytest.mark.parametrize(("bm", "ranks"), [(8, 2), (8, 4), (8, 8), (16, 8), (6, 3)])
def test_interleaved_is_a_stable_sort_of_rows_inside_each_group(bm, ranks):
    grid = TileGrid(bm * 4, 12, bm, 4)
    groups = (2, 7, 3)
    order = grid.execution_order(2)
    reorder = subtile_map(grid, order, groups, ranks, "interleaved")
    # One unit a row of a tile, stored as tiles one after another, then sorted by row mod ranks inside each group.
    units = np.array([(tile, row) for tile in order.tolist() for row in range(bm)])
    ends = np.cumsum(groups) * bm
    expected = np.concatenate(
        [part[np.argsort(part[:, 1] % ranks, kind="stable")] for part in np.split(units, ends[:-1])]
    )
    row = expected[:, 0] // grid.grid_n * bm + expected[:, 1]
    column = expected[:, 0] % grid.grid_n * 4
    assert reorder.send_offset(row, column).tolist() == list(range(0, grid.m * grid.n, 4))


@pytest.mark.parametrize("row_order", ["slab", "interleaved"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_whole_tiles_leave_a_smaller_matrix_with_the_same_tile_map(row_order, ranks):
    grid = TileGrid(96, 64, 16, 8)
    order = grid.execution_order(4)
    groups = (5, 20, 23)
    reorder = subtile_map(grid, order, groups, ranks, row_order)
    small = tile_map(TileGrid(96 // ranks, 64, 16 // ranks, 8), order, groups)
    assert (reorder.tile_slot == small.tile_slot).all() and (reorder.part_start == small.group_start).all()
    for rank in range(ranks):
        rows = reorder.global_row[rank * reorder.rows_per_rank :][: reorder.rows_per_rank]
        local = small.offset(np.arange(96 // ranks)[:, None], np.arange(64))
        assert (reorder.receive_offset(rows[:, None], np.arange(64)) == local).all()


@settings(deadline=None, max_examples=100)
@given(seeds, ranks_of, st.sampled_from(["slab", "interleaved"]), st.booleans())
def test_gathered_order_needs_no_table(seed, ranks, row_order, multiple):
    work = draw_work(np.random.default_rng(seed), multiple=multiple)
    m, bm = work.grid.m, work.grid.bm
    reorder = subtile_map(work.grid, work.order, work.groups, ranks, row_order)
    for i in range(m):
        row, height = i % bm, min(bm, m - i // bm * bm)
        if row_order == "slab":
            rank = row * ranks // height
            before = -(-(rank * bm) // ranks), -(-(rank * height) // ranks)
            per_tile = -(-((rank + 1) * bm) // ranks) - before[0]
            place = i // bm * per_tile + row - before[1]
        else:
            rank = row % ranks
            per_tile = -(-(bm - rank) // ranks) if rank < bm else 0
            place = i // bm * per_tile + row // ranks
        assert int(reorder.gathered_row[i]) == rank * reorder.rows_per_rank + place


def test_row_order_is_slabs_where_they_are_equal():
    assert choose_row_order(TileGrid(8192, 8192, 256, 128), 8) == "slab"
    assert choose_row_order(TileGrid(8190, 8192, 256, 128), 8) == "interleaved"
    assert choose_row_order(TileGrid(8190, 8192, 256, 128), 2) == "slab"
    assert choose_row_order(TileGrid(8192, 8192, 256, 128), 6) == "interleaved"
    assert choose_row_order(TileGrid(8190, 8192, 256, 128), 6) == "interleaved"
    grid = TileGrid(100, 30, 16, 8)
    assert subtile_map(grid, grid.execution_order(), (28,), 4).row_order == "slab"
    assert subtile_map(grid, grid.execution_order(), (28,), 8).row_order == "interleaved"


def test_padding_is_at_most_one_row_of_every_tile():
    # 101 rows over 8 ranks: 13 rows from the last tile's 5, 1 from each whole one of 12.
    grid = TileGrid(101, 8, 12, 8)
    reorder = subtile_map(grid, grid.execution_order(), (4, 5), 8, "interleaved")
    assert reorder.part_elements.tolist() == [4 * 2 * 8, 5 * 2 * 8 - 8]
    assert reorder.rank_rows.tolist() == [17, 17, 17, 17, 9, 8, 8, 8] and reorder.rows_per_rank == 17
    even = subtile_map(TileGrid(96, 8, 16, 8), np.arange(6), (6,), 8)
    assert even.group_start.tolist() == [0, 96 * 8]


# all together


def test_map_of_each_collective_by_its_name():
    grid = TileGrid(100, 60, 16, 16)
    by_name = collective_map("all_reduce", grid, (8, 20), ranks=4, swizzle=2)
    assert by_name.slot_tile.tolist() == grid.execution_order(2).tolist()
    rows = collective_map("reduce_scatter", grid, (8, 20), ranks=4, swizzle=2, row_order="interleaved")
    assert (rows.row_order, rows.ranks, rows.group_tiles) == ("interleaved", 4, (8, 20))
    tokens = collective_map("all_to_all", grid, (8, 20), ranks=4, swizzle=2)
    assert tokens.counts.sum(axis=0).tolist() == [[25 * 60] * 4] * 4
    assert all(source.slot_tile.tolist() == by_name.slot_tile.tolist() for source in tokens.sources)


def test_maps_are_read_only_and_narrow():
    grid = TileGrid(100, 60, 16, 16)
    for kind in ("all_reduce", "reduce_scatter", "all_to_all"):
        reorder = collective_map(kind, grid, (8, 20), ranks=4)
        for part in (reorder, *getattr(reorder, "sources", ())):
            arrays = {k: v for k, v in vars(part).items() if isinstance(v, np.ndarray)}
            assert all(not array.flags.writeable for array in arrays.values())
            offsets = {k for k, v in arrays.items() if v.dtype == np.int64}
            assert {k for k, v in arrays.items() if v.dtype == np.int32} == arrays.keys() - offsets
            assert all(k.endswith("_start") or k in ("group_slot", "counts") for k in offsets)


GRID = TileGrid(64, 64, 16, 16)
ORDER = GRID.execution_order()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tile_map(GRID, ORDER[:-1], (16,)), "permutation"),
        (lambda: tile_map(GRID, ORDER - 1, (16,)), "permutation"),
        (lambda: tile_map(GRID, np.zeros(16, int), (16,)), "permutation"),
        (lambda: tile_map(GRID, ORDER.astype(float), (16,)), "permutation"),
        (lambda: tile_map(GRID, ORDER, (8, 9)), "adding up to 16"),
        (lambda: tile_map(GRID, ORDER, (16, 0)), ">= 1"),
        (lambda: tile_map(GRID, ORDER, ()), "adding up to 16"),
        (lambda: tile_map(TileGrid(2**31 - 1, 2**31 - 1, 16, 16), [0], (1,)), "larger tile"),
        (lambda: tile_map(GRID, ORDER, (16,)).offset(64, 0), "row 64"),
        (lambda: tile_map(GRID, ORDER, (16,)).offset(0, -1), "column -1"),
        (lambda: subtile_map(GRID, ORDER, (16,), 0), "0 ranks"),
        (lambda: subtile_map(GRID, ORDER, (16,), 0, "slab"), "0 ranks"),
        (lambda: subtile_map(GRID, ORDER, (16,), 2, "striped"), "striped"),
        (lambda: subtile_map(TileGrid(2**27, 1, 2**20, 1), range(128), (128,), 2), "rows"),
        (lambda: collective_map("all_gather", GRID, (16,), ranks=2), "all_reduce"),
        (lambda: collective_map("all_to_all", GRID, (16,), ranks=2, counts=[[1]]), "2"),
    ],
)
def test_errors_say_what_was_expected(call, words):
    with pytest.raises(StrategyError, match=words):
        call()


# long runs


@pytest.mark.slow
def test_many_random_shapes():
    """Print how many shapes of each kind were drawn."""
    rng = np.random.default_rng(20)
    ragged = uneven = empty = 0
    draws = 3000
    for _ in range(draws):
        seed, ranks = int(rng.integers(2**32)), int(rng.integers(2, 9))
        multiple = bool(rng.random() < 0.3)
        check_all_reduce(seed, ranks, multiple=multiple)
        work = check_reduce_scatter(seed, ranks, str(rng.choice(["slab", "interleaved"])), multiple=multiple)
        ragged += work.grid.ragged
        uneven += work.grid.m % ranks != 0
        empty += check_all_to_all(seed, ranks, by_counts=bool(rng.random() < 0.3))
    drawn = f"{ragged} ragged, {uneven} with M not divisible by the ranks, {empty} with a rank without tokens"
    print(f"{draws} shapes x 3 collectives: {drawn}")
    assert min(ragged, draws - ragged, uneven, draws - uneven, empty, draws - empty) > draws // 10


@pytest.mark.benchmark
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_to_all"])
def test_map_of_65536_tiles(benchmark, kind):
    grid = TileGrid(16384, 16384, 64, 64)
    groups = scale_groups((1,) * 40, grid.num_tiles)
    benchmark(collective_map, kind, grid, groups, ranks=8, swizzle=8)

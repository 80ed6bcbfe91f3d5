"""Tables that kernels read say what the reorder maps say, for every element; what contradicts itself is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from overlapsim.validate.kernels.arrival_order import ArrivalOrder  # noqa: E402
from overlapsim.validate.kernels.config import GemmConfig  # noqa: E402
from overlapsim.validate.kernels.restore_order import RestoreOrder  # noqa: E402
from overlapsim.validate.kernels.tile_order import TileOrder  # noqa: E402

from overlapsim.cost.tiles import TileGrid  # noqa: E402
from overlapsim.errors import PlanError, StrategyError  # noqa: E402
from overlapsim.schedule.reorder import (  # noqa: E402
    ReorderMap,
    SubtokenMap,
    TileMap,
    collective_map,
    map_settings,
    scale_groups,
    subtoken_map,
    write_side_file,
)

TILES = st.sampled_from((16, 32))


@st.composite
def maps(draw: st.DrawFn) -> ReorderMap:
    kind = draw(st.sampled_from(("all_reduce", "reduce_scatter", "all_to_all")))
    bm, bn, ranks = draw(TILES), draw(TILES), draw(st.integers(1, 4))
    n = draw(st.integers(1, 90))
    swizzle = draw(st.sampled_from((1, 2, 4, 8)))
    if kind == "all_to_all":
        rank = st.integers(0, ranks - 1)
        destinations = [draw(st.lists(rank, max_size=50)) for _ in range(ranks)]
        tiles = [-(-len(rows) // bm) * -(-n // bn) for rows in destinations]
        groups = [scale_groups((1, 2), count) for count in tiles]
        return subtoken_map(n, bm, bn, groups, destinations=destinations, swizzle=swizzle)
    grid = TileGrid(draw(st.integers(1, 90)), n, bm, bn)
    cut = draw(st.integers(0, grid.num_tiles - 1))
    groups = (grid.num_tiles,) if not cut else (cut, grid.num_tiles - cut)
    return collective_map(kind, grid, groups, ranks=ranks, swizzle=swizzle)


def config_of(reorder: ReorderMap) -> GemmConfig:
    bm, bn = (reorder.bm, reorder.bn) if isinstance(reorder, SubtokenMap) else (reorder.grid.bm, reorder.grid.bn)
    return GemmConfig(bm, bn, 16)


def stored_at(order: TileOrder) -> np.ndarray:
    """Address of every element by the formula in TileOrder's docstring, as the kernel computes it."""
    grid = order.grid
    row, column = np.arange(grid.m)[:, None], np.arange(grid.n)[None, :]
    slot_of_tile = np.argsort(order.tile_of_slot.numpy())
    slot = slot_of_tile[row // grid.bm * grid.grid_n + column // grid.bn]
    width = np.minimum(grid.bn, grid.n - column // grid.bn * grid.bn)
    part, index = np.zeros(grid.m, dtype=int), np.arange(grid.m) % grid.bm
    if order.row_part is not None and order.row_index is not None:
        part, index = order.row_part.numpy(), order.row_index.numpy()
    slab = order.slab_start.numpy()[part[:, None], slot]
    assert not order.aligned or ((slab + index[:, None] * width) % 16 == 0).all()
    return slab + index[:, None] * width + column % grid.bn


def found_at(restore: RestoreOrder) -> np.ndarray:
    column = np.arange(restore.n)[None, :]
    width = np.minimum(restore.bn, restore.n - column // restore.bn * restore.bn)
    slab = restore.slab_start.numpy()[restore.row_slab.numpy()[:, None], column // restore.bn]
    start = slab + restore.row_place.numpy()[:, None] * width
    assert not restore.aligned or (start % 16 == 0).all()
    return start + column % restore.bn


@settings(max_examples=60, deadline=None)
@given(maps())
def test_producer_and_consumer_tables_are_the_maps(reorder: ReorderMap) -> None:
    config = config_of(reorder)
    if isinstance(reorder, SubtokenMap):
        for rank in range(reorder.ranks):
            tokens, columns = len(reorder.tokens(rank)[0]), np.arange(reorder.n)
            restore = RestoreOrder.from_map(reorder, rank=rank)
            assert restore.rows == tokens
            assert (found_at(restore) == reorder.receive_offset(rank, np.arange(tokens)[:, None], columns)).all()
            source = reorder.sources[rank]
            if not source.rows:
                with pytest.raises(StrategyError, match="no tokens"):
                    TileOrder.from_map(reorder, config, rank=rank)
                continue
            order = TileOrder.from_map(reorder, config, rank=rank)
            assert (stored_at(order) == reorder.send_offset(rank, np.arange(source.rows)[:, None], columns)).all()
            assert order.group_tiles == source.group_tiles
        return
    order = TileOrder.from_map(reorder, config)
    row, column = np.arange(reorder.grid.m), np.arange(reorder.grid.n)
    if isinstance(reorder, TileMap):
        right = reorder.offset(row[:, None], column)
        assert (stored_at(order) == right).all() and (found_at(RestoreOrder.from_map(reorder)) == right).all()
        return
    assert (stored_at(order) == reorder.send_offset(row[:, None], column)).all()
    for rank in range(reorder.ranks):
        mine = np.flatnonzero(reorder.row_rank == rank)
        restore = RestoreOrder.from_map(reorder, rank=rank)
        assert restore.rows == len(mine)
        assert (found_at(restore) == reorder.receive_offset(mine[:, None], column)).all()


@settings(max_examples=30, deadline=None)
@given(maps())
def test_counts_add_up(reorder: ReorderMap) -> None:
    if isinstance(reorder, SubtokenMap):
        return
    order = TileOrder.from_map(reorder, config_of(reorder))
    assert np.bincount(order.group_of_slot.numpy(), minlength=order.num_groups).tolist() == list(order.group_tiles)
    assert order.group_start[-1] == order.packed_elements


def test_tables_of_a_plan_with_and_without_its_side_file(tmp_path: Any) -> None:
    grid = TileGrid(2048, 2048, 16, 16)
    reorder = collective_map("reduce_scatter", grid, (8000, grid.num_tiles - 8000), ranks=4, swizzle=4)
    plan = {**map_settings(reorder), "swizzle": 4, "bk": 16, "stages": 2, "accumulate": "fp32"}
    write_side_file(reorder, tmp_path)
    ruled, read = TileOrder.from_settings(plan), TileOrder.from_settings(plan, folder=tmp_path)
    assert torch.equal(ruled.slab_start, read.slab_start) and ruled.config == read.config == GemmConfig(16, 16, 16, 2)
    assert torch.equal(
        RestoreOrder.from_settings(plan, rank=3).slab_start,
        RestoreOrder.from_settings(plan, folder=tmp_path, rank=3).slab_start,
    )
    with pytest.raises(PlanError, match="bk"):
        TileOrder.from_settings({key: value for key, value in plan.items() if key != "bk"})


def test_group_tables_that_would_hang_a_wait_are_refused() -> None:
    grid = TileGrid(64, 64, 16, 16)
    order = TileOrder.from_map(collective_map("all_reduce", grid, (6, 10), ranks=2), GemmConfig(16, 16, 16))
    wrong: tuple[dict[str, Any], ...] = (
        {"group_tiles": (7, 9)},
        {"group_tiles": (6, 9)},
        {"group_of_slot": order.group_of_slot.flip(0)},
        {"group_of_slot": order.group_of_slot[:-1]},
    )
    for change in wrong:
        with pytest.raises(StrategyError, match="a wait would never end"):
            replace(order, **change)
    with pytest.raises(StrategyError, match="not a permutation"):
        replace(order, tile_of_slot=torch.zeros_like(order.tile_of_slot))
    with pytest.raises(StrategyError, match="in a packed buffer of 4095"):
        replace(order, packed_elements=4095)
    with pytest.raises(StrategyError, match="slab table of shape"):
        replace(order, slab_start=order.slab_start[:, :-1])
    with pytest.raises(StrategyError, match="expected the same tile"):
        replace(order, config=GemmConfig(32, 16, 16))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tiles_come_in_the_order_in_which_their_last_shard_arrives(data: st.DataObject) -> None:
    m, n, shards = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 80)), data.draw(st.integers(1, 8))
    arrival = data.draw(st.permutations(range(min(shards, m))))
    order = ArrivalOrder.by_arrival(m, n, GemmConfig(16, 16, 16), arrival)
    tiles = order.tile_of_slot.numpy()
    assert sorted(tiles) == list(range(order.grid.num_tiles))
    when = [
        max(arrival.index(row // order.shard_rows) for row in range(top, min(top + 16, m)))
        for top in tiles // order.grid.grid_n * 16
    ]
    assert when == sorted(when)


def test_configs_that_cannot_be_built_are_refused() -> None:
    for sizes, message in (
        ((48, 16, 16), "bm is 48"),
        ((16, 8, 16), "bn is 8"),
        ((16, 16, 0), "bk is 0"),
        ((512, 256, 16), "at most 65536"),
        ((16, 16, 16, 0), "0 stages"),
        ((16, 16, 16, 2, 3), "3 warps"),
        ((16, 16, 16, 2, 4, "bf16"), "accumulate is 'bf16'"),
    ):
        with pytest.raises(StrategyError, match=message):
            GemmConfig(*sizes)
    with pytest.raises(StrategyError, match="arrival order"):
        ArrivalOrder.by_arrival(10, 10, GemmConfig(16, 16, 16), (0, 0))

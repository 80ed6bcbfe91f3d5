import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import StrategyError
from tests.cost.published import COMM_SMS, stored_plans

sizes = st.integers(1, 120)
tiles = st.integers(1, 40)
grids = st.builds(TileGrid, sizes, sizes, tiles, tiles)
swizzles = st.sampled_from([1, 2, 3, 4, 6, 8, 16])


def launched_order(grid: TileGrid, swizzle: int) -> list[int]:
    """Block by block, as the kernel maps its launch grid: width is a power of two, blocks off the edge leave."""
    shift = grid.panel_width(swizzle).bit_length() - 1
    width = 1 << shift
    taken = []
    for y in range(-(-grid.grid_n // width)):
        for x in range(grid.grid_m * width):
            row, column = x >> shift, (y << shift) + (x & (width - 1))
            if column < grid.grid_n:
                taken.append(row * grid.grid_n + column)
    return taken


@pytest.mark.parametrize("plan", stored_plans(), ids=lambda plan: f"m{plan.m}")
def test_groups_hold_the_tiles_that_the_device_recorded(plan):
    # Kernels 99 and 100 of the artifact have swizzle 4 and 6: both walk panels of 4.
    grid = TileGrid(plan.m, plan.n, plan.bm, plan.bn)
    members = grid.group_members(plan.group_tiles, {99: 4, 100: 6}[plan.kernel])
    start = 0
    matched = 0
    for group in members:
        recorded = plan.order[start : start + group.size]
        matched += sorted(group.tolist()) == sorted(recorded)
        start += group.size
    assert matched == len(plan.group_tiles) == 10
    assert start == grid.num_tiles == len(plan.order)


@pytest.mark.parametrize("plan", stored_plans(), ids=lambda plan: f"m{plan.m}")
@pytest.mark.parametrize("swizzle", [1, 2, 8])
def test_another_swizzle_does_not_match_the_record(plan, swizzle):
    grid = TileGrid(plan.m, plan.n, plan.bm, plan.bn)
    first = grid.group_members(plan.group_tiles, swizzle)[0]
    assert set(first.tolist()) != set(plan.order[: first.size])


@pytest.mark.parametrize("plan", stored_plans(), ids=lambda plan: f"m{plan.m}")
def test_stored_groups_are_whole_waves_beside_the_collective(plan):
    grid = TileGrid(plan.m, plan.n, plan.bm, plan.bn)
    unit = -(-grid.waves(108) // 10)
    waves = grid.waves(108 - COMM_SMS)
    rest = waves - unit * 9
    assert grid.group_tiles((unit,) * 9 + (rest,), 108 - COMM_SMS) == plan.group_tiles


@settings(deadline=None)
@given(grids, swizzles)
def test_order_is_the_launch_grid_walked_block_by_block(grid, swizzle):
    assert grid.execution_order(swizzle).tolist() == launched_order(grid, swizzle)


@settings(deadline=None)
@given(grids, swizzles)
def test_order_is_a_permutation_and_position_its_inverse(grid, swizzle):
    order = grid.execution_order(swizzle)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(grid.num_tiles))
    assert (order[grid.execution_position(swizzle)] == np.arange(grid.num_tiles)).all()


def test_last_panel_keeps_the_walk_with_fewer_columns():
    grid = TileGrid(3, 11, 1, 1)
    order = grid.execution_order(8)
    assert order[:9].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 11]
    assert order[24:].tolist() == [8, 9, 10, 19, 20, 21, 30, 31, 32]


@pytest.mark.parametrize(
    ("columns", "swizzle", "width"),
    [(64, 8, 8), (6, 8, 8), (5, 8, 4), (3, 4, 4), (2, 8, 2), (1, 8, 1), (64, 6, 4), (64, 3, 2), (64, 1, 1)],
)
def test_panel_width_follows_swizzle_and_columns(columns, swizzle, width):
    assert TileGrid(1, columns, 1, 1).panel_width(swizzle) == width


@settings(deadline=None)
@given(grids)
def test_tile_elements_are_exact(grid):
    owner = np.arange(grid.m)[:, None] // grid.bm * grid.grid_n + np.arange(grid.n) // grid.bn
    assert (grid.tile_elements() == np.bincount(owner.ravel(), minlength=grid.num_tiles)).all()


@settings(deadline=None)
@given(grids, swizzles, st.integers(1, 200))
def test_waves_and_groups_cover_the_output(grid, swizzle, sms):
    waves = grid.waves(sms)
    assert (waves - 1) * sms < grid.num_tiles <= waves * sms
    per_wave = grid.wave_elements(sms, swizzle)
    assert per_wave.size == waves and per_wave.sum() == grid.m * grid.n
    groups = grid.group_tiles((1,) * waves, sms)
    assert (grid.group_elements(groups, swizzle) == per_wave).all()
    members = grid.group_members(groups, swizzle)
    assert [int(grid.tile_elements()[m].sum()) for m in members] == per_wave.tolist()


def test_ragged_edge_makes_the_last_groups_smaller():
    grid = TileGrid(100, 100, 64, 64)
    assert grid.ragged
    assert grid.tile_elements().tolist() == [64 * 64, 64 * 36, 36 * 64, 36 * 36]
    assert grid.group_elements((1, 2, 1)).tolist() == [4096, 4608, 1296]


def test_published_wave_counts():
    # RTX 4090: 512 tiles are 4 clean waves on 128 SMs and 5 on 126.
    grid = TileGrid(2048, 8192, 256, 128)
    assert (grid.num_tiles, grid.waves(128), grid.waves(126)) == (512, 4, 5)


def test_a_million_tiles_are_listed():
    grid = TileGrid(2**17, 2**17, 128, 128)
    order = grid.execution_order(8)
    assert order.size == 2**20 and order[8] == grid.grid_n


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g: g.group_tiles((1, 1), 4), "add"),
        (lambda g: g.group_tiles((), 4), "add"),
        (lambda g: g.group_tiles((0, 4), 4), "add"),
        (lambda g: g.group_elements((8, 9)), "16 tiles"),
        (lambda g: g.group_members((16, 0)), "16 tiles"),
        (lambda g: g.waves(0), "SMs"),
        (lambda g: g.execution_order(0), "swizzle"),
        (lambda g: TileGrid(0, 1, 1, 1), "m = 0"),
        (lambda g: TileGrid(1, 1, 1, -3), "bn = -3"),
        (lambda g: TileGrid(2**31 - 1, 2**31 - 1, 16, 16).execution_order(), "larger tile"),
        (lambda g: TileGrid(2**31 - 1, 2**31 - 1, 16, 16).tile_elements(), "larger tile"),
    ],
)
def test_errors_say_what_was_expected(call, words):
    with pytest.raises(StrategyError, match=words):
        call(TileGrid(64, 64, 16, 16))

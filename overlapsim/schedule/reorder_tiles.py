"""Reorder maps of all_reduce (whole tiles) and reduce_scatter (each tile split by rows over the ranks)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike

from overlapsim.cost.tiles import IntArray, TileGrid
from overlapsim.errors import StrategyError
from overlapsim.schedule.reorder_layout import (
    Int32Array,
    check_inside,
    check_listed,
    extents,
    freeze,
    group_slots,
    prefix,
    rows_before,
    rows_by_rank,
    slab_ends,
    slots_of,
)

RowOrder = Literal["slab", "interleaved"]
ROW_ORDERS: Final[tuple[RowOrder, ...]] = ("slab", "interleaved")


@dataclass(frozen=True, eq=False)
class TileMap:
    """Whole tiles in execution order: what all_reduce needs (docs/maps.md).

    The packed buffer has the elements of C and nothing else.  Slot s holds
    one tile, row by row, rows as wide as the tile; all ranks use one map.

    Attributes
    ----------
    grid : tiles of C
    group_tiles : tiles of each group: what its counter must reach
    tile_slot : int32, shape (tiles,): slot of each row-major tile, read by producer and consumer
    slot_tile : int32, shape (tiles,): its inverse, the execution order
    slot_start : int64, shape (tiles + 1,): first element of each slot in the packed buffer, exact at ragged edges
    group_slot : int64, shape (groups + 1,): first slot of each group

    Examples
    --------
    >>> grid = TileGrid(4, 6, 2, 2)
    >>> m = tile_map(grid, grid.execution_order(2), (2, 4))
    >>> m.tile_slot.tolist(), m.group_start.tolist(), int(m.offset(3, 2))
    ([0, 1, 4, 2, 3, 5], [0, 8, 24], 14)
    """

    grid: TileGrid
    group_tiles: tuple[int, ...]
    tile_slot: Int32Array
    slot_tile: Int32Array
    slot_start: IntArray
    group_slot: IntArray

    def __post_init__(self) -> None:
        assert (np.diff(self.slot_start) > 0).all(), "slots follow each other without gaps or overlap"
        assert self.slot_start[0] == 0 and self.slot_start[-1] == self.grid.m * self.grid.n
        assert self.group_slot[0] == 0 and self.group_slot[-1] == self.grid.num_tiles
        assert (np.diff(self.group_slot) > 0).all(), "groups are contiguous ranges of slots that cover all tiles"
        freeze(self.tile_slot, self.slot_tile, self.slot_start, self.group_slot)

    @property
    def group_start(self) -> IntArray:
        """First element of each group and, last, all elements: group g is ``[group_start[g], group_start[g + 1])``."""
        return self.slot_start[self.group_slot]

    def offset(self, row: ArrayLike, column: ArrayLike) -> IntArray:
        """Where element (row, column) of C stands in the packed buffer; arguments broadcast.

        ``offset(rows[:, None], tile_columns * bn)`` is the table of one entry
        a tile row for kernels that prefer to look it up.

        Raises
        ------
        StrategyError
            If an element is outside C.
        """
        _, slot, inside = _place(self.grid, self.tile_slot, row, column, np.arange(self.grid.m) % self.grid.bm)
        offset: IntArray = self.slot_start[slot] + inside
        return offset


@dataclass(frozen=True, eq=False)
class SubtileMap:
    """Rows of every tile dealt to ranks: what reduce_scatter needs (docs/maps.md).

    Row i of C ends whole on rank ``row_rank[i]``.  Group g of the send buffer
    is `ranks` parts of ``part_elements[g]`` each, the k-th for rank k; a part
    is the slabs of rank k from the tiles of the group, in slot order.  Parts
    are padded to the largest of the group where ranks get unequal rows, so
    that an unmodified library collective can be used; padding is never read.

    Attributes
    ----------
    grid, group_tiles, tile_slot, slot_tile, group_slot : as in `TileMap`
    ranks : of the collective
    row_order : ``slab`` or ``interleaved``
    slab_start : int64, shape (ranks, tiles): first element of the slab of slot s in the receive buffer of rank k
    part_start : int64, shape (groups + 1,): first element of each group in the receive buffer, padding included
    row_rank : int32, shape (m,): rank that gets row i
    row_index : int32, shape (m,): place of row i in its slab
    gathered_row : int32, shape (m,): where row i stands after an all_gather of every rank's rows
    global_row : int32, shape (ranks * rows_per_rank,): its inverse, -1 where a rank has fewer rows

    Examples
    --------
    >>> grid = TileGrid(8, 4, 4, 2)
    >>> m = subtile_map(grid, grid.execution_order(), (2, 2), ranks=2)
    >>> m.row_order, m.row_rank.tolist(), m.global_row.tolist()
    ('slab', [0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 4, 5, 2, 3, 6, 7])
    """

    grid: TileGrid
    ranks: int
    row_order: RowOrder
    group_tiles: tuple[int, ...]
    tile_slot: Int32Array
    slot_tile: Int32Array
    group_slot: IntArray
    slab_start: IntArray
    part_start: IntArray
    row_rank: Int32Array
    row_index: Int32Array
    gathered_row: Int32Array
    global_row: Int32Array

    def __post_init__(self) -> None:
        assert (np.diff(self.group_slot) > 0).all() and self.group_slot[-1] == self.grid.num_tiles
        first, last = self.slab_start[:, self.group_slot[:-1]], self.slab_start[:, self.group_slot[1:] - 1]
        assert (first == self.part_start[:-1]).all(), "every rank's part of a group starts where the group does"
        assert (np.diff(self.slab_start, axis=1) >= 0).all() and (last <= self.part_start[1:]).all()
        assert (self.global_row[self.gathered_row] == np.arange(self.grid.m)).all(), "no row is lost in the gather"
        freeze(self.tile_slot, self.slot_tile, self.group_slot, self.slab_start, self.part_start)
        freeze(self.row_rank, self.row_index, self.gathered_row, self.global_row)

    @property
    def part_elements(self) -> IntArray:
        """Elements that one rank receives from each group, padding included: the collective's receive count."""
        return np.diff(self.part_start)

    @property
    def group_start(self) -> IntArray:
        """First element of each group in the send buffer and, last, the buffer's size."""
        return self.part_start * self.ranks

    @property
    def rows_per_rank(self) -> int:
        """Most rows that a rank gets: what each rank hands to a later all_gather."""
        return self.global_row.size // self.ranks

    @property
    def rank_rows(self) -> IntArray:
        """Rows that each rank gets, shape (ranks,)."""
        return np.bincount(self.row_rank, minlength=self.ranks)

    def receive_offset(self, row: ArrayLike, column: ArrayLike) -> IntArray:
        """Where element (row, column) of C stands in the receive buffer of rank ``row_rank[row]``; broadcasts.

        Raises
        ------
        StrategyError
            If an element is outside C.
        """
        rows, slot, inside = _place(self.grid, self.tile_slot, row, column, self.row_index)
        offset: IntArray = self.slab_start[self.row_rank[rows], slot] + inside
        return offset

    def send_offset(self, row: ArrayLike, column: ArrayLike) -> IntArray:
        """Where the producer stores element (row, column) of C in the send buffer; arguments broadcast.

        Raises
        ------
        StrategyError
            If an element is outside C.
        """
        rows, slot, inside = _place(self.grid, self.tile_slot, row, column, self.row_index)
        rank = self.row_rank[rows]
        # Before part k of group g stand the parts of all ranks of earlier groups, then k parts of this one.
        earlier = np.repeat(self.part_start[:-1] * (self.ranks - 1), self.group_tiles)
        part = np.repeat(self.part_elements, self.group_tiles)
        offset: IntArray = self.slab_start[rank, slot] + earlier[slot] + rank * part[slot] + inside
        return offset


def tile_map(grid: TileGrid, order: ArrayLike, group_tiles: Sequence[int]) -> TileMap:
    """Map of all_reduce: slot = position in execution order.

    Parameters
    ----------
    order : row-major tile indices in the order in which the kernel takes them, the same on all ranks
    group_tiles : tiles of each group, in that order

    Raises
    ------
    StrategyError
        If `order` is not a permutation of the tiles, the groups do not add
        up, or there are more tiles than can be listed (2^27).
    """
    check_listed("tiles", grid.num_tiles)
    tile_slot, slot_tile = slots_of(order, grid.num_tiles)
    slot_start = prefix(grid.tile_elements()[slot_tile])
    group_slot = group_slots(group_tiles, grid.num_tiles)
    return TileMap(grid, _counts(group_tiles), tile_slot, slot_tile, slot_start, group_slot)


def subtile_map(
    grid: TileGrid,
    order: ArrayLike,
    group_tiles: Sequence[int],
    ranks: int,
    row_order: RowOrder | Literal["auto"] = "auto",
) -> SubtileMap:
    """Map of reduce_scatter: which rank gets which rows of a tile, and where they stand.

    Parameters
    ----------
    order, group_tiles : as in `tile_map`
    ranks : of the collective, >= 1
    row_order
        ``slab``: row r of a tile of h rows goes to rank ``r * ranks // h``
        (contiguous); ``interleaved``: to rank ``r % ranks``; ``auto``:
        `choose_row_order`.

    Raises
    ------
    StrategyError
        As `tile_map`, or if `ranks` or `row_order` is not one of the above.
    """
    check_listed("tiles by rank", grid.num_tiles * max(ranks, 1))
    check_listed("rows by rank", grid.m * max(ranks, 1))
    row_order = choose_row_order(grid, ranks) if row_order == "auto" else row_order
    tile_slot, slot_tile = slots_of(order, grid.num_tiles)
    group_slot = group_slots(group_tiles, grid.num_tiles)
    row_rank = _row_ranks(grid, ranks, row_order)
    counts, row_index = rows_by_rank(row_rank, grid.bm, ranks)

    ends = slab_ends(counts, extents(grid.n, grid.bn), slot_tile)
    at_group = ends[:, group_slot]
    part_start = prefix(np.diff(at_group, axis=1).max(axis=0))
    shift = np.repeat(part_start[:-1] - at_group[:, :-1], np.diff(group_slot), axis=1)

    rows_per_rank = int(counts.sum(axis=0).max())
    gathered = row_rank * np.int64(rows_per_rank) + rows_before(counts, row_rank, row_index, grid.bm)
    global_row = np.full(ranks * rows_per_rank, -1, dtype=np.int32)
    global_row[gathered] = np.arange(grid.m, dtype=np.int32)
    return SubtileMap(
        grid=grid,
        ranks=ranks,
        row_order=row_order,
        group_tiles=_counts(group_tiles),
        tile_slot=tile_slot,
        slot_tile=slot_tile,
        group_slot=group_slot,
        slab_start=ends[:, :-1] + shift,
        part_start=part_start,
        row_rank=row_rank,
        row_index=row_index,
        gathered_row=gathered.astype(np.int32),
        global_row=global_row,
    )


def choose_row_order(grid: TileGrid, ranks: int) -> RowOrder:
    """Choose ``slab`` where every tile has a multiple of `ranks` rows, otherwise ``interleaved``.

    Equal slabs are whole blocks of ``bm / ranks`` rows: a kernel stores each
    at once, with no arithmetic by row.  Where heights differ, the rank of an
    interleaved row does not depend on the height of its tile.

    Raises
    ------
    StrategyError
        If `ranks` is less than 1.
    """
    if ranks < 1:
        raise StrategyError(f"a reorder map for {ranks} ranks; expected at least 1")
    return "slab" if grid.bm % ranks == 0 and grid.m % ranks == 0 else "interleaved"


def _row_ranks(grid: TileGrid, ranks: int, row_order: RowOrder) -> Int32Array:
    if ranks < 1:
        raise StrategyError(f"a reorder map for {ranks} ranks; expected at least 1")
    row = np.arange(grid.m, dtype=np.int64) % grid.bm
    if row_order == "interleaved":
        return (row % ranks).astype(np.int32)
    if row_order != "slab":
        raise StrategyError(f"row order {row_order!r}; expected auto, {' or '.join(ROW_ORDERS)}")
    height = extents(grid.m, grid.bm)
    return (row * ranks // np.repeat(height, height)).astype(np.int32)


def _place(
    grid: TileGrid, tile_slot: Int32Array, row: ArrayLike, column: ArrayLike, row_index: IntArray | Int32Array
) -> tuple[IntArray, Int32Array, IntArray]:
    """Row of each element, slot of its tile, and elements before it there, `row_index` rows among them."""
    rows, columns = check_inside(row, column, grid.m, grid.n)
    tile_column = columns // grid.bn
    slot = tile_slot[rows // grid.bm * grid.grid_n + tile_column]
    inside: IntArray = row_index[rows] * extents(grid.n, grid.bn)[tile_column] + columns % grid.bn
    return rows, slot, inside


def _counts(group_tiles: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(tiles) for tiles in group_tiles)

"""Reorder map of all_to_all: every row of C (a token) has a destination rank, each with a pool of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, eq=False)
class TokenSource:
    """One rank's side as a producer; a rank without tokens has empty arrays and groups of 0 tiles.

    Attributes
    ----------
    rows : tokens on this rank: M of its GEMM
    group_tiles : tiles of each group; 0 where this rank has nothing to add
    tile_slot : int32, shape (tiles,): slot of each row-major tile
    slot_tile : int32, shape (tiles,): its inverse, the execution order
    destination : int32, shape (rows,): rank that gets each row
    row_index : int32, shape (rows,): place of the row among the rows of its tile row with the same destination
    slab_start : int64, shape (ranks, tiles): first element, in this rank's send buffer, of what slot s has for rank d
    token : int32, shape (rows,): number of the row among all tokens of its destination
    """

    rows: int
    group_tiles: tuple[int, ...]
    tile_slot: Int32Array
    slot_tile: Int32Array
    destination: Int32Array
    row_index: Int32Array
    slab_start: IntArray
    token: Int32Array

    def __post_init__(self) -> None:
        freeze(self.tile_slot, self.slot_tile, self.destination, self.row_index, self.slab_start, self.token)


@dataclass(frozen=True, eq=False)
class SubtokenMap:
    """Rows of tiles in one pool a destination, execution order inside: what all_to_all needs (docs/maps.md).

    The send buffer of a rank is its pools, by destination; the receive buffer
    the pools meant for it, by source.  A group's signal launches the transfer
    of its range of every pool.  Tokens are numbered at their destination by
    source, then by row: the order in which an all_to_all without reordering
    delivers them.

    Attributes
    ----------
    n, bm, bn : columns of C and elements of a whole tile, the same on all ranks
    ranks : of the collective
    sources : the producer's side of each rank
    counts : int64, shape (groups, source, destination): elements of each transfer, 0 = none
    send_start : same shape: first element of each transfer in the source's send buffer
    receive_start : same shape: first element of each transfer in the destination's receive buffer

    Examples
    --------
    >>> m = subtoken_map(2, 2, 2, [(1, 1), (1, 0)], destinations=[[1, 0, 1], [0]])
    >>> m.counts.tolist()
    [[[2, 2], [2, 0]], [[0, 2], [0, 0]]]
    >>> [part.tolist() for part in m.tokens(0)], m.receive_offset(0, [0, 1], 1).tolist()
    ([[0, 1], [1, 0]], [1, 3])
    """

    n: int
    bm: int
    bn: int
    ranks: int
    sources: tuple[TokenSource, ...]
    counts: IntArray
    send_start: IntArray
    receive_start: IntArray

    def __post_init__(self) -> None:
        for number, source in enumerate(self.sources):
            assert (np.diff(source.slab_start, axis=1) >= 0).all()
            assert self.counts[:, number].sum() == source.rows * self.n, "every element is in exactly one transfer"
        inside = self.counts[:-1] == np.diff(self.send_start, axis=0)
        assert inside.all() and (self.counts[:-1] == np.diff(self.receive_start, axis=0)).all(), "pools have no gaps"
        freeze(self.counts, self.send_start, self.receive_start)

    @property
    def num_groups(self) -> int:
        """Groups, the same number on every rank."""
        return len(self.counts)

    def send_offset(self, rank: int, row: ArrayLike, column: ArrayLike) -> IntArray:
        """Where rank `rank` stores element (row, column) of its C in its send buffer; arguments broadcast.

        Raises
        ------
        StrategyError
            If an element is outside C.
        """
        source = self.sources[rank]
        rows, columns = check_inside(row, column, source.rows, self.n)
        tile_column = columns // self.bn
        slot = source.tile_slot[rows // self.bm * -(-self.n // self.bn) + tile_column]
        slab = source.slab_start[source.destination[rows], slot]
        width = extents(self.n, self.bn)[tile_column]
        offset: IntArray = slab + source.row_index[rows] * width + columns - tile_column * self.bn
        return offset

    def tokens(self, rank: int) -> tuple[Int32Array, Int32Array]:
        """Source rank and row there of every token of rank `rank`, in token order: the inverse of ``token``."""
        rows = [np.flatnonzero(source.destination == rank).astype(np.int32) for source in self.sources]
        source = np.repeat(np.arange(self.ranks, dtype=np.int32), [part.size for part in rows])
        return source, np.concatenate(rows)

    def receive_offset(self, rank: int, token: ArrayLike, column: ArrayLike) -> IntArray:
        """Where the consumer on rank `rank` finds (token, column) in its receive buffer; arguments broadcast.

        ``receive_offset(rank, tokens[:, None], tile_columns * bn)`` is the
        table of one entry a subtoken for kernels that prefer to look it up.

        Raises
        ------
        StrategyError
            If a token or column is outside what the rank receives.
        """
        token_source, token_row = self.tokens(rank)
        tokens, columns = np.broadcast_arrays(*check_inside(token, column, token_source.size, self.n))
        offset = np.empty(tokens.shape, dtype=np.int64)
        for number in range(self.ranks):
            mine = token_source[tokens] == number
            sent = self.send_offset(number, token_row[tokens[mine]], columns[mine])
            # The pool arrives as it was sent.
            offset[mine] = sent - self.send_start[0, number, rank] + self.receive_start[0, number, rank]
        return offset


def subtoken_map(
    n: int,
    bm: int,
    bn: int,
    group_tiles: Sequence[Sequence[int]],
    *,
    destinations: Sequence[ArrayLike] | None = None,
    counts: ArrayLike | None = None,
    orders: Sequence[ArrayLike] | None = None,
    swizzle: int = 1,
) -> SubtokenMap:
    """Map of all_to_all: token pools by destination.

    Parameters
    ----------
    n, bm, bn : columns of C and elements of a whole tile, the same on all ranks
    group_tiles : for each rank, tiles of each group; the same number of groups, 0 tiles allowed (`scale_groups`)
    destinations : for each rank, the destination of every row; any order of rows
    counts : instead, rows by (source, destination): each rank's rows are sorted by destination
    orders : for each rank, its execution order; by default the swizzled one
    swizzle : of the kernel, see `TileGrid.execution_order`

    Raises
    ------
    StrategyError
        If the routing is not given in exactly one form or names a rank that
        does not exist, the ranks disagree in the number of groups, or groups
        or orders do not fit the tiles.
    """
    routing = _routing(destinations, counts)
    ranks = len(routing)
    if len(group_tiles) != ranks or len({len(groups) for groups in group_tiles}) != 1:
        raise StrategyError(
            f"groups of {len(group_tiles)} ranks, {sorted({len(g) for g in group_tiles})} a rank, for a routing of "
            f"{ranks} ranks; expected the same number of groups on every rank, with 0 tiles where a rank has nothing"
        )
    if orders is not None and len(orders) != ranks:
        raise StrategyError(f"tile orders of {len(orders)} ranks for a routing of {ranks}; expected one a rank")

    sent = np.array([np.bincount(destination, minlength=ranks) for destination in routing])
    first_token = np.cumsum(sent, axis=0) - sent
    transfers, sources = [], []
    for rank, destination in enumerate(routing):
        num_tiles = TileGrid(destination.size, n, bm, bn).num_tiles if destination.size else 0
        check_listed("tiles", num_tiles * ranks)
        order = orders[rank] if orders is not None else swizzled_order(destination.size, n, bm, bn, swizzle)
        tile_slot, slot_tile = slots_of(order, num_tiles)
        slots = group_slots(group_tiles[rank], num_tiles, empty=True)
        by_rank, row_index = rows_by_rank(destination, bm, ranks)
        ends = slab_ends(by_rank, extents(n, bn), slot_tile)
        token = first_token[rank, destination] + rows_before(by_rank, destination, row_index, bm)
        transfers.append(np.diff(ends[:, slots], axis=1).T)
        sources.append(
            TokenSource(
                rows=destination.size,
                group_tiles=tuple(int(tiles) for tiles in group_tiles[rank]),
                tile_slot=tile_slot,
                slot_tile=slot_tile,
                destination=destination,
                row_index=row_index,
                slab_start=ends[:, :-1] + prefix(ends[:, -1])[:-1, None],
                token=token.astype(np.int32),
            )
        )
    moved = np.stack(transfers, axis=1)
    pool = moved.sum(axis=0)
    earlier = np.cumsum(moved, axis=0) - moved
    return SubtokenMap(
        n=n,
        bm=bm,
        bn=bn,
        ranks=ranks,
        sources=tuple(sources),
        counts=moved,
        send_start=earlier + (np.cumsum(pool, axis=1) - pool),
        receive_start=earlier + (np.cumsum(pool, axis=0) - pool),
    )


def swizzled_order(rows: int, n: int, bm: int, bn: int, swizzle: int) -> IntArray:
    """Execution order of a rank's tiles by the swizzle; empty for a rank without rows."""
    return TileGrid(rows, n, bm, bn).execution_order(swizzle) if rows else np.empty(0, dtype=np.int64)


def even_counts(rows: int, ranks: int) -> IntArray:
    """Balanced routing: `rows` tokens on each of `ranks` ranks, spread evenly over destinations.

    Examples
    --------
    >>> even_counts(5, 2).tolist()
    [[2, 3], [2, 3]]
    """
    return np.tile(np.diff(np.arange(ranks + 1, dtype=np.int64) * rows // ranks), (ranks, 1))


def scale_groups(group_tiles: Sequence[int], num_tiles: int) -> tuple[int, ...]:
    """Split `num_tiles` tiles in the proportions of `group_tiles`: as many groups, each ending no later.

    Used where ranks have unequal tiles and must share the number of groups.
    A rank with fewer tiles than groups gets groups of 0 tiles.

    Raises
    ------
    StrategyError
        If `group_tiles` is empty or has a group of less than 1 tile.

    Examples
    --------
    >>> scale_groups((2, 4, 6), 6), scale_groups((2, 2), 1)
    ((1, 2, 3), (0, 1))
    """
    ends = group_slots(group_tiles, sum(group_tiles))
    return tuple(np.diff(ends * num_tiles // ends[-1]).tolist())


def _routing(destinations: Sequence[ArrayLike] | None, counts: ArrayLike | None) -> list[Int32Array]:
    """Destination of every row of each rank, from either form."""
    if (destinations is None) == (counts is None):
        raise StrategyError("a routing is given either as destinations or as counts; expected exactly one of them")
    if counts is not None:
        table = np.asarray(counts)
        ranks = len(table) if table.ndim else 0
        square = table.shape == (ranks, ranks) and ranks > 0 and table.dtype.kind in "iu"
        if not square or (table < 0).any():
            raise StrategyError(
                f"routing counts of shape {table.shape} and type {table.dtype}; expected rows >= 0 by source and "
                "destination, one line and one column a rank"
            )
        check_listed("rows", int(table.sum()))
        return [np.repeat(np.arange(ranks, dtype=np.int32), line) for line in table]
    assert destinations is not None
    routing = []
    ranks = len(destinations)
    for rank, given in enumerate(destinations):
        rows = np.asarray(given)
        check_listed("rows", rows.size)
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise StrategyError(f"destinations of rank {rank} have shape {rows.shape}; expected one rank a row")
        if rows.size and not (rows.min() >= 0 and rows.max() < ranks):
            raise StrategyError(
                f"destinations of rank {rank} are {rows.min()} .. {rows.max()}; expected ranks 0 .. {ranks - 1}"
            )
        routing.append(rows.astype(np.int32))
    if not routing:
        raise StrategyError("a routing of no ranks; expected at least one")
    return routing

"""Arithmetic that the reorder maps share: tile extents, slots, groups, rows of a tile by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from overlapsim.cost.tiles import MAX_LISTED_TILES, IntArray
from overlapsim.errors import StrategyError

Int32Array = NDArray[np.int32]

# Arrays of one entry a row, or one a tile and rank, stay below 1 GiB of 8 bytes each, as those of one a tile do.
MAX_LISTED: Final = MAX_LISTED_TILES


def extents(size: int, tile: int) -> IntArray:
    """Elements of each tile along one side: all `tile`, the last what is left; empty for size 0.

    Examples
    --------
    >>> extents(10, 4).tolist()
    [4, 4, 2]
    """
    count = -(-size // tile)
    result = np.full(count, tile, dtype=np.int64)
    if count:
        result[-1] = size - (count - 1) * tile
    return result


def prefix(sizes: ArrayLike) -> IntArray:
    """Running total along the last axis with a leading 0: entry x is where part x starts, the last entry the whole.

    Examples
    --------
    >>> prefix([3, 1, 2]).tolist()
    [0, 3, 4, 6]
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    result = np.zeros((*sizes.shape[:-1], sizes.shape[-1] + 1), dtype=np.int64)
    np.cumsum(sizes, axis=-1, out=result[..., 1:])
    return result


def slots_of(order: ArrayLike, num_tiles: int) -> tuple[Int32Array, Int32Array]:
    """Turn an execution order into the map tile -> slot and its inverse.

    Parameters
    ----------
    order : row-major tile indices in the order in which the kernel takes them

    Returns
    -------
    tile_slot, slot_tile : int32 arrays of `num_tiles`

    Raises
    ------
    StrategyError
        If `order` is not a permutation of ``0 .. num_tiles - 1``.
    """
    given = np.asarray(order)
    sound = given.ndim == 1 and given.size == num_tiles and (given.dtype.kind in "iu" or not given.size)
    if sound and given.size:
        sound = bool(given.min() >= 0 and given.max() < num_tiles)
    slot_tile = given.astype(np.int32) if sound else np.empty(0, np.int32)
    tile_slot = np.full(num_tiles if sound else 0, -1, dtype=np.int32)
    tile_slot[slot_tile] = np.arange(slot_tile.size, dtype=np.int32)
    if not sound or (tile_slot < 0).any():
        raise StrategyError(
            f"tile order of shape {given.shape} and type {given.dtype} is not a permutation of 0 .. {num_tiles - 1}; "
            f"expected each of the {num_tiles} tiles once, in the order in which the kernel takes them"
        )
    return tile_slot, slot_tile


def group_slots(group_tiles: Sequence[int], num_tiles: int, *, empty: bool = False) -> IntArray:
    """First slot of each group and, last, the number of tiles.

    Parameters
    ----------
    group_tiles : tiles of each group, in execution order
    empty : whether groups of 0 tiles are allowed

    Raises
    ------
    StrategyError
        If there is no group, one is too small, or they do not add up to `num_tiles`.
    """
    least = 0 if empty else 1
    if not len(group_tiles) or min(group_tiles) < least or sum(group_tiles) != num_tiles:
        raise StrategyError(
            f"groups of {_shown(group_tiles)} tiles; expected sizes >= {least} adding up to {num_tiles} tiles"
        )
    return prefix(group_tiles)


def check_listed(what: str, count: int) -> None:
    """Refuse maps whose arrays would not fit in memory.

    Raises
    ------
    StrategyError
        If `count` entries are more than ``MAX_LISTED``.
    """
    if count > MAX_LISTED:
        raise StrategyError(f"a reorder map of {count} {what}; expected at most {MAX_LISTED}: choose a larger tile")


def rows_by_rank(row_rank: Int32Array, bm: int, ranks: int) -> tuple[IntArray, Int32Array]:
    """Count the rows of each tile row by rank, and number them.

    Parameters
    ----------
    row_rank : rank of every row of C, each in ``0 .. ranks - 1``
    bm : rows of a whole tile

    Returns
    -------
    counts : int64, shape (tile rows, ranks)
    index : int32, shape (rows,)
        Place of a row among the rows of its tile row that have the same rank, in row order.

    Examples
    --------
    >>> counts, index = rows_by_rank(np.array([0, 1, 1, 0, 1], np.int32), 3, 2)
    >>> counts.tolist(), index.tolist()
    ([[1, 2], [1, 1]], [0, 0, 1, 0, 0])
    """
    m = row_rank.size
    grid_m = -(-m // bm)
    key = np.arange(m, dtype=np.int64) // bm * ranks + row_rank
    counts = np.bincount(key, minlength=grid_m * ranks)
    by_key = np.argsort(key, kind="stable")
    index = np.empty(m, dtype=np.int32)
    index[by_key] = np.arange(m) - np.repeat(prefix(counts)[:-1], counts)
    return counts.reshape(grid_m, ranks).astype(np.int64), index


def slab_ends(counts: IntArray, widths: IntArray, slot_tile: Int32Array) -> IntArray:
    """Elements that each rank gets from the tiles in slots before s.

    A *slab* is the part of one tile that goes to one rank: its rows of that
    tile, each as wide as the tile.

    Parameters
    ----------
    counts : rows of each tile row by rank, shape (tile rows, ranks)
    widths : columns of each tile column

    Returns
    -------
    int64, shape (ranks, tiles + 1)
    """
    if not slot_tile.size:
        return np.zeros((counts.shape[1], 1), dtype=np.int64)
    row, column = np.divmod(slot_tile, np.int32(widths.size))
    # By rank first: the running sum then walks memory in order.
    slabs = np.take(np.ascontiguousarray(counts.T), row, axis=1)
    slabs *= widths[column]
    return prefix(slabs)


def rows_before(counts: IntArray, row_rank: Int32Array, index: Int32Array, bm: int) -> IntArray:
    """Place of each row among all rows of C that have the same rank, in row order."""
    before = np.cumsum(counts, axis=0) - counts
    place: IntArray = before[np.arange(row_rank.size) // bm, row_rank] + index
    return place


def check_inside(row: ArrayLike, column: ArrayLike, rows: int, columns: int) -> tuple[IntArray, IntArray]:
    """Row and column numbers as int64, refused outside C: a negative index would silently wrap.

    Raises
    ------
    StrategyError
        If a number is outside ``0 .. rows - 1`` or ``0 .. columns - 1``.
    """
    places = []
    for what, given, size in (("row", row, rows), ("column", column, columns)):
        place = np.asarray(given, dtype=np.int64)
        if place.size and not (place.min() >= 0 and place.max() < size):
            raise StrategyError(f"{what} {place.min()} .. {place.max()}; expected 0 .. {size - 1}")
        places.append(place)
    return places[0], places[1]


def freeze(*arrays: NDArray[Any]) -> None:
    """Make arrays read-only."""
    for array in arrays:
        array.flags.writeable = False


def _shown(sizes: Sequence[int]) -> str:
    listed = list(sizes)
    return str(listed) if len(listed) <= 20 else f"{str(listed[:20])[:-1]}, ... {len(listed)} groups]"

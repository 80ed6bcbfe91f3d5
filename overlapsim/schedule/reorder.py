"""Reorder maps as data: made for a collective, written into a plan's settings, read back by kernels (docs/maps.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike

from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import PlanError, StrategyError
from overlapsim.schedule.reorder_files import SideFile, encode, read, write
from overlapsim.schedule.reorder_layout import Int32Array, slots_of
from overlapsim.schedule.reorder_tiles import (
    ROW_ORDERS,
    RowOrder,
    SubtileMap,
    TileMap,
    choose_row_order,
    subtile_map,
    tile_map,
)
from overlapsim.schedule.reorder_tokens import (
    SubtokenMap,
    even_counts,
    scale_groups,
    subtoken_map,
    swizzled_order,
)

__all__ = [
    "MAP_KINDS",
    "MAX_ENTRIES_IN_PLAN",
    "ROW_ORDERS",
    "ReorderMap",
    "RowOrder",
    "SubtileMap",
    "SubtokenMap",
    "TileMap",
    "choose_row_order",
    "collective_map",
    "even_counts",
    "from_settings",
    "map_settings",
    "planned_map",
    "scale_groups",
    "side_file",
    "subtile_map",
    "subtoken_map",
    "tile_map",
    "write_side_file",
]

ReorderMap = TileMap | SubtileMap | SubtokenMap
MAP_KINDS: Final[Mapping[str, str]] = {
    "all_reduce": "tile",
    "reduce_scatter": "subtile",
    "all_to_all": "subtoken",
}
"""Unit that the map of each collective moves."""
MAX_ENTRIES_IN_PLAN: Final = 4096
"""Most entries of a map that stand in the plan itself; a longer one goes into a side file."""


def collective_map(
    collective: str,
    grid: TileGrid,
    group_tiles: Sequence[int],
    *,
    ranks: int,
    swizzle: int = 1,
    row_order: RowOrder | Literal["auto"] = "auto",
    counts: ArrayLike | None = None,
) -> ReorderMap:
    """Make the map of a collective after a GEMM whose kernel walks its tiles by the swizzle.

    Parameters
    ----------
    collective : ``all_reduce``, ``reduce_scatter`` or ``all_to_all``
    grid : tiles of C on one rank
    group_tiles : tiles of each group, in execution order
    ranks : of the collective
    swizzle : of the kernel, see `TileGrid.execution_order`
    row_order : for reduce_scatter, see `subtile_map`
    counts
        For all_to_all, rows by (source, destination), sorted by destination
        on every source; by default the rows of `grid` on every rank, spread
        evenly.  Ranks with other rows than `grid` get the groups scaled to
        their tiles (`scale_groups`).

    Raises
    ------
    StrategyError
        If the collective has no map, or sizes do not fit.

    Examples
    --------
    >>> m = collective_map("reduce_scatter", TileGrid(8192, 8192, 256, 128), (1024, 1024), ranks=8, swizzle=4)
    >>> m.row_order, m.part_elements.tolist()
    ('slab', [4194304, 4194304])
    """
    kind = MAP_KINDS.get(collective)
    if kind == "tile":
        return tile_map(grid, grid.execution_order(swizzle), group_tiles)
    if kind == "subtile":
        return subtile_map(grid, grid.execution_order(swizzle), group_tiles, ranks, row_order)
    if kind is None:
        raise StrategyError(f"no reorder map for {collective!r}; expected one of {', '.join(MAP_KINDS)}")
    routing = even_counts(grid.m, ranks) if counts is None else np.asarray(counts)
    if routing.shape != (ranks, ranks):
        raise StrategyError(
            f"routing counts of shape {routing.shape}; expected rows by source and destination, {ranks}"
        )
    tiles = [-(-int(rows) // grid.bm) * grid.grid_n for rows in routing.sum(axis=1)]
    groups = [scale_groups(group_tiles, count) for count in tiles]
    return subtoken_map(grid.n, grid.bm, grid.bn, groups, counts=routing, swizzle=swizzle)


def map_settings(reorder: ReorderMap) -> dict[str, Any]:
    """Write a map down for a plan's settings, to be merged with what else the kernel needs.

    The long lists stand under ``map`` if they have at most
    ``MAX_ENTRIES_IN_PLAN`` entries together; otherwise ``map`` names the side
    file (`write_side_file`) and its SHA-256.

    Returns
    -------
    dict
        Builtins only: ``map_kind n bm bn map``, and for ``tile`` ``m
        group_tiles``; for ``subtile`` ``m group_tiles ranks row_order``; for
        ``subtoken`` ``ranks rows_by_rank group_tiles_by_rank`` and, if every
        rank's rows are sorted by destination, ``routing_counts``.

    Examples
    --------
    >>> map_settings(collective_map("all_reduce", TileGrid(4, 2, 2, 2), (1, 1), ranks=2))["map"]
    {'tile_slot': [0, 1]}
    """
    arrays = _arrays(reorder)
    side = side_file(reorder)
    stored: dict[str, Any] = {name: array.tolist() for name, array in arrays.items()} if side is None else {}
    if side is not None:
        stored = {"file": side.name, "sha256": side.sha256}
    if isinstance(reorder, SubtokenMap):
        return {
            "map_kind": "subtoken",
            "ranks": reorder.ranks,
            "n": reorder.n,
            "bm": reorder.bm,
            "bn": reorder.bn,
            "rows_by_rank": [source.rows for source in reorder.sources],
            "group_tiles_by_rank": [list(source.group_tiles) for source in reorder.sources],
            **({} if "destination" in arrays else {"routing_counts": _routing_counts(reorder)}),
            "map": stored,
        }
    grid = reorder.grid
    sizes = {"m": grid.m, "n": grid.n, "bm": grid.bm, "bn": grid.bn, "group_tiles": list(reorder.group_tiles)}
    if isinstance(reorder, TileMap):
        return {"map_kind": "tile", **sizes, "map": stored}
    return {"map_kind": "subtile", "ranks": reorder.ranks, **sizes, "row_order": reorder.row_order, "map": stored}


def from_settings(settings: Mapping[str, Any], folder: str | Path) -> ReorderMap:
    """Read a map back from a plan's settings; derived arrays are computed again.

    Parameters
    ----------
    settings : of one operator of a plan, with what `map_settings` gave
    folder : where the plan is, and beside it the side file if there is one

    Raises
    ------
    PlanError
        If a key is missing or malformed, the side file is missing or another
        one, or the map does not fit the sizes.
    """
    stored = _get(settings, "map", dict)
    if "file" in stored:
        arrays = read(folder, _get(stored, "file", str), _get(stored, "sha256", str))
    else:
        arrays = {name: _integers(stored, name) for name in stored}
    if "tile_slot" not in arrays:
        raise PlanError(f"the plan's map has {', '.join(arrays) or 'nothing'}; expected tile_slot: plan again")
    return _rebuild(settings, arrays)


def planned_map(settings: Mapping[str, Any]) -> ReorderMap:
    """Make a planned map again from its rule (sizes, groups, ``swizzle``), without its side file.

    Raises
    ------
    PlanError
        If a key is missing or malformed, or the map follows no rule: a
        recorded tile order, or a routing that was given row by row.
    """
    swizzle = _get(settings, "swizzle", int)
    n, bm, bn = (_get(settings, name, int) for name in ("n", "bm", "bn"))
    rows = _counts(settings, "rows_by_rank") if "rows_by_rank" in settings else [_get(settings, "m", int)]
    try:
        orders = [swizzled_order(count, n, bm, bn, swizzle) for count in rows]
    except StrategyError as error:
        raise PlanError(f"the plan's reorder map does not fit: {error}") from None
    slots = [np.argsort(order).astype(np.int32) for order in orders]
    result = _rebuild(settings, {"tile_slot": np.concatenate(slots)})
    if map_settings(result)["map"] != settings.get("map"):
        raise PlanError(
            f"the plan's map is not the one of swizzle {swizzle}: its tile order was recorded; "
            "write its side file from the map it was made as"
        )
    return result


def side_file(reorder: ReorderMap) -> SideFile | None:
    """Side file of a map, or None if the map stands in the plan itself."""
    arrays = _arrays(reorder)
    if sum(array.size for array in arrays.values()) <= MAX_ENTRIES_IN_PLAN:
        return None
    return encode(arrays)


def write_side_file(reorder: ReorderMap, folder: str | Path) -> Path | None:
    """Write the side file of a map into the plan's folder, if it needs one: before the plan that names it.

    Raises
    ------
    PlanError
        If the folder cannot be written.
    """
    side = side_file(reorder)
    return None if side is None else write(side, folder)


def _arrays(reorder: ReorderMap) -> dict[str, Int32Array]:
    """Everything about a map that its sizes and groups do not say."""
    if not isinstance(reorder, SubtokenMap):
        return {"tile_slot": reorder.tile_slot}
    arrays = {"tile_slot": np.concatenate([source.tile_slot for source in reorder.sources])}
    if not all((np.diff(source.destination) >= 0).all() for source in reorder.sources):
        arrays["destination"] = np.concatenate([source.destination for source in reorder.sources])
    return arrays


def _routing_counts(reorder: SubtokenMap) -> list[list[int]]:
    return [np.bincount(source.destination, minlength=reorder.ranks).tolist() for source in reorder.sources]


def _rebuild(settings: Mapping[str, Any], arrays: Mapping[str, Int32Array]) -> ReorderMap:
    kind = _get(settings, "map_kind", str)
    n, bm, bn = (_get(settings, name, int) for name in ("n", "bm", "bn"))
    slot = arrays["tile_slot"]
    try:
        if kind == "subtoken":
            return _rebuild_tokens(settings, arrays, n, bm, bn)
        grid = TileGrid(_get(settings, "m", int), n, bm, bn)
        groups = _counts(settings, "group_tiles")
        if kind == "tile":
            return tile_map(grid, slots_of(slot, grid.num_tiles)[0], groups)
        if kind == "subtile":
            row_order = next((name for name in ROW_ORDERS if name == settings.get("row_order")), None)
            if row_order is None:
                raise PlanError(f"row_order is {settings.get('row_order')!r}; expected {' or '.join(ROW_ORDERS)}")
            order, _ = slots_of(slot, grid.num_tiles)
            return subtile_map(grid, order, groups, _get(settings, "ranks", int), row_order)
    except StrategyError as error:
        raise PlanError(f"the plan's reorder map does not fit: {error}") from None
    raise PlanError(f"map_kind is {kind!r}; expected one of {', '.join(MAP_KINDS.values())}")


def _rebuild_tokens(
    settings: Mapping[str, Any], arrays: Mapping[str, Int32Array], n: int, bm: int, bn: int
) -> SubtokenMap:
    rows = _counts(settings, "rows_by_rank")
    groups = [_counts({"group_tiles_by_rank": line}, "group_tiles_by_rank") for line in _lines(settings)]
    tiles = [TileGrid(count, n, bm, bn).num_tiles if count else 0 for count in rows]
    slots = _split(arrays["tile_slot"], tiles, "tile_slot")
    # Slot and order are inverse permutations: turning one round gives the other.
    orders = [slots_of(slot, count)[0] for slot, count in zip(slots, tiles, strict=True)]
    if "destination" in arrays:
        destinations = _split(arrays["destination"], rows, "destination")
        return subtoken_map(n, bm, bn, groups, destinations=destinations, orders=orders)
    if "routing_counts" not in settings:
        raise PlanError(
            "the routing was given row by row and stands only in the map; read it with from_settings, "
            "or give the routing again"
        )
    routing = [_counts({"routing_counts": line}, "routing_counts") for line in _get(settings, "routing_counts", list)]
    if [sum(line) for line in routing] != rows or any(len(line) != len(rows) for line in routing):
        raise PlanError(f"routing_counts do not add up to rows_by_rank {rows}; plan again")
    return subtoken_map(n, bm, bn, groups, counts=np.array(routing), orders=orders)


def _split(array: Int32Array, sizes: Sequence[int], what: str) -> list[Int32Array]:
    if array.size != sum(sizes):
        raise PlanError(f"{what} of the plan's map has {array.size} entries; expected {sum(sizes)}: plan again")
    return np.split(array, np.cumsum(sizes)[:-1])


def _lines(settings: Mapping[str, Any]) -> list[Any]:
    lines: list[Any] = _get(settings, "group_tiles_by_rank", list)
    return lines


def _get(settings: Mapping[str, Any], name: str, kind: type) -> Any:
    value = settings.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise PlanError(f"{name} in the plan's settings is {value!r}; expected {kind.__name__}: plan again")
    return value


def _counts(settings: Mapping[str, Any], name: str) -> list[int]:
    return [int(count) for count in _integers(settings, name)]


def _integers(settings: Mapping[str, Any], name: str) -> Int32Array:
    values = settings.get(name)
    whole = isinstance(values, list | tuple) and all(type(value) is int for value in values)
    if not whole or any(not 0 <= value < 2**31 for value in values or ()):
        raise PlanError(f"{name} in the plan's settings is {values!r:.60}; expected a list of whole numbers >= 0")
    return np.array(values, dtype=np.int32)

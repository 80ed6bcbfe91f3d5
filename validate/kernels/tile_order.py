"""Tables that a GEMM reads: the order of its tiles, their groups, and where every row of every tile is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from overlapsim.validate.kernels.config import GemmConfig
from overlapsim.validate.kernels.tables import check_rank, check_tile, is_aligned, tensor_of

from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import StrategyError
from overlapsim.schedule.reorder import ReorderMap, SubtokenMap, TileMap, from_settings, planned_map
from overlapsim.schedule.reorder_layout import extents, rows_by_rank, slots_of

if TYPE_CHECKING:
    from overlapsim.validate.kernels.tables import Device
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class TileOrder:
    """What a signalled GEMM reads: execution order, groups, and the address of every row of every tile.

    Element (i, j) of C goes to ``slab_start[row_part[i], slot] + row_index[i] * w + j mod bn`` of the packed buffer,
    where w is the width of the tile; whole tiles (`row_part` None) have one part and ``row_index = i mod bm``.

    Attributes
    ----------
    grid : tiles of C on this rank
    config : kernel
    kind : ``tile``, ``subtile`` or ``subtoken`` (docs/maps.md)
    group_tiles : tiles of each group: what its counter must reach, 0 allowed for ``subtoken``
    group_start : first element of each group in the packed buffer and, last, its size; empty for ``subtoken``, whose
        transfers are in the map (`send_start`, `counts`)
    packed_elements : elements of the packed (send) buffer, padding included
    tile_of_slot : int32, shape (tiles,)
    group_of_slot : int32, shape (tiles,)
    slab_start : int64, shape (parts, tiles), by slot
    row_part, row_index : int32, shape (m,), or None
    aligned : all rows of tiles start at multiples of 16 elements

    Raises
    ------
    StrategyError
        If the tables contradict each other: tiles that are missing or twice, groups that do not add up, or addresses
        outside the packed buffer.
    """

    grid: TileGrid
    config: GemmConfig
    kind: str
    group_tiles: tuple[int, ...]
    group_start: tuple[int, ...]
    packed_elements: int
    tile_of_slot: Tensor
    group_of_slot: Tensor
    slab_start: Tensor
    row_part: Tensor | None
    row_index: Tensor | None
    aligned: bool

    def __post_init__(self) -> None:
        tiles, config = self.grid.num_tiles, self.config
        check_tile(config, self.grid.bm, self.grid.bn)
        order, group = self.tile_of_slot.cpu().numpy(), self.group_of_slot.cpu().numpy()
        slots_of(order, tiles)
        if group.size != tiles or not np.array_equal(group, np.repeat(np.arange(self.num_groups), self.group_tiles)):
            raise StrategyError(
                f"groups of {list(self.group_tiles)[:20]} tiles and a group table of {group.size} slots contradict "
                f"each other for {tiles} tiles; expected consecutive slots, each in exactly one group: a wait would "
                "never end"
            )
        self._check_addresses(order)

    def _check_addresses(self, order: NDArray[Any]) -> None:
        """Refuse tables by which a kernel would write outside the packed buffer."""
        grid, slab = self.grid, self.slab_start.cpu().numpy()
        if self.row_part is None or self.row_index is None:
            part = np.zeros(grid.m, dtype=np.int32)
        else:
            part = self.row_part.cpu().numpy()
        if slab.shape != (slab.shape[0], grid.num_tiles) or part.size != grid.m or part.max() >= slab.shape[0]:
            raise StrategyError(
                f"a slab table of shape {slab.shape} and parts of {part.size} rows for {grid.m} rows in "
                f"{grid.num_tiles} tiles; expected one line a part, one column a slot"
            )
        rows, _ = rows_by_rank(part, grid.bm, slab.shape[0])
        tile_row, tile_column = np.divmod(order, grid.grid_n)
        ends = slab + rows.T[:, tile_row] * extents(grid.n, grid.bn)[tile_column]
        if slab.min() < 0 or ends.max() > self.packed_elements:
            raise StrategyError(
                f"slabs reach from {slab.min()} to {ends.max()} in a packed buffer of {self.packed_elements} elements"
            )

    @classmethod
    def from_map(cls, reorder: ReorderMap, config: GemmConfig, *, rank: int = 0, device: Device = "cpu") -> TileOrder:
        """Tables of one rank from a reorder map.

        Parameters
        ----------
        reorder : as made by `overlapsim.schedule.reorder`; for all_to_all with the actual destinations
        config : kernel; its tile must be the map's
        rank : of the producer; matters for all_to_all only
        device : of the tables

        Raises
        ------
        StrategyError
            If tile or rank do not fit the map, or the rank has no rows.
        """
        if isinstance(reorder, SubtokenMap):
            return cls._from_tokens(reorder, config, rank, device)
        grid = reorder.grid
        check_tile(config, grid.bm, grid.bn)
        if isinstance(reorder, TileMap):
            slab, part, index = reorder.slot_start[None, :-1], None, None
        else:
            earlier = np.repeat(reorder.part_start[:-1] * (reorder.ranks - 1), reorder.group_tiles)
            own = np.repeat(reorder.part_elements, reorder.group_tiles)
            slab = reorder.slab_start + earlier + np.arange(reorder.ranks)[:, None] * own
            part, index = reorder.row_rank, reorder.row_index
        start = tuple(int(value) for value in reorder.group_start)
        kind = "tile" if isinstance(reorder, TileMap) else "subtile"
        return cls._build(grid, config, kind, reorder.group_tiles, start, reorder.slot_tile, slab, part, index, device)

    @classmethod
    def from_settings(
        cls,
        settings: Mapping[str, Any],
        *,
        folder: str | Path | None = None,
        rank: int = 0,
        device: Device = "cpu",
    ) -> TileOrder:
        """Tables from an operator plan's settings: the side file is read if `folder` is given, else made again.

        Raises
        ------
        PlanError
            If the settings hold no kernel or no map, or the map follows no rule and `folder` is None.
        """
        reorder = planned_map(settings) if folder is None else from_settings(settings, folder)
        return cls.from_map(reorder, GemmConfig.from_settings(settings), rank=rank, device=device)

    @property
    def num_groups(self) -> int:
        """Groups, empty ones included: counters that the GEMM needs."""
        return len(self.group_tiles)

    @classmethod
    def _from_tokens(cls, reorder: SubtokenMap, config: GemmConfig, rank: int, device: Device) -> TileOrder:
        check_rank(rank, reorder.ranks)
        check_tile(config, reorder.bm, reorder.bn)
        source = reorder.sources[rank]
        if not source.rows:
            raise StrategyError(f"rank {rank} has no tokens: there is no GEMM to launch; expected at least one row")
        grid = TileGrid(source.rows, reorder.n, reorder.bm, reorder.bn)
        return cls._build(
            *(grid, config, "subtoken", source.group_tiles, (), source.slot_tile),
            *(source.slab_start, source.destination, source.row_index, device),
        )

    @classmethod
    def _build(
        cls,
        grid: TileGrid,
        config: GemmConfig,
        kind: str,
        group_tiles: Sequence[int],
        group_start: tuple[int, ...],
        slot_tile: NDArray[Any],
        slab: NDArray[Any],
        part: NDArray[Any] | None,
        index: NDArray[Any] | None,
        device: Device,
    ) -> TileOrder:
        group = np.repeat(np.arange(len(group_tiles)), group_tiles)
        return cls(
            grid=grid,
            config=config,
            kind=kind,
            group_tiles=tuple(group_tiles),
            group_start=group_start,
            packed_elements=group_start[-1] if group_start else grid.m * grid.n,
            tile_of_slot=tensor_of(slot_tile, np.int32, device),
            group_of_slot=tensor_of(group, np.int32, device),
            slab_start=tensor_of(slab, np.int64, device),
            row_part=None if part is None else tensor_of(part, np.int32, device),
            row_index=None if index is None else tensor_of(index, np.int32, device),
            aligned=is_aligned(slab, grid.n),
        )

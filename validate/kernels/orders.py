"""Tables that kernels read: where a GEMM stores its tiles, and where the consumer of a collective finds its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from overlapsim.validate.kernels.config import GemmConfig

from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import StrategyError
from overlapsim.schedule.reorder import ReorderMap, SubtileMap, SubtokenMap, TileMap, from_settings, planned_map
from overlapsim.schedule.reorder_layout import extents, rows_by_rank, slots_of

if TYPE_CHECKING:
    from torch import Tensor

    Device = str | Any


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
        _check_tile(config, self.grid.bm, self.grid.bn)
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
            part = np.zeros(grid.m, dtype=np.int64)
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
        _check_tile(config, grid.bm, grid.bn)
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
        _check_rank(rank, reorder.ranks)
        _check_tile(config, reorder.bm, reorder.bn)
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
            tile_of_slot=_tensor(slot_tile, np.int32, device),
            group_of_slot=_tensor(group, np.int32, device),
            slab_start=_tensor(slab, np.int64, device),
            row_part=None if part is None else _tensor(part, np.int32, device),
            row_index=None if index is None else _tensor(index, np.int32, device),
            aligned=_aligned(slab, grid.n),
        )


@dataclass(frozen=True, eq=False)
class RestoreOrder:
    """What a consumer reads: where its rows stand in the buffer that the collective filled, in one form for all maps.

    Element (row, j) stands at ``slab_start[row_slab[row], j / bn] + row_place[row] * w + j mod bn``.

    Attributes
    ----------
    rows, n : of the consumer's matrix on this rank: all of C after all_reduce, the rank's rows of C in rising order
        after reduce_scatter, its tokens in token order after all_to_all
    bn : columns of a whole tile
    packed_elements : elements of the receive buffer
    row_slab, row_place : int32, shape (rows,)
    slab_start : int64, shape (slabs, tile columns)
    aligned : all rows of tiles start at multiples of 16 elements
    """

    rows: int
    n: int
    bn: int
    packed_elements: int
    row_slab: Tensor
    row_place: Tensor
    slab_start: Tensor
    aligned: bool

    @classmethod
    def from_map(cls, reorder: ReorderMap, *, rank: int = 0, device: Device = "cpu") -> RestoreOrder:
        """Tables of one rank's consumer from the map that its producers used.

        Raises
        ------
        StrategyError
            If there is no such rank.
        """
        if isinstance(reorder, TileMap):
            grid = reorder.grid
            slab = reorder.slot_start[reorder.tile_slot].reshape(grid.grid_m, grid.grid_n)
            row = np.arange(grid.m)
            return cls._build(grid.n, grid.bn, grid.m * grid.n, row // grid.bm, row % grid.bm, slab, device)
        _check_rank(rank, reorder.ranks)
        if isinstance(reorder, SubtileMap):
            grid = reorder.grid
            slab = reorder.slab_start[rank][reorder.tile_slot].reshape(grid.grid_m, grid.grid_n)
            row = np.flatnonzero(reorder.row_rank == rank)
            size = int(reorder.part_start[-1])
            return cls._build(grid.n, grid.bn, size, row // grid.bm, reorder.row_index[row], slab, device)
        return cls._from_tokens(reorder, rank, device)

    @classmethod
    def from_settings(
        cls,
        settings: Mapping[str, Any],
        *,
        folder: str | Path | None = None,
        rank: int = 0,
        device: Device = "cpu",
    ) -> RestoreOrder:
        """Tables from an operator plan's settings; see `TileOrder.from_settings`."""
        reorder = planned_map(settings) if folder is None else from_settings(settings, folder)
        return cls.from_map(reorder, rank=rank, device=device)

    @classmethod
    def _from_tokens(cls, reorder: SubtokenMap, rank: int, device: Device) -> RestoreOrder:
        columns = -(-reorder.n // reorder.bn)
        slabs, row_slab, row_place, before = [], [], [], 0
        for number, source in enumerate(reorder.sources):
            shift = reorder.receive_start[0, number, rank] - reorder.send_start[0, number, rank]
            slab = source.slab_start[rank][source.tile_slot].reshape(-1, columns) + shift
            row = np.flatnonzero(source.destination == rank)
            slabs.append(slab)
            row_slab.append(before + row // reorder.bm)
            row_place.append(source.row_index[row])
            before += len(slab)
        size = int(reorder.counts[:, :, rank].sum())
        place = np.concatenate(row_place)
        return cls._build(reorder.n, reorder.bn, size, np.concatenate(row_slab), place, np.concatenate(slabs), device)

    @classmethod
    def _build(
        cls,
        n: int,
        bn: int,
        size: int,
        row_slab: NDArray[Any],
        row_place: NDArray[Any],
        slab: NDArray[Any],
        device: Device,
    ) -> RestoreOrder:
        return cls(
            rows=len(row_slab),
            n=n,
            bn=bn,
            packed_elements=size,
            row_slab=_tensor(row_slab, np.int32, device),
            row_place=_tensor(row_place, np.int32, device),
            slab_start=_tensor(slab, np.int64, device),
            aligned=_aligned(slab, n),
        )


@dataclass(frozen=True, eq=False)
class ArrivalOrder:
    """Order of a GEMM that starts while the shards of A still arrive: tiles of early shards first.

    Attributes
    ----------
    grid : tiles of C
    config : kernel
    shard_rows : rows of A in each shard; the last may have fewer
    num_shards : shards, one flag each
    tile_of_slot : int32, shape (tiles,)
    """

    grid: TileGrid
    config: GemmConfig
    shard_rows: int
    num_shards: int
    tile_of_slot: Tensor

    @classmethod
    def by_arrival(
        cls, m: int, n: int, config: GemmConfig, arrival: Sequence[int], *, device: Device = "cpu"
    ) -> ArrivalOrder:
        """Order by when the last shard that a row of tiles needs arrives.

        Parameters
        ----------
        m, n : of C, all shards together
        arrival : numbers of the shards as they arrive, the rank's own first; as many as shards

        Raises
        ------
        StrategyError
            If `arrival` does not name each shard once, or there are more shards than rows.

        Examples
        --------
        >>> order = ArrivalOrder.by_arrival(64, 32, GemmConfig(16, 16, 16), (1, 0))
        >>> order.shard_rows, order.tile_of_slot.tolist()
        (32, [4, 5, 6, 7, 0, 1, 2, 3])
        """
        shards = len(arrival)
        if not shards or sorted(arrival) != list(range(shards)) or shards > m:
            raise StrategyError(
                f"arrival order {list(arrival)} for {m} rows; expected each shard 0 .. {shards - 1} once, and at "
                "least one row a shard"
            )
        grid = TileGrid(m, n, config.bm, config.bn)
        rows = -(-m // shards)
        position = np.argsort(np.asarray(arrival))
        first = np.arange(grid.grid_m) * config.bm // rows
        last = (np.minimum(np.arange(1, grid.grid_m + 1) * config.bm, m) - 1) // rows
        # Rising shards between first and last: few, since tiles are rarely taller than a shard.
        latest = np.array([position[a : b + 1].max() for a, b in zip(first, last, strict=True)])
        tile_rows = np.argsort(latest, kind="stable")
        order = tile_rows[:, None] * grid.grid_n + np.arange(grid.grid_n)
        return cls(grid, config, rows, shards, _tensor(order.ravel(), np.int32, device))


def _aligned(slab: NDArray[Any], n: int) -> bool:
    """Whether every row of every tile starts at a multiple of 16 elements: widths are then multiples of 16 too."""
    return n % 16 == 0 and bool((slab % 16 == 0).all())


def _check_tile(config: GemmConfig, bm: int, bn: int) -> None:
    if (config.bm, config.bn) != (bm, bn):
        raise StrategyError(
            f"a kernel of {config.bm}x{config.bn} tiles for a map of {bm}x{bn} tiles; expected the same tile"
        )


def _check_rank(rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise StrategyError(f"rank {rank} of a map for {ranks} ranks; expected 0 .. {ranks - 1}")


def _tensor(values: NDArray[Any], dtype: Any, device: Device) -> Tensor:
    import torch

    # A copy: maps are read-only, and torch would write through.
    return torch.from_numpy(np.array(values, dtype=dtype, order="C")).to(device)

"""Tables that a consumer reads: where its rows stand in the buffer that a collective filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from overlapsim.validate.kernels.tables import check_rank, is_aligned, tensor_of

from overlapsim.schedule.reorder import ReorderMap, SubtileMap, SubtokenMap, TileMap, from_settings, planned_map

if TYPE_CHECKING:
    from overlapsim.validate.kernels.tables import Device
    from torch import Tensor


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
        check_rank(rank, reorder.ranks)
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
            row_slab=tensor_of(row_slab, np.int32, device),
            row_place=tensor_of(row_place, np.int32, device),
            slab_start=tensor_of(slab, np.int64, device),
            aligned=is_aligned(slab, n),
        )

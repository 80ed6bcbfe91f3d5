"""A signalled GEMM on CPU tensors: tiles in execution order, stored through the map, each counted for its group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from overlapsim.validate.runners.base import matmul

from overlapsim.errors import DeadlockError
from overlapsim.schedule.reorder import ReorderMap, SubtokenMap, TileMap

if TYPE_CHECKING:
    import torch


class HostTiles:
    """Walks the tiles of one rank as a GPU's kernel would, one after the other.

    Parameters
    ----------
    a, b : operands
    packed : buffer that tiles are stored in
    reorder, rank : where each row of each tile goes
    expected : tiles that a group's counter must reach; by default the map's
    """

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        packed: torch.Tensor,
        reorder: ReorderMap,
        rank: int,
        expected: Sequence[int] | None = None,
    ) -> None:
        layout = _layout(reorder, rank)
        self.expected = tuple(layout.group_tiles if expected is None else expected)
        self._group = np.repeat(np.arange(len(layout.group_tiles)), layout.group_tiles).tolist()
        scratch = packed.new_empty(layout.bm * layout.bn)
        # Views of operands and destinations are made once: a run then only multiplies and copies.
        self._tiles: list[_Tile] = []
        for tile in layout.slot_tile.tolist():
            i, j = divmod(tile, -(-layout.n // layout.bn))
            first, left = i * layout.bm, j * layout.bn
            row = np.arange(first, min(layout.rows, first + layout.bm))
            width = min(layout.bn, layout.n - left)
            operands = (a[first : first + row.size], b[:, left : left + width])
            if layout.part is None:
                start = int(layout.offset(row[:1], left)[0])
                whole = packed[start : start + row.size * width].view(row.size, width)
                self._tiles.append((*operands, whole, []))
                continue
            target = scratch[: row.size * width].view(row.size, width)
            offset, part = layout.offset(row, left), layout.part[row]
            copies = [
                (target, _selector(np.flatnonzero(part == k)), _rows(packed, offset[part == k], width))
                for k in np.unique(part)
            ]
            self._tiles.append((*operands, target, copies))

    def run(self, ready: Callable[[int], None]) -> None:
        """Compute all tiles; `ready` is called for a group as soon as its count is reached.

        Raises
        ------
        DeadlockError
            If a group counts more tiles than expected (it was signalled before it was whole), or never reaches its
            count (on a GPU its collective would wait for ever).
        """
        counters = [0] * len(self.expected)
        for group, expected in enumerate(self.expected):
            if not expected:
                ready(group)
        for (a, b, target, copies), group in zip(self._tiles, self._group, strict=True):
            matmul(a, b, target)
            for tile, rows, destination in copies:
                destination.copy_(tile[rows])
            counters[group] += 1
            if counters[group] > self.expected[group]:
                raise DeadlockError(
                    f"group {group} counted {counters[group]} tiles where its collective waits for "
                    f"{self.expected[group]}: it was signalled before it was whole; the group table is wrong"
                )
            if counters[group] == self.expected[group]:
                ready(group)
        hung = [
            f"group {group} reached {count} of {expected} tiles"
            for group, (count, expected) in enumerate(zip(counters, self.expected, strict=True))
            if count < expected
        ]
        if hung:
            raise DeadlockError(f"{'; '.join(hung)}: its collective would wait for ever; the group table is wrong")


if TYPE_CHECKING:
    _Tile = tuple[
        torch.Tensor, torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, slice | torch.Tensor, torch.Tensor]]
    ]


@dataclass(frozen=True)
class _Layout:
    """One rank's side of any map: its tiles in order, and where the elements of a tile's left edge are stored."""

    rows: int
    n: int
    bm: int
    bn: int
    slot_tile: NDArray[np.int32]
    group_tiles: tuple[int, ...]
    offset: Callable[[NDArray[np.int64], int], NDArray[np.int64]]
    part: NDArray[np.int32] | None


def _layout(reorder: ReorderMap, rank: int) -> _Layout:
    if isinstance(reorder, SubtokenMap):
        source = reorder.sources[rank]
        return _Layout(
            *(source.rows, reorder.n, reorder.bm, reorder.bn, source.slot_tile, source.group_tiles),
            lambda row, column: reorder.send_offset(rank, row, column),
            source.destination,
        )
    grid = reorder.grid
    offset = reorder.offset if isinstance(reorder, TileMap) else reorder.send_offset
    part = None if isinstance(reorder, TileMap) else reorder.row_rank
    return _Layout(grid.m, grid.n, grid.bm, grid.bn, reorder.slot_tile, reorder.group_tiles, offset, part)


def _rows(packed: torch.Tensor, offset: NDArray[np.int64], width: int) -> torch.Tensor:
    """Rows of one tile and destination stand together, from the first one's place on."""
    start = int(offset[0])
    return packed[start : start + offset.size * width].view(offset.size, width)


def _selector(rows: NDArray[np.int64]) -> slice | torch.Tensor:
    """Evenly spaced rows as a slice, which copies nothing by itself; others as an index."""
    steps = np.unique(np.diff(rows)) if rows.size > 1 else np.array([1])
    if steps.size == 1:
        return slice(int(rows[0]), int(rows[-1]) + 1, int(steps[0]))
    import torch

    return torch.as_tensor(rows)

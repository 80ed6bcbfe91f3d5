"""Collectives of the groups of a reorder map: contiguous pieces of packed buffers, through the library unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from overlapsim.validate.numerics import Placed
from overlapsim.validate.runners.base import all_reduce, exchange, reduce_scatter

from overlapsim.schedule.reorder import ReorderMap, SubtileMap, SubtokenMap, TileMap

if TYPE_CHECKING:
    import torch

RESTORED_ROWS: Final = 256
"""Rows that are gathered at once when a whole output is put back in order for a check: bounds the index table."""


class GroupTransfers:
    """Buffers and collectives of one map on one rank.

    Parameters
    ----------
    reorder : of all ranks
    rank : this one
    empty : makes a poisoned buffer of so many elements

    Attributes
    ----------
    packed : what the GEMM writes
    received : what the consumer reads; `packed` itself where the collective works in place
    num_groups : groups
    """

    def __init__(self, reorder: ReorderMap, rank: int, empty: Callable[[int], torch.Tensor]) -> None:
        self.reorder, self.rank = reorder, rank
        if isinstance(reorder, SubtokenMap):
            source = reorder.sources[rank]
            self.packed = empty(source.rows * reorder.n)
            self.received = empty(int(reorder.counts[:, :, rank].sum()))
            self.num_groups = reorder.num_groups
            self.group_tiles = source.group_tiles
        else:
            self.packed = empty(int(reorder.group_start[-1]))
            self.received = empty(int(reorder.part_start[-1])) if isinstance(reorder, SubtileMap) else self.packed
            self.num_groups = len(reorder.group_tiles)
            self.group_tiles = reorder.group_tiles

    def start(self, group: int) -> Sequence[Any]:
        """Start the collective of one group."""
        reorder = self.reorder
        if isinstance(reorder, SubtokenMap):
            return self._exchange(reorder, group)
        sent = self.packed[reorder.group_start[group] : reorder.group_start[group + 1]]
        if isinstance(reorder, TileMap):
            return all_reduce(sent)
        return reduce_scatter(self.received[reorder.part_start[group] : reorder.part_start[group + 1]], sent)

    def restored(self) -> tuple[torch.Tensor, Placed]:
        """Put what was received back into plain rows, through the map's own offsets."""
        import torch

        reorder, rank = self.reorder, self.rank
        offset: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]
        if isinstance(reorder, SubtokenMap):
            source, row = reorder.tokens(rank)
            placed, n = Placed(source.astype(np.int64), row.astype(np.int64)), reorder.n
            index = np.arange(row.size)

            def offset(at: NDArray[np.int64], column: NDArray[np.int64]) -> NDArray[np.int64]:
                return reorder.receive_offset(rank, at, column)

        elif isinstance(reorder, SubtileMap):
            index = np.flatnonzero(reorder.row_rank == rank)
            placed, n, offset = Placed.summed(index), reorder.grid.n, reorder.receive_offset
        else:
            index = np.arange(reorder.grid.m)
            placed, n, offset = Placed.summed(index), reorder.grid.n, reorder.offset
        column = np.arange(n)
        parts = [
            self.received[
                torch.as_tensor(offset(index[i : i + RESTORED_ROWS, None], column), device=self.packed.device)
            ]
            for i in range(0, index.size, RESTORED_ROWS)
        ]
        return torch.cat(parts) if parts else self.received.new_empty(0, n), placed

    def _exchange(self, reorder: SubtokenMap, group: int) -> Sequence[Any]:
        """All transfers of one group: a copy for the own pool, sends and receives with the others."""
        rank, counts = self.rank, reorder.counts[group]
        sent_at, received_at = reorder.send_start[group], reorder.receive_start[group]

        def sent(to: int) -> torch.Tensor:
            return self.packed[sent_at[rank, to] : sent_at[rank, to] + counts[rank, to]]

        def received(source: int) -> torch.Tensor:
            return self.received[received_at[source, rank] : received_at[source, rank] + counts[source, rank]]

        received(rank).copy_(sent(rank))
        # The same order of pairs on both sides: by how far the peer is away.
        far = [(step, (rank + step) % reorder.ranks, (rank - step) % reorder.ranks) for step in range(1, reorder.ranks)]
        works: list[Any] = []
        pairs = [(to, sent(to), None) for _, to, _ in far] + [(source, None, received(source)) for _, _, source in far]
        works.extend(exchange(pairs))
        return works

"""Order of a GEMM's tiles that follows the arrival of its input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from overlapsim.validate.kernels.config import GemmConfig
from overlapsim.validate.kernels.tables import tensor_of

from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import StrategyError

if TYPE_CHECKING:
    from overlapsim.validate.kernels.tables import Device
    from torch import Tensor


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
        return cls(grid, config, rows, shards, tensor_of(order.ravel(), np.int32, device))

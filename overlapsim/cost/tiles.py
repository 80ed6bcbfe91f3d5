"""Output tiles of a GEMM: how many, in which order CTAs take them, and how they fall into waves and groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from overlapsim.errors import StrategyError
from overlapsim.workload.operators import MAX_DIMENSION

IntArray = NDArray[np.int64]

# Orders and element counts are arrays of 8 bytes a tile: 1 GiB at this many.
MAX_LISTED_TILES: Final = 2**27


@dataclass(frozen=True)
class TileGrid:
    """The tiles of ``C[m, n]``, numbered row by row; the last row and column may be ragged.

    Tile ``i * grid_n + j`` covers rows ``i*bm ..`` and columns ``j*bn ..``, cut at the edge of C.

    Attributes
    ----------
    m, n : elements of C
    bm, bn : elements of a whole tile

    Raises
    ------
    StrategyError
        If a size is not a whole number from 1 to 2^31 - 1.

    Examples
    --------
    >>> grid = TileGrid(8192, 8192, 256, 128)
    >>> grid.num_tiles, grid.waves(108), grid.waves(106)
    (2048, 19, 20)
    """

    m: int
    n: int
    bm: int
    bn: int

    def __post_init__(self) -> None:
        for name in ("m", "n", "bm", "bn"):
            value = getattr(self, name)
            if not 1 <= value <= MAX_DIMENSION:
                raise StrategyError(f"tile grid has {name} = {value}; expected 1 to {MAX_DIMENSION} elements")

    @property
    def grid_m(self) -> int:
        """Rows of tiles."""
        return -(-self.m // self.bm)

    @property
    def grid_n(self) -> int:
        """Columns of tiles."""
        return -(-self.n // self.bn)

    @property
    def num_tiles(self) -> int:
        """Tiles in all, ragged ones included."""
        return self.grid_m * self.grid_n

    @property
    def ragged(self) -> bool:
        """True if an edge cuts tiles."""
        return self.m % self.bm != 0 or self.n % self.bn != 0

    def waves(self, sms: int) -> int:
        """Waves on `sms` SMs, one CTA to an SM: the last may be nearly empty and takes as long as any."""
        _check_positive("SMs of a GEMM", sms)
        return -(-self.num_tiles // sms)

    def panel_width(self, swizzle: int) -> int:
        """Columns of one panel of the walk that `execution_order` describes.

        Narrow grids get narrow panels: ``swizzle`` 8 needs at least 6 columns
        of tiles, 4 needs 3, 2 needs 2 (hwprofiles/SOURCES.md, FLASH).
        """
        _check_positive("swizzle", swizzle)
        for width, least_columns in ((8, 6), (4, 3), (2, 2)):
            if swizzle >= width and self.grid_n >= least_columns:
                return width
        return 1

    def execution_order(self, swizzle: int = 1) -> IntArray:
        """Row-major tile indices in the order in which CTAs take them.

        The identity block swizzle of CUTLASS: panels of ``w = panel_width``
        columns from left to right; inside a panel down the rows; inside a row
        the w tiles.  CTAs are launched for whole panels, and those beyond the
        right edge leave at once, so a last panel narrower than w is walked
        the same way with what columns it has.

        Parameters
        ----------
        swizzle : the kernel's swizzle size, >= 1 (8, 4, 2 and 1 differ; 6 acts as 4, 3 as 2)

        Returns
        -------
        int64 array of ``num_tiles``
            A permutation of ``0 .. num_tiles-1``; position = when the tile is taken.

        Raises
        ------
        StrategyError
            If the grid has more tiles than can be listed (2^27).

        Examples
        --------
        >>> TileGrid(2, 5, 1, 1).execution_order(2).tolist()
        [0, 1, 5, 6, 2, 3, 7, 8, 4, 9]
        """
        self._check_listable()
        width = self.panel_width(swizzle)
        whole = self.grid_n // width
        rows = np.arange(self.grid_m, dtype=np.int64)[:, None] * self.grid_n
        panels = (np.arange(whole, dtype=np.int64) * width)[:, None, None]
        body = panels + rows + np.arange(width, dtype=np.int64)
        rest = rows + np.arange(whole * width, self.grid_n, dtype=np.int64)
        return np.concatenate((body.ravel(), rest.ravel()))

    def execution_position(self, swizzle: int = 1) -> IntArray:
        """When each row-major tile is taken: the inverse of `execution_order`."""
        order = self.execution_order(swizzle)
        position = np.empty_like(order)
        position[order] = np.arange(order.size, dtype=np.int64)
        return position

    def tile_elements(self) -> IntArray:
        """Elements of C in each tile, row-major, exact at ragged edges; they add up to ``m * n``."""
        self._check_listable()
        rows = np.full(self.grid_m, self.bm, dtype=np.int64)
        columns = np.full(self.grid_n, self.bn, dtype=np.int64)
        rows[-1] = self.m - (self.grid_m - 1) * self.bm
        columns[-1] = self.n - (self.grid_n - 1) * self.bn
        return np.outer(rows, columns).ravel()

    def wave_elements(self, sms: int, swizzle: int = 1) -> IntArray:
        """Elements of C that each wave on `sms` SMs finishes, in order; exact at ragged edges."""
        starts = np.arange(self.waves(sms), dtype=np.int64) * sms
        return np.add.reduceat(self.tile_elements()[self.execution_order(swizzle)], starts)

    def group_tiles(self, group_waves: Sequence[int], sms: int) -> tuple[int, ...]:
        """Tiles of each group of consecutive waves on `sms` SMs.

        Parameters
        ----------
        group_waves : waves of each group, >= 1, adding up to ``waves(sms)``

        Raises
        ------
        StrategyError
            If a group is empty or the waves do not add up.

        Examples
        --------
        >>> TileGrid(8192, 8192, 256, 128).group_tiles((2,) * 10, 106)
        (212, 212, 212, 212, 212, 212, 212, 212, 212, 140)
        """
        waves = self.waves(sms)
        if not group_waves or min(group_waves) < 1 or sum(group_waves) != waves:
            raise StrategyError(
                f"groups of {list(group_waves)} waves; expected sizes >= 1 adding up to the {waves} waves "
                f"of {self.num_tiles} tiles on {sms} SMs"
            )
        ends = np.minimum(np.cumsum(group_waves) * sms, self.num_tiles)
        return tuple(np.diff(ends, prepend=0).tolist())

    def group_elements(self, group_tiles: Sequence[int], swizzle: int = 1) -> IntArray:
        """Elements of C in each group of tiles taken in execution order; exact at ragged edges.

        Raises
        ------
        StrategyError
            If a group is empty or the groups do not add up to all tiles.
        """
        starts = self._group_starts(group_tiles)
        if not self.ragged:
            return np.asarray(group_tiles, dtype=np.int64) * (self.bm * self.bn)
        return np.add.reduceat(self.tile_elements()[self.execution_order(swizzle)], starts)

    def group_members(self, group_tiles: Sequence[int], swizzle: int = 1) -> list[IntArray]:
        """Row-major tile indices of each group, in execution order.

        Raises
        ------
        StrategyError
            If a group is empty or the groups do not add up to all tiles.
        """
        starts = self._group_starts(group_tiles)
        return np.split(self.execution_order(swizzle), starts[1:])

    def _group_starts(self, group_tiles: Sequence[int]) -> IntArray:
        if not len(group_tiles) or min(group_tiles) < 1 or sum(group_tiles) != self.num_tiles:
            raise StrategyError(
                f"groups of {list(group_tiles)} tiles; expected sizes >= 1 adding up to {self.num_tiles} tiles"
            )
        return np.concatenate(([0], np.cumsum(group_tiles[:-1], dtype=np.int64))).astype(np.int64)

    def _check_listable(self) -> None:
        if self.num_tiles > MAX_LISTED_TILES:
            raise StrategyError(
                f"C[{self.m}, {self.n}] in {self.bm}x{self.bn} tiles has {self.num_tiles} tiles; "
                f"expected at most {MAX_LISTED_TILES}: choose a larger tile"
            )


def _check_positive(what: str, value: int) -> None:
    if value < 1:
        raise StrategyError(f"{what} is {value}; expected at least 1")

"""Library collectives in numpy, over one buffer a rank, and random work for them: exact in int64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from overlapsim.cost.tiles import TileGrid

Array = np.ndarray


def all_reduce(buffers: Sequence[Array], start: int, stop: int) -> None:
    """Sum elements start .. stop - 1 of all ranks' buffers, in place."""
    total = np.sum([buffer[start:stop] for buffer in buffers], axis=0)
    for buffer in buffers:
        buffer[start:stop] = total


def reduce_scatter(send: Sequence[Array]) -> list[Array]:
    """Rank k gets the k-th of equal parts, summed over ranks: equal counts, as the libraries demand."""
    parts = np.sum(send, axis=0).reshape(len(send), -1)
    return list(parts)


def all_gather(send: Sequence[Array]) -> Array:
    """Every rank gets all ranks' equal buffers, one after another."""
    assert len({part.shape for part in send}) == 1
    return np.concatenate(send)


def all_to_all(send: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """``send[s][d]`` goes from rank s to rank d; the result's ``[d][s]`` is what d gets from s."""
    return [[line[rank].copy() for line in send] for rank in range(len(send))]


def garbage(rng: np.random.Generator, size: int) -> Array:
    """What a buffer holds before anything is written: any sum with it is seen."""
    return rng.integers(2**50, 2**51, size)


def matrix(rng: np.random.Generator, rows: int, columns: int) -> Array:
    """A GEMM's output, exact in int64."""
    return rng.integers(-(2**40), 2**40, (rows, columns))


def split(rng: np.random.Generator, count: int, parts: int | None = None) -> tuple[int, ...]:
    """Positive sizes that add up to `count`, anything from one part to `count` parts."""
    parts = int(rng.integers(1, count + 1)) if parts is None else parts
    cuts = np.sort(rng.choice(np.arange(1, count), parts - 1, replace=False)) if count > 1 else np.empty(0, np.int64)
    return tuple(np.diff([0, *cuts.tolist(), count]).tolist())


@dataclass(frozen=True)
class Work:
    """A grid with its execution order and groups, as a test draws them."""

    grid: TileGrid
    order: Array
    groups: tuple[int, ...]

    def rows(self, tile: int) -> slice:
        top = tile // self.grid.grid_n * self.grid.bm
        return slice(top, min(top + self.grid.bm, self.grid.m))

    def columns(self, tile: int) -> slice:
        left = tile % self.grid.grid_n * self.grid.bn
        return slice(left, min(left + self.grid.bn, self.grid.n))

    def members(self) -> list[list[int]]:
        """Tiles of each group, in execution order."""
        return [part.tolist() for part in np.split(self.order, np.cumsum(self.groups)[:-1])]

    def elements(self) -> tuple[Array, Array]:
        """Row and column of every element."""
        return np.arange(self.grid.m)[:, None], np.arange(self.grid.n)[None, :]


def draw_work(rng: np.random.Generator, *, multiple: bool, most: int = 40) -> Work:
    """A random grid, order (swizzled or any) and partition; `multiple` makes sizes multiples of the tile."""
    bm, bn = (int(x) for x in rng.integers(1, 17, 2))
    if multiple:
        m, n = bm * int(rng.integers(1, 6)), bn * int(rng.integers(1, 6))
    else:
        m, n = (int(x) for x in rng.integers(1, most + 1, 2))
    grid = TileGrid(m, n, bm, bn)
    if rng.random() < 0.5:
        order = rng.permutation(grid.num_tiles)
    else:
        order = grid.execution_order(int(rng.choice([1, 2, 4, 8])))
    return Work(grid, order, split(rng, grid.num_tiles))

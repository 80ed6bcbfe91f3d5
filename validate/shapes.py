"""Specs of given shapes, made without a plan file: what `overlap` and `loop` run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from overlapsim.validate.plans import RunSpec
from overlapsim.validate.runners.catalogue import check_settings

from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import UsageError
from overlapsim.schedule.reorder import collective_map, map_settings
from overlapsim.strategy.shards import chunk_rows

STAGES: Final = 3
DEFAULT_BK: Final = 64


def serial_spec(collective: str, ranks: int, m: int, n: int, k: int, dtype: str) -> RunSpec:
    """A shape without overlap.

    Raises
    ------
    PlanError
        If no runner takes the collective.
    UsageError
        If the type or a size is not one that runners take.
    """
    from overlapsim.validate.plans import TORCH_TYPES

    if dtype not in TORCH_TYPES:
        raise UsageError(f"dtype is {dtype!r}; runners take {', '.join(TORCH_TYPES)}")
    if min(m, n, k) < 1 or ranks < 1:
        raise UsageError(f"{m}x{n}x{k} on {ranks} ranks; expected sizes and ranks of at least 1")
    spec = RunSpec("serial", {}, collective, ranks, m, n, k, dtype, "fp32", {"kernel": "vendor"})
    check_settings(spec)
    return spec


def chunked_spec(base: RunSpec, chunks: int) -> RunSpec:
    """The shape in pieces of rows, cut as the strategy cuts them."""
    settings = {"kernel": "vendor", "chunk_rows": list(chunk_rows(base.m, chunks))}
    spec = replace(base, strategy="chunked", parameters={"chunks": chunks}, settings=settings)
    check_settings(spec)
    return spec


def wave_group_spec(base: RunSpec, tile: Sequence[int], groups: int | Sequence[int], *, swizzle: int = 1) -> RunSpec:
    """The shape as one signalled GEMM.

    Parameters
    ----------
    tile : BM, BN and, if given, BK
    groups : how many groups as equal as they can be, or the tiles of each
    swizzle : panel width of the execution order

    Raises
    ------
    StrategyError
        If groups do not add up to the tiles, or the collective has no reorder map.
    """
    bm, bn, *rest = tile
    bk = rest[0] if rest else DEFAULT_BK
    grid = TileGrid(base.m, base.n, bm, bn)
    tiles = _equal(grid.num_tiles, groups) if isinstance(groups, int) else [int(count) for count in groups]
    reorder = collective_map(base.collective, grid, tiles, ranks=base.ranks, swizzle=swizzle)
    settings = {
        **{"kernel": "signalled_gemm", "bm": bm, "bn": bn, "bk": bk, "stages": STAGES, "persistent": False},
        **{"swizzle": swizzle, "group_tiles": tiles, "sm_reserve": 0, "accumulate": base.accumulate},
        **map_settings(reorder),
    }
    parameters = {"tile": [bm, bn, bk], "swizzle": swizzle, "sms": "steal", "group_tiles": tiles}
    spec = replace(base, strategy="wave_group", parameters=parameters, settings=settings, reorder=reorder)
    check_settings(spec)
    return spec


def _equal(num_tiles: int, groups: int) -> list[int]:
    """Tiles of groups as equal as they can be."""
    count = min(groups, num_tiles)
    sizes: list[int] = np.diff(np.arange(count + 1) * num_tiles // count).tolist()
    return sizes

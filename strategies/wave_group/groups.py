"""Waves, groups and bytes of one signalled kernel: what the partition is solved over."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np

from overlapsim.cost.gemm import GemmCost
from overlapsim.cost.prices import PriceBook
from overlapsim.cost.tiles import IntArray, TileGrid
from overlapsim.errors import StrategyError
from overlapsim.strategy.base import Float, Partition
from overlapsim.units import dtype_bytes
from overlapsim.workload.operators import CollectiveOp, GemmOp

# O(T^2) memory and time; more waves than this are split at multiples of several waves.
MAX_WAVES: Final = 128


@lru_cache(maxsize=64)
def written_bytes(grid: TileGrid, swizzle: int, element_bytes: int) -> Float:
    """Bytes written when the first t tiles are done, t = 0 .. tiles; ragged edges make some tiles smaller."""
    if not grid.ragged:
        return np.arange(grid.num_tiles + 1, dtype=np.float64) * float(grid.bm * grid.bn * element_bytes)
    elements = grid.tile_elements()[grid.execution_order(swizzle)]
    return np.concatenate([[0.0], np.cumsum(elements.astype(np.float64) * element_bytes)])


def group_bytes(gemm: GemmOp, kernel: GemmCost, swizzle: int, groups: tuple[int, ...]) -> Float:
    """Bytes of each group of tiles; an empty group has none."""
    written = written_bytes(kernel.grid, swizzle, dtype_bytes(gemm.dtype))
    return np.diff(written[np.cumsum((0, *groups))])


def checked_groups(parameters: Mapping[str, Any], kernel: GemmCost) -> tuple[int, ...]:
    """Return ``group_tiles``, refusing what does not cover the output.

    Raises
    ------
    StrategyError
        If a group is empty or the groups do not sum to the tiles.
    """
    groups = tuple(int(tiles) for tiles in parameters["group_tiles"])
    if not groups or min(groups) < 1 or sum(groups) != kernel.grid.num_tiles:
        raise StrategyError(
            f"group_tiles sum to {sum(groups)} with a least of {min(groups, default=0)}; "
            f"expected positive groups that sum to the {kernel.grid.num_tiles} tiles of the output"
        )
    return groups


def effective_sms(prices: PriceBook, kernel: GemmCost, collective: CollectiveOp, mode: str) -> int:
    """SMs that the GEMM has on average while waves are signalled.

    A reserve is kept for the whole run.  Stolen SMs are missing only while a
    collective runs, and the waiting kernel holds one SM for the whole run.
    """
    num_sms, taken = prices.cluster.device.num_sms, prices.comm_sms(collective.kind)
    if mode == "reserve":
        return num_sms - taken
    busy = min(1.0, prices.collective(collective).duration_s / kernel.duration_s)
    return max(1, round(num_sms - 1 - taken * busy))


def partitions(
    prices: PriceBook, gemm: GemmOp, collective: CollectiveOp, kernel: GemmCost, point: Mapping[str, Any]
) -> tuple[Partition, ...]:
    """Build the problems of splitting the kernel's waves into groups; none where there is a single wave.

    With reserved SMs the recurrence is exact.  A collective that takes its
    SMs as CTAs retire may find them free or wait up to a wave, so that case
    is stated twice: without a wait, and with half a wave a group.
    """
    sms = effective_sms(prices, kernel, collective, point["sms"])
    waves = kernel.grid.waves(sms)
    if waves < 2:
        return ()
    unit = -(-waves // MAX_WAVES)
    ends = np.minimum(np.arange(0, waves + unit, unit), waves)
    done_tiles = np.minimum(ends * sms, kernel.grid.num_tiles)
    written = written_bytes(kernel.grid, point["swizzle"], dtype_bytes(gemm.dtype))[done_tiles]
    count = len(ends) - 1
    first, last = _pairs(count)
    seconds = (
        prices.collective_seconds(collective.kind, written[last + 1] - written[first], collective.ranks)
        + prices.signal_wait_s
    )

    def to_parameters(cuts: tuple[int, ...]) -> Mapping[str, Any]:
        groups = np.diff(done_tiles[list(cuts)], prepend=0)
        return {**point, "group_tiles": tuple(int(tiles) for tiles in groups)}

    waits = (0.0,) if point["sms"] == "reserve" else (0.0, kernel.tile_time_s / 2)
    problems = []
    for wait_s in waits:
        tau = np.full((count, count), np.inf)
        tau[first, last] = seconds + wait_s
        problems.append(Partition(kernel.tile_time_s * ends[1:], kernel.duration_s, tau, to_parameters))
    return tuple(problems)


@lru_cache(maxsize=256)
def _pairs(count: int) -> tuple[IntArray, IntArray]:
    """First and last wave of every group there can be."""
    first, last = np.triu_indices(count)
    return first, last

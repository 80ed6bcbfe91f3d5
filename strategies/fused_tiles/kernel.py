"""The fused kernel: templates and their price, comm tiles, and which tiles a comm tile waits for or serves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from overlapsim.cost.gemm import GemmCost
from overlapsim.cost.prices import PriceBook
from overlapsim.cost.stores import mechanism
from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import StrategyError
from overlapsim.strategy.base import Pair
from overlapsim.strategy.fused import SLOWDOWN, Template, as_copies
from overlapsim.workload.operators import GemmOp

NAME: Final = "fused_tiles"
Size = Annotated[int, Meta(ge=1, le=65536)]
Rows = Annotated[int, Meta(ge=1, le=2**31 - 1)]
# A shard is cut in halves down to an eighth.
SPLITS: Final = (1, 2, 4, 8)


@dataclass(frozen=True)
class FusedTilesParameters:
    """Tile (BM, BN, BK), rows of a comm tile, what moves the bytes, and which template the kernel is made from.

    ``keep_gathered`` copies the gathered rows out of the communication buffer behind the GEMM, for a later backward.
    """

    tile: tuple[Size, Size, Size]
    comm_rows: Rows
    transport: Literal["copy_engine", "stores"] = "copy_engine"
    template: Template = "cutlass"
    keep_gathered: bool = False


def kernel_of(prices: PriceBook, pair: Pair, parameters: Mapping[str, Any]) -> GemmCost:
    """The fused kernel without its communication; on architectures before Hopper every CTA first reads its flag.

    Persistent kernels with TMA look at the next tile's flag while they compute.
    """
    slowdown = SLOWDOWN[parameters.get("template", "cutlass")]
    cost = prices.kernel_gemm(pair.gemm, NAME, tuple(parameters["tile"]), slowdown=slowdown)
    if pair.relation == "before" and mechanism(prices.cluster.device) == "registers":
        return cost.scaled(1 + prices.flag_s / cost.tile_time_s)
    return cost


def candidates(prices: PriceBook, gemm: GemmOp) -> list[GemmCost]:
    """Kernels by tile, fastest first."""
    slowdown = SLOWDOWN["cutlass"]
    kernels = [prices.kernel_gemm(gemm, NAME, tile, slowdown=slowdown) for tile in prices.kernel_tiles(gemm, NAME)]
    return sorted(kernels, key=lambda kernel: kernel.duration_s)


def shard_of(pair: Pair) -> int:
    """Rows of a rank's share, those of the largest."""
    return math.ceil(pair.gemm.m / pair.collective.ranks)


def comm_row_choices(pair: Pair) -> tuple[int, ...]:
    """Rows of comm tiles worth trying: a shard and its halves."""
    shard = shard_of(pair)
    return tuple(dict.fromkeys(max(1, math.ceil(shard / split)) for split in SPLITS))


def checked_pieces(pair: Pair, parameters: Mapping[str, Any]) -> int:
    """Comm tiles of all other ranks together.

    Raises
    ------
    StrategyError
        If a comm tile is larger than a rank's share.
    """
    rows, shard = int(parameters["comm_rows"]), shard_of(pair)
    if not 1 <= rows <= shard:
        raise StrategyError(f"comm_rows is {rows}; expected 1 to the {shard} rows of a rank's share")
    return (pair.collective.ranks - 1) * math.ceil(shard / rows)


def first_tiles(grid: TileGrid, ranks: int, pieces: int) -> list[int]:
    """First tile that needs each comm tile of an all-gather, in the order they arrive; own rows come first.

    Tiles are numbered along N, row by row of tiles, from the first own row on.
    """
    own = grid.m / ranks
    starts = (own + (grid.m - own) * piece / pieces for piece in range(pieces))
    return [min(int(row / grid.bm), grid.grid_m - 1) * grid.grid_n for row in starts]


def last_tiles(grid: TileGrid, ranks: int, pieces: int) -> list[int]:
    """Tiles that must be done before each comm tile is complete, in the order they are sent; own rows come last."""
    others = grid.m * (ranks - 1) / ranks
    ends = (others * (piece + 1) / pieces for piece in range(pieces))
    return [min(math.ceil(round(row / grid.bm, 6)), grid.grid_m) * grid.grid_n for row in ends]


def closed_form_s(prices: PriceBook, pair: Pair, parameters: Mapping[str, Any]) -> float:
    """Time without contention: pieces and the tiles they gate, one after another; what orders candidates."""
    kernel, ranks = kernel_of(prices, pair, parameters), pair.collective.ranks
    pieces = checked_pieces(pair, parameters)
    num_sms = prices.cluster.device.num_sms
    waves = [kernel.grid.waves(num_sms) * done / pieces for done in range(pieces + 1)]
    compute_s = kernel.tile_time_s
    if pair.relation == "before":
        piece_s = prices.copies(as_copies(pair.collective), pieces)[0]
        own = kernel.grid.waves(num_sms) / ranks
        done_s = own * compute_s
        for piece in range(pieces):
            rest = math.ceil((waves[piece + 1] - waves[piece]) * (ranks - 1) / ranks)
            done_s = max(done_s + rest * compute_s, (piece + 1) * piece_s + rest * compute_s)
        return max(done_s, kernel.duration_s)
    extra_s, piece_s = store_price(prices, pair, parameters, kernel, pieces)
    compute_s += extra_s
    sent_s = 0.0
    for done in last_tiles(kernel.grid, ranks, pieces):
        sent_s = max(sent_s, math.ceil(done / num_sms) * compute_s) + piece_s
    return max(sent_s, kernel.grid.waves(num_sms) * compute_s)


def store_price(
    prices: PriceBook, pair: Pair, parameters: Mapping[str, Any], kernel: GemmCost, pieces: int
) -> tuple[float, float]:
    """What stores add to every tile, and the time of one comm tile on the links."""
    if parameters["transport"] == "copy_engine":
        return 0.0, prices.copies(as_copies(pair.collective), pieces)[0]
    stores = prices.stores(pair.collective)
    return stores.sm_seconds / kernel.grid.num_tiles, stores.seconds / pieces


def tiles_text(kernels: Sequence[GemmCost], num_sms: int) -> str:
    """How few tiles the fastest kernel has."""
    grid = kernels[0].grid
    return f"{grid.num_tiles} tiles of {grid.bm}x{grid.bn} on {num_sms} SMs"

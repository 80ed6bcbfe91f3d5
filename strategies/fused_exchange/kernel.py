"""The fused kernel: its price, what each share of the exchange waits for or serves, and a closed form of both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from overlapsim.cost.base import Demand
from overlapsim.cost.gemm import GemmCost
from overlapsim.cost.prices import PriceBook
from overlapsim.cost.stores import mechanism
from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import StrategyError
from overlapsim.strategy.chains import Chain
from overlapsim.strategy.fused import SLOWDOWN, Template, as_copies, comm_ctas
from overlapsim.workload.operators import GemmOp

NAME: Final = "fused_exchange"
Size = Annotated[int, Meta(ge=1, le=65536)]
Count = Annotated[int, Meta(ge=1, le=4096)]
Sms = Annotated[int, Meta(ge=0, le=4096)]
Transport = Literal["stores", "copy_engine"]
SPLITS: Final = (1, 2, 4)
COMM_SMS: Final = (4, 8, 16)


@dataclass(frozen=True)
class FusedExchangeParameters:
    """Tile (BM, BN, BK), pieces of each rank's share, what moves the bytes, SMs that pull them, and the template.

    Behind a GEMM its epilogue ``stores``, or copy engines move what is done; in front of one copy engines pull, or
    ``comm_sms`` SMs where that is above 0.
    """

    tile: tuple[Size, Size, Size]
    pieces: Count
    transport: Transport = "copy_engine"
    comm_sms: Sms = 0
    template: Template = "cutlass"


def gemm_of(chain: Chain) -> GemmOp:
    """The plain GEMM of a chain that holds one."""
    assert isinstance(chain.gemm, GemmOp), "asked only about chains that apply"
    return chain.gemm


def candidates(prices: PriceBook, gemm: GemmOp) -> list[GemmCost]:
    """Kernels by tile, fastest first."""
    kernels = [kernel_of(prices, gemm, {"tile": tile}) for tile in prices.kernel_tiles(gemm, NAME)]
    return sorted(kernels, key=lambda kernel: kernel.duration_s)


def kernel_of(prices: PriceBook, gemm: GemmOp, parameters: Mapping[str, Any]) -> GemmCost:
    """The fused kernel without its communication."""
    slowdown = SLOWDOWN[parameters.get("template", "cutlass")]
    return prices.kernel_gemm(gemm, NAME, tuple(parameters["tile"]), slowdown=slowdown)


def checked_sms(prices: PriceBook, chain: Chain, parameters: Mapping[str, Any]) -> int:
    """SMs that only communicate.

    Raises
    ------
    StrategyError
        If a kernel in front of its exchange is to reserve SMs, one behind it to store, or no SM is left.
    """
    transport, sms = parameters.get("transport", "copy_engine"), int(parameters.get("comm_sms", 0))
    most = prices.cluster.device.num_sms - 1 if chain.relation == "before" else 0
    if sms > most:
        raise StrategyError(f"comm_sms is {sms} with an exchange {chain.relation} the GEMM; expected 0 to {most}")
    if chain.relation == "before" and transport != "copy_engine":
        raise StrategyError("an epilogue cannot store what comes before its GEMM; expected transport copy_engine")
    return sms


def store_price(
    prices: PriceBook, chain: Chain, parameters: Mapping[str, Any], kernel: GemmCost
) -> tuple[float, float, tuple[Demand, ...]]:
    """What stores add to every tile, and duration and demands of all of them on the links."""
    if parameters.get("transport", "copy_engine") == "copy_engine":
        return 0.0, prices.copies(as_copies(chain.collective), 1)[0], ()
    stores = prices.stores(chain.collective)
    return stores.sm_seconds / kernel.grid.num_tiles, stores.seconds, stores.demands


def pull_price(
    prices: PriceBook, chain: Chain, sms: int, pieces: int, device: int = 0
) -> tuple[float, tuple[Demand, ...]]:
    """Duration and demands of pulling all other ranks' shares, by SMs, or by `pieces` copies one after another."""
    op = chain.collective
    if sms:
        read = op.size_bytes * (1 - 1 / op.ranks)
        return comm_ctas(prices, op, sms, mechanism(prices.cluster.device), read_bytes=read, device=device)
    return prices.copies(as_copies(op), pieces)[0] * pieces, ()


def last_tiles(grid: TileGrid, ranks: int, pieces: int) -> list[int]:
    """Tiles that must be done before each piece is complete, in the order they are sent.

    A rank's share is a range of columns; columns are computed one after another, own ones last.
    """
    others = grid.n * (ranks - 1) / ranks
    ends = (others * (piece + 1) / pieces for piece in range(pieces))
    return [min(math.ceil(round(column / grid.bn, 6)), grid.grid_n) * grid.grid_m for column in ends]


def in_slices(kernel: GemmCost, ranks: int, sms: int) -> GemmCost:
    """The kernel with one unit for each tile and rank: the part of a tile's depth that comes from that rank.

    CTAs of a wave take the same slice at a time, own first; a ragged last wave has as many units as a whole one.
    """
    waves = kernel.grid.waves(sms)
    units = TileGrid(waves * ranks * sms, 1, 1, 1)
    return replace(kernel, grid=units, tile_time_s=kernel.tile_time_s / ranks, split_k=1)


def first_units(waves: int, ranks: int, blocks: int, sms: int) -> Iterator[int]:
    """First unit of `in_slices` that needs each piece, in the order pieces arrive: of each block of rows, each rank's.

    A wave's tiles stand in a stretch of rows; own slices need nothing.
    """
    for block, rank in itertools.product(range(blocks), range(1, ranks)):
        yield (block * waves // blocks * ranks + rank) * sms


def closed_form_s(prices: PriceBook, chain: Chain, parameters: Mapping[str, Any]) -> float:
    """Time without contention; what orders candidates."""
    kernel, ranks = kernel_of(prices, gemm_of(chain), parameters), chain.collective.ranks
    sms, blocks = checked_sms(prices, chain, parameters), int(parameters["pieces"])
    num_sms, pieces = prices.cluster.device.num_sms - sms, int(parameters["pieces"]) * (ranks - 1)
    waves, slice_s = kernel.grid.waves(num_sms), kernel.tile_time_s / ranks
    if chain.relation == "before":
        piece_s = pull_price(prices, chain, sms, pieces)[0] / pieces
        gates = dict(zip(first_units(waves, ranks, blocks, 1), itertools.count(1), strict=False))
        done_s = 0.0
        for unit in range(waves * ranks):
            done_s = max(done_s, gates.get(unit, 0) * piece_s) + slice_s
        return done_s
    extra_s, total_s, _ = store_price(prices, chain, parameters, kernel)
    compute_s, sent_s = kernel.tile_time_s + extra_s, 0.0
    for done in last_tiles(kernel.grid, ranks, pieces):
        sent_s = max(sent_s, math.ceil(done / num_sms) * compute_s) + total_s / pieces
    return max(sent_s, waves * compute_s)

"""The fused kernel of experts: the order of its tiles, stage by stage, what each stage waits for, and its price."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from overlapsim.cost.base import Demand
from overlapsim.cost.grouped import GroupedCost
from overlapsim.cost.prices import PriceBook
from overlapsim.cost.stores import mechanism
from overlapsim.errors import StrategyError
from overlapsim.strategy.chains import Chain
from overlapsim.strategy.fused import SLOWDOWN, Template, as_copies, comm_ctas, whole_waves
from overlapsim.units import dtype_bytes
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.operators import GroupedGemmOp, KernelOp

NAME: Final = "fused_experts"
Size = Annotated[int, Meta(ge=1, le=65536)]
Count = Annotated[int, Meta(ge=1, le=4096)]
Sms = Annotated[int, Meta(ge=0, le=4096)]
Order = Literal["ranks", "experts", "columns"]
TILES: Final = ((128, 256), (128, 128), (64, 256), (64, 128))
INDEX_BYTES: Final = 4
STAYS: Final = 0.5
"""Share of L2 that an operand may fill and still be there for the next stage: a judgement, half for what streams by."""
PIECES: Final = 32
"""Pieces of an exchange that goes expert by expert: fine enough for any number of rows."""
ROW_MOVES: Final = (
    *(("moe_permute", "fwd"), ("moe_permute", "bwd"), ("moe_unpermute", "fwd")),
    *(("torch_permute", "fwd"), ("torch_permute", "bwd"), ("torch_unpermute", "fwd")),
)
"""Kernels that only move rows, or add up those of a token: the fused kernel finds rows by index instead."""
WEIGHTING: Final = (("moe_unpermute", "bwd"), ("torch_unpermute", "bwd"))
"""Their backward also makes the gradient of the sum's weights, which stays a kernel of its own."""


@dataclass(frozen=True)
class FusedExpertsParameters:
    """Tile (BM, BN), stages of the tile order, SMs that only communicate, the order, and the template.

    ``ranks``: tokens of an expert stand by the rank that they come from (or go to), and a stage is the tiles of a few
    ranks; ``experts`` (all_to_all only): a stage is a few experts, whose tokens all ranks exchange before others';
    ``columns`` (behind the GEMM only): a stage is a panel of columns of all experts, as COMET cuts it.
    ``comm_sms`` of 0 leaves gathers to copy engines.
    """

    tile: tuple[Size, Size]
    stages: Count
    comm_sms: Sms
    order: Order = "ranks"
    template: Template = "cutlass"


@dataclass(frozen=True)
class Stages:
    """The grouped GEMM in the order that its kernel takes.

    Attributes
    ----------
    work : a product for each stretch of an expert's tiles: its weights (or, by columns, rows) are read again for each
    again_bytes : of what is read again
    tiles : of each stage
    share : of all rows (or columns) that is done after each stage
    """

    work: GroupedGemmOp
    again_bytes: float
    tiles: tuple[int, ...]
    share: tuple[float, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """Tiles that are done after each stage."""
        return tuple(itertools.accumulate(self.tiles))


def moves_rows(op: KernelOp) -> bool:
    """Whether the fused kernel makes a kernel superfluous."""
    return isinstance(op.work, MemoryOp) and (op.work.kind, op.work.pass_) in ROW_MOVES


def goes_along(op: KernelOp) -> bool:
    """Whether a kernel may stand between experts and their collective."""
    return isinstance(op.work, MemoryOp) and (op.work.kind, op.work.pass_) in (*ROW_MOVES, *WEIGHTING)


def work_of(chain: Chain) -> GroupedGemmOp:
    """The experts of a chain that holds some."""
    work = chain.gemm.work if isinstance(chain.gemm, KernelOp) else None
    assert isinstance(work, GroupedGemmOp), "asked only about chains that apply"
    return work


def most_stages(work: GroupedGemmOp, ranks: int, order: Order, bn: int) -> int:
    """Stages that an order has at most."""
    if order == "columns":
        return -(-work.n // bn)
    return ranks if order == "ranks" else sum(count > 0 for count in work.rows)


def staged(work: GroupedGemmOp, chain: Chain, parameters: Mapping[str, Any]) -> Stages:
    """Cut the tiles of all experts into stages.

    By ranks, a tile belongs to the stage of the last rank that it has rows of in front of the GEMM, and of the first
    behind it: rows of an expert are spread evenly over ranks.

    Raises
    ------
    StrategyError
        If there is no such tile, or there are more stages than the order has.
    """
    (bm, bn), stages, order = tuple(parameters["tile"]), int(parameters["stages"]), parameters.get("order", "ranks")
    if (bm, bn) not in TILES:
        known = ", ".join(f"{rows}x{columns}" for rows, columns in TILES)
        raise StrategyError(f"tile is {bm}x{bn}; expected one that the grouped kernel has: {known}")
    most = most_stages(work, chain.collective.ranks, order, bn)
    if not 1 <= stages <= most:
        raise StrategyError(f"stages is {stages}; expected 1 to {most} in the order of {order}")
    rows, evenly = [count for count in work.rows if count], tuple((stage + 1) / stages for stage in range(stages))
    if order == "columns":
        panel = -(-work.n // stages)
        each = sum(-(-count // bm) for count in rows) * -(-panel // bn)
        again = float(sum(rows) * work.k * dtype_bytes(work.dtype))
        return Stages(replace(work, rows=tuple(rows * stages), n=panel), again, (each,) * stages, evenly)
    products: list[list[int]] = [[] for _ in range(stages)]
    for number, count in enumerate(rows):
        if order == "experts":
            products[number * stages // len(rows)].append(count)
            continue
        own = [0] * stages
        for first in range(0, count, bm):
            last = min(count, first + bm)
            at = first * stages // count if chain.relation == "after" else -(-last * stages // count) - 1
            own[at] += last - first
        for stage, rows_there in enumerate(own):
            products[stage].append(rows_there)
    across = -(-work.n // bn)
    tiles = tuple(sum(-(-count // bm) for count in stage) * across for stage in products)
    done = itertools.accumulate(sum(stage) / sum(rows) for stage in products)
    share = tuple(done) if order == "experts" else evenly
    split = replace(work, rows=tuple(count for stage in products for count in stage if count))
    return Stages(split, float(len(rows) * work.n * work.k * dtype_bytes(work.dtype)), tiles, share)


def kernel_of(prices: PriceBook, work: GroupedGemmOp, stages: Stages, parameters: Mapping[str, Any]) -> GroupedCost:
    """The fused kernel without its communication; rows are found by index.

    What stages read again comes from memory each time, unless it stays in L2 beside what streams through.
    Before Hopper every CTA reads its indices and its flag first; later kernels read the next tile's while they compute.
    """
    slowdown, tile = SLOWDOWN[parameters.get("template", "cutlass")], tuple(parameters["tile"])
    cost = prices.expert_gemm(replace(stages.work, looped=False), tile, slowdown)
    if stages.again_bytes <= STAYS * prices.cluster.device.l2_bytes:
        least = prices.expert_gemm(replace(work, looped=False), tile, slowdown)
        tiles = cost.grid.num_tiles / least.grid.num_tiles
        cost = cost.scaled(min(1.0, tiles * least.duration_s / cost.duration_s))
    if mechanism(prices.cluster.device) == "registers":
        cost = cost.scaled(1 + 2 * prices.flag_s / cost.tile_time_s)
    return cost


def candidates(prices: PriceBook, work: GroupedGemmOp) -> list[tuple[int, int]]:
    """Tiles, fastest first."""
    return sorted(TILES, key=lambda tile: prices.expert_gemm(replace(work, looped=False), tile).duration_s)


def checked_sms(prices: PriceBook, chain: Chain, parameters: Mapping[str, Any]) -> int:
    """SMs that only communicate.

    Raises
    ------
    StrategyError
        If none is left for the GEMM, none is given where copy engines cannot do it, or the order is not to be had.
    """
    sms, most = int(parameters["comm_sms"]), prices.cluster.device.num_sms - 1
    least = 0 if by_copies(chain) else 1
    if not least <= sms <= most:
        raise StrategyError(f"comm_sms is {sms} with {chain.collective.kind}; expected {least} to {most}")
    order, known = parameters.get("order", "ranks"), orders(chain)
    if order not in known:
        where = f"{chain.collective.kind} {chain.relation} the GEMM"
        raise StrategyError(f"order is {order} with {where}; expected {' or '.join(known)}")
    return sms


def orders(chain: Chain) -> tuple[Order, ...]:
    """Orders of tiles that are to be had.

    Every column needs all rows in front, sums over a rank's experts need all of them, and gathers bring whole ranks.
    """
    by_expert: tuple[Order, ...] = ("experts",) if chain.collective.kind == "all_to_all" else ()
    by_column: tuple[Order, ...] = ("columns",) if chain.relation == "after" else ()
    return ("ranks", *by_expert, *by_column)


def by_copies(chain: Chain) -> bool:
    """Whether copy engines can move it: whole rows of every rank, and nothing to add."""
    return chain.relation == "before" and chain.collective.kind == "all_gather"


def num_pieces(chain: Chain, parameters: Mapping[str, Any]) -> int:
    """Pieces that arrive, or are sent, one after another: a rank's each, a panel's, or a part of all."""
    order = parameters.get("order", "ranks")
    if order == "ranks":
        return chain.collective.ranks - 1
    return PIECES if order == "experts" else int(parameters["stages"])


def moving_price(
    prices: PriceBook, chain: Chain, parameters: Mapping[str, Any], device: int = 0
) -> tuple[float, tuple[Demand, ...]]:
    """Duration and demands of all pieces together, by SMs that only communicate.

    Sums of several ranks' parts go through registers; rows that are moved as they are go as stores do.
    """
    op, work, device_spec = chain.collective, work_of(chain), prices.cluster.device
    sent = op.size_bytes * (1 - 1 / op.ranks)
    if op.kind == "reduce_scatter":
        read = float(sum(work.rows) * (work.n * dtype_bytes("bf16") + INDEX_BYTES))
        return comm_ctas(prices, op, parameters["comm_sms"], "registers", read_bytes=read, device=device)
    return comm_ctas(prices, op, parameters["comm_sms"], mechanism(device_spec), read_bytes=sent, device=device)


def arrivals(chain: Chain, stages: Stages, parameters: Mapping[str, Any]) -> list[int]:
    """Pieces that must be there for each stage in front of the GEMM: by ranks, own rows are."""
    pieces, ranks = num_pieces(chain, parameters), chain.collective.ranks
    if parameters.get("order", "ranks") == "ranks":
        return [max(0, math.ceil(round(ranks * share - 1, 9))) for share in stages.share]
    return [math.ceil(round(pieces * share, 9)) for share in stages.share]


def departures(chain: Chain, stages: Stages, parameters: Mapping[str, Any]) -> list[int]:
    """Tiles that must be done before each piece can be sent behind the GEMM; by ranks, own rows come last."""
    pieces = num_pieces(chain, parameters)
    whole = chain.collective.ranks if parameters.get("order", "ranks") == "ranks" else pieces
    first = (sum(share < (piece + 1) / whole - 1e-9 for share in stages.share) for piece in range(pieces))
    return [stages.ends[stage] for stage in first]


def closed_form_s(prices: PriceBook, chain: Chain, parameters: Mapping[str, Any]) -> float:
    """Time without contention; what orders candidates."""
    stages = staged(work_of(chain), chain, parameters)
    kernel, sms = kernel_of(prices, work_of(chain), stages, parameters), checked_sms(prices, chain, parameters)
    left, pieces = prices.cluster.device.num_sms - sms, num_pieces(chain, parameters)
    if sms:
        piece_s = moving_price(prices, chain, parameters)[0] / pieces
    else:
        piece_s = prices.copies(as_copies(chain.collective), pieces)[0]
    if chain.relation == "before":
        done_s = 0.0
        for needed, tiles in zip(arrivals(chain, stages, parameters), stages.tiles, strict=True):
            done_s = max(done_s, needed * piece_s) + tiles / left * kernel.tile_time_s
        return max(done_s, whole_waves(stages.ends[-1], left) * kernel.tile_time_s)
    sent_s = 0.0
    for done in departures(chain, stages, parameters):
        sent_s = max(sent_s, whole_waves(done, left) * kernel.tile_time_s) + piece_s
    return max(sent_s, whole_waves(stages.ends[-1], left) * kernel.tile_time_s)

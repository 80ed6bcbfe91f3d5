"""What strategies that cut a GEMM by rows share: rows of pieces and of ranks, and where they cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from overlapsim.cost.gemm import GemmCost
from overlapsim.cost.prices import PriceBook
from overlapsim.errors import StrategyError
from overlapsim.plan import Finding
from overlapsim.strategy.base import Applicability, Pair
from overlapsim.units import format_time
from overlapsim.workload.operators import CollectiveOp, GemmOp

ROW_STEP: Final = 128
"""Pieces are cut at multiples of the tallest common tile, so that no piece but the last has a ragged row of tiles."""


def shard_rows(m: int, ranks: int) -> tuple[int, ...]:
    """Rows of each rank's shard: as equal as they can be, larger ones first.

    Raises
    ------
    StrategyError
        If there are fewer rows than ranks.

    Examples
    --------
    >>> shard_rows(1000, 3)
    (334, 333, 333)
    """
    if m < ranks:
        raise StrategyError(f"{m} rows over {ranks} ranks; expected at least one row a rank")
    least, more = divmod(m, ranks)
    return (least + 1,) * more + (least,) * (ranks - more)


def chunk_rows(m: int, chunks: int) -> tuple[int, ...]:
    """Rows of each piece: multiples of 128 where there are enough rows, larger ones first; what is left last.

    Raises
    ------
    StrategyError
        If there are fewer rows than pieces.

    Examples
    --------
    >>> chunk_rows(1000, 3)
    (384, 256, 360)
    """
    if not 1 <= chunks <= m:
        raise StrategyError(f"{m} rows in {chunks} pieces; expected 1 to {m} pieces")
    step = ROW_STEP if m > (chunks - 1) * ROW_STEP else 1
    blocks = -(-m // step)
    ends = [min(m, step * (blocks * (i + 1) // chunks)) for i in range(chunks)]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return (*tuple(sorted(sizes[:-1], reverse=True)), sizes[-1])


def refuse_one_rank(collective: CollectiveOp) -> Applicability | None:
    """Refusal of a group of one rank; None for others."""
    if collective.ranks > 1:
        return None
    return Applicability(False, ("one rank has nothing to communicate",), "little_to_hide")


def refuse_one_wave(prices: PriceBook, gemm: GemmOp) -> Applicability | None:
    """Refusal of a GEMM whose tiles are all computed at once: pieces of it would each take as long as the whole."""
    num_sms, grid = prices.cluster.device.num_sms, prices.vendor_gemm(gemm).grid
    if grid.num_tiles > num_sms:
        return None
    reason = f"{grid.num_tiles} tiles on {num_sms} SMs are one wave: every piece would take as long as the whole"
    return Applicability(False, (reason,), "under_one_wave")


def refuse_far_peers(prices: PriceBook, pair: Pair) -> Applicability | None:
    """Refusal of ranks that do not reach one another's memory, or of fewer rows than ranks; None for others."""
    node, ranks = prices.cluster.node, pair.collective.ranks
    if pair.gemm.m < ranks:
        return Applicability(False, (f"{pair.gemm.m} rows over {ranks} ranks: some have none",), "few_tiles")
    if ranks > node.num_devices:
        reason = f"{ranks} ranks are more than the {node.num_devices} of a node, and peers' memory ends there"
        return Applicability(False, (reason,))
    if not node.p2p:
        reason = f"GPUs of {node.name} have no peer-to-peer access, so shards cannot go from memory to memory"
        return Applicability(False, (reason,))
    return None


def refuse_mesh(prices: PriceBook, pair: Pair) -> Applicability | None:
    """Refusal of more than two ranks where every pair of GPUs has links of its own; None elsewhere.

    A transfer between two ranks then has one pair's links; prices are those of all links of a GPU together.
    """
    node = prices.cluster.node
    if node.scale_up != "nvlink_mesh" or pair.collective.ranks == 2:
        return None
    reason = f"{node.name} joins each pair of GPUs by links of its own: a transfer over those alone is not priced"
    return Applicability(False, (reason,))


WORTH_SAYING: Final = 1.05


def few_tiles_finding(name: str, prices: PriceBook, whole: GemmCost, pieces: Sequence[GemmCost]) -> tuple[Finding, ...]:
    """Say where the GEMMs of all pieces take longer than the whole one, which has the tiles to fill the SMs."""
    total_s = sum(piece.duration_s for piece in pieces)
    if total_s <= WORTH_SAYING * whole.duration_s:
        return ()
    least = min(piece.grid.num_tiles for piece in pieces)
    message = (
        f"{name} runs {len(pieces)} GEMMs of {least} tiles and more on {prices.cluster.device.num_sms} SMs: together "
        f"{format_time(total_s)} where the whole one of {whole.grid.num_tiles} tiles takes "
        f"{format_time(whole.duration_s)}"
    )
    return (Finding("few_tiles", message),)

"""What strategies of tensor parallelism share: rows of each rank, and where they cannot be used."""

from __future__ import annotations

from overlapsim.cost.prices import PriceBook
from overlapsim.errors import StrategyError
from overlapsim.strategy.base import Applicability, Pair
from overlapsim.workload.operators import CollectiveOp, GemmOp


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
    """Refusal of ranks that do not reach one another's memory at the full rate of their port; None for others.

    Shards go from one GPU's memory to another's inside one node.  In a mesh a
    pair of GPUs has one of a GPU's links for itself, and prices of transfers
    are those of all links together.
    """
    node, ranks = prices.cluster.node, pair.collective.ranks
    reason = None
    if ranks > node.num_devices:
        reason = f"{ranks} ranks are more than the {node.num_devices} of a node, and peers' memory ends there"
    elif not node.p2p:
        reason = f"GPUs of {node.name} have no peer-to-peer access, so shards cannot go from memory to memory"
    elif node.scale_up == "nvlink_mesh" and ranks > 2:
        reason = f"{node.name} joins each pair of GPUs by links of its own: one pair's share of a port is not priced"
    elif pair.gemm.m < ranks:
        return Applicability(False, (f"{pair.gemm.m} rows over {ranks} ranks: some have none",), "few_tiles")
    return None if reason is None else Applicability(False, (reason,))

"""Several ranks in one process: operands, packed buffers, and collectives done by copying."""

from __future__ import annotations

import math

import numpy as np
import torch
from overlapsim.validate.kernels.launch import GemmConfig, RestoreOrder, TileOrder, new_counters, signalled_gemm
from torch import Tensor

from overlapsim.schedule.reorder import ReorderMap, SubtileMap, SubtokenMap, TileMap

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2}


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.rand(*shape, generator=generator) - 1).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Not-a-number everywhere: what is not written, or read from padding, shows."""
    return torch.full(shape, math.nan, dtype=dtype)


def orders(reorder: ReorderMap, config: GemmConfig, ranks: int) -> list[TileOrder | None]:
    """Producer's tables of every rank; None where a rank has no rows."""
    if not isinstance(reorder, SubtokenMap):
        return [TileOrder.from_map(reorder, config, rank=rank) for rank in range(ranks)]
    return [
        TileOrder.from_map(reorder, config, rank=rank) if reorder.sources[rank].rows else None for rank in range(ranks)
    ]


def run_gemms(
    tables: list[TileOrder | None], operands: list[tuple[Tensor, Tensor]], *, persistent: bool = False
) -> list[Tensor]:
    """Packed buffers of all ranks; every counter must be exact."""
    packed = []
    for order, (a, b) in zip(tables, operands, strict=True):
        if order is None:
            packed.append(poisoned(0, dtype=a.dtype))
            continue
        out = poisoned(order.packed_elements, dtype=a.dtype)
        counters = new_counters(order.num_groups)
        signalled_gemm(a, b, out, order, counters, persistent=persistent)
        assert counters.tolist() == list(order.group_tiles)
        packed.append(out)
    return packed


def collective(reorder: ReorderMap, packed: list[Tensor]) -> list[Tensor]:
    """What every rank's consumer finds after the library's collective on each group."""
    ranks = len(packed)
    dtype = packed[0].dtype
    if isinstance(reorder, TileMap):
        summed = torch.stack(packed).float().sum(0).to(dtype)
        return [summed] * ranks
    if isinstance(reorder, SubtileMap):
        received = [poisoned(int(reorder.part_start[-1]), dtype=dtype) for _ in range(ranks)]
        for group in range(len(reorder.group_tiles)):
            start, size = int(reorder.group_start[group]), int(reorder.part_elements[group])
            for rank in range(ranks):
                part = torch.stack([buffer[start + rank * size :][:size] for buffer in packed])
                received[rank][int(reorder.part_start[group]) :][:size] = part.float().sum(0).to(dtype)
        return received
    received = [poisoned(int(reorder.counts[:, :, rank].sum()), dtype=dtype) for rank in range(ranks)]
    for group, source, to in np.ndindex(reorder.counts.shape):
        size = int(reorder.counts[group, source, to])
        first, at = int(reorder.send_start[group, source, to]), int(reorder.receive_start[group, source, to])
        received[to][at : at + size] = packed[source][first : first + size]
    return received


def expected(reorder: ReorderMap, outputs: list[Tensor], rank: int) -> Tensor:
    """Rows that the consumer on a rank must see, from every rank's whole C (float64)."""
    if isinstance(reorder, SubtokenMap):
        source, row = reorder.tokens(rank)
        rows = [outputs[s][r] for s, r in zip(source.tolist(), row.tolist(), strict=True)]
        return torch.stack(rows) if rows else torch.empty(0, reorder.n, dtype=torch.float64)
    total = torch.stack(outputs).sum(0)
    if isinstance(reorder, TileMap):
        return total
    return total[torch.from_numpy(np.flatnonzero(reorder.row_rank == rank))]


def restore_of(reorder: ReorderMap, rank: int) -> RestoreOrder:
    return RestoreOrder.from_map(reorder, rank=rank)

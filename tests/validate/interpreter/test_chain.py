"""Signalled GEMM, collective over pretended ranks, consumer: the whole chain gives the reference on ragged shapes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from overlapsim.validate.kernels.launch import GemmConfig, restored_add, restored_rmsnorm
from ranks import TOLERANCE, collective, expected, orders, poisoned, random, restore_of, run_gemms

from overlapsim.cost.tiles import TileGrid
from overlapsim.schedule.reorder import ReorderMap, collective_map, subtoken_map, tile_map

SHAPES = (
    pytest.param((64, 64, 64), (32, 32, 32), id="whole tiles"),
    pytest.param((70, 53, 41), (32, 16, 16), id="ragged"),
    pytest.param((33, 200, 17), (16, 64, 32), id="wide, ragged"),
)


def the_map(kind: str, m: int, n: int, bm: int, bn: int, ranks: int) -> ReorderMap:
    grid = TileGrid(m, n, bm, bn)
    tiles = grid.num_tiles
    cuts = sorted({1, tiles // 2, tiles} - {0})
    groups = tuple(b - a for a, b in pairwise([0, *cuts]))
    return collective_map(kind, grid, groups, ranks=ranks, swizzle=2)


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize(("sizes", "tile"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_chain_gives_the_reference(
    kind: str, sizes: tuple[int, int, int], tile: tuple[int, int, int], dtype: torch.dtype
) -> None:
    ranks = 3 if dtype is torch.float32 else 2
    m, n, k = sizes
    config = GemmConfig(*tile)
    reorder = the_map(kind, m, n, tile[0], tile[1], ranks)
    operands = [(random(2 * r, m, k, dtype=dtype), random(2 * r + 1, k, n, dtype=dtype)) for r in range(ranks)]
    tables = orders(reorder, config, ranks)
    received = collective(reorder, run_gemms(tables, operands, persistent=ranks == 2))
    outputs = [a.double() @ b.double() for a, b in operands]
    for rank in range(ranks):
        restore = restore_of(reorder, rank)
        reference = expected(reorder, outputs, rank)
        residual = random(99, *reference.shape, dtype=dtype)
        out = poisoned(*reference.shape, dtype=dtype)
        restored_add(received[rank], restore, residual, out)
        scale = ranks * k**0.5
        assert (out.double() - reference - residual.double()).abs().max() < TOLERANCE[dtype] * scale
        weight = random(98, n, dtype=dtype)
        normed, total = poisoned(*reference.shape, dtype=dtype), poisoned(*reference.shape, dtype=dtype)
        restored_rmsnorm(received[rank], restore, weight, normed, residual=residual, residual_out=total)
        x = reference + residual.double()
        right = x / (x.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
        assert (normed.double() - right).abs().max() < TOLERANCE[dtype] * 8
        assert torch.equal(total, out)


def test_tokens_of_any_order_and_ranks_without_rows() -> None:
    destinations = [[2, 0, 2, 1, 1, 0, 2] * 3, [], [1] * 18]
    groups = [(2, 4), (0, 0), (6, 0)]
    reorder = subtoken_map(40, 16, 16, groups, destinations=destinations)
    operands = [(random(r, len(d), 24), random(r + 9, 24, 40)) for r, d in enumerate(destinations)]
    received = collective(reorder, run_gemms(orders(reorder, GemmConfig(16, 16, 16), 3), operands))
    outputs = [a.double() @ b.double() for a, b in operands]
    for rank in range(3):
        reference = expected(reorder, outputs, rank)
        out = poisoned(*reference.shape)
        restored_add(received[rank], restore_of(reorder, rank), None, out)
        assert torch.allclose(out.double(), reference, atol=1e-4)


def test_a_recorded_tile_order_is_as_good_as_a_rule() -> None:
    grid = TileGrid(50, 50, 16, 16)
    order = np.random.default_rng(3).permutation(grid.num_tiles)
    reorder = tile_map(grid, order, (5, grid.num_tiles - 5))
    operands = [(random(1, 50, 30), random(2, 30, 50))]
    (packed,) = run_gemms(orders(reorder, GemmConfig(16, 16, 16), 1), operands)
    out = poisoned(50, 50)
    restored_add(packed, restore_of(reorder, 0), None, out)
    assert torch.allclose(out, operands[0][0] @ operands[0][1], atol=1e-4)


def test_long_rows_are_normalised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from overlapsim.validate.kernels import launch_restore

    reorder = the_map("all_reduce", 16, 150, 16, 16, 1)
    packed = random(5, 16 * 150)
    restore = restore_of(reorder, 0)
    weight, residual = random(6, 150), random(7, 16, 150)
    whole, parts = poisoned(16, 150), poisoned(16, 150)
    sums = residual.clone()
    restored_rmsnorm(packed, restore, weight, whole, residual=residual, residual_out=poisoned(16, 150))
    monkeypatch.setattr(launch_restore, "WHOLE_ROW", 64)
    monkeypatch.setattr(launch_restore, "PART_OF_ROW", 64)
    # The sum may take the place of the residual.
    restored_rmsnorm(packed, restore, weight, parts, residual=sums, residual_out=sums)
    assert torch.allclose(whole, parts, atol=1e-6)
    restored = poisoned(16, 150)
    restored_add(packed, restore, residual, restored)
    assert torch.equal(sums, restored)

"""GEMM kernels alone: operands of any stride, accumulate types, experts, arrival, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from overlapsim.validate.kernels.launch import (
    ArrivalOrder,
    GemmConfig,
    TileOrder,
    arrival_gemm,
    check_status,
    grouped_gemm,
    new_counters,
    new_status,
    raise_flag,
    signalled_gemm,
)
from overlapsim.validate.kernels.launch_gemm import _check_operands
from ranks import poisoned, random

from overlapsim.cost.tiles import TileGrid
from overlapsim.errors import DeadlockError, StrategyError
from overlapsim.schedule.reorder import collective_map

CONFIG = GemmConfig(16, 16, 16)


def order_of(m: int, n: int, config: GemmConfig = CONFIG) -> TileOrder:
    grid = TileGrid(m, n, config.bm, config.bn)
    return TileOrder.from_map(collective_map("all_reduce", grid, (grid.num_tiles,), ranks=2), config)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_row_major_store_and_any_stride(persistent: bool, counted: bool) -> None:
    a, b = random(0, 21, 35).T, random(1, 40, 42)[:, ::2]
    a, b = a.T[:, :35], b[:35]
    out = poisoned(50, 21)[:21].T.contiguous().T
    counters = new_counters(1) if counted else None
    signalled_gemm(a, b, out, order_of(21, 21), counters, persistent=persistent, store="row_major")
    assert torch.allclose(out.double(), a.double() @ b.double(), atol=1e-5)
    assert counters is None or counters.tolist() == [4]


def test_half_sums_are_coarser_than_full_ones() -> None:
    a, b = random(0, 32, 512, dtype=torch.float16), random(1, 512, 32, dtype=torch.float16)
    reference = a.double() @ b.double()
    errors = {}
    for accumulate in ("fp32", "fp16"):
        out = poisoned(32, 32, dtype=torch.float16)
        config = GemmConfig(32, 32, 32, accumulate=accumulate)
        signalled_gemm(a, b, out, order_of(32, 32, config), None, store="row_major")
        errors[accumulate] = float((out.double() - reference).abs().max())
    assert errors["fp32"] < 0.01 < errors["fp16"] < 0.2


def test_experts_have_their_own_weights_and_blocks_without_one_are_zero() -> None:
    a, b = random(0, 64, 24), random(1, 3, 24, 20)
    experts = torch.tensor([2, -1, 0, 2], dtype=torch.int32)
    out = poisoned(64, 20)
    counters = new_counters(1)
    grouped_gemm(a, b, experts, out, order_of(64, 20), counters, store="row_major")
    reference = torch.cat([a[16 * i : 16 * i + 16] @ b[e] * (e >= 0) for i, e in enumerate(experts.tolist())])
    assert torch.allclose(out, reference, atol=1e-5)
    assert counters.tolist() == [8]
    with pytest.raises(StrategyError, match="experts of tile rows"):
        grouped_gemm(a, b, experts[:3], out, order_of(64, 20), counters, store="row_major")


def test_arrival_waits_for_every_shard_that_a_tile_touches() -> None:
    # Shards of 11 rows, tiles of 16: the middle tile needs two shards.
    order = ArrivalOrder.by_arrival(33, 20, CONFIG, (1, 2, 0))
    a, b, out = random(0, 33, 24), random(1, 24, 20), poisoned(33, 20)
    flags, status = new_counters(3), new_status(3)
    for shard in (1, 2, 0):
        raise_flag(flags, shard, 7)
    arrival_gemm(a, b, out, order, flags, status, expected=7, num_sms=2)
    check_status(status, what="shard")
    assert torch.allclose(out, a @ b, atol=1e-5)


def test_a_shard_that_does_not_arrive_is_named() -> None:
    order = ArrivalOrder.by_arrival(48, 16, CONFIG, (0, 1, 2))
    a, b, out = random(0, 48, 16), random(1, 16, 16), poisoned(48, 16)
    flags, status = new_counters(3), new_status(3)
    raise_flag(flags, 0)
    raise_flag(flags, 2)
    arrival_gemm(a, b, out, order, flags, status)
    with pytest.raises(DeadlockError, match=r"^shard 1 was not complete in time: 0 of 1\."):
        check_status(status, [1, 1, 1], what="shard")
    assert torch.allclose(out[:16], (a @ b)[:16], atol=1e-5)


def test_bf16_is_refused_where_it_would_be_wrong() -> None:
    a, b = random(0, 16, 16, dtype=torch.bfloat16), random(1, 16, 16, dtype=torch.bfloat16)
    with pytest.raises(StrategyError, match=r"bf16.*use fp16 or fp32, or a GPU"):
        signalled_gemm(a, b, torch.empty_like(a), order_of(16, 16), None, store="row_major")


def test_what_does_not_fit_is_refused() -> None:
    a, b, order = random(0, 32, 16), random(1, 16, 32), order_of(32, 32)
    out, counters = poisoned(32 * 32), new_counters(1)
    refused = [
        (a[:16], b, out, order, counters, "A has shape"),
        (a, b[:, :16], out, order, counters, "B has shape"),
        (a, b[:8], out, order, counters, r"expected \(m, k\) and \(k, n\)"),
        (a, b, out[:-1], order, counters, "packed buffer of 1023 elements"),
        (a, b, poisoned(2048)[::2], order, counters, "not contiguous"),
        (a, b, out, order, counters[:0], "counters"),
        (a, b, out, order, counters.long(), "counters"),
        (a, b.half(), out, order, counters, "types"),
        (a, b, out, order_of(32, 32, replace(CONFIG, accumulate="fp16")), counters, "summed in fp16"),
    ]
    for *arguments, message in refused:
        with pytest.raises(StrategyError, match=message):
            signalled_gemm(*arguments)
    with pytest.raises(StrategyError, match="only a persistent kernel"):
        signalled_gemm(a, b, out, order, counters, num_sms=2)
    with pytest.raises(StrategyError, match="on 0 SMs"):
        signalled_gemm(a, b, out, order, counters, persistent=True, num_sms=0)
    with pytest.raises(StrategyError, match="tf32 with operands"):
        signalled_gemm(a.half(), b.half(), out.half(), order, counters, tf32=True)
    assert counters.tolist() == [0] and out.isnan().all()


def test_pieces_whose_offsets_would_wrap_are_refused() -> None:
    far = torch.empty_strided((32, 16), (2**28, 1), device="meta")
    near = torch.empty((16, 32), device="meta")
    with pytest.raises(StrategyError, match=r"A with strides .* less than 2\^31"):
        _check_operands(far, near, near, CONFIG, False)
    with pytest.raises(StrategyError, match="B with strides"):
        _check_operands(near, far, near, CONFIG, False)
    _check_operands(near, near, near, CONFIG, False)

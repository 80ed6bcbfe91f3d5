"""Tasks of the fused kernel: gathered rows with arrival flags, epilogues that store or copy to the owners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlapsim.strategies.fused_tiles.kernel import checked_pieces, first_tiles, kernel_of, last_tiles, store_price

from overlapsim.cost.gemm import GemmCost
from overlapsim.strategy.base import Pair
from overlapsim.strategy.fused import (
    CALLS_BEFORE,
    SUM_SMS,
    add_barrier,
    add_copies,
    add_own_copy,
    add_sum,
    lag_ps,
    tag_of,
)
from overlapsim.strategy.tasks import Gpu, Placement


def gather_then_multiply(gpu: Gpu, pair: Pair, parameters: Mapping[str, Any]) -> Placement:
    """One GEMM launch whose tiles wait for the copies they read; own rows first."""
    prices, builder, op = gpu.prices, gpu.builder, pair.collective
    kernel, pieces = kernel_of(prices, pair, parameters), checked_pieces(pair, parameters)
    ready = add_barrier(gpu, op, "wait for free buffers")
    add_own_copy(gpu, op)
    there = add_barrier(gpu, op, "wait for own rows of all")
    copies = add_copies(gpu, op, pieces)
    gemm = gpu.add_gemm(pair.gemm, kernel, launches=1 + CALLS_BEFORE, tag=f"{pair.gemm.pass_} fused gemm")
    # Another stream's event, and then the launch.
    builder.add_edge(there, gemm, lag_ps=lag_ps(prices.signal_wait_s))
    flag_ps = lag_ps(prices.flag_s)
    for copy, tile in zip(copies, first_tiles(kernel.grid, op.ranks, pieces), strict=True):
        builder.add_edge(copy, gemm, dst_unit=tile, lag_ps=flag_ps)
    last = gemm
    if parameters.get("keep_gathered", False):
        seconds, demands = prices.hbm_pass(2 * op.size_bytes)
        last = gpu.add_transfer(
            seconds,
            demands,
            sms=min(SUM_SMS, gpu.num_sms),
            stream=gpu.compute_stream,
            op=op.name,
            tag=tag_of(op, "copy of gathered rows"),
        )
    return pair.placement(((gemm,), (last,)), ((ready,), (copies[-1],)))


def multiply_then_scatter(gpu: Gpu, pair: Pair, parameters: Mapping[str, Any]) -> Placement:
    """One GEMM launch whose tiles go to their owners as they are done, own rows last; then the local sum."""
    prices, builder, op = gpu.prices, gpu.builder, pair.collective
    kernel, pieces = kernel_of(prices, pair, parameters), checked_pieces(pair, parameters)
    extra_s, _ = store_price(prices, pair, parameters, kernel, pieces)
    kernel = kernel.scaled(1 + extra_s / kernel.tile_time_s)
    gemm = gpu.add_gemm(pair.gemm, kernel, launches=1 + CALLS_BEFORE, tag=f"{pair.gemm.pass_} fused gemm")
    ready = add_barrier(gpu, op, "wait for free buffers")
    _scatter(gpu, pair, parameters, kernel, gemm, pieces)
    done = add_barrier(gpu, op, "wait for parts of all")
    builder.add_edge(gemm, done)
    last = add_sum(gpu, op)
    if op.kind == "all_reduce":
        add_barrier(gpu, op, "wait for sums of all")
        last = add_copies(gpu, op, op.ranks - 1)[-1]
    # Buffers are asked for when the kernel may start, and beside it.
    return pair.placement(((ready, gemm), (gemm,)), ((ready,), (last,)))


def _scatter(gpu: Gpu, pair: Pair, parameters: Mapping[str, Any], kernel: GemmCost, gemm: int, pieces: int) -> None:
    """Stores of the epilogue, or copies of finished rows."""
    op, flag_ps = pair.collective, lag_ps(gpu.prices.flag_s)
    needed = last_tiles(kernel.grid, op.ranks, pieces)
    if parameters["transport"] == "copy_engine":
        copies = add_copies(gpu, op, pieces)
        for copy, tiles in zip(copies, needed, strict=True):
            gpu.builder.add_edge(gemm, copy, src_units=tiles, lag_ps=flag_ps)
        return
    stores = gpu.prices.stores(op, gpu.device)
    # No call of the host's: the kernel stores.
    flow = gpu.add_transfer(
        stores.seconds, stores.demands, units=pieces, launches=0, op=op.name, tag=tag_of(op, "stores to owners")
    )
    for piece, tiles in enumerate(needed):
        gpu.builder.add_edge(gemm, flow, src_units=tiles, dst_unit=piece)

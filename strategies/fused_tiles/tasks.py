"""Tasks of the fused kernel: gathered rows with arrival flags, epilogues that store or copy to the owners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from overlapsim.strategies.fused_tiles.kernel import (
    SUM_SMS,
    as_copies,
    checked_pieces,
    first_tiles,
    kernel_of,
    last_tiles,
    store_price,
)

from overlapsim.cost.gemm import GemmCost
from overlapsim.strategy.base import Pair
from overlapsim.strategy.tasks import Gpu, Placement
from overlapsim.units import ps_from_s

# Host calls of one fused operator, counted in the sources that run it (hwprofiles/SOURCES.md, FUSED-CALLS): a copy and
# its stream's write of a flag or wait for tiles; outputs, counters and stream joins before the kernel, and after it.
CALLS: Final = 2
CALLS_BEFORE: Final = 4
CALLS_AFTER: Final = 6


def gather_then_multiply(gpu: Gpu, pair: Pair, parameters: Mapping[str, Any]) -> Placement:
    """One GEMM launch whose tiles wait for the copies they read; own rows first."""
    prices, builder, op = gpu.prices, gpu.builder, pair.collective
    kernel, pieces = kernel_of(prices, pair, parameters), checked_pieces(pair, parameters)
    ready = _barrier(gpu, pair, "wait for free buffers")
    own_s, own = prices.hbm_pass(2 * op.size_bytes / op.ranks)
    gpu.add_transfer(own_s, own, sms=min(SUM_SMS, gpu.num_sms), op=op.name, tag=f"{op.pass_} copy of own rows")
    there = _barrier(gpu, pair, "wait for own rows of all")
    copies = _copies(gpu, pair, pieces)
    gemm = gpu.add_gemm(pair.gemm, kernel, launches=1 + CALLS_BEFORE, tag=f"{pair.gemm.pass_} fused gemm")
    # Another stream's event, and then the launch.
    builder.add_edge(there, gemm, lag_ps=_ps(prices.signal_wait_s))
    flag_ps = _ps(prices.flag_s)
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
            tag=f"{op.pass_} copy of gathered rows",
        )
    return pair.placement(((gemm,), (last,)), ((ready,), (copies[-1],)))


def multiply_then_scatter(gpu: Gpu, pair: Pair, parameters: Mapping[str, Any]) -> Placement:
    """One GEMM launch whose tiles go to their owners as they are done, own rows last; then the local sum."""
    prices, builder, op = gpu.prices, gpu.builder, pair.collective
    kernel, pieces = kernel_of(prices, pair, parameters), checked_pieces(pair, parameters)
    extra_s, _ = store_price(prices, pair, parameters, kernel, pieces)
    kernel = kernel.scaled(1 + extra_s / kernel.tile_time_s)
    gemm = gpu.add_gemm(pair.gemm, kernel, launches=1 + CALLS_BEFORE, tag=f"{pair.gemm.pass_} fused gemm")
    ready = _barrier(gpu, pair, "wait for free buffers")
    _scatter(gpu, pair, parameters, kernel, gemm, pieces)
    done = _barrier(gpu, pair, "wait for parts of all")
    builder.add_edge(gemm, done)
    seconds, demands = prices.hbm_pass(op.size_bytes * (1 + 1 / op.ranks))
    last = gpu.add_transfer(
        seconds,
        demands,
        sms=min(SUM_SMS, gpu.num_sms),
        launches=1 + CALLS_AFTER,
        op=op.name,
        tag=f"{op.pass_} sum of parts",
    )
    if op.kind == "all_reduce":
        _barrier(gpu, pair, "wait for sums of all")
        last = _copies(gpu, pair, op.ranks - 1)[-1]
    # Buffers are asked for when the kernel may start, and beside it.
    return pair.placement(((ready, gemm), (gemm,)), ((ready,), (last,)))


def _scatter(gpu: Gpu, pair: Pair, parameters: Mapping[str, Any], kernel: GemmCost, gemm: int, pieces: int) -> None:
    """Stores of the epilogue, or copies of finished rows."""
    op, flag_ps = pair.collective, _ps(gpu.prices.flag_s)
    needed = last_tiles(kernel.grid, op.ranks, pieces)
    if parameters["transport"] == "copy_engine":
        copies = _copies(gpu, pair, pieces)
        for copy, tiles in zip(copies, needed, strict=True):
            gpu.builder.add_edge(gemm, copy, src_units=tiles, lag_ps=flag_ps)
        return
    stores = gpu.prices.stores(op, gpu.device)
    # No call of the host's: the kernel stores.
    flow = gpu.add_transfer(
        stores.seconds, stores.demands, units=pieces, launches=0, op=op.name, tag=f"{op.pass_} stores to owners"
    )
    for piece, tiles in enumerate(needed):
        gpu.builder.add_edge(gemm, flow, src_units=tiles, dst_unit=piece)


def _copies(gpu: Gpu, pair: Pair, pieces: int) -> list[int]:
    op = as_copies(pair.collective)
    seconds, demands = gpu.prices.copies(op, pieces, gpu.device)
    return [
        gpu.add_transfer(
            seconds,
            demands,
            sms=1,
            pool=gpu.copy_engine(),
            launches=CALLS,
            op=op.name,
            tag=f"{op.pass_} copy {piece}/{pieces}",
        )
        for piece in range(1, pieces + 1)
    ]


def _barrier(gpu: Gpu, pair: Pair, tag: str) -> int:
    op = pair.collective
    return gpu.add_transfer(gpu.prices.barrier_s, op=op.name, tag=f"{op.pass_} {tag}")


def _ps(seconds: float) -> int:
    return ps_from_s(seconds) if seconds > 0 else 0

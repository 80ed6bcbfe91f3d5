"""Tasks of the fused kernel: tiles stored to their owners, or slices of tiles that wait for what is pulled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlapsim.strategies.fused_exchange.kernel import (
    checked_sms,
    first_units,
    gemm_of,
    in_slices,
    kernel_of,
    last_tiles,
    pull_price,
    store_price,
)

from overlapsim.strategy.base import Context
from overlapsim.strategy.chains import Chain
from overlapsim.strategy.fused import CALLS_BEFORE, add_barrier, add_copies, lag_ps, tag_of
from overlapsim.strategy.tasks import Gpu, Placement
from overlapsim.workload.operators import KernelOp


def multiply_then_exchange(gpu: Gpu, context: Context, chain: Chain, parameters: Mapping[str, Any]) -> Placement:
    """One GEMM launch whose tiles go to their owners as they are done; element-wise kernels follow the exchange."""
    prices, builder, op, gemm = gpu.prices, gpu.builder, chain.collective, gemm_of(chain)
    checked_sms(prices, chain, parameters)
    kernel, pieces = kernel_of(prices, gemm, parameters), int(parameters["pieces"]) * (op.ranks - 1)
    extra_s, total_s, demands = store_price(prices, chain, parameters, kernel)
    kernel = kernel.scaled(1 + extra_s / kernel.tile_time_s)
    copies = parameters.get("transport", "copy_engine") == "copy_engine"
    multiply = gpu.add_gemm(gemm, kernel, launches=1 + CALLS_BEFORE, tag=f"{gemm.pass_} fused gemm")
    # Without copies barriers are in device memory, within the kernel.
    ready = add_barrier(gpu, op, "wait for free buffers", inside=not copies)
    needed = last_tiles(kernel.grid, op.ranks, pieces)
    if copies:
        for copy, tiles in zip(add_copies(gpu, op, pieces), needed, strict=True):
            builder.add_edge(multiply, copy, src_units=tiles, lag_ps=lag_ps(prices.flag_s))
    else:
        # No call of the host's: the kernel stores.
        flow = gpu.add_transfer(
            total_s, demands, units=pieces, launches=0, op=op.name, tag=tag_of(op, "stores to owners")
        )
        for piece, tiles in enumerate(needed):
            builder.add_edge(multiply, flow, src_units=tiles, dst_unit=piece)
    done = add_barrier(gpu, op, "wait for shares of all", inside=not copies)
    builder.add_edge(multiply, done)
    moved = _kernels(gpu, context, chain.near)
    if moved:
        builder.add_edge(done, moved[0], lag_ps=lag_ps(prices.signal_wait_s))
    last = moved[-1] if moved else done
    entries = {chain.gemm_at: (ready, multiply), chain.collective_at: (ready,)}
    exits = {chain.gemm_at: (multiply,), chain.collective_at: (last,)}
    return _placed(chain, entries, exits, moved, last)


def exchange_then_multiply(gpu: Gpu, context: Context, chain: Chain, parameters: Mapping[str, Any]) -> Placement:
    """One GEMM launch that starts on the depth it has and goes on with that of each rank as it arrives."""
    prices, builder, op, gemm = gpu.prices, gpu.builder, chain.collective, gemm_of(chain)
    sms, blocks = checked_sms(prices, chain, parameters), int(parameters["pieces"])
    pieces, left = blocks * (op.ranks - 1), gpu.num_sms - sms
    kernel = kernel_of(prices, gemm, parameters)
    moved = _kernels(gpu, context, chain.near)
    ready = add_barrier(gpu, op, "wait for shares of all", inside=bool(sms))
    if sms:
        seconds, demands = pull_price(prices, chain, sms, pieces, gpu.device)
        tag = tag_of(op, f"pull by {sms} SMs")
        flow = gpu.add_transfer(seconds, demands, sms=sms, units=pieces, launches=0, op=op.name, tag=tag)
        arrivals = [(flow, piece) for piece in range(1, pieces + 1)]
    else:
        arrivals = [(copy, 1) for copy in add_copies(gpu, op, pieces)]
    sliced = in_slices(kernel, op.ranks, left)
    calls, tag = 1 + CALLS_BEFORE, f"{gemm.pass_} fused gemm"
    multiply = gpu.add_gemm(gemm, sliced, sms=left, launches=calls, tag=tag)
    units = first_units(kernel.grid.waves(left), op.ranks, blocks, left)
    for (source, done), unit in zip(arrivals, units, strict=True):
        builder.add_edge(source, multiply, src_units=done, dst_unit=unit, lag_ps=lag_ps(prices.flag_s))
    if moved:
        builder.add_edge(moved[-1], ready, lag_ps=lag_ps(prices.signal_wait_s))
    last = arrivals[-1][0]
    entries = {chain.gemm_at: (multiply,), chain.collective_at: (moved[0],) if moved else (ready, multiply)}
    exits = {chain.gemm_at: (multiply,), chain.collective_at: (last,)}
    return _placed(chain, entries, exits, moved, last)


def _kernels(gpu: Gpu, context: Context, positions: tuple[int, ...]) -> list[int]:
    """Element-wise kernels as the library runs them, one after another."""
    operators = [context.graph.operators[position] for position in positions]
    return [gpu.add_kernel(op, context.prices.kernel(op)) for op in operators if isinstance(op, KernelOp)]


def _placed(
    chain: Chain,
    entries: Mapping[int, tuple[int, ...]],
    exits: Mapping[int, tuple[int, ...]],
    moved: list[int],
    last: int,
) -> Placement:
    """Kernels that changed sides are done where the exchange is: whoever waits for them wants exchanged rows."""
    near = dict(zip(chain.near, moved, strict=True))
    return Placement(
        {**entries, **{position: (task,) for position, task in near.items()}},
        {**exits, **dict.fromkeys(near, (last,))},
    )

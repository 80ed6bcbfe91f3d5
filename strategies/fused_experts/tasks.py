"""Tasks of the fused kernel: tiles wait for the ranks whose tokens they have, or are sent as they are done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from overlapsim.strategies.fused_experts.kernel import (
    arrivals,
    checked_sms,
    departures,
    kernel_of,
    moves_rows,
    moving_price,
    num_pieces,
    staged,
    work_of,
)

from overlapsim.strategy.base import Context
from overlapsim.strategy.chains import Chain
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
from overlapsim.workload.operators import KernelOp

# For each routed row the kernel that makes wait lists reads an expert and a rank, and writes a place and a source.
LIST_BYTES: Final = 16


def fetch_then_multiply(gpu: Gpu, context: Context, chain: Chain, parameters: Mapping[str, Any]) -> Placement:
    """One launch whose tiles wait for the ranks that their rows come from; own rows first."""
    prices, builder, op, work = gpu.prices, gpu.builder, chain.collective, work_of(chain)
    stages, sms = staged(work, chain, parameters), checked_sms(prices, chain, parameters)
    kernel, pieces = kernel_of(prices, work, stages, parameters), num_pieces(chain, parameters)
    seconds, demands = prices.hbm_pass(LIST_BYTES * sum(work.rows))
    lists = gpu.add_transfer(
        seconds, demands, sms=min(SUM_SMS, gpu.num_sms), op=op.name, tag=tag_of(op, "wait lists of tiles")
    )
    add_barrier(gpu, op, "wait for free buffers and counts of all", inside=bool(sms))
    if sms:
        seconds, demands = moving_price(prices, chain, parameters, gpu.device)
        tag = tag_of(op, f"{op.kind} by {sms} SMs")
        flow = gpu.add_transfer(seconds, demands, sms=sms, units=pieces, launches=0, op=op.name, tag=tag)
        there, sources = lists, [(flow, piece) for piece in range(1, pieces + 1)]
    else:
        add_own_copy(gpu, op)
        there = add_barrier(gpu, op, "wait for own rows of all")
        sources = [(copy, 1) for copy in add_copies(gpu, op, pieces)]
    calls, tag = 1 + CALLS_BEFORE, f"{chain.gemm.pass_} fused gemm"
    multiply = gpu.add_gemm(chain.gemm, kernel, sms=gpu.num_sms - sms, launches=calls, tag=tag)
    builder.add_edge(there, multiply, lag_ps=lag_ps(prices.signal_wait_s))
    starts = [0, *stages.ends[:-1]]
    for needed, unit, tiles in zip(arrivals(chain, stages, parameters), starts, stages.tiles, strict=True):
        if needed and tiles:
            source, done = sources[needed - 1]
            builder.add_edge(source, multiply, src_units=done, dst_unit=unit, lag_ps=lag_ps(prices.flag_s))
    last = sources[-1][0]
    entries = dict.fromkeys((chain.collective_at, *chain.near, *chain.far), (lists,))
    exits = dict.fromkeys(entries, (last,))
    for position, task in _library_kernels(gpu, context, chain.near).items():
        # Gradients of routing weights: from gathered rows, and nothing of the GEMM waits for them.
        builder.add_edge(last, task, lag_ps=lag_ps(prices.signal_wait_s))
        entries[position] = exits[position] = (task,)
    return Placement({**entries, chain.gemm_at: (multiply,)}, {**exits, chain.gemm_at: (multiply,)})


def multiply_then_send(gpu: Gpu, context: Context, chain: Chain, parameters: Mapping[str, Any]) -> Placement:
    """One launch whose tiles are summed and sent to the ranks of their tokens by SMs that do nothing else."""
    prices, builder, op = gpu.prices, gpu.builder, chain.collective
    work, sms = work_of(chain), checked_sms(prices, chain, parameters)
    stages, pieces = staged(work, chain, parameters), num_pieces(chain, parameters)
    kernel = kernel_of(prices, work, stages, parameters)
    calls, tag = 1 + CALLS_BEFORE, f"{chain.gemm.pass_} fused gemm"
    multiply = gpu.add_gemm(chain.gemm, kernel, sms=gpu.num_sms - sms, launches=calls, tag=tag)
    # Barriers are in device memory, within the kernel.
    ready = add_barrier(gpu, op, "wait for free buffers", inside=True)
    seconds, demands = moving_price(prices, chain, parameters, gpu.device)
    flow = gpu.add_transfer(
        seconds, demands, sms=sms, units=pieces, launches=0, op=op.name, tag=tag_of(op, f"{op.kind} by {sms} SMs")
    )
    for piece, tiles in enumerate(departures(chain, stages, parameters)):
        # Thread blocks that communicate start with the kernel: they hold no SM of one that runs before it.
        unit = piece if piece else -1
        builder.add_edge(multiply, flow, src_units=tiles, dst_unit=unit, lag_ps=lag_ps(prices.flag_s))
    last = add_barrier(gpu, op, "wait for parts of all", inside=True)
    builder.add_edge(multiply, last)
    done: dict[int, int] = {}
    if op.kind == "reduce_scatter":
        last = add_sum(gpu, op, calls=1)
    else:
        # Copies of one token come from several ranks: they are added up at home, by the kernel that always does.
        done = _library_kernels(gpu, context, chain.far, all_of_them=True)
        for task in done.values():
            builder.add_edge(last, task, lag_ps=lag_ps(prices.signal_wait_s))
            last = task
    entries = dict.fromkeys((chain.collective_at, *chain.near, *chain.far), (ready,))
    entries |= {position: (task,) for position, task in done.items()}
    exits = dict.fromkeys(entries, (last,))
    return Placement({**entries, chain.gemm_at: (ready, multiply)}, {**exits, chain.gemm_at: (multiply,)})


def _library_kernels(
    gpu: Gpu, context: Context, positions: tuple[int, ...], *, all_of_them: bool = False
) -> dict[int, int]:
    """Add the kernels on the way that the fused one does not replace, by position."""
    kernels = {position: context.graph.operators[position] for position in positions}
    return {
        position: gpu.add_kernel(op, context.prices.kernel(op))
        for position, op in kernels.items()
        if isinstance(op, KernelOp) and (all_of_them or not moves_rows(op))
    }

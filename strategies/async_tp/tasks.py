"""Tasks of the three ways: a gather by the switch, a GEMM that waits for flags, and pieces pulled from every peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from overlapsim.cost.gemm import GemmCost
from overlapsim.cost.prices import PriceBook
from overlapsim.strategy.base import Pair
from overlapsim.strategy.shards import shard_rows
from overlapsim.strategy.tasks import Gpu, Placement
from overlapsim.units import ps_from_s
from overlapsim.workload.operators import COMPUTE, CollectiveOp, GemmOp

STREAMS: Final = (COMPUTE, f"{COMPUTE} 1")
"""Pieces alternate between the stream of the rest of the model and one more."""
NAME: Final = "async_tp"
# A template of the GPU's own architecture, as tuned ones are measured (hwprofiles/SOURCES.md, FUSED-TEMPLATE).
SLOWDOWN: Final = 1.0


def pulls_of(collective: CollectiveOp) -> CollectiveOp:
    """What a rank pulls from all peers together: as many bytes as a ring all_gather of the same size brings."""
    return replace(collective, kind="all_gather", engine="copy_engine")


def flag_kernel(prices: PriceBook, gemm: GemmOp) -> GemmCost:
    """The GEMM that waits for the flag of each shard."""
    return prices.kernel_gemm(gemm, NAME, slowdown=SLOWDOWN)


def switch_s(prices: PriceBook, collective: CollectiveOp) -> float:
    """Time of the framework's own gather kernel: multicast at the switch's rate between two barriers of all ranks."""
    return prices.without_latency().flow(replace(collective, engine="nvls"))[0] + 2 * prices.barrier_s


def gather_by_switch(gpu: Gpu, pair: Pair) -> Placement:
    """The switch multicasts all shards, then the whole GEMM follows: nothing overlaps."""
    op = replace(pair.collective, engine="nvls")
    seconds, (_, demands) = switch_s(gpu.prices, op), gpu.prices.flow(op, gpu.device)
    flow = gpu.add_transfer(
        seconds,
        demands,
        sms=gpu.prices.comm_sms(op.kind, op.engine),
        stream=gpu.compute_stream,
        op=op.name,
        tag=f"{op.pass_} all_gather by the switch",
    )
    gemm = gpu.add_gemm(pair.gemm, gpu.prices.vendor_gemm(pair.gemm))
    return pair.placement(((gemm,), (gemm,)), ((flow,), (flow,)))


def gather_under_flags(gpu: Gpu, pair: Pair) -> Placement:
    """One GEMM from the own rows on; its tiles wait for the flag of the shard that they read."""
    kernel, ranks = flag_kernel(gpu.prices, pair.gemm), pair.collective.ranks
    first, ready = _open_gather(gpu, pair, ranks)
    pulls = [_pull(gpu, pair, step, gpu.stream(STREAMS[1])) for step in range(1, ranks)]
    gpu.builder.add_edge(ready, pulls[0])
    gemm = gpu.add_gemm(pair.gemm, kernel, tag=f"{pair.gemm.pass_} gemm under flags")
    grid, flag_ps = kernel.grid, _ps(gpu.prices.flag_s)
    for step, pull in enumerate(pulls, start=1):
        tile = min(int(pair.gemm.m * step / ranks / grid.bm), grid.grid_m - 1) * grid.grid_n
        gpu.builder.add_edge(pull, gemm, dst_unit=tile, lag_ps=flag_ps)
    last = _barrier(gpu, pair, "wait for readers", gpu.compute_stream)
    return pair.placement(((gemm,), (last,)), ((first,), (pulls[-1],)))


def gather_by_pieces(gpu: Gpu, pair: Pair, *, co_run: bool) -> Placement:
    """Own rows are published, then each stream in turn pulls a shard and multiplies it."""
    streams = [gpu.stream(name) for name in STREAMS]
    first, ready = _open_gather(gpu, pair, pair.collective.ranks)
    gemms: list[int] = []
    pulls: list[int] = []
    for step, rows in enumerate(shard_rows(pair.gemm.m, pair.collective.ranks)):
        stream = streams[step % 2]
        if step:
            pulls.append(_pull(gpu, pair, step, stream))
            if step == 1:
                gpu.builder.add_edge(ready, pulls[-1])
        gemms.append(_piece(gpu, pair, step, rows, stream))
        _after(gpu, gemms, co_run=co_run)
    last = _close(gpu, pair, gemms)
    # Producers of the weights alone hold the multiplications back.
    return pair.placement((tuple(gemms[:2]), (last,)), ((first,), (pulls[-1],)))


def scatter_by_pieces(gpu: Gpu, pair: Pair, *, co_run: bool) -> Placement:
    """Each stream in turn multiplies a peer's rows, waits for all and pulls its own; own rows and the sum come last."""
    streams = [gpu.stream(name) for name in STREAMS]
    ranks = pair.collective.ranks
    shards = shard_rows(pair.gemm.m, ranks)
    ready = _barrier(gpu, pair, "wait for free buffers", streams[0])
    gemms: list[int] = []
    pulls: list[int] = []
    readers: list[int] = []
    for step in range(1, ranks):
        stream = streams[step % 2]
        gemms.append(_piece(gpu, pair, step, shards[step], stream))
        if step == 1:
            gpu.builder.add_edge(ready, gemms[-1])
        _after(gpu, gemms, co_run=co_run)
        _barrier(gpu, pair, "wait for products of all", stream)
        pulls.append(_pull(gpu, pair, step, stream))
        readers.append(_barrier(gpu, pair, "wait for readers", stream))
    gemms.append(_piece(gpu, pair, 0, shards[0], streams[0]))
    _after(gpu, gemms, co_run=co_run)
    done = _close(gpu, pair, readers)
    seconds, demands = gpu.prices.hbm_pass(pair.collective.size_bytes * (1 + 1 / ranks))
    tag = f"{pair.collective.pass_} sum of parts"
    total = gpu.add_transfer(seconds, demands, stream=streams[0], op=pair.collective.name, tag=tag)
    gpu.builder.add_edge(done, total)
    return pair.placement(((ready, *gemms[:2]), (gemms[-1],)), ((pulls[0],), (total,)))


def _open_gather(gpu: Gpu, pair: Pair, ranks: int) -> tuple[int, int]:
    """Wait for free buffers, copy the own rows into one, wait for those of all; the first and last task."""
    first = _barrier(gpu, pair, "wait for free buffers", gpu.compute_stream)
    seconds, demands = gpu.prices.hbm_pass(2 * pair.collective.size_bytes / ranks)
    tag = f"{pair.collective.pass_} copy of own rows"
    gpu.add_transfer(seconds, demands, stream=gpu.compute_stream, op=pair.collective.name, tag=tag)
    return first, _barrier(gpu, pair, "wait for own rows of all", gpu.compute_stream)


def _close(gpu: Gpu, pair: Pair, last: Sequence[int]) -> int:
    """The barrier after which buffers are free again; it waits for what ran last on both streams."""
    end = _barrier(gpu, pair, "wait for the last reader", gpu.compute_stream)
    for task in last[-2:]:
        gpu.builder.add_edge(task, end)
    return end


def _piece(gpu: Gpu, pair: Pair, step: int, rows: int, stream: int) -> int:
    piece = replace(pair.gemm, m=rows)
    tag = f"{piece.pass_} gemm of rank +{step}"
    return gpu.add_gemm(piece, gpu.prices.shard_gemm(piece), stream=stream, tag=tag)


def _after(gpu: Gpu, gemms: Sequence[int], *, co_run: bool) -> None:
    """Let the last piece follow the one before it, as measured pieces do although streams alternate."""
    if not co_run and len(gemms) > 1:
        gpu.builder.add_edge(gemms[-2], gemms[-1], lag_ps=ps_from_s(gpu.prices.step_gap_s))


def _pull(gpu: Gpu, pair: Pair, step: int, stream: int) -> int:
    op = pulls_of(pair.collective)
    seconds, demands = gpu.prices.copies(op, op.ranks - 1, gpu.device)
    tag = f"{op.pass_} pull from rank +{step}"
    return gpu.add_transfer(seconds, demands, sms=1, pool=gpu.copy_engine(), stream=stream, op=op.name, tag=tag)


def _barrier(gpu: Gpu, pair: Pair, what: str, stream: int) -> int:
    op = pair.collective
    return gpu.add_transfer(gpu.prices.barrier_s, stream=stream, op=op.name, tag=f"{op.pass_} {what}")


def _ps(seconds: float) -> int:
    return ps_from_s(seconds) if seconds > 0 else 0

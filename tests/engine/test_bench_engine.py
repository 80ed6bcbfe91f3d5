"""Timings: the compiled engine beside a bare heap loop, the SimPy engine and what it costs to make a Program.

Run with ``pytest -m benchmark tests/engine/test_bench_engine.py``; one group is one workload.  The bare
loop is a floor, not an engine: the workload is written into it, and it does nothing but keep its heap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from overlapsim.engine import compiled, reference
from overlapsim.engine import kernel_layout as at
from overlapsim.engine.kernel_heap import pop, schedule
from overlapsim.engine.kernel_pack import pack
from overlapsim.jit import compiled as to_machine_code
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import Int

pytestmark = pytest.mark.benchmark

NUM_RANKS, TILES, NUM_SMS, CHUNKS = 8, 4096, 132, 64
CHUNK_PS = 5_000_000
TILE_PS = 10_000_000 + 17_000 * np.arange(NUM_RANKS)
"""No two ranks alike, so no two ranks share an instant: 768 cohorts, 768 events."""
RANKS = f"{NUM_RANKS} ranks x {TILES} tiles, {CHUNKS} gated chunks each (33,280 units)"
MANY = "65,536 one-unit tasks"
SMALL = "one rank, 64 tiles, 4 chunks"


def ranks(as_units: bool, num_ranks: int = NUM_RANKS, tiles: int = TILES, chunks: int = CHUNKS) -> ProgramBuilder:
    """Build a GEMM per rank and its collective: one FLOW with gated units, or one FLOW per chunk."""
    b = ProgramBuilder()
    for rank in range(num_ranks):
        hbm, link, pool = b.add_resource(3e12), b.add_resource(4e11), b.add_pool(NUM_SMS)
        compute, comm = b.add_stream(), b.add_stream(priority=1)
        gemm = b.add_blocks(
            stream=compute, pool=pool, units=tiles, unit_ps=int(TILE_PS[rank]), sm=NUM_SMS, host=rank,
            demands={hbm: 2e5},
        )  # fmt: skip
        flow = -1
        for j in range(chunks):
            if j == 0 or not as_units:
                flow = b.add_flow(
                    stream=comm, pool=pool, units=chunks if as_units else 1, unit_ps=CHUNK_PS, sm=0, host=rank,
                    demands={link: 2e6, hbm: 1e7},
                )  # fmt: skip
            b.add_edge(gemm, flow, src_units=tiles * (j + 1) // chunks, dst_unit=j if as_units else -1)
    return b


def many() -> ProgramBuilder:
    """Build kernels and transfers of one unit each on 16 streams; all ranks' HBM is overloaded nearly always."""
    rng = np.random.default_rng(0)
    b = ProgramBuilder()
    pools = [b.add_pool(NUM_SMS) for _ in range(NUM_RANKS)]
    streams = [(b.add_stream(), b.add_stream(priority=1)) for _ in pools]
    rates = [(b.add_resource(3e12), b.add_resource(4e11)) for _ in pools]
    for _ in range(4096):
        for (compute, comm), pool, (hbm, link) in zip(streams, pools, rates, strict=True):
            first, second = rng.integers(1_000_000, 20_000_000, 2).tolist()
            kernel = b.add_blocks(
                stream=compute, pool=pool, units=1, unit_ps=first, sm=1, host=pool, demands={hbm: 2.0 * first}
            )
            transfer = b.add_flow(
                stream=comm, pool=pool, units=1, unit_ps=second, sm=1, host=pool,
                demands={hbm: 1.5 * second, link: 0.3 * second},
            )  # fmt: skip
            b.add_edge(kernel, transfer)
    return b


@to_machine_code
def bare_loop(tile_ps: Int, tiles: int, num_sms: int, chunks: int, chunk_ps: int) -> int:
    """Return the end of `ranks`: waves and chunks in a heap, and nothing else."""
    num_ranks = len(tile_ps)
    heap = np.empty((2 * num_ranks, at.HEAP_COLUMNS), np.int64)
    heap[:, at.PLACE] = at.NEVER
    var = np.zeros(at.NUM_VARS, np.int64)
    started, finished = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    sent, moving = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    now = var[at.NOW]
    for rank in range(num_ranks):
        started[rank] = min(num_sms, tiles)
        schedule(heap, var, 2 * rank, tile_ps[rank])
    while var[at.HEAP_SIZE] > 0:
        now = heap[0, at.AT]
        event = pop(heap, var)
        rank = event >> 1
        if event & 1:
            moving[rank] = 0
            sent[rank] += 1
        else:
            finished[rank] = started[rank]
            if started[rank] < tiles:
                started[rank] = min(tiles, started[rank] + num_sms)
                schedule(heap, var, event, now + tile_ps[rank])
        if moving[rank] == 0 and sent[rank] < chunks and finished[rank] >= tiles * (sent[rank] + 1) // chunks:
            moving[rank] = 1
            schedule(heap, var, 2 * rank + 1, now + chunk_ps)
    return int(now)


FORMS = pytest.mark.parametrize("as_units", [True, False], ids=["one FLOW a rank", "one FLOW a chunk"])
CONTENTION = pytest.mark.parametrize("contention", [False, True], ids=["alone", "contention"])


def end_of_ranks() -> int:
    return int(bare_loop(TILE_PS, TILES, NUM_SMS, CHUNKS, CHUNK_PS))


@pytest.mark.benchmark(group=RANKS)
def test_ranks_bare_loop(benchmark: Callable[..., Any]) -> None:
    assert benchmark(end_of_ranks) == compiled.run(ranks(True).freeze(), contention=False).end_ps


@CONTENTION
@FORMS
@pytest.mark.benchmark(group=RANKS)
def test_ranks_compiled(benchmark: Callable[..., Any], as_units: bool, contention: bool) -> None:
    program = ranks(as_units).freeze()
    timeline = compiled.run(program, contention=contention)
    assert contention or timeline.end_ps == end_of_ranks()
    benchmark(compiled.run, program, contention=contention)


@FORMS
@pytest.mark.benchmark(group=RANKS)
def test_ranks_compiled_recorded(benchmark: Callable[..., Any], as_units: bool) -> None:
    program = ranks(as_units).freeze()
    timeline = benchmark(compiled.run, program, record=True)
    assert len(timeline.cohorts.task) == 768


@CONTENTION
@pytest.mark.benchmark(group=RANKS)
def test_ranks_reference(benchmark: Any, contention: bool) -> None:
    program = ranks(True).freeze()
    timeline = benchmark.pedantic(reference.run, (program,), {"contention": contention}, rounds=3)
    assert timeline.same_instants(compiled.run(program, contention=contention))


@FORMS
@pytest.mark.benchmark(group=RANKS)
def test_ranks_freeze(benchmark: Callable[..., Any], as_units: bool) -> None:
    benchmark(ranks(as_units).freeze)


@FORMS
@pytest.mark.benchmark(group=RANKS)
def test_ranks_pack(benchmark: Callable[..., Any], as_units: bool) -> None:
    benchmark(pack, ranks(as_units).freeze())


@CONTENTION
@pytest.mark.benchmark(group=MANY)
def test_many_compiled(benchmark: Any, contention: bool) -> None:
    program = many().freeze()
    assert compiled.run(program, contention=contention).complete
    benchmark.pedantic(compiled.run, (program,), {"contention": contention}, rounds=10)


@pytest.mark.benchmark(group=MANY)
def test_many_reference(benchmark: Any) -> None:
    program = many().freeze()
    timeline = benchmark.pedantic(reference.run, (program,), rounds=1)
    assert timeline.same_instants(compiled.run(program))


@pytest.mark.benchmark(group=MANY)
def test_many_freeze(benchmark: Any) -> None:
    benchmark.pedantic(many().freeze, rounds=3)


@pytest.mark.benchmark(group=MANY)
def test_many_pack(benchmark: Any) -> None:
    program = many().freeze()
    pack(program)  # the incidences that the Program keeps are made here, not in the timing
    benchmark.pedantic(pack, (program,), rounds=3)


@CONTENTION
@pytest.mark.benchmark(group=SMALL)
def test_small_compiled(benchmark: Callable[..., Any], contention: bool) -> None:
    """What a planner pays per call, most of it for entering and leaving compiled code."""
    program = ranks(False, num_ranks=1, tiles=64, chunks=4).freeze()
    benchmark(compiled.run, program, contention=contention)


@pytest.mark.benchmark(group=SMALL)
def test_small_new_program(benchmark: Callable[..., Any]) -> None:
    """The same when every call has a program of its own: build, freeze, pack, run."""
    benchmark(lambda: compiled.run(ranks(False, num_ranks=1, tiles=64, chunks=4).freeze()))


@pytest.mark.benchmark(group=SMALL)
def test_small_reference(benchmark: Callable[..., Any]) -> None:
    benchmark(reference.run, ranks(False, num_ranks=1, tiles=64, chunks=4).freeze())

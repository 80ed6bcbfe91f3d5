"""Timings: what a new Program costs before, and with, its first run; and what it costs with other prices.

Run with ``pytest -m benchmark tests/schedule/test_bench_program.py``.  The calls of the builder are outside
the timing, but for `test_small_build`.  A planner makes a Program per candidate, so the small one counts.
"""

from __future__ import annotations

from typing import Any

import pytest

from overlapsim.engine import compiled
from overlapsim.engine.kernel_pack import pack, packed
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import Program, validate_program

pytestmark = pytest.mark.benchmark

NUM_SMS = 132
SMALL, LARGE = "20 tasks, 30 edges, 40 demands", "65,536 tasks, 65,534 edges, 131,072 demands"


def chain(num_tasks: int) -> ProgramBuilder:
    """Build kernels and the transfers they feed, on two GPUs; each transfer also feeds the next but one kernel."""
    b = ProgramBuilder()
    gpus = [b.add_pool(NUM_SMS, derate=0.95, name=f"gpu{g}", device=g) for g in range(2)]
    hbm = [b.add_resource(3e12, f"hbm{g}") for g in range(2)]
    link = [b.add_resource(4e11, f"link{g}") for g in range(2)]
    streams = [(b.add_stream(), b.add_stream(priority=1)) for _ in gpus]
    for i in range(num_tasks // 2):
        g = i % 2
        compute, comm = streams[g]
        gemm = b.add_blocks(
            stream=compute, pool=gpus[g], units=264, unit_ps=9_000_000 + 1000 * i, sm=NUM_SMS - 8, host=g,
            demands={hbm[g]: 2e5, link[g]: 1e3}, op="mlp.fc1", tag="fwd",
        )  # fmt: skip
        transfer = b.add_flow(
            stream=comm, pool=gpus[g], units=4, unit_ps=5_000_000 + 700 * i, sm=8, host=g,
            demands={link[g]: 2e6, hbm[g]: 1e7}, op="mlp.fc1", tag="fwd",
        )  # fmt: skip
        b.add_edge(gemm, transfer)
        if i >= 2:
            b.add_edge(transfer - 4, gemm, lag_ps=1000)
    return b


def small() -> ProgramBuilder:
    b = chain(20)
    for task in range(8, 20):
        b.add_edge(0, task, src_units=132)
    return b


def check_size(program: Program, size: str) -> None:
    tasks, edges, demands = (int(part.split()[0].replace(",", "")) for part in size.split(", "))
    assert (program.num_tasks, program.num_edges, len(program.demand_amount)) == (tasks, edges, demands)
    assert compiled.run(program).complete


@pytest.mark.benchmark(group=SMALL)
def test_small_build(benchmark: Any) -> None:
    check_size(benchmark(small).freeze(), SMALL)


@pytest.mark.benchmark(group=SMALL)
def test_small_freeze(benchmark: Any) -> None:
    benchmark(small().freeze)


@pytest.mark.benchmark(group=SMALL)
def test_small_validate(benchmark: Any) -> None:
    benchmark(validate_program, small().freeze())


@pytest.mark.benchmark(group=SMALL)
def test_small_pack(benchmark: Any) -> None:
    benchmark(pack, small().freeze())


@pytest.mark.benchmark(group=SMALL)
def test_small_freeze_pack_run(benchmark: Any) -> None:
    """From the last call of the builder to the timeline."""
    b = small()
    assert benchmark(lambda: compiled.run(b.freeze())).complete


@pytest.mark.benchmark(group=SMALL)
def test_small_repriced_run(benchmark: Any) -> None:
    program = small().freeze()
    packed(program)
    unit_ps = program.unit_ps * 2
    assert benchmark(lambda: compiled.run(program.repriced(unit_ps))).complete


@pytest.mark.benchmark(group=SMALL)
def test_small_run_again(benchmark: Any) -> None:
    """The run alone: the floor of the others."""
    program = small().freeze()
    packed(program)
    benchmark(compiled.run, program)


@pytest.mark.benchmark(group=LARGE)
def test_large_freeze(benchmark: Any) -> None:
    b = chain(65_536)
    check_size(b.freeze(), LARGE)
    benchmark.pedantic(b.freeze, rounds=10)


@pytest.mark.benchmark(group=LARGE)
def test_large_pack(benchmark: Any) -> None:
    benchmark.pedantic(pack, (chain(65_536).freeze(),), rounds=10)


@pytest.mark.benchmark(group=LARGE)
def test_large_freeze_pack_run(benchmark: Any) -> None:
    b = chain(65_536)
    assert benchmark.pedantic(lambda: compiled.run(b.freeze()), rounds=10).complete


@pytest.mark.benchmark(group=LARGE)
def test_large_repriced_pack(benchmark: Any) -> None:
    program = chain(65_536).freeze()
    packed(program)
    benchmark.pedantic(lambda: packed(program.repriced(program.unit_ps)), rounds=10)

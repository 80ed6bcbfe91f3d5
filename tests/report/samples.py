"""Small programs whose timelines are known by heart (docs/program.md section 5), and hand-made timelines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overlapsim.engine.timeline import Timeline
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import Program


def steal() -> Program:
    """Golden program 3: a FLOW waits for SMs that a running kernel gives up."""
    b = ProgramBuilder()
    gpu = b.add_pool(num_sms=4, name="sms")
    compute, comm = b.add_stream(name="compute"), b.add_stream(priority=5, name="comm")
    b.add_blocks(stream=compute, pool=gpu, units=10, unit_ps=100, sm=4, op="mlp.fc1")
    b.add_flow(stream=comm, pool=gpu, units=1, unit_ps=120, sm=2, launch_ps=50, op="mlp.fc1", tag="all_reduce")
    return b.freeze()


def signal() -> Program:
    """Golden program 2: two wave groups, each with its collective."""
    b = ProgramBuilder()
    gpu = b.add_pool(num_sms=4, name="sms")
    link = b.add_resource(1e12, "nvlink_out[0]")
    compute, comm = b.add_stream(name="compute"), b.add_stream(priority=5, name="comm")
    gemm = b.add_blocks(stream=compute, pool=gpu, units=9, unit_ps=100, sm=3, op="mlp.fc2", tag="fwd gemm")
    for number, (units, unit_ps) in enumerate(((3, 150), (9, 50)), 1):
        flow = b.add_flow(
            stream=comm, pool=gpu, units=1, unit_ps=unit_ps, sm=1, op="mlp.fc2", tag=f"group {number}/2",
            demands={link: float(unit_ps) / 10},
        )  # fmt: skip
        b.add_edge(gemm, flow, src_units=units, lag_ps=10)
    return b.freeze()


def skew() -> Program:
    """Golden program 7: a group member spins until its peer comes, 500 ps late."""
    b = ProgramBuilder()
    one, two = (b.add_pool(num_sms=2, device=d, name="sms") for d in (0, 1))
    streams = [b.add_stream() for _ in range(4)]
    b.add_flow(stream=streams[0], pool=one, units=2, unit_ps=100, sm=1, group=0, op="ar")
    b.add_blocks(stream=streams[1], pool=one, units=4, unit_ps=150, sm=2, op="gemm")
    b.add_blocks(stream=streams[2], pool=two, units=1, unit_ps=500, sm=2, op="gemm")
    b.add_flow(stream=streams[2], pool=two, units=2, unit_ps=130, sm=1, group=0, op="ar")
    last = b.add_flow(stream=streams[3], pool=one, units=1, unit_ps=7, sm=0, op="p2p")
    b.add_edge(0, last, src_units=1)
    return b.freeze()


def host_lane() -> Program:
    """Golden program 9: launches, and a host that waits for the device."""
    b = ProgramBuilder()
    gpu, stream = b.add_pool(num_sms=1), b.add_stream(name="compute")
    launches = {"stream": stream, "pool": gpu, "units": 1, "unit_ps": 20, "sm": 1}
    b.add_blocks(launch_ps=5, **launches)
    second = b.add_blocks(launch_ps=5, **launches)
    sync = b.add_host(unit_ps=3, op="sync")
    b.add_edge(second, sync, lag_ps=4)
    b.add_blocks(launch_ps=5, **launches)
    b.add_blocks(launch_ps=0, **launches)
    return b.freeze()


def late_worker() -> Program:
    """Golden program 5: a persistent kernel with a hole in its finished units."""
    b = ProgramBuilder()
    gpu = b.add_pool(num_sms=4)
    streams = [b.add_stream() for _ in range(3)]
    b.add_flow(stream=streams[0], pool=gpu, units=1, unit_ps=250, sm=1)
    kernel = b.add_blocks(stream=streams[1], pool=gpu, units=8, unit_ps=100, sm=4, persistent=True)
    flow = b.add_flow(stream=streams[2], pool=gpu, units=1, unit_ps=10, sm=0)
    b.add_edge(kernel, flow, src_units=4)
    return b.freeze()


def deadlock() -> Program:
    """Golden program 15: two groups in opposite order."""
    b = ProgramBuilder()
    pools = [b.add_pool(num_sms=1, device=d) for d in (0, 1)]
    for pool, group in ((0, 0), (0, 1), (1, 1), (1, 0)):
        stream = b.add_stream()
        b.add_flow(stream=stream, pool=pools[pool], units=1, unit_ps=10, sm=1, group=group, op="grad", tag=f"b{group}")
    return b.freeze()


def timeline_of(program: Program, rows: Sequence[tuple[int, int, int, int, int]]) -> Timeline:
    """A timeline with the given instants, a row a task, nothing recorded."""
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    ended = columns[4] >= 0
    return Timeline(
        program,
        *columns,
        progress=np.where(ended, program.units, 0),
        held_sm=np.zeros(program.num_tasks, np.int64),
    )

"""Kernels beside transfers that hold no SM: both lose speed by what the transfer draws of HBM."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapsim.cost.base import Demand, hbm_name, hbm_rate
from overlapsim.cost.overlap import LEAST_GEMM_SPEED
from overlapsim.cost.prices import PriceBook
from overlapsim.engine import compiled, reference
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.operator import simulate, time_s
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.strategy.base import Context
from overlapsim.strategy.registry import load_strategy
from overlapsim.strategy.tasks import Site
from overlapsim.workload.operators import GemmOp, independent_pair

H100 = load_cluster("h100-sxm8")
RATE = hbm_rate(H100.device)


def beside(gemm: GemmOp, share: float, *, sms: int = 0, engine: bool = True, first: bool = True):
    """Ends of a GEMM and of a transfer that draws `share` of HBM, as long as the GEMM alone; and the time alone."""
    prices = PriceBook(H100, 8)
    cost = prices.vendor_gemm(gemm)
    cost = replace(cost, demands=())
    builder = ProgramBuilder()
    gpu = Site(builder, prices).gpu()
    demands = (Demand(hbm_name(0), share * RATE * cost.duration_s, RATE),) if share else ()

    def transfer() -> int:
        pool = gpu.copy_engine() if engine else None
        return gpu.add_transfer(cost.duration_s, demands, sms=1 if engine else sms, pool=pool, units=4)

    moved = transfer() if first else -1
    kernel = gpu.add_gemm(gemm, cost)
    moved = moved if first else transfer()
    program = builder.freeze()
    timeline = compiled.run(program)
    assert (reference.run(program).t_end == timeline.t_end).all()
    return timeline.t_end[kernel] * 1e-12, timeline.t_end[moved] * 1e-12, cost.duration_s


FULL = GemmOp(11 * 128 * 12, 128 * 256, 512)  # whole waves of tiles


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_full_gemm_and_copies_lose_as_much(share: float, first: bool) -> None:
    kernel_s, copies_s, alone_s = beside(FULL, share, first=first)
    speed = PriceBook(H100, 8).overlap.speed_beside(share)
    assert kernel_s / alone_s == pytest.approx(1 / speed, rel=0.01)
    assert copies_s == pytest.approx(kernel_s, rel=0.01)


def test_stores_without_sms_are_transfers_as_well() -> None:
    assert beside(FULL, 0.25, engine=False)[0] == pytest.approx(beside(FULL, 0.25)[0], rel=1e-6)


def test_a_small_kernel_is_not_slowed() -> None:
    small = GemmOp(256, 1024, 256)  # 64 tiles on 132 SMs
    kernel_s, _, alone_s = beside(small, 0.25)
    assert kernel_s == pytest.approx(alone_s, rel=1e-6)


def test_what_draws_nothing_costs_nothing_and_the_loss_is_bounded() -> None:
    kernel_s, copies_s, alone_s = beside(FULL, 0.0)
    assert kernel_s == pytest.approx(alone_s, rel=1e-6) and copies_s == pytest.approx(alone_s, rel=1e-6)
    assert PriceBook(H100, 8).overlap.speed_beside(100.0) == LEAST_GEMM_SPEED


def test_one_on_sms_slows_the_gemm_by_the_derate_alone() -> None:
    kernel_s, moved_s, alone_s = beside(FULL, 0.25, engine=False, sms=8)
    assert moved_s == pytest.approx(alone_s, rel=0.3)
    assert kernel_s > alone_s


def test_the_same_copies_without_contention_cost_nothing() -> None:
    gemm = GemmOp(8192, 8192, 4096)
    graph = independent_pair(gemm, "all_gather", 8, 2.0**26)
    moved = replace(graph.operators[0], engine="copy_engine")
    context = Context(replace(graph, operators=(moved, gemm)), PriceBook(H100, 8, gemm=gemm))
    point = {"comm_sms": 0, "sm_margin": False}
    bulk = load_strategy("bulk")
    free, real = (simulate(bulk, context, point, contention=c).duration_s for c in (False, True))
    assert free == pytest.approx(context.prices.vendor_gemm(gemm).duration_s, rel=1e-6)
    assert 1.01 < real / free < 1.1
    assert time_s(bulk, context, point) == real


def test_late_demands_stand_behind_those_of_their_task() -> None:
    b = ProgramBuilder()
    pool, stream = b.add_pool(4), b.add_stream()
    x, y = b.add_resource(1e12, "x"), b.add_resource(1e12, "y")
    tasks = [
        b.add_blocks(stream=stream, pool=pool, units=2, unit_ps=10, sm=2, demands=d) for d in ({x: 1.0}, None, {x: 2.0})
    ]
    for task, amount in ((tasks[2], 5.0), (tasks[0], 3.0), (tasks[1], 4.0)):
        b.add_demand(task, y, amount)
    program = b.freeze()
    assert program.demand_ptr.tolist() == [0, 2, 3, 5]
    assert program.demand_resource.tolist() == [x, y, y, x, y]
    assert program.demand_amount.tolist() == [1.0, 3.0, 4.0, 2.0, 5.0]

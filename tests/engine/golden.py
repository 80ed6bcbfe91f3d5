"""The fifteen golden programs of docs/program.md section 5, each with the five instants of every task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlapsim.engine.timeline import Timeline
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import Program

NEVER = -1

Rows = tuple[tuple[int, int, int, int, int], ...]


@dataclass(frozen=True)
class Golden:
    """A program and, per task, the instants issued, eligible, resident, start, end."""

    name: str
    build: Callable[[], Program]
    rows: Rows
    contention: bool = False


class Builder(ProgramBuilder):
    """A ProgramBuilder in the words of section 5: own stream and queue each, pool 0 unless said."""

    def __init__(self, *num_sms: int, derate: float = 1.0) -> None:
        super().__init__()
        for n in num_sms:
            self.add_pool(n, derate=derate)

    def B(  # noqa: N802
        self,
        units: int,
        unit_ps: int,
        sm: int,
        *,
        stream: int | None = None,
        priority: int = 0,
        pool: int = 0,
        **more: Any,
    ) -> int:
        stream = self.add_stream(priority=priority) if stream is None else stream
        return self.add_blocks(stream=stream, pool=pool, units=units, unit_ps=unit_ps, sm=sm, **more)

    def F(  # noqa: N802
        self,
        units: int,
        unit_ps: int,
        sm: int,
        *,
        stream: int | None = None,
        priority: int = 0,
        pool: int = 0,
        **more: Any,
    ) -> int:
        stream = self.add_stream(priority=priority) if stream is None else stream
        return self.add_flow(stream=stream, pool=pool, units=units, unit_ps=unit_ps, sm=sm, **more)

    def e(self, src: int, n: int, dst: int, u: int, lag: int = 0) -> None:
        self.add_edge(src, dst, src_units=n, dst_unit=u, lag_ps=lag)


def waves() -> Program:
    b = Builder(4)
    b.B(10, 100, 4)
    return b.freeze()


def signal_reserve() -> Program:
    b = Builder(4)
    b.B(9, 100, 3)
    comm = b.add_stream(priority=5)
    b.F(1, 150, 1, stream=comm)
    b.F(1, 50, 1, stream=comm)
    b.e(0, 3, 1, -1, lag=10)
    b.e(0, 9, 2, -1, lag=10)
    return b.freeze()


def steal() -> Program:
    b = Builder(4)
    b.B(10, 100, 4)
    b.F(1, 120, 2, launch_ps=50, priority=5)
    return b.freeze()


def all_sms_at_once() -> Program:
    b = Builder(3)
    b.B(1, 100, 1)
    b.B(2, 70, 1)
    b.F(1, 30, 3)
    b.B(1, 10, 1)
    return b.freeze()


def persistent_prefix() -> Program:
    b = Builder(4)
    b.F(1, 250, 1)
    b.B(8, 100, 4, persistent=True)
    b.F(1, 10, 0)
    b.e(1, 4, 2, -1)
    return b.freeze()


def gates_spin() -> Program:
    b = Builder(2)
    b.F(3, 100, 0)
    b.B(6, 60, 2)
    b.B(1, 40, 1, priority=9)
    b.e(0, 1, 1, 0, lag=5)
    b.e(0, 2, 1, 3, lag=5)
    b.e(0, 3, 1, 5, lag=5)
    b.e(0, 1, 2, -1)
    return b.freeze()


def group_skew() -> Program:
    b = Builder(2, 2)
    b.F(2, 100, 1, group=0)
    b.B(4, 150, 2)
    late = b.add_stream()
    b.B(1, 500, 2, stream=late, pool=1)
    b.F(2, 130, 1, stream=late, pool=1, group=0)
    b.F(1, 7, 0)
    b.e(0, 1, 4, -1)
    return b.freeze()


def shared_queue() -> Program:
    b = Builder(4)
    first, second, third = (b.add_stream(queue=0) for _ in range(3))
    b.B(1, 100, 1, stream=first)
    b.F(1, 50, 1, stream=second)
    b.B(1, 30, 1, stream=third)
    b.e(0, 1, 1, -1)
    return b.freeze()


def host_lane() -> Program:
    b = Builder(1)
    s = b.add_stream()
    b.B(1, 20, 1, stream=s, launch_ps=5)
    b.B(1, 20, 1, stream=s, launch_ps=5)
    b.add_host(unit_ps=3)
    b.B(1, 20, 1, stream=s, launch_ps=5)
    b.B(1, 20, 1, stream=s)
    b.e(1, 1, 2, -1, lag=4)
    return b.freeze()


def two_flows() -> Program:
    b = Builder(1)
    r = b.add_resource(1e12)
    b.F(1, 1000, 0, demands={r: 1000.0})
    b.F(1, 400, 0, demands={r: 400.0}, launch_ps=300)
    return b.freeze()


def max_min() -> Program:
    b = Builder(1, 1)
    r0, r1 = b.add_resource(1e12), b.add_resource(2e12)
    b.F(1, 900, 0, group=0, demands={r0: 900.0})
    b.F(1, 600, 0, pool=1, group=0, demands={r1: 900.0})
    b.F(1, 400, 0, demands={r0: 400.0}, weight=2.0)
    b.F(1, 300, 0, demands={r1: 450.0})
    return b.freeze()


def derate(capacity: float) -> Program:
    b = Builder(4, derate=0.8)
    r = b.add_resource(capacity)
    b.B(5, 100, 3, demands={r: 100.0})
    b.F(1, 90, 1, demands={r: 90.0}, priority=5)
    return b.freeze()


def copy_lane() -> Program:
    b = Builder(1)
    b.F(1, 60, 1)
    b.F(1, 40, 1, launch_ps=10)
    b.F(1, 20, 1, launch_ps=10, priority=7)
    return b.freeze()


def clusters() -> Program:
    b = Builder(5)
    b.B(7, 100, 4, sm_quantum=2)
    b.B(3, 30, 2, sm_quantum=2)
    return b.freeze()


def deadlock() -> Program:
    b = Builder(1, 1)
    b.F(1, 10, 1, group=0)
    b.F(1, 10, 1, group=1)
    b.F(1, 10, 1, pool=1, group=1)
    b.F(1, 10, 1, pool=1, group=0)
    return b.freeze()


def _at_once(*ends: int) -> Rows:
    return tuple((0, 0, 0, 0, end) for end in ends)


GOLDEN = (
    Golden("1 waves", waves, _at_once(300)),
    Golden(
        "2 signal, reserve",
        signal_reserve,
        ((0, 0, 0, 0, 300), (0, 110, 110, 110, 260), (0, 310, 310, 310, 360)),
    ),
    Golden("3 steal", steal, ((0, 0, 0, 0, 320), (50, 50, 100, 100, 220))),
    Golden(
        "4 all SMs at once",
        all_sms_at_once,
        ((0, 0, 0, 0, 100), (0, 0, 0, 0, 140), (0, 0, 140, 140, 170), (0, 0, 170, 170, 180)),
    ),
    Golden(
        "5 persistent, prefix",
        persistent_prefix,
        ((0, 0, 0, 0, 250), (0, 0, 0, 0, 400), (0, 300, 300, 300, 310)),
    ),
    Golden("6 gates spin", gates_spin, ((0, 0, 0, 0, 300), (0, 0, 0, 105, 365), (0, 100, 165, 165, 205))),
    Golden(
        "7 group, skew",
        group_skew,
        ((0, 0, 0, 500, 760), (0, 0, 0, 0, 600), (0, 0, 0, 0, 500), (0, 500, 500, 500, 760), (0, 630, 630, 630, 637)),
    ),
    Golden("8 shared queue", shared_queue, ((0, 0, 0, 0, 100), (0, 100, 100, 100, 150), (0, 100, 100, 100, 130))),
    Golden(
        "9 host lane",
        host_lane,
        ((5, 5, 5, 5, 25), (10, 25, 25, 25, 45), (10, 49, 49, 49, 52), (57, 57, 57, 57, 77), (57, 77, 77, 77, 97)),
    ),
    Golden("10 two flows", two_flows, ((0, 0, 0, 0, 1400), (300, 300, 300, 300, 1100)), contention=True),
    Golden("11 max-min", max_min, _at_once(1300, 1300, 600, 300), contention=True),
    Golden("12 derate, C = 4e12", lambda: derate(4e12), _at_once(218, 90), contention=True),
    Golden("12 derate, C = 3e12", lambda: derate(3e12), _at_once(230, 120), contention=True),
    Golden("13 copy lane", copy_lane, ((0, 0, 0, 0, 60), (10, 10, 80, 80, 120), (20, 20, 60, 60, 80))),
    Golden("14 clusters", clusters, ((0, 0, 0, 0, 200), (0, 0, 100, 100, 160))),
    Golden(
        "15 deadlock",
        deadlock,
        ((0, 0, 0, NEVER, NEVER), (0, 0, NEVER, NEVER, NEVER), (0, 0, 0, NEVER, NEVER), (0, 0, NEVER, NEVER, NEVER)),
    ),
)


def oldest_contender_first() -> Program:
    """Task 3 is eligible at 0, task 2, issued before it, at 60."""
    b = Builder(1)
    b.B(1, 100, 1)
    b.F(1, 60, 0)
    b.B(1, 10, 1)
    b.B(1, 10, 1)
    b.e(1, 1, 2, -1)
    return b.freeze()


def gate_of_the_second_member() -> Program:
    """Both wait for it with chunk 1, and both give back their SM."""
    b = Builder(1, 1)
    b.F(2, 10, 1, group=7)
    b.F(2, 10, 1, group=7, pool=1)
    b.F(1, 35, 0)
    b.B(1, 5, 1, pool=1)
    b.e(2, 1, 1, 1)
    return b.freeze()


def derate_by_the_second_member() -> Program:
    """Only that one has an SM, so only its pool is slowed: 80 of 100 are done at 100, the rest at full speed."""
    b = Builder(2, 2, derate=0.8)
    b.F(1, 100, 0, group=0, pool=1)
    b.F(1, 100, 1, group=0)
    b.B(1, 100, 1)
    b.B(1, 100, 1, pool=1)
    return b.freeze()


def demand_over_the_chunk_time() -> Program:
    """The group asks 1.5e12, not 2e12, so all move at 3 / 3.5: 1166.7 ps, rounded up."""
    b = Builder(1)
    r = b.add_resource(3e12)
    b.F(1, 1000, 0, group=0, demands={r: 1000.0})
    b.F(1, 500, 0, group=0, demands={r: 500.0})
    b.F(1, 1000, 0, demands={r: 2000.0})
    return b.freeze()


def demand_times_1e12_first() -> Program:
    """A unit so long that the bit between d * 1e12 / T and d * (1e12 / T) moves an end."""
    b = Builder(1)
    r = b.add_resource(1e12)
    b.F(1, 56463756756211, 0, demands={r: 56463756756211.0}, weight=2.0)
    b.F(1, 56463756756211, 0, demands={r: 50817381080590.0})
    return b.freeze()


def equal_speed_touches_nothing() -> Program:
    """Task 2 asks for nothing: its end must not have the rest of the others reckoned anew."""
    b = Builder(1)
    r = b.add_resource(1e12)
    b.F(1, 34738793090835, 0, demands={r: 24317155163584.0})
    b.F(1, 49158832138705, 1, demands={r: 29495299283223.0})
    b.F(1, 44638365023910, 0)
    return b.freeze()


def _named(build: Callable[[], Program], rows: Rows) -> Golden:
    return Golden(build.__name__.replace("_", " "), build, rows, contention=True)


RULES = (
    _named(
        oldest_contender_first,
        ((0, 0, 0, 0, 100), (0, 0, 0, 0, 60), (0, 60, 110, 110, 120), (0, 0, 100, 100, 110)),
    ),
    _named(
        gate_of_the_second_member,
        ((0, 0, 0, 0, 45), (0, 0, 0, 0, 45), (0, 0, 0, 0, 35), (0, 0, 45, 45, 50)),
    ),
    _named(derate_by_the_second_member, _at_once(100, 100, 120, 100)),
    _named(demand_over_the_chunk_time, _at_once(1167, 1167, 1167)),
    _named(demand_times_1e12_first, _at_once(81872447296507, 110104325674613)),
    _named(equal_speed_touches_nothing, _at_once(45160431018085, 59580470065955, 44638365023910)),
)
"""Single rules that neither the fifteen nor the directed programs of the other files would see broken."""


def instants(timeline: Timeline) -> Rows:
    """Return the five instants of every task as section 5 writes them."""
    columns = (timeline.t_issued, timeline.t_eligible, timeline.t_resident, timeline.t_start, timeline.t_end)
    return tuple(tuple(row) for row in np.stack(columns, axis=1).tolist())

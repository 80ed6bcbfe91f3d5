"""Section 3.5: who shares what, caps and derates."""

from __future__ import annotations

from tests.engine.directed import Directed, Make, all_at
from tests.engine.golden import Builder


def alone_nobody_is_slowed() -> Directed:
    """Each wants ten times its resource, alone; asks are capped at C, and a FLOW without SMs derates nobody."""
    b = Builder(4, derate=0.5)
    r, s = b.add_resource(1e12), b.add_resource(1e12)
    b.B(4, 100, 4, demands={r: 1000.0})
    b.F(1, 100, 0, demands={s: 1000.0})
    return Directed(b.freeze(), [100, 100])


def ask_is_capped_at_capacity() -> Directed:
    """Full demands 5 C and C: both ask C, so both move at 1/2."""
    b = Builder(1)
    r = b.add_resource(1e12)
    b.F(1, 100, 0, demands={r: 500.0})
    b.F(1, 100, 0, demands={r: 100.0})
    return Directed(b.freeze(), [200, 200])


def infinite_resource_slows_nobody() -> Directed:
    """As before, on a resource without limit."""
    b = Builder(1)
    r = b.add_resource(float("inf"))
    b.F(1, 100, 0, demands={r: 500.0})
    b.F(1, 100, 0, demands={r: 100.0})
    return Directed(b.freeze(), [100, 100])


def end_is_rounded_up() -> Directed:
    """Asks 1 and 0.4 of C: x = 1 / 1.4; 99 / x = 138.6: both end at 139."""
    b = Builder(1)
    r = b.add_resource(1e12)
    b.F(1, 99, 0, demands={r: 99.0})
    b.F(1, 99, 0, demands={r: 39.6})
    return Directed(b.freeze(), [139, 139])


def spinning_units_ask_for_nothing() -> Directed:
    """Four CTAs of C/4 each, two of them behind a gate that opens at 300.

    Task 1 runs 2 units: it asks C/2, task 2 asks C: x = 2/3, all end at 150 (100 / (2/3)).  The
    other two run alone, 300-400.
    """
    b = Builder(4)
    r = b.add_resource(1e12)
    b.F(1, 300, 0)
    b.B(4, 100, 4, demands={r: 25.0})
    b.F(1, 100, 0, demands={r: 100.0})
    b.e(0, 1, 1, 2)
    return Directed(b.freeze(), [300, 400, 150], speeds={1: 1 / 1.5, 2: 1 / 1.5})


def ask_follows_the_units_running() -> Directed:
    """Waves of 2 and 1 CTAs, C/2 each, beside a flow that asks C/2.

    0: asks C and C/2: x = 2/3; the wave ends at 150, the flow has 300 - 100 left.  150: asks C/2 and
    C/2 fit: the last CTA ends at 250, the flow at 350.
    """
    b = Builder(2)
    r = b.add_resource(1e12)
    b.B(3, 100, 2, demands={r: 50.0})
    b.F(1, 300, 0, demands={r: 150.0})
    return Directed(b.freeze(), [250, 350])


def weights_share() -> Directed:
    """Both ask C, weights 2 and 1: x = 2/3 and 1/3.  The first ends at 450; the other has 150 left: 600."""
    b = Builder(1)
    r = b.add_resource(1e12)
    b.F(1, 300, 0, demands={r: 300.0}, weight=2.0)
    b.F(1, 300, 0, demands={r: 300.0})
    return Directed(b.freeze(), [450, 600])


def weight_for_equal_rates() -> Directed:
    """Full demands C and 0.8 C, weight = C / full: each moves C/2, so x = 0.5 and 0.625.

    The second ends at 160; the first has 100 - 80 left: 180.
    """
    b = Builder(1)
    r = b.add_resource(1e12)
    b.F(1, 100, 0, demands={r: 100.0})
    b.F(1, 100, 0, demands={r: 80.0}, weight=1.25)
    return Directed(b.freeze(), [180, 160], speeds={0: 0.5, 1: 0.625})


def rounds_of_bottlenecks() -> Directed:
    """Four flows in a chain, each asks 1e12; r0, r1, r2 have 1, 1.25 and 1.6 times that, two flows each.

    Round 1: lam 0.5, 0.625, 0.8: flows 0, 1 settle at 0.5.  Round 2: lam of r1 is (1.25 - 0.5) / 1 =
    0.75, of r2 0.8: flow 2 settles at 0.75.  Round 3: (1.6 - 0.75) / 1 = 0.85.  Units of 50, 50, 75
    and 85 ps all end at 100.
    """
    b = Builder(1)
    r = [b.add_resource(capacity) for capacity in (1e12, 1.25e12, 1.6e12)]
    b.F(1, 50, 0, demands={r[0]: 50.0})
    b.F(1, 50, 0, demands={r[0]: 50.0, r[1]: 50.0})
    b.F(1, 75, 0, demands={r[1]: 75.0, r[2]: 75.0})
    b.F(1, 85, 0, demands={r[2]: 85.0})
    return Directed(b.freeze(), [100] * 4, speeds={0: 0.5, 1: 0.5, 2: 0.75, 3: 0.85})


def group_asks_at_the_pace_of_its_chunk() -> Directed:
    """Member 1 alone would ask 2e12, but its chunk takes 200, not 100: it asks 1e12, as task 2 does; C is 1.5e12.

    x = 0.75.  Task 2 (120 ps) ends at 160; the group has 200 - 120 left: 240.
    """
    b = Builder(1)
    r = b.add_resource(1.5e12)
    b.F(1, 200, 0, group=0)
    b.F(1, 100, 0, group=0, demands={r: 200.0})
    b.F(1, 120, 0, demands={r: 120.0})
    return Directed(b.freeze(), [240, 240, 160], speeds={0: 0.75, 2: 0.75})


def derate_while_sms_move() -> Directed:
    """A speed cap of 0.5 on kernels, while a moving group holds SMs of the same pool.

    Flow 1 is resident from 0 but waits for flow 2 (no SM) until 40, then moves 40-100.  Kernel 0: 40 at
    full speed, 60 at half (30 done), 30 left: 130; its second unit runs at full speed to 230, although
    group 3, 4 moves 130-180: in pool 0 that has no SM.  In pool 1 it has one: kernel 5 does 25 until
    180 and ends at 255.
    """
    b = Builder(4, 2, derate=0.5)
    b.B(2, 100, 1)
    b.F(1, 60, 1)
    b.F(1, 40, 0)
    b.F(1, 50, 1, group=1, pool=1, host=1, launch_ps=130)
    b.F(1, 50, 0, group=1, host=1)
    b.B(1, 100, 1, pool=1, host=2, launch_ps=130)
    b.e(2, 1, 1, 0)
    return Directed(b.freeze(), [230, (0, 0, 0, 40, 100), 40, all_at(130, 180), all_at(130, 180), all_at(130, 255)])


def derate_pauses_between_chunks() -> Directed:
    """Chunks 0-40 and 100-140 (a gate between): the kernel has done 20 at 40, 80 at 100, 100 at 140: ends 240."""
    b = Builder(2, derate=0.5)
    b.B(1, 200, 1)
    b.F(2, 40, 1)
    b.F(1, 100, 0)
    b.e(2, 1, 1, 1)
    return Directed(b.freeze(), [240, 140, 100])


def without_contention_no_derate_and_no_limit() -> Directed:
    """Off = capacities inf, derates 1: everything at its cost."""
    b = Builder(2, derate=0.5)
    r = b.add_resource(1e9)
    b.B(1, 200, 1, demands={r: 200.0})
    b.F(2, 40, 1, demands={r: 200.0})
    return Directed(b.freeze(), [200, 80], contention=False)


def slowest_speed() -> Directed:
    """Both ask C; weights 1 and 2^-20: lam = 1 / (1 + 2^-20).  The second would get 2^-20 of it; the floor is 2^-16.

    Its 1 ps ends at 65536.  The first has done 65536 / (1 + 2^-20) = 65535.94 by then, so 100000 ps end at 100001.
    """
    b = Builder(1)
    r = b.add_resource(1e12)
    b.F(1, 100000, 0, demands={r: 100000.0})
    b.F(1, 1, 0, demands={r: 1.0}, weight=2.0**-20)
    return Directed(b.freeze(), [100001, 65536], speeds={1: 2.0**-16})


CASES: tuple[Make, ...] = (
    alone_nobody_is_slowed,
    ask_is_capped_at_capacity,
    infinite_resource_slows_nobody,
    end_is_rounded_up,
    spinning_units_ask_for_nothing,
    ask_follows_the_units_running,
    weights_share,
    weight_for_equal_rates,
    rounds_of_bottlenecks,
    group_asks_at_the_pace_of_its_chunk,
    derate_while_sms_move,
    derate_pauses_between_chunks,
    without_contention_no_derate_and_no_limit,
    slowest_speed,
)

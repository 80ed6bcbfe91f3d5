"""Sections 3.3 and 3.4: persistent kernels, groups, gates, progress."""

from __future__ import annotations

from tests.engine.directed import Directed, Make
from tests.engine.golden import Builder


def late_persistent_workers() -> Directed:
    """Four CTAs of two units each, two of which get their SM when the flow ends at 150.

    Units end: 0, 1 at 100; 4, 5 at 200; 2, 3 at 250; 6, 7 at 350.  So the prefix is 2 from 100, 6 from
    250, 8 from 350 (at 200 four units are finished, yet the prefix is 2).  Flows 2 to 5 wait for 2, 3, 6
    and 7 units; flow 6 for 5 units and 10 ps: unit 4 ended at 200, but the prefix of 5 only at 250.
    """
    b = Builder(4)
    b.F(1, 150, 2)
    b.B(8, 100, 4, persistent=True)
    for _ in range(5):
        b.F(1, 10, 0)
    for flow, units in ((2, 2), (3, 3), (4, 6), (5, 7)):
        b.e(1, units, flow, -1)
    b.e(1, 5, 6, -1, lag=10)
    rows = [
        150,
        350,
        (0, 100, 100, 100, 110),
        (0, 250, 250, 250, 260),
        (0, 250, 250, 250, 260),
        (0, 350, 350, 350, 360),
        (0, 260, 260, 260, 270),
    ]
    return Directed(b.freeze(), rows)


def late_worker_follows_an_early_one() -> Directed:
    """The second CTA gets the SM on which the first has done units 0 and 2 (0-200): units 1 and 3 at 200-400.

    Prefix: 1 at 100, still 1 at 200, 3 at 300, 4 at 400; the flow waits for 2 units.
    """
    b = Builder(2)
    b.F(1, 500, 1)
    b.B(4, 100, 2, persistent=True)
    b.F(1, 10, 0)
    b.e(1, 2, 2, -1)
    return Directed(b.freeze(), [500, 400, (0, 300, 300, 300, 310)])


def late_worker_of_many_rounds() -> Directed:
    """CTA 0 does 0, 2, 4 until 300, CTA 1 from 150: 1, 3, 5 until 250, 350, 450.

    Prefix: 1 at 100 and still at 200, 3 at 250 and still at 300, 5 at 350, 6 at 450; flows wait for 2, 4, 6 units.
    """
    b = Builder(2)
    b.F(1, 150, 1)
    b.B(6, 100, 2, persistent=True)
    for flow, units in ((2, 2), (3, 4), (4, 6)):
        b.F(1, 10, 0)
        b.e(1, units, flow, -1)
    return Directed(b.freeze(), [150, 450, (0, 250, 250, 250, 260), (0, 350, 350, 350, 360), (0, 450, 450, 450, 460)])


def workers_spin_in_different_rounds() -> Directed:
    """As before, with a gate at unit 3 until 500: CTA 0 spins at unit 4 from 200, CTA 1 at unit 3 from 250.

    3 and 4: 500-600; 5: 600-700.  Prefix 3 at 250, 5 at 600; the flow waits for 4 units.
    """
    b = Builder(2)
    b.F(1, 150, 1)
    b.B(6, 100, 2, persistent=True)
    b.F(1, 500, 0)
    b.F(1, 10, 0)
    b.e(2, 1, 1, 3)
    b.e(1, 4, 3, -1)
    return Directed(b.freeze(), [150, 700, 500, (0, 600, 600, 600, 610)])


def late_worker_retires_between_units_of_another() -> Directed:
    """CTA 0 does units 0 and 2 (0-200), CTA 1 unit 1 (50-150): its SM is free at 150, for task 2."""
    b = Builder(2)
    b.F(1, 50, 1)
    b.B(3, 100, 2, persistent=True)
    b.B(1, 10, 1)
    return Directed(b.freeze(), [50, 200, (0, 0, 150, 150, 160)])


def end_is_the_last_to_finish() -> Directed:
    """CTA 0 does units 0, 2, 4 (0-300), CTA 1 gets its SM then: 1 and 3 (300-500).  Unit 4 is not the last to end."""
    b = Builder(2)
    b.F(1, 350, 1)
    b.B(5, 100, 2, persistent=True)
    return Directed(b.freeze(), [350, 500])


def persistent_workers_retire_apart() -> Directed:
    """7 units on 3 CTAs: two have two units and free their SMs at 200, for task 1; the first goes on to 300."""
    b = Builder(3)
    b.B(7, 100, 3, persistent=True)
    b.B(2, 40, 2)
    return Directed(b.freeze(), [300, (0, 0, 200, 200, 240)])


def persistent_takes_no_more_than_its_units() -> Directed:
    """W = min(sm, units) = 2 of the 4 SMs; the rest is task 1's."""
    b = Builder(4)
    b.B(2, 100, 4, persistent=True)
    b.B(2, 100, 2)
    return Directed(b.freeze(), [100, 100])


def small_persistent_needs_no_full_cluster() -> Directed:
    """Two units want W = 2 CTAs, all of them, so they are not rounded down to clusters of four; 3 SMs are free."""
    b = Builder(5)
    b.F(1, 50, 2)
    b.B(2, 100, 4, sm_quantum=4, persistent=True)
    return Directed(b.freeze(), [50, 100])


def persistent_clusters() -> Directed:
    """One SM is free, a cluster is two: none until 60.  Then two CTAs of two units, 60-260."""
    b = Builder(3)
    b.F(1, 60, 2)
    b.B(4, 100, 2, sm_quantum=2, persistent=True)
    return Directed(b.freeze(), [60, (0, 0, 60, 60, 260)])


def resident_member_holds_its_sm() -> Directed:
    """Member 0 spins on its SM from 0; member 2 comes at 200; chunk = max(100, 80); kernel 3 waits until 300."""
    b = Builder(1, 1)
    late = b.add_stream()
    b.F(1, 100, 1, group=0)
    b.B(1, 200, 1, stream=late, pool=1)
    b.F(1, 80, 1, stream=late, pool=1, group=0)
    b.B(1, 10, 1)
    return Directed(b.freeze(), [(0, 0, 0, 200, 300), 200, (0, 200, 200, 200, 300), (0, 0, 300, 300, 310)])


def slowest_member_sets_the_pace() -> Directed:
    """Two chunks of max(30, 70, 50)."""
    b = Builder(1, 1, 1)
    for pool, unit_ps in enumerate((30, 70, 50)):
        b.F(2, unit_ps, 1, pool=pool, group=4)
    return Directed(b.freeze(), [140, 140, 140])


def flow_holds_its_sm_at_a_gate() -> Directed:
    """Chunk 0 is 0-50; chunk 1 waits for task 1 until 200 on its SM, so kernel 2 gets it at 250."""
    b = Builder(1, 1)
    b.F(2, 50, 1)
    b.B(1, 200, 1, pool=1)
    b.B(1, 10, 1)
    b.e(1, 1, 0, 1)
    return Directed(b.freeze(), [250, 200, (0, 0, 250, 250, 260)])


def gate_closes_later_units_too() -> Directed:
    """The gate at unit 1 (open at 200) also holds 2 and 3, on their SMs; unit 0 frees its SM at 30 for task 2."""
    b = Builder(4)
    b.F(2, 100, 0)
    b.B(4, 30, 4)
    b.B(1, 10, 1)
    b.e(0, 2, 1, 1)
    return Directed(b.freeze(), [200, 230, (0, 0, 30, 30, 40)])


def persistent_workers_at_gates() -> Directed:
    """CTAs do 0, 2, 4 and 1, 3, 5.  Gates: unit 2 at 100, unit 5 at 300.

    0, 1: 0-30.  2, 3: 100-130.  4: 130-160, then its SM goes to task 2.  5: 300-330.
    """
    b = Builder(2)
    b.F(3, 100, 0)
    b.B(6, 30, 2, persistent=True)
    b.B(1, 20, 1)
    b.e(0, 1, 1, 2)
    b.e(0, 3, 1, 5)
    return Directed(b.freeze(), [300, 330, (0, 0, 160, 160, 180)])


def gates_open_in_any_order() -> Directed:
    """Unit 0 has gates that open at 100 and at 40, in that order of edges, unit 1 one that opens at 40: all at 100."""
    b = Builder(2)
    b.F(1, 100, 0)
    b.F(1, 40, 0)
    b.B(2, 10, 2)
    b.e(0, 1, 2, 0)
    b.e(1, 1, 2, 0)
    b.e(1, 1, 2, 1)
    return Directed(b.freeze(), [100, 40, (0, 0, 0, 100, 110)])


def group_waits_for_gates_of_all_members() -> Directed:
    """Chunk 0: 0-50.  Chunk 1 waits for member 0's gate: 120-170.  Chunk 2 for member 1's: 200-250.

    Flow 4 follows two chunks of member 1: 170.
    """
    b = Builder(1, 1)
    b.F(3, 50, 0, group=0)
    b.F(3, 50, 0, group=0, pool=1)
    b.B(1, 120, 1)
    b.B(1, 200, 1, pool=1)
    b.F(1, 10, 0)
    b.e(2, 1, 0, 1)
    b.e(3, 1, 1, 2)
    b.e(1, 2, 4, -1)
    return Directed(b.freeze(), [250, 250, 120, 200, (0, 170, 170, 170, 180)])


def gate_of_the_other_member_at_chunk_0() -> Directed:
    """Both are resident at 0; member 1's gate opens at 40 + lag 2: start 42 for both."""
    b = Builder(1, 1)
    b.F(1, 50, 1, group=0)
    b.F(1, 50, 1, group=0, pool=1)
    b.F(1, 40, 0)
    b.e(2, 1, 1, 0, lag=2)
    return Directed(b.freeze(), [(0, 0, 0, 42, 92), (0, 0, 0, 42, 92), 40])


def task_gates_itself() -> Directed:
    """Units 0 to 2 end at 100; unit 3 waits for the first two and 7 ps: 107-207."""
    b = Builder(4)
    b.B(4, 100, 4)
    b.e(0, 2, 0, 3, lag=7)
    return Directed(b.freeze(), [207])


CASES: tuple[Make, ...] = (
    late_persistent_workers,
    late_worker_follows_an_early_one,
    late_worker_of_many_rounds,
    workers_spin_in_different_rounds,
    late_worker_retires_between_units_of_another,
    end_is_the_last_to_finish,
    persistent_workers_retire_apart,
    persistent_takes_no_more_than_its_units,
    small_persistent_needs_no_full_cluster,
    persistent_clusters,
    resident_member_holds_its_sm,
    slowest_member_sets_the_pace,
    flow_holds_its_sm_at_a_gate,
    gate_closes_later_units_too,
    persistent_workers_at_gates,
    gates_open_in_any_order,
    group_waits_for_gates_of_all_members,
    gate_of_the_other_member_at_chunk_0,
    task_gates_itself,
)

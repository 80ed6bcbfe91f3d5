"""Sections 3.1 to 3.3 and 3.7: life of a task, one instant, who gets SMs, deadlock."""

from __future__ import annotations

from tests.engine.directed import NEVER, Directed, Make, all_at
from tests.engine.golden import Builder


def settle_before_grant() -> Directed:
    """At 100 the one SM comes free, and a chain opens: task 0 ends -> HOST of 0 ps -> HOST of 0 ps -> launch.

    All of it happens before the SM is granted, so the kernel at its end (3, priority 9) takes it,
    not kernel 4 that has waited since 0.
    """
    b = Builder(1)
    b.B(1, 100, 1)
    b.add_host(unit_ps=0, host=1)
    b.add_host(unit_ps=0, host=1)
    b.B(1, 10, 1, priority=9, host=1)
    b.B(1, 10, 1)
    b.e(0, 1, 1, -1)
    return Directed(
        b.freeze(), [100, (0, 100, 100, 100, 100), all_at(100, 100), all_at(100, 110), (0, 0, 110, 110, 120)]
    )


def lanes_are_serial_and_independent() -> Directed:
    """Lane 0: launch 30, HOST 20 (30-50), launch 5 -> issued 55.  Lane 1: launches 10 and 10 -> issued 10, 20."""
    b = Builder(8)
    b.B(1, 5, 1, launch_ps=30)
    b.B(1, 5, 1, launch_ps=10, host=1)
    b.B(1, 5, 1, launch_ps=10, host=1)
    b.add_host(unit_ps=20)
    b.B(1, 5, 1, launch_ps=5)
    return Directed(b.freeze(), [all_at(30, 35), all_at(10, 15), all_at(20, 25), all_at(30, 50), all_at(55, 60)])


def head_leaves_queue_when_eligible() -> Directed:
    """Tasks 1 and 2 share a queue.  1 is eligible at 0 and leaves the queue, though it waits for the SM until 100."""
    b = Builder(1)
    first, second = (b.add_stream(queue=3) for _ in range(2))
    b.B(1, 100, 1)
    b.B(1, 50, 1, stream=first)
    b.F(1, 10, 0, stream=second)
    return Directed(b.freeze(), [100, (0, 0, 100, 100, 150), 10])


def head_waits_for_its_stream() -> Directed:
    """One queue, two streams: task 1 waits for task 0 of its stream until 100, and task 2 is behind it."""
    b = Builder(4)
    first, second = (b.add_stream(queue=3) for _ in range(2))
    b.B(1, 100, 1, stream=first)
    b.B(1, 20, 1, stream=first)
    b.B(1, 30, 1, stream=second)
    return Directed(b.freeze(), [100, (0, 100, 100, 100, 120), (0, 100, 100, 100, 130)])


def waits_and_lags() -> Directed:
    """Task 0 has 1 or 2 units after 100 and 3 or 4 after 200.

    Edges: one unit + 30 = 130; three units + 30 = 230; the later of one unit + 150 = 250 and four units + 30 = 230.
    """
    b = Builder(2)
    b.B(4, 100, 2)
    for _ in range(3):
        b.F(1, 10, 0)
    b.e(0, 1, 1, -1, lag=30)
    b.e(0, 3, 2, -1, lag=30)
    b.e(0, 1, 3, -1, lag=150)
    b.e(0, 4, 3, -1, lag=30)
    return Directed(b.freeze(), [200, (0, 130, 130, 130, 140), (0, 230, 230, 230, 240), (0, 250, 250, 250, 260)])


def wait_on_a_host_task() -> Directed:
    """HOST 0-50, lag 5: the other lane's kernel is issued at 0, eligible at 55; a lag end alone is an instant."""
    b = Builder(1)
    b.add_host(unit_ps=50)
    b.B(1, 10, 1, host=1)
    b.e(0, 1, 1, -1, lag=5)
    return Directed(b.freeze(), [50, (0, 55, 55, 55, 65)])


def order_of_contenders() -> Directed:
    """One SM, held until 100.  Then (-priority, time eligible, index), 10 ps each: 4, then 2, 3, 1, then 5."""
    b = Builder(1)
    b.B(1, 100, 1)
    b.B(1, 10, 1, host=1, launch_ps=20)
    b.B(1, 10, 1, host=2, launch_ps=10)
    b.B(1, 10, 1, host=3, launch_ps=10)
    b.B(1, 10, 1, host=4, launch_ps=50, priority=1)
    b.B(1, 10, 1, priority=-1)
    rows = [
        100,
        (20, 20, 130, 130, 140),
        (10, 10, 110, 110, 120),
        (10, 10, 120, 120, 130),
        (50, 50, 100, 100, 110),
        (0, 0, 140, 140, 150),
    ]
    return Directed(b.freeze(), rows)


def stalled_flow_collects_sms() -> Directed:
    """A collective short of SMs beside kernels of one SM.

    At 10 task 2 (priority 5) wants both SMs and closes the pool.  At 30 one comes free and stays
    free: 1 and 3 are behind it; task 4 needs no SM and starts at 40.  At 100 the second comes free:
    2 runs 100-150.  Then 1 goes on (150-250-350) and 3 gets the other SM for 5 * 20.
    """
    b = Builder(2)
    b.B(1, 30, 1)
    b.B(3, 100, 1)
    b.F(1, 50, 2, host=1, launch_ps=10, priority=5)
    b.B(5, 20, 1)
    b.F(1, 10, 0, host=2, launch_ps=40)
    return Directed(
        b.freeze(),
        [30, 350, (10, 10, 100, 100, 150), (0, 0, 150, 150, 250), all_at(40, 50)],
    )


def stalled_flow_waits_for_those_before_it() -> Directed:
    """Task 0 is asked first and keeps two SMs for its three waves, until 300; then 1 takes all four, 2 comes last."""
    b = Builder(4)
    b.B(6, 100, 2)
    b.F(1, 50, 4)
    b.B(2, 30, 1)
    b.F(1, 10, 0)
    return Directed(b.freeze(), [300, (0, 0, 300, 300, 350), (0, 0, 350, 350, 410), 10])


def stalled_flow_closes_its_own_pool_only() -> Directed:
    """Task 1 lacks an SM, so task 2, which would fit, waits behind it; task 3 has a pool of its own."""
    b = Builder(3, 1)
    b.F(1, 100, 2)
    b.F(1, 50, 2)
    b.F(1, 30, 1)
    b.F(1, 30, 1, pool=1)
    return Directed(b.freeze(), [100, (0, 0, 100, 100, 150), (0, 0, 100, 100, 130), 30])


def blocks_do_not_close_the_pool() -> Directed:
    """Clusters of two on five SMs.

    0: the flow takes 2; task 1 may take 2 of the 3 left (3 is rounded down); task 2 takes the last.
    20: one SM is free, task 1 cannot use it.  50: 3 free, it wants 3, may hold 2 more: 2 CTAs.
    100: its last CTA is all it wants, so no rounding: ends 200.
    """
    b = Builder(5)
    b.F(1, 50, 2)
    b.B(5, 100, 4, sm_quantum=2)
    b.B(1, 20, 1)
    return Directed(b.freeze(), [50, 200, 20])


def reserved_sms_stay_free() -> Directed:
    """Task 0 may hold 2 of 4 SMs however many are free: 3 waves; task 1 has the other two."""
    b = Builder(4)
    b.B(6, 100, 2)
    b.B(2, 100, 2)
    return Directed(b.freeze(), [300, 100])


def deadlock_at_a_gate() -> Directed:
    """Units 0, 1 end; 2, 3 spin on both SMs for task 1, which waits for all of task 0.

    The HOST task waits for task 1, so the lane never issues task 3.
    """
    b = Builder(2)
    b.B(4, 10, 2)
    b.F(1, 5, 0)
    b.add_host(unit_ps=1)
    b.B(1, 10, 1)
    b.e(0, 4, 1, -1)
    b.e(1, 1, 0, 2)
    b.e(1, 1, 2, -1)
    never = (NEVER,) * 5
    rows = [(0, 0, 0, 0, NEVER), (0, *never[1:]), (0, *never[1:]), never]
    return Directed(b.freeze(), rows, progress=[2, 0, 0, 0], held_sm=[2, 0, 0, 0])


def deadlock_of_a_half_finished_flow() -> Directed:
    """Chunk 0 of both members ends at 20, chunk 1 waits for a task behind them; the copy engine stays held."""
    b = Builder(3, 1)
    s = b.add_stream()
    b.F(2, 20, 2, group=0, stream=s)
    b.F(2, 20, 1, group=0, pool=1)
    b.B(3, 5, 3, stream=s)
    b.e(2, 1, 1, 1)
    rows = [(0, 0, 0, 0, NEVER), (0, 0, 0, 0, NEVER), (0, NEVER, NEVER, NEVER, NEVER)]
    return Directed(b.freeze(), rows, progress=[1, 1, 0], held_sm=[2, 1, 0])


CASES: tuple[Make, ...] = (
    settle_before_grant,
    lanes_are_serial_and_independent,
    head_leaves_queue_when_eligible,
    head_waits_for_its_stream,
    waits_and_lags,
    wait_on_a_host_task,
    order_of_contenders,
    stalled_flow_collects_sms,
    stalled_flow_waits_for_those_before_it,
    stalled_flow_closes_its_own_pool_only,
    blocks_do_not_close_the_pool,
    reserved_sms_stay_free,
    deadlock_at_a_gate,
    deadlock_of_a_half_finished_flow,
)

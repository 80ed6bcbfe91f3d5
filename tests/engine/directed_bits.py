"""Sections 3.5 and 3.6 to the last bit: order of sums, ties, rounding.

Where one bit of a speed decides, units take 10^12 ps: at x = 1 - 2^-53 such a unit ends 1 ps late,
since 10^12 / x is above 10^12 and is rounded up.  Decimal fractions are the float64 nearest to them.
"""

from __future__ import annotations

from tests.engine.directed import T12, Directed, Make, all_at, flows
from tests.engine.golden import Builder


def same_speed_touches_nothing() -> Directed:
    """Three flows share one resource: x = 1/3, 10 ps end at 30.  At 2 a flow comes on another resource, with room.

    Reckoned anew at 2, remaining = 10 - 2/3, and 2 + ceil(remaining / x) would be 31.
    """
    b = Builder(1)
    r, other = b.add_resource(1e12), b.add_resource(1e12)
    for _ in range(3):
        b.F(1, 10, 0, demands={r: 10.0})
    b.F(1, 100, 0, host=1, launch_ps=2, demands={other: 50.0})
    return Directed(b.freeze(), [30, 30, 30, all_at(2, 102)])


def speeds_are_set_once_an_instant() -> Directed:
    """The flow asks C, the kernel C/2 with one unit after another: x = 2/3; 10 ps end at 15, 5 ps at 8 (7.5).

    At 8 a unit ends and the next starts; who runs after that instant ran before it, so no speed changes.
    Set between the two, the flow's speed would change twice, its remaining be rounded, and it end at 16.
    At 15 the kernel has 5 - 14/3 left: 16.
    """
    b = Builder(1)
    r = b.add_resource(1e12)
    b.F(1, 10, 0, demands={r: 10.0})
    b.B(2, 5, 1, demands={r: 2.5})
    return Directed(b.freeze(), [15, 16])


def nothing_left_still_takes_one_ps() -> Directed:
    """Two flows ask 0.5, C = 0.7: x = 0.7, and 21 / 0.7 is 30.000000000000004 in float64: the end is 31.

    At 30 a third flow comes and speeds change; 21 - 0.7 * 30 = 0.0 remains, and a unit ends only by its
    scheduled end, at least 1 ps away: 31.  The third does 0.7 / 1.5 in that 1 ps, then 9.53 alone: 41.
    """
    b = Builder(1)
    r = b.add_resource(0.7e12)
    b.F(1, 21, 0, demands={r: 10.5})
    b.F(1, 21, 0, demands={r: 10.5})
    b.F(1, 10, 0, demands={r: 5.0}, host=1, launch_ps=30)
    return Directed(b.freeze(), [31, 31, all_at(30, 41)], speeds={0: 0.7})


def overload_is_summed_in_order() -> Directed:
    """0.1 + 0.2 + 0.3 = 0.6000000000000001 > 0.6 = C: x = 0.9999999999999998, all end 1 ps late."""
    b = Builder(1)
    flows(b, b.add_resource(0.6), [0.1, 0.2, 0.3])
    return Directed(b.freeze(), [T12 + 1] * 3, speeds={0: 0.9999999999999998})


def overload_is_summed_in_order_and_fits() -> Directed:
    """0.3 + 0.2 + 0.1 = 0.6 = C: not overloaded."""
    b = Builder(1)
    flows(b, b.add_resource(0.6), [0.3, 0.2, 0.1])
    return Directed(b.freeze(), [T12] * 3, speeds={0: 1.0})


def group_is_summed_at_its_lowest_member() -> Directed:
    """0.1 is asked by member 0 of a group whose other member is task 3: first in the sum, so overloaded.

    At its highest member it would come last: 0.2 + 0.3 + 0.1 = 0.6.
    """
    b = Builder(1)
    r = b.add_resource(0.6)
    b.F(1, T12, 0, group=0, demands={r: 0.1})
    flows(b, r, [0.2, 0.3])
    b.F(1, T12, 0, group=0)
    return Directed(b.freeze(), [T12 + 1] * 4)


def group_sums_its_members_in_order() -> Directed:
    """Members ask 0.1 + 0.2 + 0.3 = 0.6000000000000001; with 0.3 that is above C = 0.9, so 1 ps late.

    In any order that begins with 0.3 it would be 0.6 + 0.3 = 0.8999999999999999, and fit.
    """
    b = Builder(1)
    r = b.add_resource(0.9)
    for demand in (0.1, 0.2, 0.3):
        b.F(1, T12, 0, group=0, demands={r: demand})
    flows(b, r, [0.3])
    return Directed(b.freeze(), [T12 + 1] * 4, speeds={0: 0.9 / (0.1 + 0.2 + 0.3 + 0.3)})


def slope_is_summed_in_order() -> Directed:
    """0.4 + 0.8 + 0.3 + 0.1 = 1.6000000000000003: lam = 0.8 / that = 0.49999999999999994, end 2 * 10^12 + 1.

    From the other end the sum is 1.6, lam 0.5.
    """
    b = Builder(1)
    flows(b, b.add_resource(0.8), [0.4, 0.8, 0.3, 0.1])
    return Directed(b.freeze(), [2 * T12 + 1] * 4, speeds={0: 0.49999999999999994})


def fixed_is_summed_in_order() -> Directed:
    """Asks 0.4, 0.1, 0.2, 0.4 of 0.9, weights 10, 10, 5, 1.

    Round 1: slope 6.4, lam 0.14: the weights of 10 (0.1 <= lam) settle at 1.  Round 2: lam = 0.4 / 1.4:
    the weight of 5 settles at 1.  Round 3: fixed = 0.4 + 0.1 + 0.2 = 0.7, lam = (0.9 - 0.7) / 0.4 =
    0.5000000000000001; from the other end fixed = 0.7000000000000001 and lam = 0.4999999999999999.
    So 5 * 10^11 ps end in time at 10^12, with the others.
    """
    b = Builder(1)
    r = b.add_resource(0.9)
    flows(b, r, [0.4, 0.1, 0.2], [10.0, 10.0, 5.0])
    b.F(1, T12 // 2, 0, demands={r: 0.2})
    return Directed(b.freeze(), [T12] * 4, speeds={0: 1.0, 1: 1.0, 2: 1.0, 3: 0.5000000000000001})


def demand_is_scaled_before_it_is_divided() -> Directed:
    """Units of 3 * 10^11 ps, demands 0.1 and 0.8: full = 0.1 * 10^12 / T + 0.8 * 10^12 / T = 1/3 + 8/3 = 3.0 = C.

    Divided first, 0.1 / T * 10^12 is 0.33333333333333337 and the sum above 3: 1 ps late.
    """
    b = Builder(1)
    r = b.add_resource(3.0)
    for demand in (0.1, 0.8):
        b.F(1, 3 * T12 // 10, 0, demands={r: demand})
    return Directed(b.freeze(), [3 * T12 // 10] * 2, speeds={0: 1.0, 1: 1.0})


def full_demand_is_not_overload() -> Directed:
    """0.1 + 0.6 = 0.7 = C exactly: nobody uses an overloaded resource, x = 1.

    Were it overloaded, the weight of 10 would settle at 1 and leave (0.7 - 0.6) / 0.1 =
    0.9999999999999998 for the other.
    """
    b = Builder(1)
    flows(b, b.add_resource(0.7), [0.1, 0.6], [1.0, 10.0])
    return Directed(b.freeze(), [T12, T12], speeds={0: 1.0, 1: 1.0})


def caps_count_in_the_overload() -> Directed:
    """A flow (0.7, weight 5) and a kernel (0.6, weight 10, cap 0.5) on C = 1: 0.7 + 0.3 is not above C.

    Without caps in that sum 1.3 would be; the kernel would settle at its cap and leave (1 - 0.3) / 0.7 =
    0.9999999999999999.  The kernel has half left when the flow ends and then runs at 1.
    """
    b = Builder(2, derate=0.5)
    r = b.add_resource(1.0)
    b.F(1, T12, 1, demands={r: 0.7}, weight=5.0)
    b.B(1, T12, 1, demands={r: 0.6}, weight=10.0)
    return Directed(b.freeze(), [T12, T12 + T12 // 2], speeds={0: 1.0, 1: 0.5})


def cap_over_weight_equal_to_lam() -> Directed:
    """Asks 1 and 0.9 of C = 1, weights 1 and 10: slope = 1 + 9, lam = 0.1 = cap / weight of the second.

    It settles at its cap, 1, alone.  Round 2: lam = 1 - 0.9 = 0.09999999999999998, so 10^11 ps of the
    first end 1 ps late.  If equal did not count, both would settle at lam * weight: 0.1 and 1, in time.
    """
    b = Builder(1)
    r = b.add_resource(1.0)
    b.F(1, T12 // 10, 0, demands={r: 0.1})
    b.F(1, T12, 0, demands={r: 0.9}, weight=10.0)
    return Directed(b.freeze(), [T12 + 1, T12], speeds={0: 0.09999999999999998, 1: 1.0})


def cap_is_divided_by_weight() -> Directed:
    """Asks 0.1 and 0.2 of C = 0.3, weights 49: 0.1 + 0.2 > 0.3, slope = 14.700000000000001.

    lam = 0.02040816326530612 = 1 / 49 in float64: both settle at 1.  lam * 49 is 0.9999999999999999,
    so to compare cap with lam * weight would not do, and nor would to settle at lam * weight.
    """
    b = Builder(1)
    flows(b, b.add_resource(0.3), [0.1, 0.2], [49.0, 49.0])
    return Directed(b.freeze(), [T12, T12], speeds={0: 1.0, 1: 1.0})


def equal_lam_settle_together() -> Directed:
    """Flow 0 uses r0, flow 1 r1, flow 2 (weight 3) both; each asks all of C = 0.5 and 0.1: lam = 1/4 on both.

    All settle at once: 0.25, 0.25, 0.75.  One resource after the other would leave flow 1
    (0.1 - 0.1 * 0.75) / 0.1 = 0.24999999999999994, and 1 ps late.
    """
    b = Builder(1)
    r0, r1 = b.add_resource(0.5), b.add_resource(0.1)
    b.F(1, T12 // 4, 0, demands={r0: 0.125})
    b.F(1, T12 // 4, 0, demands={r1: 0.025})
    b.F(1, 3 * T12 // 4, 0, demands={r0: 0.375, r1: 0.075}, weight=3.0)
    return Directed(b.freeze(), [T12] * 3, speeds={0: 0.25, 1: 0.25, 2: 0.75})


def equal_lam_on_the_last_resource() -> Directed:
    """Flows 0, 1 use r0 (0.3) and r1 (0.6), flow 2 r1, flow 3 r0, each to the full: lam = 0.33333333333333337 on both.

    All settle at once.  If r1 alone did, flow 3 would get 0.33333333333333326 and end 1 ps late.
    """
    b = Builder(1)
    r0, r1 = b.add_resource(0.3), b.add_resource(0.6)
    b.F(1, T12, 0, demands={r0: 0.3, r1: 0.6})
    b.F(1, T12, 0, demands={r0: 0.3, r1: 0.6})
    b.F(1, T12, 0, demands={r1: 0.6})
    b.F(1, T12, 0, demands={r0: 0.3})
    return Directed(b.freeze(), [3 * T12] * 4, speeds=dict.fromkeys(range(4), 0.33333333333333337))


CASES: tuple[Make, ...] = (
    same_speed_touches_nothing,
    speeds_are_set_once_an_instant,
    nothing_left_still_takes_one_ps,
    overload_is_summed_in_order,
    overload_is_summed_in_order_and_fits,
    group_is_summed_at_its_lowest_member,
    group_sums_its_members_in_order,
    slope_is_summed_in_order,
    fixed_is_summed_in_order,
    demand_is_scaled_before_it_is_divided,
    full_demand_is_not_overload,
    caps_count_in_the_overload,
    cap_over_weight_equal_to_lam,
    cap_is_divided_by_weight,
    equal_lam_settle_together,
    equal_lam_on_the_last_resource,
)

"""Weighted max-min sharing of scarce resources among the active runners (docs/program.md section 3.5).

Every sum runs over the runners by rising index, and a product is rounded
before it is added: the bits of the result are part of the contract.  Sums of
a resource are kept until one of its users settles, which changes no bit.
"""

from __future__ import annotations

import math

from overlapsim.engine import kernel_layout as at
from overlapsim.jit import inlined
from overlapsim.schedule.program import Float, Int


@inlined
def share(
    task: Int, runner: Int, pool: Int, rate: Float, ask: Int, demand: Float, usage: Int, resource: Float,
    active: Int, open_runners: Int, scarce: Int, var: Int,
) -> None:  # fmt: skip
    """Set NEW_SPEED of all active runners."""
    _load(task, runner, pool, rate, ask, demand, usage, resource, active, scarce, var)
    bound = _open(rate, ask, usage, open_runners, scarce, var)
    num_open = var[at.NUM_OPEN]
    while num_open > 0:
        lam = _least_lam(rate, ask, demand, usage, resource, scarce, var)
        settled = 0
        if bound <= lam:
            settled = _settle_capped(runner, rate, ask, usage, open_runners, var, lam)
        if settled == 0:
            settled = _settle_limited(runner, rate, ask, usage, resource, scarce, var, lam)
        num_open -= settled


@inlined
def _load(
    task: Int, runner: Int, pool: Int, rate: Float, ask: Int, demand: Float, usage: Int, resource: Float,
    active: Int, scarce: Int, var: Int,
) -> None:  # fmt: skip
    """Compute caps and asks, chain the users of each resource, and list the overloaded resources."""
    var[at.NUM_SHARINGS] += 1
    var[at.NUM_SCARCE] = 0
    for j in range(var[at.NUM_ACTIVE]):
        k = active[j]
        cap = 1.0
        if rate[k, at.DERATE] < 1.0 and pool[task[runner[k, at.LEAD], at.POOL], at.MOVING] > 0:
            cap = rate[k, at.DERATE]
        rate[k, at.CAP] = cap
        rate[k, at.NEW_SPEED] = cap
        many = float(runner[k, at.RUNNING])
        for d in range(runner[k, at.ASK], runner[k, at.ASK_END]):
            r = ask[d, at.RESOURCE]
            ask[d, at.NEXT_ASK] = at.NEVER
            demand[d, at.ASKED] = min(many * demand[d, at.FULL], resource[r, at.CAPACITY])
            if usage[r, at.SEEN] != var[at.NUM_SHARINGS]:
                usage[r, at.SEEN] = var[at.NUM_SHARINGS]
                usage[r, at.STATE] = at.AMPLE
                usage[r, at.FIRST_ASK] = d
                resource[r, at.LOAD] = 0.0
            else:
                ask[usage[r, at.LAST_ASK], at.NEXT_ASK] = d
            usage[r, at.LAST_ASK] = d
            resource[r, at.LOAD] += demand[d, at.ASKED] * cap
            # Loads only grow, so what is overloaded now is overloaded at the end.
            if resource[r, at.LOAD] > resource[r, at.CAPACITY] and usage[r, at.STATE] == at.AMPLE:
                usage[r, at.STATE] = at.STALE
                scarce[var[at.NUM_SCARCE]] = r
                var[at.NUM_SCARCE] += 1


@inlined
def _open(rate: Float, ask: Int, usage: Int, open_runners: Int, scarce: Int, var: Int) -> float:
    """List the users of overloaded resources, the open runners; return their least cap / weight."""
    num_open = 0
    bound = math.inf
    for s in range(var[at.NUM_SCARCE]):
        d = usage[scarce[s], at.FIRST_ASK]
        while d != at.NEVER:
            k = ask[d, at.ASKER]
            if rate[k, at.NEW_SPEED] > 0.0:
                rate[k, at.NEW_SPEED] = -1.0
                rate[k, at.BOUND] = rate[k, at.CAP] / rate[k, at.WEIGHT]
                bound = min(bound, rate[k, at.BOUND])
                open_runners[num_open] = k
                num_open += 1
            d = ask[d, at.NEXT_ASK]
    var[at.NUM_OPEN] = num_open
    return bound


@inlined
def _least_lam(rate: Float, ask: Int, demand: Float, usage: Int, resource: Float, scarce: Int, var: Int) -> float:
    """Bring lam of the scarce resources up to date and return the least; drop those that no open runner uses."""
    least = math.inf
    num_scarce = 0
    for s in range(var[at.NUM_SCARCE]):
        r = scarce[s]
        if usage[r, at.STATE] == at.STALE:
            usage[r, at.STATE] = at.SCARCE
            fixed = 0.0
            slope = 0.0
            d = usage[r, at.FIRST_ASK]
            while d != at.NEVER:
                k = ask[d, at.ASKER]
                if rate[k, at.NEW_SPEED] < 0.0:
                    slope += demand[d, at.ASKED] * rate[k, at.WEIGHT]
                else:
                    fixed += demand[d, at.ASKED] * rate[k, at.NEW_SPEED]
                d = ask[d, at.NEXT_ASK]
            resource[r, at.LAM] = math.inf
            if slope > 0.0:
                resource[r, at.LAM] = max(0.0, resource[r, at.CAPACITY] - fixed) / slope
        if resource[r, at.LAM] < math.inf:
            least = min(least, resource[r, at.LAM])
            scarce[num_scarce] = r
            num_scarce += 1
    var[at.NUM_SCARCE] = num_scarce
    return least


@inlined
def _settle(runner: Int, rate: Float, ask: Int, usage: Int, k: int, speed: float) -> None:
    rate[k, at.NEW_SPEED] = speed
    for d in range(runner[k, at.ASK], runner[k, at.ASK_END]):
        r = ask[d, at.RESOURCE]
        if usage[r, at.STATE] == at.SCARCE:
            usage[r, at.STATE] = at.STALE


@inlined
def _settle_capped(runner: Int, rate: Float, ask: Int, usage: Int, open_runners: Int, var: Int, lam: float) -> int:
    """Settle the open runners whose cap comes before the least lam; return how many."""
    settled = 0
    for j in range(var[at.NUM_OPEN]):
        k = open_runners[j]
        if rate[k, at.NEW_SPEED] < 0.0 and rate[k, at.BOUND] <= lam:
            _settle(runner, rate, ask, usage, k, rate[k, at.CAP])
            settled += 1
    return settled


@inlined
def _settle_limited(
    runner: Int, rate: Float, ask: Int, usage: Int, resource: Float, scarce: Int, var: Int, lam: float
) -> int:
    """Settle the open runners that use a resource whose lam is the least; return how many."""
    settled = 0
    for s in range(var[at.NUM_SCARCE]):
        if resource[scarce[s], at.LAM] == lam:
            d = usage[scarce[s], at.FIRST_ASK]
            while d != at.NEVER:
                k = ask[d, at.ASKER]
                if rate[k, at.NEW_SPEED] < 0.0:
                    _settle(runner, rate, ask, usage, k, max(at.MIN_SPEED, lam * rate[k, at.WEIGHT]))
                    settled += 1
                d = ask[d, at.NEXT_ASK]
    return settled

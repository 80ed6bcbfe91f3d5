"""How runners share what they contend for: the fluid part of the readable engine, alone and pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

SLOWEST: Final = 2.0**-16
"""Least speed that contention sets (docs/program.md section 3.5)."""


def share(
    *,
    cap: Sequence[float],
    weight: Sequence[float],
    ask: Sequence[dict[int, float]],
    capacity: Sequence[float],
) -> list[float]:
    """Weighted max-min fair speeds of runners that share resources (docs/program.md section 3.5).

    Parameters
    ----------
    cap, weight : sequence of float, one per runner, runners by rising index
        Greatest speed, and share under contention.
    ask : sequence of dict, one per runner
        Resource -> units/s wanted at speed 1, not above its capacity.
    capacity : sequence of float
        Units/s of each resource.

    Returns
    -------
    list of float
        One speed per runner.  Every sum is a plain loop in runner order: the built-in ``sum``
        compensates rounding from Python 3.12 on, and the bits would differ from the other engine's.

    Examples
    --------
    >>> share(cap=[1.0, 1.0], weight=[1.0, 1.0], ask=[{0: 3.0}, {0: 3.0}], capacity=[4.0])
    [0.6666666666666666, 0.6666666666666666]
    """
    users: dict[int, list[int]] = {}
    for k, asks in enumerate(ask):
        for r in asks:
            users.setdefault(r, []).append(k)
    overloaded: dict[int, list[int]] = {}
    for r, ks in users.items():
        total = 0.0
        for k in ks:
            total += ask[k][r] * cap[k]
        if total > capacity[r]:
            overloaded[r] = ks
    x = list(cap)
    still_open = {k for ks in overloaded.values() for k in ks}
    while still_open:
        lam: dict[int, float] = {}
        for r, ks in overloaded.items():
            fixed = slope = 0.0
            for k in ks:
                if k in still_open:
                    slope += ask[k][r] * weight[k]
                else:
                    fixed += ask[k][r] * x[k]
            if slope > 0.0:
                lam[r] = max(0.0, capacity[r] - fixed) / slope
        least = min(lam.values(), default=math.inf)
        settling = {k for k in still_open if cap[k] / weight[k] <= least}
        if not settling:
            settling = {k for r in lam if lam[r] == least for k in overloaded[r]} & still_open
            for k in settling:
                x[k] = max(SLOWEST, least * weight[k])
        still_open -= settling
    return x

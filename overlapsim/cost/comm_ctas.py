"""Bytes moved to peers by thread blocks of a kernel that do nothing else: links and the SMs they hold, together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from overlapsim.cost.sm_feed import LEAST
from overlapsim.cost.stores import Mechanism
from overlapsim.errors import UsageError

# One H100's rate of stores into peers' memory over the SMs that reach it (hwprofiles/SOURCES.md, PK): 15 by TMA, five
# times as many by loads and stores. An SM's rate is its own, whatever the links of the machine that it is in.
PER_SM: Final[Mapping[Mechanism, float]] = {"tma": 0.78 * 450e9 / 15, "registers": LEAST}


def comm_ctas_s(link_s: float, sent_bytes: float, sms: int, how: Mechanism) -> float:
    """Time in which `sms` SMs send bytes that the links alone would take `link_s` for.

    Model: ``time^2 = links^2 + (bytes / (SMs x rate))^2``, the form of expert dispatch over 12 and 24 SMs
    (`sm_feed.fewer_sms_s`).

    Parameters
    ----------
    link_s : at the rate of the links, seconds
    sent_bytes : to peers
    sms : at least 1
    how : ``tma`` for rows that are moved as they are, ``registers`` where rows are added up on the way

    Raises
    ------
    UsageError
        If no SM sends.

    Examples
    --------
    58.7 MB at 156 GB/s: moved by 15 SMs, and summed and stored by as many.

    >>> [round(comm_ctas_s(376e-6, 58.7e6, 15, how) * 1e6) for how in ("tma", "registers")]
    [412, 947]
    """
    if sms < 1:
        raise UsageError(f"{sms} SMs send to peers; expected at least 1")
    return math.hypot(link_s, sent_bytes / (sms * PER_SM[how]))

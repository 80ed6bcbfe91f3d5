"""Whether the machine has time for a measurement: CPU time that others take, from the kernel's own counters."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from overlapsim.plan import Finding

STAT: Final = Path("/proc/stat")
BUSY_SHARE: Final = 0.10
"""Share of all CPU time taken by others from which times of CPU runs are not trusted."""
LOOK_S: Final = 0.5
PATIENCE_S: Final = 20.0
# Columns of /proc/stat: user nice system idle iowait irq softirq steal; the fourth and fifth are idle.
_IDLE: Final = (3, 4)


@dataclass(frozen=True)
class CpuTime:
    """CPU time of the whole machine up to an instant.

    Attributes
    ----------
    busy_s, total_s : over all CPUs, in the kernel's ticks
    at_s : `time.monotonic` of the reading
    """

    busy: float
    total: float

    @classmethod
    def now(cls) -> Self | None:
        """Read the counters; None where the system has none."""
        try:
            first = STAT.read_text(encoding="ascii").splitlines()[0].split()
            ticks = [float(value) for value in first[1:9]]
        except (OSError, ValueError, IndexError):
            return None
        idle = sum(ticks[place] for place in _IDLE if place < len(ticks))
        return cls(sum(ticks) - idle, sum(ticks))


def others_share(before: CpuTime | None, after: CpuTime | None, own_s: float, ticks_per_s: float = 100.0) -> float:
    """Share of all CPU time between two readings that was neither idle nor `own_s` seconds of our own.

    Examples
    --------
    >>> others_share(CpuTime(0.0, 0.0), CpuTime(150.0, 200.0), own_s=1.0)
    0.25
    """
    if before is None or after is None or after.total <= before.total:
        return 0.0
    busy = after.busy - before.busy - own_s * ticks_per_s
    return max(0.0, busy / (after.total - before.total))


def wait_until_idle(patience_s: float = PATIENCE_S, limit: float = BUSY_SHARE) -> Finding | None:
    """Wait until others leave the CPUs alone, for a while.

    Returns
    -------
    Finding or None
        ``machine_busy`` if they did not: times are then those of a shared machine.
    """
    deadline = time.monotonic() + patience_s
    while True:
        before, own = CpuTime.now(), time.process_time()
        time.sleep(LOOK_S)
        share = others_share(before, CpuTime.now(), time.process_time() - own)
        if share <= limit:
            return None
        if time.monotonic() >= deadline:
            text = f"others take {share:.0%} of this machine's CPU time: times are those of a shared machine"
            return Finding("machine_busy", text)

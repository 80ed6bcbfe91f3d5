"""How long each kind of task runs in a stretch of time: computation first, then moving data, the rest is host."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from overlapsim.engine.timeline import Timeline
from overlapsim.schedule.program import FLOW
from overlapsim.step.categories import COMM_KINDS, COMPUTE_KINDS, KINDS, kinds_of

Int = npt.NDArray[np.int64]
# Which kind an instant counts as when several run: computation before communication, each in the order of `KINDS`,
# before a collective that waits for an absent peer.
_RANK: Final = (*COMPUTE_KINDS, *COMM_KINDS, "bubble")


def spans(timeline: Timeline, start_ps: int, end_ps: int, tasks: Int | None = None) -> dict[str, float]:
    """Seconds of each kind between two instants, over one device's tasks.

    Parameters
    ----------
    timeline : what happened
    start_ps, end_ps : the stretch to read; its length is the sum of what is returned
    tasks : of the device; all by default

    Returns
    -------
    dict of str to float
        By name of `categories.KINDS`; a collective that only waits for its peers is ``bubble``, and what is neither
        computed nor moved nor waited for so is ``host``.
    """
    program = timeline.program
    kinds = kinds_of(program)
    chosen = np.arange(program.num_tasks) if tasks is None else tasks
    chosen = chosen[kinds[chosen] >= 0]
    waiting = chosen[(program.kind[chosen] == FLOW) & (program.group[chosen] >= 0)]
    all_kinds = np.concatenate((kinds[chosen], np.full(len(waiting), KINDS.index("bubble"), np.int64)))
    begin = np.concatenate((timeline.t_start[chosen], timeline.t_resident[waiting]))
    end = np.concatenate((timeline.t_end[chosen], timeline.t_start[waiting]))
    return cover(all_kinds, np.clip(begin, start_ps, end_ps), np.clip(end, start_ps, end_ps), start_ps, end_ps)


def cover(kinds: Int, begin: Int, end: Int, start_ps: int, end_ps: int) -> dict[str, float]:
    """Length of the stretch in which each kind is the first that runs."""
    long = end > begin
    kinds, begin, end = kinds[long], begin[long], end[long]
    cuts = np.unique(np.concatenate((begin, end, np.array([start_ps, end_ps], dtype=np.int64))))
    length = np.diff(cuts)
    covered = np.zeros(len(length), dtype=bool)
    found = dict.fromkeys(KINDS, 0.0)
    for kind in _RANK:
        mine = kinds == KINDS.index(kind)
        if not mine.any():
            continue
        change = np.zeros(len(cuts), dtype=np.int64)
        np.add.at(change, np.searchsorted(cuts, begin[mine]), 1)
        np.add.at(change, np.searchsorted(cuts, end[mine]), -1)
        runs = (np.cumsum(change)[:-1] > 0) & ~covered
        found[kind] = float(length[runs].sum()) / 1e12
        covered |= runs
    found["host"] = float(length[~covered].sum()) / 1e12
    return found

"""How long each kind of task runs in a stretch of time: computation first, then moving data, the rest is host."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from overlapsim.engine.timeline import Timeline
from overlapsim.step.categories import COMM_KINDS, COMPUTE_KINDS, KINDS, kinds_of

Int = npt.NDArray[np.int64]
# Which kind an instant counts as when several run: computation before communication, each in the order of `KINDS`.
_RANK: Final = {kind: number for number, kind in enumerate((*COMPUTE_KINDS, *COMM_KINDS))}


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
        By name of `categories.KINDS`; what is neither computed nor moved is ``host``.
    """
    program = timeline.program
    kinds = kinds_of(program)
    chosen = np.arange(program.num_tasks) if tasks is None else tasks
    chosen = chosen[kinds[chosen] >= 0]
    begin = np.clip(timeline.t_start[chosen], start_ps, end_ps)
    end = np.clip(timeline.t_end[chosen], start_ps, end_ps)
    return cover(kinds[chosen], begin, end, start_ps, end_ps)


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

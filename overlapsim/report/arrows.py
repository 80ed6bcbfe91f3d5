"""Progress edges as arrows: from the moment the source had done enough to the moment the destination went on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlapsim.engine.timeline import Timeline
from overlapsim.report.spans import horizon_ps

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Arrow:
    """One edge that was opened and used.

    Attributes
    ----------
    edge, src, dst : int
        Numbers of the edge and of its two tasks.
    leave_ps, arrive_ps : int
        ``leave_ps <= arrive_ps``.
    """

    edge: int
    src: int
    dst: int
    leave_ps: int
    arrive_ps: int


def progress_arrows(timeline: Timeline) -> list[Arrow]:
    """Arrows of all edges whose source got far enough and whose destination got as far as waiting for it.

    The head of a stream wait is where the destination became eligible; the
    head of a gate into unit u is where unit u can first have started: the
    start of the task for u = 0, otherwise when the gate opened, and not
    before the task's start.  The tail is exact when ``src_units`` is all
    units, or when cohorts are recorded and units ended in order; otherwise
    it is the end of the source, or the latest moment that lets the head be
    where it is, whichever is first.

    Parameters
    ----------
    timeline : Timeline

    Returns
    -------
    list of Arrow
        In the order of edges.
    """
    program = timeline.program
    when = _finish_of_prefixes(timeline)
    horizon = horizon_ps(timeline)
    arrows = []
    rows = zip(
        program.edge_src.tolist(),
        program.edge_src_units.tolist(),
        program.edge_dst.tolist(),
        program.edge_dst_unit.tolist(),
        program.edge_lag_ps.tolist(),
        when.tolist(),
        strict=True,
    )
    eligible, start = timeline.t_eligible.tolist(), timeline.t_start.tolist()
    resident, end, progress = timeline.t_resident.tolist(), timeline.t_end.tolist(), timeline.progress.tolist()
    for edge, (src, src_units, dst, unit, lag, moment) in enumerate(rows):
        if progress[src] < src_units or eligible[dst] < 0:
            continue
        limit = (end[dst] if end[dst] >= 0 else horizon) - 1
        known = moment >= 0
        if unit < 0:
            head = eligible[dst]
        elif start[dst] < 0:
            # Open, yet the task never started: another gate or a peer is missing. It points at the spinning.
            head = min(max(resident[dst], eligible[dst], moment + lag if known else 0), limit)
        elif unit == 0:
            head = start[dst]
        else:
            opened = moment if known else end[src]
            head = max(start[dst], min(opened + lag, limit) if opened >= 0 else 0)
        tail = moment if known else min(head - min(lag, head), end[src] if end[src] >= 0 else head)
        arrows.append(Arrow(edge, src, dst, min(tail, head), head))
    return arrows


def _finish_of_prefixes(timeline: Timeline) -> Int:
    """When each edge's source finished its first ``src_units`` units, or -1 where that is not recorded."""
    program = timeline.program
    src, need = program.edge_src, program.edge_src_units
    when = np.where(need == program.units[src], timeline.t_end[src], -1).astype(np.int64)
    cohorts = timeline.cohorts
    if cohorts is None or len(cohorts.task) == 0:
        return when
    order = np.lexsort((cohorts.end_ps, cohorts.task))
    done = np.cumsum(cohorts.units[order])
    first = np.searchsorted(cohorts.task[order], np.arange(program.num_tasks + 1))
    ordered = _ends_in_order(timeline)
    for edge in np.flatnonzero((when < 0) & (timeline.progress[src] >= need) & ordered[src]).tolist():
        low, high = first[src[edge]], first[src[edge] + 1]
        before = done[low - 1] if low > 0 else 0
        at = low + int(np.searchsorted(done[low:high] - before, need[edge]))
        if at < high:
            when[edge] = cohorts.end_ps[order[at]]
    return when


def _ends_in_order(timeline: Timeline) -> npt.NDArray[np.bool_]:
    """Tasks whose units end in rising order, so that counting finished units gives the prefix.

    All but persistent kernels do; those do when all their workers began
    together.  A late worker leaves a hole in the prefix.
    """
    program, cohorts = timeline.program, timeline.cohorts
    assert cohorts is not None
    opening = cohorts.start_ps == timeline.t_start[cohorts.task]
    began = np.bincount(cohorts.task[opening], cohorts.units[opening], program.num_tasks)
    return ~program.persistent | (began >= np.minimum(program.sm, program.units))

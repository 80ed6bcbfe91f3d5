"""Why a program came to a stop: what each unfinished task still waits for, and who is in its way.

A deadlock is an outcome (docs/program.md section 3.7): nothing is left to happen and tasks have not
ended.  Everything here is read from the program and its timeline, so it serves both engines.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlapsim.engine.timeline import Timeline
from overlapsim.errors import DeadlockError
from overlapsim.schedule.program import BLOCKS, FLOW, HOST, KIND_NAMES, Program

MAX_TASKS_SHOWN = 12
MAX_ITEMS_SHOWN = 4


@dataclass(frozen=True)
class ClosedEdge:
    """An edge that never opened: `src` finished `progress` of the `src_units` units it asks for.

    `dst_unit` is -1 for a stream wait, else the gated unit of `dst`, which
    may be another member of the group of the task that is reported.
    """

    edge: int
    src: int
    src_units: int
    progress: int
    dst: int
    dst_unit: int


@dataclass(frozen=True)
class Shortage:
    """SMs that a task could not get: it needs `needed` at once, `pool` has `free`; `holders` are (task, SMs held).

    `behind` is the FLOW in front that closed the pool for all behind it, or -1.
    """

    pool: int
    needed: int
    free: int
    holders: tuple[tuple[int, int], ...]
    behind: int


@dataclass(frozen=True)
class StuckTask:
    """A task that did not end, and everything that keeps it; fields that do not apply are -1, empty or None.

    Attributes
    ----------
    task : int
    state : str
        How far it came: ``not issued``, ``not eligible``, ``not resident`` or ``resident``.
    progress, held_sm : int
        Finished prefix of units; SMs it holds, spinning.
    host_in_front : int
        HOST task of the same lane that does not end.
    queue_head : int
        Task in front in the same hardware queue that is not eligible.
    stream_predecessor : int
        Previous task of the same stream, not ended.
    closed_edges : tuple of ClosedEdge
        Stream waits while not eligible; gates of all members once resident.
    missing_members : tuple of int
        Members of its group that are not resident.
    shortage : Shortage or None
    """

    task: int
    state: str
    progress: int
    held_sm: int
    host_in_front: int = -1
    queue_head: int = -1
    stream_predecessor: int = -1
    closed_edges: tuple[ClosedEdge, ...] = ()
    missing_members: tuple[int, ...] = ()
    shortage: Shortage | None = None


def explain(timeline: Timeline) -> tuple[StuckTask, ...]:
    """Report every task that did not end, by index; empty if the program completed.

    Examples
    --------
    >>> from overlapsim.engine.reference import run
    >>> from overlapsim.schedule.builder import ProgramBuilder
    >>> b = ProgramBuilder()
    >>> gpu = b.add_pool(num_sms=1)
    >>> gemm = b.add_blocks(stream=b.add_stream(), pool=gpu, units=1, unit_ps=10, sm=1)
    >>> gather = b.add_flow(stream=b.add_stream(), pool=gpu, units=1, unit_ps=10, sm=1)
    >>> b.add_edge(gather, gemm, dst_unit=0)
    >>> [(s.task, s.state) for s in explain(run(b.freeze()))]
    [(0, 'resident'), (1, 'not resident')]
    """
    unfinished = (timeline.t_end < 0).nonzero()[0].tolist()
    return tuple(_explain_task(timeline, i) for i in unfinished)


def raise_if_deadlocked(timeline: Timeline) -> None:
    """Do nothing if every task ended.

    Raises
    ------
    DeadlockError
        With one line per stuck task, those that came furthest first: the
        cycle is among them, the others wait behind it.
    """
    if timeline.complete:
        return
    stuck = explain(timeline)
    last = max(int(getattr(timeline, f"t_{name}").max()) for name in ("issued", "eligible", "resident", "start", "end"))
    shown = sorted(stuck, key=lambda s: (-_STATES.index(s.state), s.task))[:MAX_TASKS_SHOWN]
    lines = [describe(timeline.program, s) for s in shown]
    if len(stuck) > len(shown):
        lines.append(f"and {len(stuck) - len(shown)} more that wait behind these")
    raise DeadlockError(
        f"deadlock: {len(stuck)} of {timeline.program.num_tasks} tasks never end, "
        f"and no task starts or ends after {last} ps\n  " + "\n  ".join(lines) + "\n"
        "Break the cycle: launch the members of all groups in one order, leave SMs free for what a spinning kernel "
        "waits for, or issue it earlier."
    )


_STATES = ("not issued", "not eligible", "not resident", "resident")


def _explain_task(timeline: Timeline, i: int) -> StuckTask:
    p = timeline.program
    progress, held_sm = int(timeline.progress[i]), int(timeline.held_sm[i])
    if timeline.t_issued[i] < 0:
        in_front = (j for j in p.lane_tasks.row(int(p.task_lane[i])).tolist() if timeline.t_end[j] < 0)
        host = next(j for j in in_front if p.kind[j] == HOST)
        return StuckTask(i, _STATES[0], progress, held_sm, host_in_front=host)
    if timeline.t_eligible[i] < 0:
        return StuckTask(
            i,
            _STATES[1],
            progress,
            held_sm,
            queue_head=_queue_head(timeline, i),
            stream_predecessor=_stream_predecessor(timeline, i),
            closed_edges=_closed_edges(timeline, i, gates=False),
        )
    if timeline.t_resident[i] < 0:
        return StuckTask(i, _STATES[2], progress, held_sm, shortage=_shortage(timeline, i))
    members = p.group_members.row(int(p.task_runner_group[i])).tolist() if p.kind[i] == FLOW else [i]
    missing = tuple(j for j in members if timeline.t_resident[j] < 0)
    return StuckTask(
        i,
        _STATES[3],
        progress,
        held_sm,
        closed_edges=() if missing else tuple(e for j in members for e in _closed_edges(timeline, j, gates=True)),
        missing_members=missing,
        shortage=_shortage(timeline, i) if p.kind[i] == BLOCKS else None,
    )


def _closed_edges(timeline: Timeline, i: int, *, gates: bool) -> tuple[ClosedEdge, ...]:
    # An edge whose lag has begun has opened by the end, so progress alone tells.
    p = timeline.program
    edges = (
        ClosedEdge(
            e,
            src := int(p.edge_src[e]),
            int(p.edge_src_units[e]),
            int(timeline.progress[src]),
            i,
            int(p.edge_dst_unit[e]),
        )
        for e in p.edges_in.row(i).tolist()
    )
    return tuple(e for e in edges if e.progress < e.src_units and (e.dst_unit >= 0) == gates)


def _queue_head(timeline: Timeline, i: int) -> int:
    queue = timeline.program.task_queue[i]
    if queue < 0:
        return -1
    head = next(j for j in timeline.program.queue_tasks.row(int(queue)).tolist() if timeline.t_eligible[j] < 0)
    return -1 if head == i else int(head)


def _stream_predecessor(timeline: Timeline, i: int) -> int:
    stream = timeline.program.stream[i]
    if stream < 0:
        return -1
    before = [j for j in timeline.program.stream_tasks.row(int(stream)).tolist() if j < i]
    return int(before[-1]) if before and timeline.t_end[before[-1]] < 0 else -1


def _num_placed(timeline: Timeline, i: int) -> int:
    """CTAs of BLOCKS `i` that ever got an SM: those that hold one and those that retired."""
    p = timeline.program
    units, progress = int(p.units[i]), int(timeline.progress[i])
    gate = min((e.dst_unit for e in _closed_edges(timeline, i, gates=True)), default=units)
    if progress < gate:
        # A placed CTA finishes its units before the gate, and CTAs are placed in order: this unit's has no SM.
        return progress
    # All units before the gate are finished and none after, so who retired had its last unit before the gate.
    # The last units of the CTAs are the last units of the task.
    num_ctas = min(int(p.sm[i]), units) if p.persistent[i] else units
    return int(timeline.held_sm[i]) + max(0, progress - (units - num_ctas))


def _shortage(timeline: Timeline, i: int) -> Shortage | None:
    p = timeline.program
    needed = int(p.sm[i])
    if p.kind[i] == BLOCKS:
        num_ctas = min(needed, int(p.units[i])) if p.persistent[i] else int(p.units[i])
        want = num_ctas - _num_placed(timeline, i)
        room = int(p.sm[i] - timeline.held_sm[i])
        needed = min(want, int(p.sm_quantum[i]))
        if want == 0 or room < needed:
            return None  # its own `sm` is the limit: it waits for CTAs of its own
    pool = int(p.pool[i])
    in_pool = (p.pool == pool).nonzero()[0].tolist()
    holders = tuple((j, int(timeline.held_sm[j])) for j in in_pool if timeline.held_sm[j] > 0)
    free = int(p.pool_num_sms[pool]) - sum(held for _, held in holders)

    def rank(j: int) -> tuple[int, int, int]:
        return -int(p.stream_priority[p.stream[j]]), int(timeline.t_eligible[j]), j

    closing = [
        j
        for j in in_pool
        if p.kind[j] == FLOW and timeline.t_eligible[j] >= 0 and timeline.t_resident[j] < 0 and rank(j) < rank(i)
    ]
    return Shortage(pool, needed, free, holders, behind=min(closing, key=rank, default=-1))


def describe(program: Program, stuck: StuckTask) -> str:
    """Return one line of text for people: what the task is, how far it came, and what keeps it."""
    reasons: list[str] = []
    if stuck.host_in_front >= 0:
        reasons.append(f"its host waits in {_name(program, stuck.host_in_front)}")
    if stuck.queue_head >= 0:
        reasons.append(f"behind {_name(program, stuck.queue_head)} in its hardware queue")
    if stuck.stream_predecessor >= 0:
        reasons.append(f"behind {_name(program, stuck.stream_predecessor)} on its stream")
    if stuck.missing_members:
        reasons.append("not resident in its group: " + _some([_name(program, j) for j in stuck.missing_members]))
    if stuck.closed_edges:
        reasons.append("waits for " + _some([_edge(program, stuck.task, e) for e in stuck.closed_edges]))
    if stuck.shortage is not None:
        reasons.append(_short(program, stuck.shortage))
    state = stuck.state + (f", holds {stuck.held_sm} SM" if stuck.held_sm else "")
    return f"{_name(program, stuck.task)}, {state}: " + "; ".join(reasons)


def _name(program: Program, i: int) -> str:
    words = [text for text in (program.op[i], program.tag[i]) if text] if program.op else []
    return f"{KIND_NAMES[program.kind[i]]} task {i}" + (f" ({' '.join(words)})" if words else "")


def _edge(program: Program, task: int, e: ClosedEdge) -> str:
    text = f"{_name(program, e.src)} to finish {e.src_units} units ({e.progress} done)"
    if e.dst_unit >= 0:
        text += f" before unit {e.dst_unit}" + (f" of {_name(program, e.dst)}" if e.dst != task else "")
    return text


def _short(program: Program, shortage: Shortage) -> str:
    pool = (program.pool_name[shortage.pool] if program.pool_name else "") or str(shortage.pool)
    text = f"needs {shortage.needed} SM of pool {pool}, {shortage.free} free"
    if shortage.holders:
        text += ", held by " + _some([f"{_name(program, j)} ({held} SM)" for j, held in shortage.holders])
    if shortage.behind >= 0:
        text += f", behind {_name(program, shortage.behind)} which wants all its SMs first"
    return text


def _some(items: list[str]) -> str:
    more = f" and {len(items) - MAX_ITEMS_SHOWN} more" if len(items) > MAX_ITEMS_SHOWN else ""
    return ", ".join(items[:MAX_ITEMS_SHOWN]) + more

"""Hardware queues: what streams that share one make each other wait for, beyond the order of launches."""

from __future__ import annotations

from collections import defaultdict

from overlapsim.plan import Finding
from overlapsim.schedule.builder import ProgramBuilder


def add_queue_waits(builder: ProgramBuilder, first: int = 0) -> None:
    """Add the false dependencies of shared queues to the tasks from `first` on.

    A queue knows no streams.  When a kernel must wait for one that was
    launched into the same queue, all that was launched there since the last
    such wait is waited for, whatever stream it is on.  So a collective runs
    beside the one kernel that is launched right after it, which is why
    tensor-parallel overlap works with a single queue, and the second kernel
    waits for the collective, which is why bucketed gradients do not overlap
    (Megatron-LM issues 636 and 1468: blocked at one queue, hidden when unset).

    Streams with a queue of their own are left alone: order within a stream
    is the engine's.  The engine adds what its contract says of queues: the
    head blocks all behind it until it is eligible.

    Parameters
    ----------
    builder : whose tasks and edges are complete up to now
    first : task to begin at; earlier ones were done before

    Examples
    --------
    >>> b = ProgramBuilder()
    >>> gpu, compute, comm = b.add_pool(4), b.add_stream(queue=0), b.add_stream(queue=0)
    >>> x = b.add_blocks(stream=compute, pool=gpu, units=1, unit_ps=10, sm=1)
    >>> sent = b.add_flow(stream=comm, pool=gpu, units=1, unit_ps=100, sm=1)
    >>> b.add_edge(x, sent)
    >>> y, z = (b.add_blocks(stream=compute, pool=gpu, units=1, unit_ps=10, sm=1) for _ in range(2))
    >>> add_queue_waits(b)
    >>> sorted(b.waits())
    [(0, 1), (1, 3)]
    """
    streams, queues = builder.column("stream"), builder.stream_queues()
    sharing = defaultdict(set)
    for stream in set(streams[first:]) - {-1}:
        sharing[queues[stream]].add(stream)
    shared = {queue for queue, members in sharing.items() if len(members) > 1}
    sources: dict[int, list[int]] = defaultdict(list)
    for src, dst in builder.waits():
        if dst >= first:
            sources[dst].append(src)
    last: dict[int, int] = {}
    running: dict[int, list[int]] = defaultdict(list)
    for task in range(first, builder.num_tasks):
        stream = streams[task]
        if stream < 0 or queues[stream] not in shared:
            continue
        now = running[queues[stream]]
        needed = {*sources[task], last.get(stream, -1)}
        if not needed.isdisjoint(now):
            for other in now:
                if other not in sources[task] and streams[other] != stream:
                    builder.add_edge(other, task)
            now.clear()
        now.append(task)
        last[stream] = task


def queue_findings(builder: ProgramBuilder) -> tuple[Finding, ...]:
    """Say that streams share queues: the waits are inferred from reports of what overlapped, not measured."""
    queues = builder.stream_queues()
    if len(set(queues)) == len(queues):
        return ()
    message = (
        f"{len(queues)} streams share {len(set(queues))} hardware queues; that a wait in a queue is for all that was "
        "launched there before is inferred from published timelines: measure with and without sharing"
    )
    return (Finding("shared_queues_assumed", message),)

"""Bytes that tasks hold over time: what they allocate at their start less what was freed at their end."""

from __future__ import annotations

import numpy as np

from overlapsim.engine.timeline import Timeline


def peak_bytes(timeline: Timeline, device: int = 0) -> float:
    """Most bytes held at once by the tasks of one device, of what ``mem_start`` and ``mem_end`` count.

    What ends at an instant is freed before what starts then is allocated.
    A collective holds its buffer from when it becomes resident.

    Parameters
    ----------
    timeline : complete
    device : number of the device

    Returns
    -------
    float
        Bytes, beyond whatever is held all the time.

    Examples
    --------
    >>> from overlapsim.engine import compiled
    >>> from overlapsim.schedule.builder import ProgramBuilder
    >>> b = ProgramBuilder()
    >>> gpu, stream = b.add_pool(4), b.add_stream()
    >>> for _ in range(2):
    ...     task = b.add_flow(stream=stream, pool=gpu, units=1, unit_ps=10, sm=1, mem_start=8.0, mem_end=8.0)
    >>> peak_bytes(compiled.run(b.freeze()))
    8.0
    """
    p = timeline.program
    mine = (p.pool >= 0) & (p.pool_device[np.maximum(p.pool, 0)] == device)
    instants = np.concatenate([timeline.t_end[mine], timeline.t_resident[mine]])
    change = np.concatenate([-p.mem_end[mine], p.mem_start[mine]])
    # A stable sort keeps ends before starts of the same instant.
    held = np.cumsum(change[np.argsort(instants, kind="stable")])
    return float(held.max(initial=0.0))

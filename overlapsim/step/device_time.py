"""Where a step's time goes on one device: computation by kind, else moving data by kind, else waiting for a peer."""

from __future__ import annotations

import numpy as np

from overlapsim.engine.timeline import Timeline
from overlapsim.schedule.program import BLOCKS, FLOW
from overlapsim.step.assemble import StepProgram
from overlapsim.step.breakdown import cover
from overlapsim.step.categories import COMM_KINDS, COMPUTE_KINDS, KINDS, kind_of


def device_breakdown(step: StepProgram, timeline: Timeline) -> dict[str, float]:
    """Seconds of each kind on the pipeline device that ends last.

    A block counts by the kinds within it, stretched as it was; outside of
    blocks an instant is moving data (the kind of the transfer), else waiting
    for an absent peer: ``bubble``.

    Returns
    -------
    dict of str to float
        By name of `categories.KINDS`; the sum is the step's time.
    """
    last = int(step.device[int(np.argmax(timeline.t_end))])
    program, end = timeline.program, timeline.end_ps
    mine = np.flatnonzero((step.device == last) & (program.kind == BLOCKS))
    found = dict.fromkeys(KINDS, 0.0)
    for task in mine.tolist():
        piece = step.pieces[program.op[task]]
        seconds = (int(timeline.t_end[task]) - int(timeline.t_start[task])) / 1e12
        whole = sum(piece.kinds_s.values()) or 1.0
        for kind, part in piece.kinds_s.items():
            name = "optimizer" if program.op[task].startswith("optim.") and kind in COMPUTE_KINDS else kind
            found[name] += seconds * part / whole
    flows = np.flatnonzero((program.kind == FLOW) & ((step.device == last) | (step.receiver == last)))
    kinds = np.array(
        [KINDS.index(kind_of(program.op[t], program.tag[t], True)) for t in flows.tolist()], dtype=np.int64
    )
    # Blocks are covered first: their place is that of the first compute kind.
    all_kinds = np.concatenate((np.zeros(len(mine), dtype=np.int64), kinds))
    tasks = np.concatenate((mine, flows))
    outside = cover(all_kinds, timeline.t_start[tasks], timeline.t_end[tasks], 0, end)
    for kind in COMM_KINDS:
        found[kind] += outside[kind]
    found["bubble"] += outside["host"]
    return found

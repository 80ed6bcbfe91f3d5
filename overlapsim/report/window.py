"""Which part of a long timeline is drawn: the first fill of the pipeline and some micro-batches behind it."""

from __future__ import annotations

from typing import Final

from overlapsim.engine.timeline import Timeline
from overlapsim.report.bars import Rows
from overlapsim.report.spans import HOST_DEVICE, task_spans

MOST_TASKS: Final = 60
"""Tasks of a row that can still be told apart on a page."""
FILLS: Final = 1.5
"""Times the fill of the pipeline that is shown at least."""


def first_part_ps(timeline: Timeline, most: int = MOST_TASKS) -> int | None:
    """End of the part to draw, or None where the whole has room.

    It holds the first `most` tasks of the fullest row, and no less than the
    pipeline's fill (until the last row of a GPU has started) and half as
    much again.

    Parameters
    ----------
    timeline : of a step
    most : tasks of a row that have room
    """
    rows = [
        sorted(task[0].start_ps for task in tasks if task)
        for track, tasks in task_spans(timeline).items()
        if track.device != HOST_DEVICE
    ]
    rows = [starts for starts in rows if starts]
    fullest = max(rows, key=len, default=[])
    if len(fullest) <= most:
        return None
    # Rows that start late for another reason (reductions behind the last backward) are no part of the fill.
    fill = max(starts[0] for starts in rows if len(starts) > len(fullest) // 2)
    until = max(fullest[most], int(FILLS * fill))
    return until if until < timeline.end_ps else None


def cut(panel: Rows, until_ps: int) -> Rows:
    """What of a panel starts before an instant, cut off there."""
    bars = [bar._replace(end_ps=min(bar.end_ps, until_ps)) for bar in panel.bars if bar.start_ps < until_ps]
    labels = [label for label in panel.labels if label.end_ps <= until_ps]
    return panel._replace(bars=bars, labels=labels)

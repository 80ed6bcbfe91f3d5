"""The engine's output: five instants per task and, on request, who ran when and how fast; immutable."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlapsim.schedule.program import Program

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Cohorts:
    """Units that one task started at one instant, and so ended at one; rows are sorted by (start, task, end).

    Attributes
    ----------
    task, start_ps, end_ps, units : arrays of shape (cohorts,)
        `units` is how many units ran side by side (1 for a FLOW's chunk, and for a HOST task).
        Units still running when a deadlock is found are left out.
    """

    task: Int
    start_ps: Int
    end_ps: Int
    units: Int


@dataclass(frozen=True, eq=False)
class Speeds:
    """Speed changes of runners, in time order; a runner absent from an instant keeps its speed.

    Attributes
    ----------
    task : array, the BLOCKS task, or the lowest member of a group
    time_ps : array
    speed : array in (0, 1]
    """

    task: Int
    time_ps: Int
    speed: Float


@dataclass(frozen=True, eq=False)
class Timeline:
    """What happened: instants in integer picoseconds, -1 = never.

    Attributes
    ----------
    program : Program
    t_issued, t_eligible, t_resident, t_start, t_end : int64 arrays of shape (tasks,)
    progress : int64 array, length of the finished prefix of units of each task
    held_sm : int64 array, SMs each task still holds when nothing is left to happen (all zero unless deadlocked)
    cohorts, speeds : recorded only on request (``record=True``)
    """

    program: Program
    t_issued: Int
    t_eligible: Int
    t_resident: Int
    t_start: Int
    t_end: Int
    progress: Int
    held_sm: Int
    cohorts: Cohorts | None = None
    speeds: Speeds | None = None

    @property
    def complete(self) -> bool:
        """True when every task ended; False means a deadlock."""
        return bool(np.all(self.t_end >= 0))

    @property
    def end_ps(self) -> int:
        """Latest end of any task, 0 for an empty program."""
        return int(self.t_end.max(initial=0))

    @property
    def duration_s(self) -> float:
        """Latest end of any task in seconds."""
        return self.end_ps / 1e12

    def same_instants(self, other: Timeline) -> bool:
        """True when all five instants of all tasks are equal."""
        return all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("t_issued", "t_eligible", "t_resident", "t_start", "t_end")
        )

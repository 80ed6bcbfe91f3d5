"""Ends of tasks that only wait for one another, in one compiled pass."""

from __future__ import annotations

import numpy as np

from overlapsim.jit import compiled
from overlapsim.schedule.program import Int


@compiled
def ends_of(order: Int, ptr: Int, before: Int, duration: Int) -> Int:
    """End of each task, which starts as soon as all before it have ended.

    Parameters
    ----------
    order : int64 array of shape (tasks,): tasks, each behind those it waits for
    ptr, before : tasks that task t waits for are ``before[ptr[t] : ptr[t + 1]]``
    duration : int64 array of shape (tasks,)

    Examples
    --------
    >>> tasks = np.arange(3)
    >>> ends_of(tasks, np.array([0, 0, 1, 2]), np.array([0, 0]), np.array([5, 2, 7])).tolist()
    [5, 7, 12]
    """
    end = np.zeros(len(order), np.int64)
    for i in range(len(order)):
        task = order[i]
        start = np.int64(0)
        for j in range(ptr[task], ptr[task + 1]):
            start = max(start, end[before[j]])
        end[task] = start + duration[task]
    return end

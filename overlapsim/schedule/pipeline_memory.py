"""What a pipeline schedule keeps alive: micro-batches in flight and weight gradients put off, at their peak."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from overlapsim.errors import PlanError
from overlapsim.schedule.pipeline import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, PipelineSchedule
from overlapsim.schedule.program import Float, Int


def peak_kept(schedule: PipelineSchedule, activation: ArrayLike = 1.0, put_off: ArrayLike | None = None) -> Float:
    """Most that each device keeps at once, over all stages it holds.

    A forward keeps `activation` until its backward has run; an input
    gradient frees it down to `put_off`, which the weight gradient frees.  In
    an F&B pair the forward's is there before the backward's goes.  By order
    alone: no times are needed, since a device does one thing after another.

    Parameters
    ----------
    schedule : PipelineSchedule
    activation : one number, or one per stage; bytes, or 1 to count micro-batches
    put_off : likewise; by default `activation`: all is kept until the weight gradient has run

    Returns
    -------
    float64 array of shape (devices,)

    Raises
    ------
    PlanError
        If there is neither one number nor one per stage.

    Examples
    --------
    >>> from overlapsim.schedule.pipeline_one_way import gpipe, one_f_one_b
    >>> peak_kept(one_f_one_b(4, 8)).tolist(), peak_kept(gpipe(4, 8)).tolist()
    ([4.0, 3.0, 2.0, 1.0], [8.0, 8.0, 8.0, 8.0])
    """
    s = schedule
    kept = _per_stage(activation, s.num_stages)
    late = kept if put_off is None else _per_stage(put_off, s.num_stages)
    # Rows by kind: what an action adds.
    change = np.stack((kept, -kept, late - kept, -late))[s.kind, s.stage]
    return np.array([_peak(change[s.ptr[d] : s.ptr[d + 1]]) for d in range(s.num_devices)])


def peak_in_flight(schedule: PipelineSchedule) -> Int:
    """Most micro-batches between their forward and the end of their backward, for each copy of each stage.

    With split backwards until the input gradient, see :func:`peak_put_off` for the rest.

    Returns
    -------
    int64 array of shape (copies, stages)
    """
    return _peak_by_stage(schedule, {FORWARD: 1, BACKWARD: -1, INPUT_GRAD: -1})


def peak_put_off(schedule: PipelineSchedule) -> Int:
    """Most weight gradients that wait, for each copy of each stage.

    Returns
    -------
    int64 array of shape (copies, stages)
    """
    return _peak_by_stage(schedule, {INPUT_GRAD: 1, WEIGHT_GRAD: -1})


def _peak_by_stage(schedule: PipelineSchedule, change_of_kind: dict[int, int]) -> Int:
    s = schedule
    change = np.array([change_of_kind.get(kind, 0) for kind in (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD)])[s.kind]
    cell = s.copy_of[s.micro_batch] * s.num_stages + s.stage
    # A copy of a stage is on one device: sorted by cell, the order inside each is the device's.
    order = np.argsort(cell, kind="stable")
    parts = np.split(change[order], np.searchsorted(cell[order], np.arange(1, s.num_copies * s.num_stages)))
    return np.array([int(_peak(part)) for part in parts], np.int64).reshape(s.num_copies, s.num_stages)


def _peak(change: Float | Int) -> float:
    return float(np.cumsum(change).max(initial=0))


def _per_stage(value: ArrayLike | Sequence[float], num_stages: int) -> Float:
    array = np.asarray(value, np.float64)
    if array.ndim > 1 or (array.ndim == 1 and len(array) != num_stages):
        raise PlanError(
            f"memory is given with shape {array.shape}; expected one number, or one for each of {num_stages} stages"
        )
    return np.broadcast_to(array, (num_stages,)).astype(np.float64)

"""What a pipeline schedule must be to run: every action once, in its place, and no device waiting for itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from overlapsim.errors import DeadlockError, PlanError
from overlapsim.schedule.kernel_order import topological_order
from overlapsim.schedule.pipeline import (
    BACKWARD,
    FORWARD,
    INPUT_GRAD,
    KIND_LETTERS,
    WEIGHT_GRAD,
    Action,
    PipelineSchedule,
)
from overlapsim.schedule.program import Int


def check_schedule(schedule: PipelineSchedule) -> None:
    """Refuse a schedule that does not do each piece of work once, at its place, or that cannot be run.

    Every micro-batch has, on each stage, one forward and either one full
    backward or one input gradient and one weight gradient.  A forward needs
    that of the stage before, a backward that of the stage behind (the last
    stage: its own forward), a weight gradient its input gradient.

    Raises
    ------
    PlanError
        Naming the first action that is missing, double, or on a device that
        does not hold its stage.
    DeadlockError
        If devices wait for each other, or one for itself; naming what each
        waits for.
    """
    s = schedule
    _refuse(
        (s.kind < 0) | (s.kind >= len(KIND_LETTERS)) | (s.stage < 0) | (s.stage >= s.num_stages)
        | (s.micro_batch < 0) | (s.micro_batch >= s.num_micro_batches),
        s, f"expected stages below {s.num_stages} and micro-batches below {s.num_micro_batches}",
    )  # fmt: skip
    _refuse(
        s.placement[s.copy_of[s.micro_batch], s.stage] != s.device, s, "its stage is placed on another device: move it"
    )
    count = np.zeros_like(s.index)
    np.add.at(count, (s.kind, s.stage, s.micro_batch), 1)
    _refuse(count[s.kind, s.stage, s.micro_batch] > 1, s, "it is there more than once: leave one")
    _refuse_missing(count[FORWARD] == 0, "there is no forward of")
    _refuse_missing(count[BACKWARD] + count[INPUT_GRAD] == 0, "there is no backward of")
    _refuse_missing(count[BACKWARD] + count[INPUT_GRAD] == 2, "there are a full backward and an input gradient of")
    _refuse_missing(count[INPUT_GRAD] != count[WEIGHT_GRAD], "input and weight gradient do not come together for")
    _refuse_deadlock(schedule)


def waits(schedule: PipelineSchedule) -> tuple[Int, Int]:
    """Producer and consumer actions of every dependency, on one device or across two.

    Returns
    -------
    before, after : int64 arrays of one shape
        In this order: what passes from stage to stage, the last stage's
        backward after its forward, weight gradients after input gradients.
    """
    s = schedule
    producer, consumer = s.hand_overs
    split = s.index[WEIGHT_GRAD] >= 0
    return (
        np.concatenate((producer, s.index[FORWARD, -1], s.index[INPUT_GRAD][split])),
        np.concatenate((consumer, s.backward_index[-1], s.index[WEIGHT_GRAD][split])),
    )


def _refuse(wrong: npt.NDArray[np.bool_], schedule: PipelineSchedule, reason: str) -> None:
    if wrong.any():
        number = int(np.argmax(wrong))
        kind, stage, micro_batch = schedule.action(number)
        letter = KIND_LETTERS[kind] if 0 <= kind < len(KIND_LETTERS) else "?"
        raise PlanError(
            f"schedule {schedule.name!r}, device {int(schedule.device[number])}: action {stage}{letter}{micro_batch}: "
            f"{reason}"
        )


def _refuse_missing(wrong: npt.NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        stage, micro_batch = (int(i) for i in np.argwhere(wrong)[0])
        raise PlanError(
            f"{what} micro-batch {micro_batch} on stage {stage}; expected one forward and one backward of every "
            "micro-batch on every stage, the backward in one piece or as one input and one weight gradient"
        )


def _refuse_deadlock(schedule: PipelineSchedule) -> None:
    s = schedule
    slot = np.cumsum(~s.second) - 1
    num_slots = int(slot[-1]) + 1 if len(slot) else 0
    before, after = waits(s)
    first = np.flatnonzero(~s.second)
    follows = s.device[first[1:]] == s.device[first[:-1]]
    order = topological_order(
        num_slots,
        np.concatenate((slot[before], np.flatnonzero(follows))),
        np.concatenate((slot[after], np.flatnonzero(follows) + 1)),
    )
    if len(order) == num_slots:
        return
    done = np.zeros(num_slots, np.bool_)
    done[order] = True
    stuck = []
    for device in range(s.num_devices):
        actions = np.arange(s.ptr[device], s.ptr[device + 1])
        ahead = actions[~done[slot[actions]]]
        if len(ahead):
            number = int(ahead[0])
            for_what = [s.action(int(b)) for b in before[(slot[after] == slot[number]) & ~done[slot[before]]]]
            stuck.append(f"device {device} cannot run {_names([s.action(number)])}, which needs {_names(for_what)}")
    raise DeadlockError(
        f"schedule {s.name!r} comes to a stop: {'; '.join(stuck[:4])}{' ...' if len(stuck) > 4 else ''}; put what is "
        "needed ahead of what needs it"
    )


def _names(actions: list[Action]) -> str:
    return " and ".join(str(action) for action in actions) or "an action behind it"

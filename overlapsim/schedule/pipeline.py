"""Pipeline schedules as data: where stages are, and what each device runs in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from overlapsim.errors import PlanError
from overlapsim.schedule.program import Int

FORWARD: Final = 0
BACKWARD: Final = 1
INPUT_GRAD: Final = 2
WEIGHT_GRAD: Final = 3
KIND_LETTERS: Final = "FBIW"
"""Letter of each kind in the cells of torch.distributed.pipelining (torch 2.13)."""


class Action(NamedTuple):
    """One piece of work of a schedule.

    Attributes
    ----------
    kind : FORWARD, BACKWARD (both halves), INPUT_GRAD (what the previous stage waits for) or WEIGHT_GRAD
    stage : 0 is the first of the model
    micro_batch
    """

    kind: int
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{KIND_LETTERS[self.kind]}{self.micro_batch}"


Slot = tuple[Action, ...]
"""What a device runs at once: one action, or the forward and the backward of an F&B pair."""


@dataclass(frozen=True, eq=False)
class PipelineSchedule:
    """Order of all actions of one pipeline, one device after another.

    Made by name (``pipeline_kinds.make_schedule``), from CSV
    (``pipeline_csv.schedule_from_csv``) or by :meth:`of_slots`;
    ``pipeline_check.check_schedule`` refuses what cannot run.

    Attributes
    ----------
    name : of the schedule, for reports
    placement : int64 array of shape (copies, stages)
        Device that holds a stage.  One copy of the model, or two for
        bidirectional schedules, which hold every stage twice.
    copy_of : int64 array of shape (micro_batches,)
        The copy that a micro-batch runs through.
    ptr : int64 array of shape (devices + 1,)
        Actions of device d are ``ptr[d] : ptr[d + 1]``, in the order they run.
    kind, stage, micro_batch : int64 arrays of shape (actions,)
    paired : bool array of shape (actions,)
        True for the forward of an F&B pair; the next action is its backward.

    Examples
    --------
    >>> slots = [[(Action(FORWARD, 0, 0),), (Action(BACKWARD, 0, 0),)]]
    >>> schedule = PipelineSchedule.of_slots("one device", slots, placement=[[0]], copy_of=[0])
    >>> schedule.num_devices, [str(action) for slot in schedule.slots(0) for action in slot]
    (1, ['0F0', '0B0'])
    """

    name: str
    placement: Int
    copy_of: Int
    ptr: Int
    kind: Int
    stage: Int
    micro_batch: Int
    paired: npt.NDArray[np.bool_] = field(repr=False)

    def __post_init__(self) -> None:
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array.setflags(write=False)

    @classmethod
    def of_slots(
        cls,
        name: str,
        slots: Sequence[Sequence[Slot]],
        *,
        placement: Sequence[Sequence[int]],
        copy_of: Sequence[int],
    ) -> PipelineSchedule:
        """Take `slots` of each device as they are; nothing is checked but that a slot holds one action or a pair.

        Raises
        ------
        PlanError
            If a slot is neither one action nor a forward and a backward, in this order.
        """
        rows: list[int] = []
        ptr = [0]
        for device, line in enumerate(slots):
            for slot in line:
                if len(slot) == 1:
                    rows += slot[0]
                    rows.append(0)
                elif len(slot) == 2 and slot[0].kind == FORWARD and slot[1].kind == BACKWARD:
                    rows += slot[0]
                    rows.append(1)
                    rows += slot[1]
                    rows.append(0)
                else:
                    text = ";".join(str(action) for action in slot)
                    raise PlanError(
                        f"device {device} runs ({text}) at once; expected one action, or a forward and a full backward"
                    )
            ptr.append(len(rows) // 4)
        columns = np.array(rows, np.int64).reshape(-1, 4).T.copy()
        return cls(
            name,
            np.array(placement, np.int64),
            np.array(copy_of, np.int64),
            np.array(ptr, np.int64),
            columns[0],
            columns[1],
            columns[2],
            columns[3] == 1,
        )

    @property
    def num_devices(self) -> int:
        """Number of pipeline devices."""
        return len(self.ptr) - 1

    @property
    def num_copies(self) -> int:
        """Number of copies of the model on the pipeline: 2 for bidirectional schedules."""
        return int(self.placement.shape[0])

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return int(self.placement.shape[1])

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of a step, all copies together."""
        return len(self.copy_of)

    @property
    def num_actions(self) -> int:
        """Number of actions, those of a pair counted one by one."""
        return len(self.kind)

    @cached_property
    def device(self) -> Int:
        """Device of each action."""
        return np.repeat(np.arange(self.num_devices), np.diff(self.ptr))

    @cached_property
    def second(self) -> npt.NDArray[np.bool_]:
        """True for the backward of an F&B pair: it shares the slot of the action before it."""
        second = np.zeros(self.num_actions, np.bool_)
        second[1:] = self.paired[:-1]
        return second

    @cached_property
    def index(self) -> Int:
        """Array of shape (kinds, stages, micro_batches): the number of that action, -1 where there is none."""
        index = np.full((len(KIND_LETTERS), self.num_stages, self.num_micro_batches), -1, np.int64)
        index[self.kind, self.stage, self.micro_batch] = np.arange(self.num_actions)
        return index

    @cached_property
    def backward_index(self) -> Int:
        """Array of shape (stages, micro_batches): the action that makes the gradient of the stage's input."""
        return _first_there(self.index[BACKWARD], self.index[INPUT_GRAD])

    @cached_property
    def gradient_index(self) -> Int:
        """Array of shape (stages, micro_batches): the action that makes the gradients of the stage's weights."""
        return _first_there(self.index[BACKWARD], self.index[WEIGHT_GRAD])

    @cached_property
    def hand_overs(self) -> tuple[Int, Int]:
        """Producer and consumer of everything that passes from stage to stage: forwards first, then backwards."""
        forward, backward = self.index[FORWARD], self.backward_index
        return (
            np.concatenate((forward[:-1].ravel(), backward[1:].ravel())),
            np.concatenate((forward[1:].ravel(), backward[:-1].ravel())),
        )

    def action(self, number: int) -> Action:
        """Action of that number."""
        return Action(int(self.kind[number]), int(self.stage[number]), int(self.micro_batch[number]))

    def slots(self, device: int) -> Iterator[Slot]:
        """What `device` runs, slot by slot."""
        number, end = int(self.ptr[device]), int(self.ptr[device + 1])
        while number < end:
            size = 2 if self.paired[number] else 1
            yield tuple(self.action(number + i) for i in range(size))
            number += size

    def hosts(self, device: int) -> list[tuple[int, int]]:
        """Copy and stage of everything that `device` holds."""
        return [(int(copy), int(stage)) for copy, stage in np.argwhere(self.placement == device)]

    def __eq__(self, other: object) -> bool:
        """Equal work in equal order at equal places, whatever the name."""
        return isinstance(other, PipelineSchedule) and all(
            np.array_equal(value, getattr(other, name)) for name, value in _arrays(self).items()
        )

    def __hash__(self) -> int:
        return hash(tuple(value.tobytes() for value in _arrays(self).values()))


def _first_there(one: Int, other: Int) -> Int:
    result: Int = np.where(one >= 0, one, other)
    return result


def _arrays(schedule: PipelineSchedule) -> dict[str, npt.NDArray[Any]]:
    names = ("placement", "copy_of", "ptr", "kind", "stage", "micro_batch", "paired")
    return {name: getattr(schedule, name) for name in names}

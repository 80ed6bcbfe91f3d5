"""Steps of a pipeline schedule: what is one task (an action, or an F&B pair with its own block), and its price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapsim.errors import ProgramError
from overlapsim.schedule.pipeline import KIND_LETTERS, PipelineSchedule
from overlapsim.schedule.pipeline_work import Block, PipelineWork
from overlapsim.schedule.program import Int

_BLOCK_NAMES: Final = ("forward", "backward", "input_grad", "weight_grad")
"""Attribute of StageWork for each kind of action."""


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps of a schedule, numbered device by device in the order they run.

    Attributes
    ----------
    of_action : int64 array of shape (actions,): step of each action
    first : int64 array of shape (steps,): its action, of a joint pair the forward
    last : int64 array of shape (steps,): its action, of a joint pair the backward
    device : int64 array of shape (steps,)
    blocks : distinct blocks
    device_of_block : int64 array of shape (blocks,)
    block_of : int64 array of shape (steps,): number of its block in `blocks`
    """

    of_action: Int
    first: Int
    last: Int
    device: Int
    blocks: tuple[Block, ...]
    device_of_block: Int
    block_of: Int

    @property
    def num(self) -> int:
        """Number of steps."""
        return len(self.first)

    @property
    def units(self) -> Int:
        """Units of each step."""
        return np.array([block.units for block in self.blocks], np.int64)[self.block_of]


def price_steps(schedule: PipelineSchedule, work: PipelineWork) -> Steps:
    """Ask `work` once for each distinct block; a pair without a block of its own is two steps.

    Raises
    ------
    ProgramError
        If a block that the schedule needs has no price.
    """
    s = schedule
    forwards = np.flatnonzero(s.paired)
    # One number for each pair of stages on a device, and further down for each action of a stage on a device.
    pair_code = (s.device[forwards] * s.num_stages + s.stage[forwards]) * s.num_stages + s.stage[forwards + 1]
    codes, some, which = np.unique(pair_code, return_index=True, return_inverse=True)
    pairs: dict[int, Block | None] = {}
    for code, forward in zip(codes.tolist(), forwards[some].tolist(), strict=True):
        pairs[code] = work.pair(int(s.device[forward]), int(s.stage[forward]), int(s.stage[forward + 1]))
    joint = np.zeros(s.num_actions, np.bool_)
    joint[forwards] = np.array([block is not None for block in pairs.values()], np.bool_)[which]
    second = np.zeros(s.num_actions, np.bool_)
    second[1:] = joint[:-1]
    code = (s.device * s.num_stages + s.stage) * len(KIND_LETTERS) + s.kind
    code[forwards] = np.where(joint[forwards], -1 - pair_code, code[forwards])
    first = np.flatnonzero(~second)
    codes, some, block_of = np.unique(code[first], return_index=True, return_inverse=True)
    blocks = tuple(
        pairs.get(-1 - code) or _single(s, work, action)
        for code, action in zip(codes.tolist(), first[some].tolist(), strict=True)
    )
    return Steps(
        np.cumsum(~second) - 1, first, first + joint[first], s.device[first], blocks, s.device[first[some]], block_of
    )


def _single(schedule: PipelineSchedule, work: PipelineWork, number: int) -> Block:
    action = schedule.action(number)
    device = int(schedule.device[number])
    block = getattr(work.stage(device, action.stage), _BLOCK_NAMES[action.kind])
    if not isinstance(block, Block):
        raise ProgramError(
            f"schedule {schedule.name!r} runs {action} on device {device}, but stage {action.stage} has no "
            f"{_BLOCK_NAMES[action.kind]} block there; give one"
        )
    return block

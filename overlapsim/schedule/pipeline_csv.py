"""Pipeline schedules as compute-only CSV of torch.distributed.pipelining, which torchtitan runs: read and written.

One row per device, cells in the order they run: ``<stage><letter><micro-batch>`` with letters F, B, I and W, an empty
cell for an idle slot, ``(0F7;7B3)OVERLAP_F_B`` for an F&B pair (torch 2.13).
"""

from __future__ import annotations

import re
from typing import Final

from overlapsim.errors import PlanError
from overlapsim.schedule.pipeline import KIND_LETTERS, Action, PipelineSchedule, Slot
from overlapsim.schedule.pipeline_check import check_schedule

_ACTION: Final = re.compile(r"([0-9]+)([FBIW])([0-9]+)")
_PAIR: Final = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
_COMMUNICATION: Final = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])[0-9]*")


def schedule_to_csv(schedule: PipelineSchedule) -> str:
    """Text of a schedule, without idle cells; the last row ends without an empty line, which torch counts as a device.

    Raises
    ------
    PlanError
        If the schedule has two copies of the model: a stage is on one device in this format.

    Examples
    --------
    >>> from overlapsim.schedule.pipeline_one_way import one_f_one_b
    >>> print(schedule_to_csv(one_f_one_b(2, 2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    if schedule.num_copies > 1:
        raise PlanError(
            f"schedule {schedule.name!r} has {schedule.num_copies} copies of the model; the CSV has one device for "
            "each stage: take a V-shaped schedule such as dualpipev"
        )
    rows = (",".join(_cell(slot) for slot in schedule.slots(device)) for device in range(schedule.num_devices))
    return "\n".join(rows) + "\n"


def schedule_from_csv(text: str, name: str = "csv") -> PipelineSchedule:
    r"""Schedule of a compute-only CSV; stages are placed where their actions are.

    What torch accepts and runs wrong, or refuses without a reason, is refused
    here: an action twice, an empty row, anything around a cell but blanks.

    Raises
    ------
    PlanError
        Naming row and cell, or the first action that is missing, double or misplaced.
    DeadlockError
        If the rows wait for each other.

    Examples
    --------
    >>> schedule_from_csv("0F0,0B0\n1F0,1B0\n").placement.tolist()
    [[0, 1]]
    """
    slots: list[list[Slot]] = []
    for row, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        cells = line.removesuffix("\r").split(",")
        found = [_slot(cell.strip(), row, column) for column, cell in enumerate(cells, start=1) if cell.strip()]
        if not found:
            raise PlanError(f"row {row} of the schedule is empty, and every row is a device; remove it")
        slots.append(found)
    device_of: dict[int, int] = {}
    for device, line_slots in enumerate(slots):
        for action in (action for slot in line_slots for action in slot):
            if device_of.setdefault(action.stage, device) != device:
                raise PlanError(
                    f"stage {action.stage} is on rows {device_of[action.stage] + 1} and {device + 1} of the schedule; "
                    "expected all of its actions in one row"
                )
    actions = [action for line_slots in slots for slot in line_slots for action in slot]
    num_stages, num_micro_batches = 1 + max(device_of), 1 + max(action.micro_batch for action in actions)
    # Before tables are made of what may be a slip.
    if 2 * num_stages * num_micro_batches > len(actions):
        raise PlanError(
            f"the schedule has {len(actions)} actions; the {num_stages} stages and {num_micro_batches} micro-batches "
            f"it names need {2 * num_stages * num_micro_batches}, more where backwards are split: give the rest, and "
            "count both from 0"
        )
    placement = [[device_of[stage] for stage in range(num_stages)]]
    schedule = PipelineSchedule.of_slots(name, slots, placement=placement, copy_of=[0] * num_micro_batches)
    check_schedule(schedule)
    return schedule


def _cell(slot: Slot) -> str:
    return str(slot[0]) if len(slot) == 1 else f"({slot[0]};{slot[1]})OVERLAP_F_B"


def _slot(cell: str, row: int, column: int) -> Slot:
    pair = _PAIR.fullmatch(cell)
    return tuple(_action(part.strip(), cell, row, column) for part in (pair.groups() if pair else (cell,)))


def _action(text: str, cell: str, row: int, column: int) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        reason = "expected <stage><F, B, I or W><micro-batch> such as 0F3, or a pair such as (0F7;7B3)OVERLAP_F_B"
        if _COMMUNICATION.fullmatch(text):
            reason = "expected computation only: torch adds communication by itself, and refuses a file that has both"
        raise PlanError(f"row {row}, cell {column} of the schedule is {cell!r}; {reason}")
    stage, letter, micro_batch = match.groups()
    return Action(KIND_LETTERS.index(letter), int(stage), int(micro_batch))

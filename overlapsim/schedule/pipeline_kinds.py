"""Pipeline schedules by name: what makes them, what they need, and their published bubbles."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from overlapsim.errors import LayoutError
from overlapsim.schedule.pipeline import PipelineSchedule
from overlapsim.schedule.pipeline_bubbles import (
    Bubble,
    dualpipe_bubble,
    dualpipev_bubble,
    full_bubble,
    interleaved_bubble,
    zb_h1_bubble,
    zb_h2_bubble,
    zbv_bubble,
)
from overlapsim.schedule.pipeline_one_way import gpipe, interleaved, interleaved_pairs, one_f_one_b, zb_h1, zb_h2
from overlapsim.schedule.pipeline_two_way import dualpipe, dualpipev, zbv


@dataclass(frozen=True)
class ScheduleKind:
    """A family of schedules.

    Attributes
    ----------
    make : from devices and micro-batches; `interleaved` also takes stages a device and micro-batches of a group
    stages_per_device : of each copy of the model; None: an argument, at least 2
    copies : of the model on the pipeline
    splits_backward : whether input and weight gradients are run apart
    has_pairs : whether a forward and a backward are run together
    bubble : published idle time of a step where all stages take equally long, None where it has no closed form
    """

    make: Callable[..., PipelineSchedule]
    stages_per_device: int | None
    copies: int
    splits_backward: bool
    has_pairs: bool
    bubble: Bubble | None


SCHEDULES: Final[Mapping[str, ScheduleKind]] = {
    "gpipe": ScheduleKind(gpipe, 1, 1, False, False, full_bubble),
    "1f1b": ScheduleKind(one_f_one_b, 1, 1, False, False, full_bubble),
    "interleaved": ScheduleKind(interleaved, None, 1, False, False, interleaved_bubble),
    "interleaved_pairs": ScheduleKind(interleaved_pairs, None, 1, False, True, None),
    "zb_h1": ScheduleKind(zb_h1, 1, 1, True, False, zb_h1_bubble),
    "zb_h2": ScheduleKind(zb_h2, 1, 1, True, False, zb_h2_bubble),
    "zbv": ScheduleKind(zbv, 2, 1, True, False, zbv_bubble),
    "dualpipe": ScheduleKind(dualpipe, 1, 2, True, True, dualpipe_bubble),
    "dualpipev": ScheduleKind(dualpipev, 2, 1, True, True, dualpipev_bubble),
}
"""Every schedule that can be made by name."""


def schedule_kind(name: str) -> ScheduleKind:
    """Family called `name`.

    Raises
    ------
    LayoutError
        If there is none.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise LayoutError(f"pipeline schedule {name!r} is unknown; {hint}known schedules: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def make_schedule(
    name: str,
    num_devices: int,
    num_micro_batches: int,
    *,
    stages_per_device: int | None = None,
    group_size: int | None = None,
) -> PipelineSchedule:
    """Make a schedule by name.

    Parameters
    ----------
    name : one of `SCHEDULES`
    num_devices, num_micro_batches : int, at least 1
        Devices of one pipeline; micro-batches of one step of it.
    stages_per_device : int, optional
        Stages of one copy of the model on each device; needed for the
        interleaved schedules, fixed for the others.
    group_size : int, optional
        For the interleaved schedules, see :func:`pipeline_one_way.interleaved`.

    Raises
    ------
    LayoutError
        If the name is unknown or the schedule does not exist for these numbers; the message says which and why.

    Examples
    --------
    >>> make_schedule("interleaved", 4, 8, stages_per_device=2).num_stages
    8
    """
    kind = schedule_kind(name)
    if num_devices < 1 or num_micro_batches < 1:
        raise LayoutError(
            f"{name} has {num_devices} devices and {num_micro_batches} micro-batches; expected at least one of each"
        )
    if kind.stages_per_device is not None:
        if stages_per_device not in (None, kind.stages_per_device):
            raise LayoutError(
                f"{name} has {stages_per_device} stages a device; it always has {kind.stages_per_device}: leave the "
                "number out, or take interleaved"
            )
        if group_size is not None:
            raise LayoutError(f"{name} has no groups of micro-batches; leave group_size out, or take interleaved")
        return kind.make(num_devices, num_micro_batches)
    if stages_per_device is None:
        raise LayoutError(f"{name} needs stages_per_device, at least 2; it was not given")
    return kind.make(num_devices, num_micro_batches, stages_per_device, group_size)

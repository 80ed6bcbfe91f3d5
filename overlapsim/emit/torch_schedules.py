"""Pipeline schedules as torch.distributed.pipelining knows them: by name, or as a file of actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from overlapsim.errors import PlanError
from overlapsim.plan import StepSettings
from overlapsim.schedule.pipeline_csv import schedule_to_csv
from overlapsim.schedule.pipeline_kinds import make_schedule, schedule_kind

CLASSES: Final[Mapping[str, str]] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Name in torch of each schedule whose actions it makes in the same order (a test holds it, torch 2.13)."""
PLACED_AS: Final[Mapping[str, str]] = {"zb_h1": "1F1B", "zb_h2": "1F1B", "interleaved_pairs": "Interleaved1F1B"}
"""Schedules that torch reads from a file: the named schedule that places stages on devices in the same way."""
NEUTRAL: Final[Mapping[str, str]] = {spelt.lower(): name for name, spelt in CLASSES.items()}
"""The way back; torch takes names in any case."""


def schedule_class(settings: StepSettings) -> str:
    """Name in torch, of the schedule or of one that places its stages alike.

    Raises
    ------
    PlanError
        If the schedule holds two copies of the model.
    """
    name = settings.schedule
    if name not in CLASSES and name not in PLACED_AS:
        raise PlanError(
            f"schedule {name} holds two copies of the model on each pipeline, which torch's pipelining cannot run; "
            "expected one of "
            f"{', '.join((*CLASSES, *PLACED_AS))}: plan with --schedules dualpipev"
        )
    return CLASSES.get(name) or PLACED_AS[name]


def schedule_file(settings: StepSettings, pp: int, vpp: int) -> str | None:
    """Text of the CSV where the schedule is in torch under no name; None where it is, or without a pipeline."""
    if pp == 1 or settings.schedule in CLASSES:
        return None
    stages = vpp if schedule_kind(settings.schedule).stages_per_device is None else None
    return schedule_to_csv(make_schedule(settings.schedule, pp, settings.num_micro_batches, stages_per_device=stages))


def splits_backward(settings: StepSettings, pp: int) -> bool:
    """Whether gradients of inputs and weights run apart, which compiled stages do not allow."""
    return pp > 1 and schedule_kind(settings.schedule).splits_backward

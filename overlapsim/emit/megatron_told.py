"""What is left of a plan where Megatron runs it: strategies and dispatchers that it has, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from overlapsim.emit.base import Subject
from overlapsim.emit.megatron_layout import RUNS
from overlapsim.emit.userbuffers import EXPERTS, STRATEGIES
from overlapsim.planner.step_plan import step_inputs_of
from overlapsim.step.inputs import StepInputs

TOLD: Final = ("grad_buckets", "fsdp_prefetch", "p2p_overlap", "wgrad_delay", "shared_expert", "expert_pair")
"""Strategies of whole graphs that arguments speak of."""
DISPATCHERS: Final = {"all_to_all": "alltoall", "all_gather": "allgather", "deepep": "flex"}
"""Megatron's name of a way to experts."""


def told_inputs(subject: Subject) -> StepInputs | None:
    """The step without what Megatron cannot be told, to be simulated; None where that is nothing, or is not known.

    GEMMs whose strategy Transformer Engine does not have run without overlap, which is the worst of what it may do.
    """
    entry, layout = subject.entry, subject.layout
    settings = entry.settings
    if subject.cluster is None or settings.schedule not in RUNS:
        return None
    split = layout.tp > 1 and layout.sequence_parallel
    kept = tuple(op for op in entry.operators if split and op.strategy in STRATEGIES and op.operator not in EXPERTS)
    left = replace(
        entry,
        operators=kept,
        settings=replace(
            settings,
            arranging=tuple(entry for entry in settings.arranging if entry[0] in TOLD),
            dispatcher=settings.dispatcher if settings.dispatcher in DISPATCHERS else "all_to_all",
            dispatch_dtype="",
            compress=(),
        ),
    )
    if left == entry:
        return None
    return step_inputs_of(subject.step.inputs, left, subject.spec, subject.cluster)

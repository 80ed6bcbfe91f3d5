"""The kernel plan of one GEMM and its collective, as ``overlapsim.validate`` runs it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from overlapsim.emit.base import Emitted, Emitter, Subject, comment
from overlapsim.emit.rules import Version
from overlapsim.plan import OperatorSettings, dump_plan

FILE: Final = "kernel_plan.yaml"
OWN_KERNEL: Final = "signalled_gemm"


class WaveGroup(Emitter):
    """The plan itself: tiles, groups and reorder map are in its settings, and the runner checks them again."""

    name = "wave_group"
    framework = "overlapsim"
    kind = "operator"

    def write(self, subject: Subject, version: Version) -> Emitted:
        """Return the plan with what runs it in its head."""
        plan = subject.operator
        left = []
        for op in plan.operators:
            left += _left(op)
        if not plan.operators:
            left.append("the plan holds no operator: there is nothing to run")
        head = (
            *self.header(subject, version),
            f"torchrun --nproc-per-node {plan.inputs.ranks // max(1, plan.inputs.nodes)} "
            f"-m overlapsim.validate plan {FILE}",
            *(f"not expressed: {sentence}" for sentence in left),
        )
        return Emitted({FILE: comment(head) + dump_plan(replace(plan, provenance={}))}, tuple(left))


def _left(op: OperatorSettings) -> list[str]:
    settings = op.settings
    left = []
    if settings.get("kernel") != OWN_KERNEL:
        left.append(f"{op.strategy} has no groups of waves: its own runner takes it, with the vendor's kernels")
    if isinstance(settings.get("map"), str):
        left.append(f"{settings['map']} must be copied beside the file")
    return left


EMITTER: Final = WaveGroup()

"""A Megatron launch as numbers that rules look at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from overlapsim.emit.lint_base import Facts, Lint, LintKind
from overlapsim.emit.megatron_env import QUEUES
from overlapsim.emit.megatron_read import Argument, Script, stages_of
from overlapsim.emit.rules import Version
from overlapsim.strategy.compatibility import BEFORE_BLACKWELL

FSDP: Final = ("--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2")


@dataclass(frozen=True)
class Config:
    """What is written, and what follows from it.

    Attributes
    ----------
    script, facts, version : what was given
    """

    script: Script
    facts: Facts
    version: Version

    def has(self, *flags: str) -> bool:
        """Whether one of some flags is there."""
        return any(self.script.has(flag) for flag in flags)

    def number(self, flag: str, default: int = 1) -> int:
        """Value of a flag, or its default."""
        found = self.script.number(flag)
        return default if found is None else found

    def value(self, flag: str, default: str = "") -> str:
        """First value of a flag as text."""
        argument = self.script.by_flag.get(flag)
        return default if argument is None else argument.value

    def lint(self, kind: LintKind, message: str, fix: str, *flags: str) -> Lint:
        """A remark on the line of the first of some flags."""
        return Lint(kind, self.script.line(*flags), message, fix)

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return self.number("--tensor-model-parallel-size")

    @property
    def pp(self) -> int:
        """Stages."""
        return self.number("--pipeline-model-parallel-size")

    @property
    def cp(self) -> int:
        """Context-parallel degree."""
        return self.number("--context-parallel-size")

    @property
    def ep(self) -> int:
        """Expert-parallel degree."""
        return self.number("--expert-model-parallel-size")

    @property
    def etp(self) -> int:
        """Tensor-parallel degree of the experts."""
        return self.number("--expert-tensor-parallel-size", self.tp)

    @property
    def interleaved(self) -> bool:
        """Whether a device holds several stages."""
        stages = stages_of(self.script)
        return self.pp > 1 and (
            self.number("--num-virtual-stages-per-pipeline-rank") > 1
            or self.has("--num-layers-per-virtual-pipeline-stage")
            or len(stages) > self.pp
        )

    @property
    def world_size(self) -> int | None:
        """Ranks, where they are known."""
        return self.script.world_size or self.facts.world_size

    @property
    def dp(self) -> int | None:
        """Data-parallel degree, where ranks are known and divide."""
        model = self.tp * self.cp * self.pp
        return self.world_size // model if self.world_size and self.world_size % model == 0 else None

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of a step, where batch and ranks are known and divide."""
        batch, each = self.script.number("--global-batch-size"), self.script.number("--micro-batch-size")
        if not batch or not each or not self.dp or batch % (each * self.dp):
            return None
        return batch // (each * self.dp)

    @property
    def sequence_parallel(self) -> bool:
        """Whether norms and residuals are split along the sequence."""
        return self.tp > 1 and self.has("--sequence-parallel")

    @property
    def fsdp(self) -> bool:
        """Whether parameters are sharded by FSDP."""
        return self.has(*FSDP)

    @property
    def pairs(self) -> bool:
        """Whether expert exchanges overlap with another micro-batch."""
        return self.has("--overlap-moe-expert-parallel-comm")

    @property
    def pairs_need_queues_alone(self) -> bool:
        """Whether expert exchanges beside another micro-batch want many queues, and nothing else wants one.

        Before Blackwell tensor and context parallelism want one: Megatron then warns, and takes 1 or 32.
        """
        return max(self.tp, self.cp) == 1 or not self.before_blackwell

    def with_flags(self, *flags: str) -> Config:
        """The same launch with switches, or flags with a value (``--flag value``), more."""
        added = (Argument(parts[0], tuple(parts[1:]), 0) for flag in flags for parts in (flag.split(),))
        return replace(self, script=replace(self.script, arguments=(*self.script.arguments, *added)))

    @property
    def overlaps_dp(self) -> bool:
        """Whether gradients or parameters are to overlap."""
        return self.has("--overlap-grad-reduce", "--overlap-param-gather")

    @property
    def queues(self) -> str | None:
        """``CUDA_DEVICE_MAX_CONNECTIONS``; None where it is unset or not said."""
        return self.script.environment.get(QUEUES, (None, 0))[0]

    @property
    def queue_line(self) -> int | None:
        """Line of the queue count."""
        return self.script.environment[QUEUES][1] if QUEUES in self.script.environment else None

    @property
    def before_blackwell(self) -> bool:
        """Whether GPUs are known to be, or may be, older than Blackwell."""
        return self.facts.architecture is None or self.facts.architecture in BEFORE_BLACKWELL

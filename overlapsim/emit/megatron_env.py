"""The environment beside Megatron's arguments: how many hardware queues, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from overlapsim.strategy.compatibility import BEFORE_BLACKWELL

QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class Run:
    """What the queue count depends on.

    Attributes
    ----------
    wide : whether tp or cp is above 1
    fsdp : whether parameters are sharded by FSDP
    expert_pairs : whether expert exchanges overlap with computation of another micro-batch
    architecture : of the GPUs; None: not known, and taken as before Blackwell
    """

    wide: bool
    fsdp: bool
    expert_pairs: bool
    architecture: str | None

    @property
    def before_blackwell(self) -> bool:
        """Whether Megatron asserts a queue count."""
        return self.architecture is None or self.architecture in BEFORE_BLACKWELL


def queues(run: Run) -> tuple[Literal["one", "unset"], str]:
    """Return whether there is to be one queue, and why.

    Source: Megatron-Core's argument checks (one queue is asserted with tp or cp above 1 before Blackwell, and refused
    with FSDP); NVIDIA/Megatron-LM issue 1468 for tp = cp = 1.

    Examples
    --------
    >>> queues(Run(wide=False, fsdp=False, expert_pairs=False, architecture="hopper"))[0]
    'unset'
    """
    if run.fsdp:
        return "unset", "FSDP's gathers and scatters would wait for each other in one queue; Megatron refuses 1"
    if run.expert_pairs:
        return "unset", "expert exchanges run beside another micro-batch's kernels, which one queue forbids"
    if run.wide and run.before_blackwell:
        return "one", "communication is launched before the GEMM beside it; Megatron asserts it with tp or cp above 1"
    if run.wide:
        return "unset", "GPUs from Blackwell on order launches by priority; Megatron asks for no count"
    return "unset", "with tp = cp = 1 one queue only keeps gradients and parameters from overlapping"


def env_text(run: Run) -> str:
    """Lines of a shell file."""
    count, why = queues(run)
    line = f"export {QUEUES}=1" if count == "one" else f"unset {QUEUES}"
    return f"{line}  # {why}\n"

"""Kinds of time: what a task of a program counts as when a timeline is read."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapsim.schedule.program import BLOCKS, FLOW, Program
from overlapsim.workload.operators import STEP_PREFIXES

COMPUTE_KINDS: Final = ("gemm", "attention", "other_compute", "optimizer")
COMM_KINDS: Final = ("exposed_tp", "exposed_sp", "exposed_ep", "exposed_cp", "exposed_pp", "exposed_dp")
KINDS: Final = (*COMPUTE_KINDS, *COMM_KINDS, "bubble", "host")
"""Names of a breakdown, in order; each instant of a step counts as one of them."""
_GROUPS: Final = {
    "tp": "exposed_tp",
    "etp": "exposed_tp",
    "sp": "exposed_sp",
    "ep": "exposed_ep",
    "etp_ep": "exposed_ep",
    "cp": "exposed_cp",
    "pp": "exposed_pp",
    "embedding": "exposed_dp",
    # The gradients' norm is summed over all ranks, whatever splits them: a part of the optimizer's step.
    "world": "optimizer",
}
# Gradients and parameters, over whatever ranks hold them.
_PARAMETERS: Final = ("grad.", "param.")


@lru_cache(maxsize=4096)
def kind_of(op: str, tag: str, flow: bool) -> str:
    """Kind of one task by its operator and tag; empty for a kernel that only waits.

    Examples
    --------
    >>> kind_of("mlp.fc1", "fwd gemm", False), kind_of("mlp.fc2", "fwd reduce_scatter [tp]", True)
    ('gemm', 'exposed_tp')
    """
    if flow:
        if op.startswith(_PARAMETERS):
            return "exposed_dp"
        group = tag.rpartition("[")[2].rstrip("]") if tag.endswith("]") else ""
        return _GROUPS.get(group) or _moved(op, group)
    if tag.startswith("wait"):
        return ""
    if op.startswith("optim."):
        return "optimizer"
    if "gemm" in tag:
        return "gemm"
    return "attention" if "attention" in tag else "other_compute"


def _moved(op: str, group: str) -> str:
    """Kind of what moves without a group that says it: copies and stores of strategies serve their operator."""
    if op == "p2p":
        return "exposed_pp"
    if group or op.startswith(("optim.", "embed", *STEP_PREFIXES)):
        return "exposed_dp"
    return "exposed_ep" if op in ("moe.dispatch", "moe.combine") else "exposed_tp"


def kinds_of(program: Program) -> npt.NDArray[np.int64]:
    """Position in `KINDS` of each task; -1 for those that are neither computation nor communication."""
    flow, blocks = program.kind == FLOW, program.kind == BLOCKS
    found = [
        kind_of(op, tag, bool(is_flow)) if is_flow or is_blocks else ""
        for op, tag, is_flow, is_blocks in zip(program.op, program.tag, flow, blocks, strict=True)
    ]
    return np.array([KINDS.index(kind) if kind else -1 for kind in found], dtype=np.int64)

"""What tensor parallelism sums and gathers, in full or narrowed to fp8 where the recipe compresses it.

MegaScale-MoE (arXiv 2505.11432, section 5): the forward reduce-scatter of partial outputs becomes an exchange of fp8
numbers with a scale for each token and a local sum in fp32; the backward gather of output gradients moves fp8 numbers
with a scale for each group of tokens. Sums of input gradients and gathers of inputs stay as they are.
"""

from __future__ import annotations

import math
from typing import Final

from overlapsim.units import dtype_bytes
from overlapsim.workload.build_part import Part
from overlapsim.workload.memory_bound import MemoryOp
from overlapsim.workload.recorder import Recorder

SCALE_BYTES: Final = dtype_bytes("fp32")
SCALE_GROUP: Final = 128
"""Tokens of a channel that share a scale in the backward pass."""


def compresses(part: Part) -> bool:
    """Whether tensor parallelism's sums and gathers of gradients go in fp8: asked for, and the sequence is split."""
    return "tp-fp8" in part.recipe.compress and part.layout.sequence_parallel


def scatter_sum(
    r: Recorder, part: Part, name: str, size_bytes: float, ranks: int, *, group: str = "tp", pass_: str = ""
) -> None:
    """Sum partial outputs over a tensor-parallel group, each rank its part of the tokens (all of them unsplit).

    Parameters
    ----------
    size_bytes : of one rank's partial output, in the model's type
    """
    if not (compresses(part) and ranks > 1):
        r.collective(part.reduction, name, size_bytes, ranks, group=group, pass_=pass_)
        return
    hidden = part.model.hidden
    rows = max(1, math.ceil(size_bytes / (hidden * part.element_bytes)))
    narrow = rows * (hidden * dtype_bytes("fp8") + SCALE_BYTES)
    r.kernel(name, MemoryOp("quantize_fp8", rows, hidden, part.model.dtype), pass_=pass_)
    r.collective("all_to_all", name, float(narrow), ranks, group=group, pass_=pass_, dtype="fp8")
    summed = MemoryOp("shard_sum_half", max(1, math.ceil(rows / ranks)), hidden, "fp8", topk=ranks)
    r.kernel(name, summed, pass_=pass_)


def gather_narrow(
    r: Recorder, part: Part, name: str, size_bytes: float, ranks: int, *, group: str = "tp", pass_: str = "dgrad"
) -> None:
    """Gather gradients of outputs over a tensor-parallel group; GEMMs in fp8 read them as they come.

    Parameters
    ----------
    size_bytes : of all ranks' gradients together, in the model's type
    """
    if not (compresses(part) and ranks > 1):
        r.collective("all_gather", name, size_bytes, ranks, group=group, pass_=pass_)
        return
    hidden = part.model.hidden
    rows = max(1, math.ceil(size_bytes / (hidden * part.element_bytes)))
    narrow = rows * hidden * (dtype_bytes("fp8") + SCALE_BYTES / SCALE_GROUP)
    own = MemoryOp("quantize_fp8", max(1, math.ceil(rows / ranks)), hidden, part.model.dtype)
    r.kernel(name, own, pass_=pass_)
    r.collective("all_gather", name, narrow, ranks, group=group, pass_=pass_, dtype="fp8")
    if not part.recipe.fp8:
        r.kernel(name, MemoryOp("dequantize_fp8", rows, hidden, part.model.dtype), pass_=pass_)

"""What a step's recipe compresses, as findings: which results change, and what was asked for and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from overlapsim.plan import Finding
from overlapsim.step.inputs import StepInputs
from overlapsim.step.traffic import compresses_gradients
from overlapsim.workload.recipe import Compress

CHANGES: Final[dict[Compress, str]] = {
    "grads-bf16": "gradients are rounded to bf16 once and summed in fp32 over the data-parallel ranks",
    "tp-fp8": "partial outputs of tensor parallelism, and gradients of its outputs, are sent in fp8 with scales",
    "params-fp8": "parameters are stored and gathered in fp8; the optimizer alone keeps more",
}


def compression_findings(inputs: StepInputs) -> tuple[Finding, ...]:
    """Name what of the recipe's compression changes results, and what has nothing to compress in this step.

    Codes: ``accuracy_affecting``, ``compression_not_applied``.
    """
    return tuple(_findings(inputs))


def _findings(inputs: StepInputs) -> Iterator[Finding]:
    for entry in inputs.recipe.compress:
        if reason := _idle(inputs, entry):
            yield Finding("compression_not_applied", f"{entry}: {reason}")
        else:
            yield Finding(
                "accuracy_affecting",
                f"{entry}: {CHANGES[entry]}; published runs converge so (MegaScale-MoE, section 5), yours may not: "
                "compare the loss of a run with and without it",
            )


def _idle(inputs: StepInputs, entry: Compress) -> str:
    """Why an entry changes nothing; empty where it does."""
    layout = inputs.layout
    if entry == "grads-bf16" and not compresses_gradients(inputs):
        return "gradients are not scattered in fp32 once a step (ZeRO 1 or 2, or 3 without resharding, has them so)"
    if entry in ("grads-bf16", "params-fp8") and max(layout.dense_shards, layout.expert_shards) < 2:
        return "no state is sharded over data-parallel ranks (ZeRO), so nothing is scattered or gathered"
    if entry == "tp-fp8" and not (max(layout.tp, layout.etp) > 1 and layout.sequence_parallel):
        return "there is no tensor parallelism with the sequence split, whose sums it would narrow"
    return ""

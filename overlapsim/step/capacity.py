"""Whether a step fits the memory of its GPUs, and which single change would make it fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from overlapsim.errors import OverlapSimError
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import step_memory, step_schedule
from overlapsim.units import format_bytes
from overlapsim.workload.memory import Memory
from overlapsim.workload.recompute import SAR, SELECTIVE, Recompute


def memory_shortfall(inputs: StepInputs, memory: Sequence[Memory]) -> str | None:
    """Why a step does not fit, with its memory by kind and what would help; None where it fits.

    Parameters
    ----------
    inputs : the step
    memory : of each pipeline device, as `simulate.step_memory` gives it
    """
    capacity = inputs.cluster.device.hbm_bytes
    stage = max(range(len(memory)), key=lambda number: memory[number].total_bytes)
    needed = memory[stage].total_bytes
    if needed <= capacity:
        return None
    kinds = sorted(memory[stage].by_kind().items(), key=lambda entry: -entry[1])
    parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds if size)
    changes = [(what, _most(changed)) for what, changed in _changes(inputs)]
    helps = [f"{what} ({format_bytes(total)})" for what, total in changes if total <= capacity]
    if helps:
        advice = f"expected a step that fits, such as with {' or '.join(helps)}"
    else:
        less = min(changes, key=lambda change: change[1], default=None)
        advice = "expected more GPUs a copy of the model (tp, pp or ep)"
        if less is not None and less[1] < needed:
            advice += f"; of single changes {less[0]} leaves least ({format_bytes(less[1])})"
    device = inputs.cluster.device.name
    where = f"stage {stage} of {len(memory)}" if len(memory) > 1 else "every GPU"
    return (
        f"{inputs.model.name} in {inputs.layout} does not fit: {where} needs {format_bytes(needed)} and {device} has "
        f"{format_bytes(capacity)} ({parts}); {advice}"
    )


def _most(inputs: StepInputs) -> float:
    return max(entry.total_bytes for entry in step_memory(inputs, step_schedule(inputs)))


def _changes(inputs: StepInputs) -> Iterator[tuple[str, StepInputs]]:
    """Single changes that save memory and that model, batch and machine allow."""
    layout, job = inputs.layout, inputs.job
    tried: list[tuple[str, dict[str, object]]] = []
    modules = inputs.recompute.modules
    if inputs.recompute.granularity != "full":
        sets = (("selective", SELECTIVE),) if inputs.recipe.attention == "unfused" else ()
        for name, more in (*sets, ("sar", SAR)):
            if not more <= modules:
                tried.append((f"{name} recompute", {"recompute": Recompute("selective", modules | more)}))
        tried.append(("full recompute", {"recompute": Recompute("full")}))
    if layout.dense_replicas > 1 or layout.edp > 1:
        for zero in range(layout.zero + 1, 4):
            tried.append((f"zero={zero}", {"layout": replace(layout, zero=zero)}))
    if job.micro_batch > 1:
        tried.append(("a micro-batch of 1", {"job": replace(job, micro_batch=1)}))
    for name in ("tp", "pp"):
        if layout.dp % 2 == 0:
            degrees = {name: 2 * getattr(layout, name), "dp": layout.dp // 2}
            if name == "tp" and layout.etp == layout.tp:
                degrees["etp"] = 2 * layout.etp
            try:
                tried.append((f"{name}={degrees[name]},dp={degrees['dp']}", {"layout": replace(layout, **degrees)}))
            except OverlapSimError:
                continue
    for what, change in tried:
        try:
            changed = replace(inputs, **change)  # type: ignore[arg-type]
            step_schedule(changed)
        except OverlapSimError:
            continue
        yield what, changed

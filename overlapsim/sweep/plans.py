"""Points of `plan`: the best layout of a model on a machine, searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from overlapsim.hardware.profile import Cluster
from overlapsim.planner.search import PlanRequest, search
from overlapsim.planner.space import Axes, Constraint
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import simulate_step
from overlapsim.sweep.keys import Cell, Column, finding_codes, flag_key, quantity_key, text_key
from overlapsim.sweep.steps import MACHINE_KEYS, SOFTWARE_KEYS, STEP_COLUMNS, step_cells
from overlapsim.units import parse_bytes
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.recipe import RECIPES


def _constraints(text: str) -> tuple[Constraint, ...]:
    return tuple(Constraint.parse(rule.strip()) for rule in text.split(",") if rule.strip())


KEYS: Final = (
    *MACHINE_KEYS,
    text_key("constraint", "", check=_constraints),
    quantity_key("memory", parse_bytes, "limit_bytes", None),
    flag_key("uneven", False),
    *SOFTWARE_KEYS,
)
COLUMNS: Final = (
    Column("gpus", "int"),
    Column("layout", "text"),
    Column("micro_batch", "int"),
    *(Column(name, "text") for name in ("schedule", "recompute", "dp_overlap", "overlap")),
    *STEP_COLUMNS,
    Column("second_step_time_s", "float"),
    Column("serial_step_time_s", "float"),
    Column("candidates", "int"),
    Column("findings", "text"),
)


def answer(
    given: Mapping[str, Any], cluster: Cluster, model: ModelSpec | None, models: dict[object, object]
) -> Mapping[str, Cell]:
    """Search the best plan of one request.

    Raises
    ------
    PlanError
        As `planner.search.search`: no layout exists or fits.
    """
    assert model is not None
    if given["dtype"]:
        model = replace(model, dtype=given["dtype"])
    request = PlanRequest(
        model,
        cluster,
        given["global_batch"],
        given["seq"],
        axes=Axes(uneven=given["uneven"]),
        constraints=_constraints(given["constraint"]),
        memory_bytes=given["memory"],
        recipe=RECIPES[given["recipe"]],
        stack=given["stack"],
        sustained_clock=given["sustained_clock"],
        top=2,
    )
    found = search(request)
    best = found.best[0].result
    inputs = best.inputs
    if given["ranges"]:
        best = simulate_step(inputs, models=models)
    return {
        "gpus": inputs.layout.world_size,
        "layout": str(inputs.layout),
        "micro_batch": inputs.job.micro_batch,
        "schedule": inputs.schedule_name if inputs.layout.pp > 1 else "",
        "recompute": _recompute(inputs),
        "dp_overlap": inputs.dp_overlap,
        "overlap": _overlap(inputs),
        **step_cells(best, ranges=given["ranges"]),
        "second_step_time_s": found.best[1].result.step_time_s if len(found.best) > 1 else None,
        "serial_step_time_s": None if found.best_serial is None else found.best_serial.result.step_time_s,
        "candidates": found.num_candidates,
        "findings": finding_codes(best.findings),
    }


def _recompute(inputs: StepInputs) -> str:
    chosen = inputs.recompute
    return "+".join(sorted(chosen.modules)) if chosen.granularity == "selective" else chosen.granularity


def _overlap(inputs: StepInputs) -> str:
    """Strategies by operator, such as ``attn.out:fwd=wave_group``; empty: the library's kernels one after another."""
    arranging = [f"step={chosen.strategy.name}" for chosen in inputs.composition.arranging]
    pairs = sorted(inputs.composition.pairs.items())
    return " ".join((*arranging, *(f"{op}:{pass_}={chosen.strategy.name}" for (op, pass_), chosen in pairs)))

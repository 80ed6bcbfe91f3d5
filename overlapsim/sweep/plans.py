"""Points of `plan`: the best plan of a model on a machine, searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, get_args

from overlapsim.hardware.profile import Cluster
from overlapsim.plan import Objective
from overlapsim.planner.search import TOP, PlanRequest
from overlapsim.planner.space import Axes, Constraint
from overlapsim.planner.step import Goal, plan_step
from overlapsim.schedule.pipeline_kinds import schedule_kind
from overlapsim.step.inputs import StepInputs
from overlapsim.step.perturb import Perturbation
from overlapsim.sweep.keys import (
    Cell,
    Column,
    choice_key,
    finding_codes,
    flag_key,
    quantity_key,
    text_key,
    whole_key,
    words,
)
from overlapsim.sweep.steps import MACHINE_KEYS, SOFTWARE_KEYS, STEP_COLUMNS, step_cells, with_dtype
from overlapsim.units import parse_bytes
from overlapsim.workload.dispatchers import DISPATCHERS
from overlapsim.workload.model import ModelSpec, check_choice
from overlapsim.workload.recipe import RECIPES


def _constraints(text: str) -> tuple[Constraint, ...]:
    return tuple(Constraint.parse(rule) for rule in words(text))


def _axes(given: Mapping[str, Any]) -> Axes:
    axes = Axes(uneven=given["uneven"])
    schedules = words(given["schedules"])
    axes = replace(axes, schedule=schedules) if schedules else axes
    dispatchers = words(given["dispatchers"])
    return replace(axes, dispatcher=tuple(n for n in DISPATCHERS if n in dispatchers)) if dispatchers else axes


def _check_dispatchers(text: str) -> None:
    for name in words(text):
        check_choice("dispatcher", name, DISPATCHERS)


KEYS: Final = (
    *MACHINE_KEYS,
    text_key("constraint", "", check=_constraints),
    quantity_key("memory", parse_bytes, "limit_bytes", None),
    choice_key("objective", get_args(Objective), "step_time"),
    text_key("perturb", "", check=Perturbation.parse),
    text_key("schedules", "", check=lambda text: [schedule_kind(name) for name in words(text)]),
    text_key("dispatchers", "", check=_check_dispatchers),
    flag_key("uneven", False),
    text_key("allow", "", check=lambda text: Goal(allow=words(text))),
    *SOFTWARE_KEYS,
    flag_key("exhaustive", False),
    whole_key("top", TOP),
)
COLUMNS: Final = (
    Column("gpus", "int"),
    Column("layout", "text"),
    Column("micro_batch", "int"),
    *(Column(name, "text") for name in ("schedule", "recompute", "dp_overlap", "overlap")),
    Column("fp8", "bool"),
    *STEP_COLUMNS,
    *(Column(name, "float") for name in ("lower_bound_s", "perturbed_s", "perturbed_high_s")),
    *(Column(name, "float") for name in ("second_step_time_s", "serial_step_time_s")),
    Column("searched", "int"),
    Column("findings", "text"),
)


def answer(
    given: Mapping[str, Any], cluster: Cluster, model: ModelSpec | None, models: dict[object, object]
) -> Mapping[str, Cell]:
    """Search the best plan as `overlapsim plan` does.

    Raises
    ------
    OverlapSimError
        As `planner.step.plan_step`: no layout exists or fits.
    """
    assert model is not None
    request = PlanRequest(
        with_dtype(model, given["dtype"]),
        cluster,
        given["global_batch"],
        given["seq"],
        axes=_axes(given),
        constraints=_constraints(given["constraint"]),
        memory_bytes=given["memory"],
        recipe=RECIPES[given["recipe"]],
        stack=given["stack"],
        sustained_clock=given["sustained_clock"],
        top=given["top"],
        exhaustive=given["exhaustive"],
    )
    goal = Goal(given["objective"], Perturbation.parse(given["perturb"]), words(given["allow"]))
    found = plan_step(request, goal)
    best, others = found.ranked[0], found.ranked[1:]
    inputs, perturbed = best.result.inputs, best.perturbed
    return {
        "gpus": inputs.layout.world_size,
        "layout": str(inputs.layout),
        "micro_batch": inputs.job.micro_batch,
        "schedule": inputs.schedule_name if inputs.layout.pp > 1 else "",
        "recompute": _recompute(inputs),
        "dp_overlap": inputs.dp_overlap,
        "overlap": _overlap(inputs),
        "fp8": inputs.recipe.fp8,
        **step_cells(best.result),
        "lower_bound_s": best.lower_bound_s,
        "perturbed_s": None if perturbed is None else perturbed.step_time_s,
        "perturbed_high_s": None if perturbed is None else perturbed.high_s,
        "second_step_time_s": others[0].result.step_time_s if others else None,
        "serial_step_time_s": None if found.serial is None else found.serial.result.step_time_s,
        "searched": found.searched,
        "findings": finding_codes((*found.findings, *best.findings)),
    }


def _recompute(inputs: StepInputs) -> str:
    """Text that `Recompute.parse` reads."""
    chosen = inputs.recompute
    return "+".join(sorted(chosen.modules)) if chosen.granularity == "selective" else chosen.granularity


def _overlap(inputs: StepInputs) -> str:
    """Strategies by operator, such as ``attn.out:fwd=wave_group``; empty: the library's kernels one after another."""
    arranging = [f"step={chosen.strategy.name}" for chosen in inputs.composition.arranging]
    pairs = sorted(inputs.composition.pairs.items())
    return "; ".join((*arranging, *(f"{op}:{pass_}={chosen.strategy.name}" for (op, pass_), chosen in pairs)))

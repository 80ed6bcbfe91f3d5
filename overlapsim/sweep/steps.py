"""Points of `simulate`: a training step in a layout that is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from overlapsim.errors import LayoutError, UsageError
from overlapsim.hardware.nic_sharing import RINGS
from overlapsim.hardware.profile import Cluster
from overlapsim.plan import Finding
from overlapsim.schedule.pipeline_kinds import SCHEDULES
from overlapsim.schedule.pipeline_links import P2P_MODES
from overlapsim.step.capacity import memory_shortfall
from overlapsim.step.categories import KINDS
from overlapsim.step.inputs import DEFAULT_BUCKET_BYTES, DP_OVERLAPS, DP_SYNCS, StepInputs
from overlapsim.step.perturb import Perturbation
from overlapsim.step.queues import with_queues
from overlapsim.step.simulate import StepResult, simulate_step, step_memory, step_schedule
from overlapsim.strategy.compose import Composition
from overlapsim.strategy.overlaps import composition
from overlapsim.sweep.keys import (
    Cell,
    Column,
    choice_key,
    finding_codes,
    flag_key,
    quantity_key,
    share_key,
    text_key,
    whole_key,
)
from overlapsim.units import DTYPE_BYTES, parse_bytes, whole_number
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.rank_map import ORDER, read_order
from overlapsim.workload.recipe import RECIPES, Recipe, parse_compress, with_dispatch
from overlapsim.workload.recompute import Recompute


def _composition(text: str) -> Composition:
    return composition([entry.strip() for entry in text.split(";") if entry.strip()])


def _dispatch(text: str) -> None:
    with_dispatch(RECIPES["modern"], text)


def _recipe(given: Mapping[str, Any]) -> Recipe:
    recipe = with_dispatch(RECIPES[given["recipe"]], given["dispatch"])
    return replace(recipe, fp8=given["fp8"], compress=parse_compress(given["compress"]))


def _counts(text: str) -> tuple[int, ...] | None:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    counts = [count for part in parts if (count := whole_number(part)) is not None]
    if len(counts) < len(parts):
        raise UsageError(f"stage_layers is {text!r}; expected whole numbers such as 7,8,8,7")
    return tuple(counts) or None


MACHINE_KEYS: Final = (
    text_key("model"),
    text_key("cluster"),
    whole_key("nodes", 1),
    whole_key("global_batch"),
    whole_key("seq"),
)
"""What every question about a step begins with."""
SOFTWARE_KEYS: Final = (
    choice_key("recipe", tuple(RECIPES), "modern"),
    choice_key("dtype", sorted(DTYPE_BYTES), None),
    text_key("stack", "graph"),
    share_key("sustained_clock", 1.0),
)
KEYS: Final = (
    *MACHINE_KEYS,
    text_key("layout", ""),
    whole_key("micro_batch", 1),
    choice_key("schedule", ("", *SCHEDULES), ""),
    text_key("stage_layers", "", check=_counts),
    text_key("recompute", "none", check=Recompute.parse),
    *SOFTWARE_KEYS,
    flag_key("fp8", False),
    text_key("compress", "", check=parse_compress),
    choice_key("dp_sync", DP_SYNCS, "hierarchical"),
    choice_key("dp_overlap", DP_OVERLAPS, "none"),
    quantity_key("bucket_size", parse_bytes, "bucket_bytes", DEFAULT_BUCKET_BYTES),
    flag_key("reshard", True),
    choice_key("p2p", P2P_MODES, None),
    choice_key("rings", RINGS, "mirrored"),
    text_key("rank_order", "", check=read_order),
    text_key("overlap", "", check=_composition),
    whole_key("queues", None),
    text_key("dispatch", "", check=_dispatch),
    text_key("perturb", "", check=Perturbation.parse),
    flag_key("contention", True),
    flag_key("ignore_memory", False),
    flag_key("ranges", True),
)
STEP_COLUMNS: Final = (
    *(Column(name, "float") for name in ("step_time_s", "low_s", "high_s")),
    *(Column(name, "float") for name in ("tokens_per_s", "tokens_per_s_per_gpu", "mfu", "hfu")),
    Column("memory_bytes", "float"),
)
COLUMNS: Final = (
    Column("gpus", "int"),
    *STEP_COLUMNS,
    *(Column(f"{kind}_s", "float") for kind in KINDS),
    Column("findings", "text"),
)


def answer(
    given: Mapping[str, Any], cluster: Cluster, model: ModelSpec | None, models: dict[object, object]
) -> Mapping[str, Cell]:
    """Simulate one step as `overlapsim simulate` does.

    Raises
    ------
    OverlapSimError
        As `StepInputs` and `simulate_step` do; LayoutError also where the step does not fit its GPUs.
    """
    assert model is not None
    model = with_dtype(model, given["dtype"])
    degrees = {part.partition("=")[0].strip() for part in given["layout"].split(",")}
    inputs = StepInputs(
        model,
        cluster,
        Layout.parse(given["layout"], None if "dp" in degrees else cluster.num_devices),
        Job(given["seq"], given["micro_batch"], given["global_batch"], stage_layers=_counts(given["stage_layers"])),
        schedule=given["schedule"],
        p2p=given["p2p"],
        recompute=Recompute.parse(given["recompute"]),
        recipe=_recipe(given),
        stack=given["stack"],
        dp_overlap=given["dp_overlap"],
        dp_sync=given["dp_sync"],
        bucket_bytes=given["bucket_size"],
        reshard=given["reshard"],
        rings=given["rings"],
        rank_order=read_order(given["rank_order"]) if given["rank_order"] else ORDER,
        sustained_clock=given["sustained_clock"],
        composition=_composition(given["overlap"]),
        perturbation=Perturbation.parse(given["perturb"]),
        contention=given["contention"],
    )
    inputs = with_queues(inputs, given["queues"])
    shortfall = memory_shortfall(inputs, step_memory(inputs, step_schedule(inputs)))
    if shortfall and not given["ignore_memory"]:
        raise LayoutError(shortfall, exit_code=1)
    exceeded = (Finding("memory_exceeded", shortfall),) if shortfall else ()
    result = simulate_step(inputs, ranges=given["ranges"], models=models)
    return {
        "gpus": inputs.layout.world_size,
        **step_cells(result, ranges=given["ranges"]),
        **{f"{kind}_s": result.breakdown_s[kind] for kind in KINDS},
        "findings": finding_codes((*exceeded, *result.findings)),
    }


def with_dtype(model: ModelSpec, dtype: str | None) -> ModelSpec:
    """The model in another type, where one is given."""
    return replace(model, dtype=dtype) if dtype else model


def step_cells(result: StepResult, *, ranges: bool = True) -> dict[str, Cell]:
    """Cells of `STEP_COLUMNS`; the range is empty where none was asked for."""
    return {
        "step_time_s": result.step_time_s,
        "low_s": result.low_s if ranges else None,
        "high_s": result.high_s if ranges else None,
        "tokens_per_s": result.tokens_per_s,
        "tokens_per_s_per_gpu": result.tokens_per_s / result.inputs.layout.world_size,
        "mfu": result.mfu,
        "hfu": result.hfu,
        "memory_bytes": float(result.fullest.total_bytes),
    }

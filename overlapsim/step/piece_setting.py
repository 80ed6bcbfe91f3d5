"""What the pieces of a step have in common: the setting of its strategies, how its kernels are launched, what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Final

from overlapsim.cost.launch import LaunchStack, launch_stack
from overlapsim.cost.prices import PriceBook
from overlapsim.schedule.pipeline import PipelineSchedule
from overlapsim.step.inputs import StepInputs
from overlapsim.strategy.compatibility import Dispatcher, Setting
from overlapsim.strategy.compose import Composition
from overlapsim.workload.layout import Layout
from overlapsim.workload.recipe import Recipe

DISPATCHES: Final[Mapping[str, Dispatcher]] = {
    "all_gather": "allgather",
    "all_to_all": "alltoall",
    "hierarchical": "alltoall",
}
"""How recipes' dispatchers move tokens, as rules on strategies tell them apart; all others write into peers' memory."""


def setting_of(composition: Composition, layout: Layout, recipe: Recipe, **known: object) -> Setting:
    """What rules on strategies ask of a step: what was said of it, the rest from layout, recipe and what is `known`."""
    dispatcher = DISPATCHES.get(recipe.dispatcher, "direct") if layout.ep > 1 else None
    found = Setting.of(layout, dispatcher=dispatcher, **known)
    given = composition.setting
    said = {field.name: value for field in fields(Setting) if (value := getattr(given, field.name)) is not None}
    return replace(found, **said)


def training_setting(inputs: StepInputs, schedule: PipelineSchedule) -> Setting:
    """Setting of a training step: its micro-batches, transfers and recomputation too."""
    recompute = inputs.recompute
    return setting_of(
        inputs.composition,
        inputs.layout,
        inputs.recipe,
        micro_batches=schedule.num_micro_batches,
        p2p=inputs.p2p_mode,
        recompute="moe" if "moe" in recompute.modules else recompute.granularity,
    )


def signature(inputs: StepInputs, prices: PriceBook) -> tuple[object, ...]:
    """All that a layer's block depends on."""
    layout, job = inputs.layout, inputs.job
    inner: tuple[object, ...] = (
        layout.tp,
        layout.sp,
        layout.cp,
        layout.cp_kind,
        layout.ep,
        layout.etp,
        layout.sequence_parallel,
    )
    places = tuple(prices.groups.get(kind) for kind in ("tp", "sp", "cp", "ep", "etp", "etp_ep", "world"))
    if inputs.sharded:
        inner += (layout.zero, layout.hsdp, layout.dp, str(inputs.precision))
        places += tuple(prices.groups.get(kind) for kind in ("shard", "expert_shard"))
    shifts = (tuple(sorted(prices.ends.items())), tuple(sorted(prices.factors.items())))
    # Settings that change nothing within a layer; whatever is added to a step counts until it is listed here.
    outside = {"model", "cluster", "layout", "job", "schedule", "p2p", "scatter_gather", "precision", "dp_overlap"}
    outside |= {"bucket_bytes", "rings", "rank_order", "sustained_clock", "composition"}
    rest: tuple[object, ...] = tuple(
        repr(getattr(inputs, field.name)) for field in fields(StepInputs) if field.name not in outside
    )
    pairs = tuple((where, c.strategy.name, repr(c.parameters)) for where, c in sorted(inputs.composition.pairs.items()))
    arranging = tuple((chosen.strategy.name, repr(chosen.parameters)) for chosen in inputs.composition.arranging)
    rest += (repr(inputs.composition.setting), pairs, arranging) if pairs or arranging else ()
    rest += (inputs.composition.setting.num_queues,)
    return ("pieces", id(inputs.model), inner, job.micro_batch, job.seq_len, places, shifts, rest)


def stack_of(inputs: StepInputs, prices: PriceBook) -> LaunchStack:
    """How kernels are launched, at the end of its spread that the prices are at."""
    stack, end = launch_stack(inputs.stack, inputs.cluster.device), prices.ends.get("launch")
    factor = prices.factors.get("launch", 1.0) * (getattr(stack.spread, end) if end else 1.0)
    return replace(stack, host_s=stack.host_s * factor)

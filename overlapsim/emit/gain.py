"""What the planner would change in a config that is there, and what it predicts that to gain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from overlapsim.emit.base import Reading
from overlapsim.emit.lint_base import Lint
from overlapsim.errors import OverlapSimError, UsageError
from overlapsim.hardware.profile import Cluster
from overlapsim.planner.explain import label
from overlapsim.planner.overlap_choice import OverlapChooser
from overlapsim.planner.search import PlanRequest
from overlapsim.planner.step import plan_step
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import StepResult, simulate_step, step_prices
from overlapsim.units import format_time
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recompute import Recompute

WORTH: Final = 0.02
"""A gain below this share of the step is not named: the ranges of both predictions overlap."""
LEAST: Final = 0.001
"""Overlap that is not asked for and saves less than this share is not named: nothing is left of it when printed."""


def as_written(reading: Reading, model: ModelSpec, cluster: Cluster) -> StepInputs:
    """The step a config describes, with the best strategies for tensor-parallel overlap where it is on.

    Raises
    ------
    UsageError
        If it does not say its batch or its tokens.
    LayoutError
        If the model cannot run so.
    """
    if reading.micro_batch is None or reading.global_batch is None or reading.seq_len is None:
        raise UsageError("the config does not say micro-batch, global batch and tokens; nothing can be predicted")
    layout, said = reading.layout, reading.settings
    nodes = -(-layout.world_size // cluster.node.num_devices)
    recipe = Recipe()
    pairs = said.get("expert_pairs") and layout.ep > 1 and layout.pp > 1 and layout.vpp > 1
    inputs = StepInputs(
        model,
        cluster.with_nodes(nodes),
        layout,
        Job(reading.seq_len, reading.micro_batch, reading.global_batch, layout.world_size, said.get("stage_layers")),
        schedule="interleaved_pairs" if pairs else "",
        recompute=_recompute(said),
        recipe=replace(recipe, dispatcher=said.get("dispatcher", recipe.dispatcher)),
        dp_overlap=said.get("dp_overlap", "none"),
        **({"bucket_bytes": said["bucket_bytes"]} if "bucket_bytes" in said else {}),
    )
    if not (said.get("tp_overlap") and layout.tp > 1):
        return inputs
    return replace(inputs, composition=OverlapChooser().composition(inputs, step_prices(inputs)))


def weighed(lints: Iterable[Lint], reading: Reading, model: ModelSpec, cluster: Cluster) -> Iterator[Lint]:
    """Remarks, with what is predicted of those whose fix can be tried; without those that gain nothing, or do not fit.

    Raises
    ------
    OverlapSimError
        If the config as written cannot be simulated.
    """
    written: StepResult | None = None
    for lint in lints:
        if not lint.trial or not _told_apart(lint, reading):
            yield lint
            continue
        written = written or simulate_step(as_written(reading, model, cluster))
        try:
            tried = as_written(replace(reading, settings={**reading.settings, **dict(lint.trial)}), model, cluster)
            result = simulate_step(tried)
        except OverlapSimError:
            yield lint
            continue
        share = 1 - result.step_time_s / written.step_time_s
        if share >= LEAST and (_fits(result) or not _fits(written)):
            yield replace(lint, message=f"{lint.message}; as predicted {share:.1%} of the step")


def _told_apart(lint: Lint, reading: Reading) -> bool:
    """Whether the step is simulated otherwise with a fix: pairs of passes are, in a pipeline of virtual stages."""
    return "expert_pairs" not in dict(lint.trial) or (reading.layout.pp > 1 and reading.layout.vpp > 1)


def _fits(result: StepResult) -> bool:
    return result.fullest.total_bytes <= result.inputs.cluster.device.hbm_bytes


def gains(reading: Reading, model: ModelSpec, cluster: Cluster) -> tuple[Lint, ...]:
    """What the planner would change, with the predicted gain: one remark, or none where it is small.

    A config that cannot be simulated is a conflict; a search that finds nothing says so.
    """
    try:
        inputs = as_written(reading, model, cluster)
        written = simulate_step(inputs)
        job = inputs.job
        assert job.global_batch is not None
        request = PlanRequest(model, inputs.cluster, job.global_batch, job.seq_len)
        answer = plan_step(request)
    except OverlapSimError as error:
        return (Lint("conflict", None, f"cannot be predicted: {error}", "correct it, or give --model and --cluster"),)
    return _compare(written, answer.ranked[0].result, None if answer.serial is None else answer.serial.result)


def _compare(written: StepResult, best: StepResult, serial: StepResult | None) -> tuple[Lint, ...]:
    share = 1 - best.step_time_s / written.step_time_s
    if share < WORTH:
        return ()
    over = "" if _fits(written) else ", more memory than there is"
    message = (
        f"as written {format_time(written.step_time_s)} a step ({format_time(written.low_s)} to "
        f"{format_time(written.high_s)}{over}); the planner's best takes "
        f"{format_time(best.step_time_s)} ({format_time(best.low_s)} to {format_time(best.high_s)}), {share:.1%} less"
    )
    spelt = "`plan` writes it, `emit` spells it"
    if best.inputs.composition.pairs and serial is not None:
        message += f"; the best without overlap strategies takes {format_time(serial.step_time_s)}"
        spelt += " and names what the framework has no strategy for"
    return (Lint("gain", None, message, f"run {label(best)}: {spelt}"),)


def _recompute(said: Mapping[str, Any]) -> Recompute:
    granularity = said.get("recompute", "none")
    if granularity == "full":
        return Recompute("full", frozenset(), said.get("recompute_method", "uniform"), said.get("recompute_layers", 1))
    if granularity == "selective":
        return Recompute("selective", frozenset(said.get("recompute_modules", ("core_attn",))))
    return Recompute()

"""What the planner would change in a config that is there, and what it predicts that to gain."""

from __future__ import annotations

from collections.abc import Mapping
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
from overlapsim.workload.recompute import Recompute

WORTH: Final = 0.02
"""A gain below this share of the step is not named: the ranges of both predictions overlap."""


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
    inputs = StepInputs(
        model,
        cluster.with_nodes(nodes),
        layout,
        Job(reading.seq_len, reading.micro_batch, reading.global_batch, layout.world_size, said.get("stage_layers")),
        recompute=_recompute(said),
        dp_overlap=said.get("dp_overlap", "none"),
        **({"bucket_bytes": said["bucket_bytes"]} if "bucket_bytes" in said else {}),
    )
    if not (said.get("tp_overlap") and layout.tp > 1):
        return inputs
    return replace(inputs, composition=OverlapChooser().composition(inputs, step_prices(inputs)))


def gains(reading: Reading, model: ModelSpec, cluster: Cluster) -> tuple[Lint, ...]:
    """What the planner would change, with the predicted gain: one remark, or none where it is small.

    A config that cannot be simulated is a conflict; a search that finds nothing says so.
    """
    try:
        inputs = as_written(reading, model, cluster)
        written = simulate_step(inputs)
        job = inputs.job
        assert job.global_batch is not None
        request = PlanRequest(model, inputs.cluster, job.global_batch, job.seq_len, top=1)
        best = plan_step(request).ranked[0].result
    except OverlapSimError as error:
        return (Lint("conflict", None, f"cannot be predicted: {error}", "correct it, or give --model and --cluster"),)
    return _compare(written, best)


def _compare(written: StepResult, best: StepResult) -> tuple[Lint, ...]:
    share = 1 - best.step_time_s / written.step_time_s
    if share < WORTH:
        return ()
    over = written.fullest.total_bytes > written.inputs.cluster.device.hbm_bytes
    message = (
        f"as written {format_time(written.step_time_s)} a step ({format_time(written.low_s)} to "
        f"{format_time(written.high_s)}{', more memory than there is' if over else ''}); the planner's best takes "
        f"{format_time(best.step_time_s)} ({format_time(best.low_s)} to {format_time(best.high_s)}), {share:.1%} less"
    )
    return (Lint("gain", None, message, f"run {label(best)}: `plan` writes it, `emit` spells it"),)


def _recompute(said: Mapping[str, Any]) -> Recompute:
    granularity = said.get("recompute", "none")
    if granularity == "full":
        return Recompute("full", frozenset(), said.get("recompute_method", "uniform"), said.get("recompute_layers", 1))
    if granularity == "selective":
        return Recompute("selective", frozenset(said.get("recompute_modules", ("core_attn",))))
    return Recompute()

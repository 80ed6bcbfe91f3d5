"""Small models and steps of them, for tests of whole steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from overlapsim.errors import OverlapSimError
from overlapsim.hardware.loading import load_cluster
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import StepResult, simulate_step
from overlapsim.workload.families import gpt
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recompute import Recompute

GPT = gpt(num_layers=8, hidden=1024, num_heads=8, vocabulary=51200, max_positions=2048)
MOE = replace(load_preset("qwen3-30b-a3b"), layers=load_preset("qwen3-30b-a3b").layers[:8])
A100 = load_cluster("a100-sxm8")
MODELS: dict[object, object] = {}
"""Cost models shared by all steps on A100."""


def ask(model: ModelSpec, layout: str, batch: int = 8, *, seq: int = 1024, micro: int = 1, **more: Any) -> StepInputs:
    """A step on as many A100 nodes as the layout needs."""
    read = Layout.parse(layout)
    nodes = -(-read.world_size // A100.node.num_devices)
    stages = more.pop("stage_layers", None)
    return StepInputs(
        model, A100.with_nodes(nodes), read, Job(seq, micro, global_batch=batch, stage_layers=stages), **more
    )


def run(inputs: StepInputs) -> StepResult:
    """Simulate without ranges."""
    return simulate_step(inputs, ranges=False, models=MODELS)


def step(*args: Any, **more: Any) -> StepResult:
    """`ask` and `run`."""
    return run(ask(*args, **more))


_DEGREE = st.sampled_from((1, 2, 4))
_RECOMPUTE = ("none", "full", "sar", "core_attn")
SPLIT = ("zb_h1", "zbv", "dualpipe", "dualpipev")


@st.composite
def steps(draw: st.DrawFn) -> StepInputs:
    """Any small step that a layout allows: dense or with experts, every schedule, overlap and recompute."""
    model = draw(st.sampled_from((GPT, MOE)))
    schedule = draw(st.sampled_from(("", "gpipe", "interleaved", *SPLIT)))
    zero = draw(st.integers(0, 3))
    degrees: dict[str, Any] = {name: draw(_DEGREE) for name in ("tp", "dp", "pp")}
    degrees[draw(st.sampled_from(("sp", "cp")))] = draw(st.sampled_from((1, 2)))
    if schedule in ("interleaved", "dualpipe", "dualpipev", "zbv"):
        degrees["pp"] = max(2, degrees["pp"])
    if schedule in ("interleaved", "zbv", "dualpipev"):
        degrees["vpp"] = 2
    if model is MOE:
        degrees |= {"ep": draw(st.sampled_from((1, 2))), "etp": 1}
    count = 2 * degrees["pp"] * draw(st.integers(1, 2))
    given = {
        "schedule": schedule,
        "recompute": Recompute.parse(draw(st.sampled_from(_RECOMPUTE))),
        "stack": draw(st.sampled_from(("graph", "eager"))),
        "dp_overlap": draw(st.sampled_from(("none", "gradients", "both"))),
        "contention": draw(st.booleans()),
    }
    for settings in _fitting({**degrees, "zero": zero}):
        text = ",".join(f"{key}={value}" for key, value in settings.items())
        try:
            return ask(model, text, count * settings["dp"], **given)
        except OverlapSimError:
            continue
    raise AssertionError(f"no layout near {degrees} is possible")


def _fitting(degrees: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The degrees drawn, and with what often does not divide taken back."""
    yield degrees
    yield degrees | {"ep": 1, "etp": 0}
    yield degrees | {"ep": 1, "etp": 0, "sp": 1, "cp": 1}
    yield degrees | {"ep": 1, "etp": 0, "sp": 1, "cp": 1, "tp": 1}

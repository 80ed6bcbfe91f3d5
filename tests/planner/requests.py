"""Small plan requests, for tests of the search and its bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.search import PlanRequest
from overlapsim.planner.space import RECOMPUTES, SCHEDULE_NAMES, Axes, Space, enumerate_space
from overlapsim.workload.families import gpt
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.presets import load_preset

GPT = gpt(num_layers=8, hidden=1024, num_heads=8, vocabulary=51200, max_positions=2048)


def few(name: str, layers: int) -> ModelSpec:
    """The first layers of a preset, equal ones as one object."""
    model = load_preset(name)
    known = {layer: layer for layer in model.layers}
    return replace(model, layers=tuple(known[layer] for layer in model.layers[:layers]))


MOE = few("qwen3-30b-a3b", 8)
MIXED = few("deepseek-moe-16b", 6)
"""A dense layer, then layers with experts."""
MODELS = (GPT, MOE, MIXED)
CLUSTERS = {name: load_cluster(name) for name in ("a100-sxm8", "h800-sxm8")}
COSTS: dict[tuple[str, int], dict[object, object]] = {}
"""Results of cost models by cluster and its nodes."""


def ask(model: ModelSpec, cluster: str = "h800-sxm8", nodes: int = 1, batch: int = 16, **more: Any) -> PlanRequest:
    """A request for sequences of 1024 tokens."""
    return PlanRequest(model, CLUSTERS[cluster].with_nodes(nodes), batch, more.pop("sequence", 1024), **more)


def space_of(request: PlanRequest) -> Space:
    """All its candidates."""
    return enumerate_space(
        request.model, request.cluster.num_devices, request.global_batch, request.sequence, request.axes,
        request.constraints,
    )  # fmt: skip


def costs_of(request: PlanRequest) -> dict[object, object]:
    """Cost models shared by all requests on one cluster."""
    return COSTS.setdefault((request.cluster.name, request.cluster.num_nodes), {})


@st.composite
def candidates(draw: st.DrawFn) -> tuple[PlanRequest, Space, int]:
    """A request, its space, and one of its rows; every schedule, recompute and ZeRO level may be there."""
    schedule = draw(st.sampled_from((*SCHEDULE_NAMES, "1f1b", "interleaved")))
    axes = Axes(
        schedule=(schedule,),
        recompute=(draw(st.sampled_from(RECOMPUTES)),),
        uneven=draw(st.booleans()),
    )
    request = ask(
        draw(st.sampled_from(MODELS)),
        draw(st.sampled_from(sorted(CLUSTERS))),
        draw(st.sampled_from((1, 2, 3))),
        draw(st.sampled_from((8, 16, 24, 48))),
        axes=axes,
        stack=draw(st.sampled_from(("graph", "graph", "eager"))),
    )
    space = space_of(request)
    own = np.flatnonzero((space.columns["schedule"] == SCHEDULE_NAMES.index(schedule)) & (space.columns["pp"] > 1))
    assume(len(space) > 0)
    rows = own if len(own) and draw(st.booleans()) else np.arange(len(space))
    return request, space, int(rows[draw(st.integers(0, len(rows) - 1))])

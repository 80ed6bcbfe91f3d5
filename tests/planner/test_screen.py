"""Every bound of a candidate is at most its time in the engine: without strategies, and with those that are chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

from overlapsim.errors import OverlapSimError
from overlapsim.planner.layout_bounds import SHARDED, LayoutBounds
from overlapsim.planner.overlap_choice import OverlapChooser
from overlapsim.planner.pipeline_path import PipelinePaths
from overlapsim.planner.screen import PAIRED
from overlapsim.planner.search import PlanRequest, step_inputs
from overlapsim.planner.space import SCHEDULE_NAMES, Space
from overlapsim.step.pieces import StagePieces
from overlapsim.step.simulate import step_schedule, step_seconds
from overlapsim.strategy.compose import Composition
from overlapsim.workload.model import ModelSpec
from tests.planner.requests import GPT, MOE, ask, candidates, costs_of, space_of

CHOOSER = OverlapChooser()
CANDIDATE = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
ALLOWED = 1 + 1e-9


def bounds_of(request: PlanRequest, space: Space, row: int, composition: Composition) -> dict[str, float]:
    """All bounds of one row, by name."""
    one = space.take(np.array([row]))
    inputs = step_inputs(request, one, 0, composition)
    found = LayoutBounds(one, inputs, costs_of(request))
    rows, with_strategies = np.array([0]), bool(composition.pairs)
    schedule = SCHEDULE_NAMES[int(one.columns["schedule"][0])]
    named = {
        "hardware": found.hardware(strategies=with_strategies),
        "layers": found.layered(rows, strategies=with_strategies),
        "priced": found.priced(rows, strategies=with_strategies),
        "path": found.along(rows, PipelinePaths().path(inputs, found.prices(0))),
    }
    if int(one.columns["zero"][0]) != SHARDED and schedule not in PAIRED:
        pieces = StagePieces(inputs, found.prices(0), step_schedule(inputs))
        which = ("forward", "backward", "input_grad", "weight_grad")
        kinds = [{w: pieces.layer(kind, w).duration_s for w in which} for kind in request.model.kinds]
        named["simulated"] = found.simulated(rows, kinds)
    return {name: float(bound[0]) for name, bound in named.items()}


def check(request: PlanRequest, space: Space, row: int, composition: Composition) -> None:
    """Compare a row's bounds with the engine."""
    try:
        inputs = step_inputs(request, space, row, composition)
        bounds = bounds_of(request, space, row, composition)
        seconds = step_seconds(inputs, LayoutBounds(space, inputs, costs_of(request)).prices(row))
    except OverlapSimError:
        assume(False)
    for name, bound in bounds.items():
        assert 0 < bound <= seconds * ALLOWED, (name, str(inputs.layout), inputs.schedule_name, inputs.dp_overlap)


@CANDIDATE
@given(candidates())
def test_no_bound_is_above_the_engine(drawn: tuple[PlanRequest, Space, int]) -> None:
    """Any model, layout, schedule, recompute, sharding and overlap of data parallelism; on one to three nodes."""
    check(*drawn, Composition())


@CANDIDATE
@given(candidates())
def test_no_bound_with_strategies_is_above_the_engine(drawn: tuple[PlanRequest, Space, int]) -> None:
    """The same where strategies take the tensor-parallel pairs."""
    request, space, row = drawn
    assume(int(space.columns["tp"][row]) > 1)
    inputs = step_inputs(request, space, row)
    composition = CHOOSER.composition(inputs, LayoutBounds(space, inputs, costs_of(request)).prices(row))
    assume(bool(composition.pairs))
    check(request, space, row, composition)


UNTIED = replace(GPT, tied_embeddings=False)


@pytest.mark.parametrize("model", [UNTIED, MOE], ids=["dense", "experts"])
def test_the_path_of_a_pipeline_is_all_of_its_time(model: ModelSpec) -> None:
    """With data parallelism out of the way the critical path is within 3 % of the engine."""
    request = ask(model, nodes=1, batch=32)
    space = space_of(request)
    c = space.columns
    alone = (c["dp"] * c["sp"] * c["cp"] == 1) & (c["ep"] * c["etp"] == c["tp"])
    rows = np.flatnonzero(alone & (c["pp"] > 2) & (c["zero"] == 0))
    for row in rows[:: max(1, len(rows) // 12)].tolist():
        inputs = step_inputs(request, space, row)
        bounds = bounds_of(request, space, row, Composition())
        seconds = step_seconds(inputs, LayoutBounds(space, inputs, costs_of(request)).prices(row))
        assert bounds["path"] >= 0.97 * seconds, (str(inputs.layout), inputs.schedule_name)

"""Every bound of a candidate is at most its time in the engine: without strategies, and with those that are chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

from overlapsim.errors import OverlapSimError
from overlapsim.planner.layer_times import PAIR_GROUPS, Hides
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


def bounds_of(request: PlanRequest, space: Space, row: int, composition: Composition, hides: Hides) -> dict[str, float]:
    """All bounds of one row, by name."""
    one = space.take(np.array([row]))
    inputs = step_inputs(request, one, 0, composition)
    found = LayoutBounds(one, inputs, costs_of(request))
    rows = np.array([0])
    schedule = SCHEDULE_NAMES[int(one.columns["schedule"][0])]
    named = {
        "hardware": found.hardware(hides=hides),
        "layers": found.layered(rows, hides=hides),
        "priced": found.priced(rows, hides=hides),
        "path": found.along(rows, PipelinePaths().path(inputs, found.prices(0))),
    }
    if int(one.columns["zero"][0]) != SHARDED and schedule not in PAIRED:
        pieces = StagePieces(inputs, found.prices(0), step_schedule(inputs))
        which = ("forward", "backward", "input_grad", "weight_grad")
        kinds = [{w: pieces.layer(kind, w).duration_s for w in which} for kind in request.model.kinds]
        named["simulated"] = found.simulated(rows, kinds, hides=hides)
    return {name: float(bound[0]) for name, bound in named.items()}


def check(request: PlanRequest, space: Space, row: int, composition: Composition, hides: Hides) -> None:
    """Compare a row's bounds with the engine."""
    try:
        inputs = step_inputs(request, space, row, composition)
        bounds = bounds_of(request, space, row, composition, hides)
        seconds = step_seconds(inputs, LayoutBounds(space, inputs, costs_of(request)).prices(row))
    except OverlapSimError:
        assume(False)
    for name, bound in bounds.items():
        assert 0 < bound <= seconds * ALLOWED, (name, str(inputs.layout), inputs.schedule_name, inputs.dp_overlap)


@CANDIDATE
@given(candidates())
def test_no_bound_is_above_the_engine(drawn: tuple[PlanRequest, Space, int]) -> None:
    """Any model, layout, schedule, recompute, sharding and overlap of data parallelism; on one to three nodes."""
    check(*drawn, Composition(), "nothing")


@CANDIDATE
@given(candidates())
def test_no_bound_with_strategies_is_above_the_engine(drawn: tuple[PlanRequest, Space, int]) -> None:
    """The same where strategies take the tensor-parallel pairs."""
    request, space, row = drawn
    assume(int(space.columns["tp"][row]) > 1)
    inputs = step_inputs(request, space, row)
    pairs = CHOOSER.pairs.pairs(inputs, LayoutBounds(space, inputs, costs_of(request)).prices(row), PAIR_GROUPS)
    assume(bool(pairs))
    check(request, space, row, Composition(pairs=pairs), "pairs")


@CANDIDATE
@given(candidates())
def test_no_bound_with_all_that_hides_is_above_the_engine(drawn: tuple[PlanRequest, Space, int]) -> None:
    """The same with whatever is chosen for a layer: pairs of all groups, orders of operators."""
    request, space, row = drawn
    inputs = step_inputs(request, space, row)
    composition = CHOOSER.composition(inputs, LayoutBounds(space, inputs, costs_of(request)).prices(row))
    assume(bool(composition.strategies))
    check(request, space, row, composition, "all")


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
        bounds = bounds_of(request, space, row, Composition(), "nothing")
        seconds = step_seconds(inputs, LayoutBounds(space, inputs, costs_of(request)).prices(row))
        assert bounds["path"] >= 0.97 * seconds, (str(inputs.layout), inputs.schedule_name)

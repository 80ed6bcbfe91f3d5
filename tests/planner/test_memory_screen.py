"""The memory bound of a candidate is at most what the memory model says."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, assume, given, settings

from overlapsim.errors import OverlapSimError
from overlapsim.planner.memory_screen import least_bytes
from overlapsim.planner.search import PlanRequest, step_inputs
from overlapsim.planner.space import Space
from overlapsim.step.simulate import step_memory, step_schedule
from tests.planner.requests import GPT, ask, candidates, space_of


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(candidates())
def test_the_bound_is_below_the_fullest_device(drawn: tuple[PlanRequest, Space, int]) -> None:
    """Any model, layout, schedule, sharding and recompute."""
    request, space, row = drawn
    inputs = step_inputs(request, space, row)
    try:
        memory = step_memory(inputs, step_schedule(inputs))
    except OverlapSimError:
        assume(False)
    least = least_bytes(space.take(np.array([row])), inputs)
    assert 0 < least[0] <= max(entry.total_bytes for entry in memory) * (1 + 1e-9)


def test_the_bound_leaves_little_out() -> None:
    """States and activations of a pipeline's first device: more than half of the whole on average."""
    request = ask(GPT, batch=32)
    space = space_of(request)
    least = least_bytes(space, step_inputs(request, space, 0))
    shares = []
    for row in range(0, len(space), max(1, len(space) // 60)):
        inputs = step_inputs(request, space, row)
        shares.append(least[row] / step_memory(inputs, step_schedule(inputs))[0].total_bytes)
    assert np.mean(shares) > 0.5

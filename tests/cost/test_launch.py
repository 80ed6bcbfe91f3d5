from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.cost.base import Spread
from overlapsim.cost.launch import (
    KERNELS_PER_LAYER,
    STACKS,
    LaunchStack,
    is_host_bound,
    launch_cost,
    launch_stack,
    stretch_seconds,
)
from overlapsim.errors import UsageError
from overlapsim.hardware.loading import load_device
from overlapsim.hardware.profile import Fit, Source

stacks = st.sampled_from(list(STACKS.values()))
times = st.floats(0, 10)
kernels = st.integers(0, 10000)


@given(times, kernels, stacks)
def test_a_stretch_is_never_shorter_than_its_kernels_or_its_launches(gpu_s, num_kernels, stack):
    total = float(stretch_seconds(gpu_s, num_kernels, stack))
    assert total >= gpu_s
    assert total >= num_kernels * stack.host_s
    assert float(stretch_seconds(gpu_s, num_kernels + 1, stack)) >= total
    assert float(stretch_seconds(gpu_s + 1e-6, num_kernels, stack)) >= total


def test_small_layers_are_bound_by_the_host_and_large_ones_are_not():
    stack = launch_stack("megatron-2021")
    count = KERNELS_PER_LAYER["fwd"] + KERNELS_PER_LAYER["bwd"]
    # Published single-node layers of hidden size 2048: 2.7 to 5 ms forward and backward whatever the micro-batch.
    small = stretch_seconds(0.5e-3, count, stack)
    assert 2.7e-3 < small < 5e-3
    assert is_host_bound(0.5e-3, count, stack)
    assert not is_host_bound(16e-3, count, stack)
    assert stretch_seconds(16e-3, count, stack) < 16.2e-3


def test_a_graph_takes_the_host_out_of_the_way():
    eager, graph = launch_stack("eager"), launch_stack("graph")
    # Forward pass of a launch-bound published workload: 8.1 to 1.9 ms with graphs, 4.3 times.
    assert stretch_seconds(1e-3, 600, eager) / stretch_seconds(1e-3, 600, graph) > 3
    # A stream of 24 us kernels gains 9 % (published on a B200), here from the gaps alone at most 20 %.
    gain = stretch_seconds(24e-6 * 1000, 1000, eager) / stretch_seconds(24e-6 * 1000, 1000, graph)
    assert 1.0 <= gain < 1.2


def test_cost_of_launches():
    cost = launch_cost(100, launch_stack("driver"))
    assert (cost.family, cost.sm, cost.demands) == ("launch", 0, ())
    assert cost.duration_s == pytest.approx(508e-6)
    assert launch_cost(0, launch_stack("driver")).duration_s == 0
    assert not launch_cost(1, launch_stack("eager")).in_range
    assert launch_cost(1, launch_stack("megatron-2021")).in_range
    # Replaying a graph costs the gaps of its nodes.
    assert launch_cost(100, launch_stack("graph")).duration_s == pytest.approx(108e-6)


def test_a_device_brings_its_own_figures():
    fit = Fit("launch", "eager", {"host_s": 3e-6}, Source("measured", "mine"), 200, {"host": (0.8, 1.3)})
    device = replace(load_device("h100-sxm5-80gb"), fits={"launch.eager": fit})
    stack = launch_stack("eager", device)
    assert (stack.host_s, stack.node_s, stack.source.reference) == (3e-6, STACKS["eager"].node_s, "mine")
    assert stack.spread == Spread(0.8, 1.3, "residual")
    assert launch_stack("driver", device) is STACKS["driver"]


def test_refusals():
    with pytest.raises(UsageError, match="'tf1' is unknown; expected one of driver"):
        launch_stack("tf1")
    with pytest.raises(UsageError, match="at least 0"):
        launch_cost(-1, launch_stack("eager"))
    with pytest.raises(UsageError, match=">= 0"):
        stretch_seconds(np.array([1.0, -1.0]), 3, launch_stack("eager"))
    with pytest.raises(UsageError, match="host_s of launch stack 'x'"):
        LaunchStack("x", -1.0, 0.0, 0.0, Spread(1, 1, "prior"), Source("prior", "x"))

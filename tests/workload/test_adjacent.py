"""Adjacent layers in one graph: what waits for the layer before, and what need not."""

from __future__ import annotations

import pytest

from overlapsim.testing.expert_layers import expert_layers
from overlapsim.workload.adjacent import adjacent, end_of_pass


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_passes_in_a_row(which: str, count: int) -> None:
    graph = expert_layers()[which]
    size, end = len(graph.operators), end_of_pass(graph)
    both = adjacent([graph] * count)
    assert both.operators == graph.operators * count
    for number in range(count):
        own = [(a, b) for a, b in both.dependencies if number * size <= b < (number + 1) * size]
        inner = {(a - number * size, b - number * size) for a, b in own if a >= number * size}
        assert inner == set(graph.dependencies)
        outer = {a for a, _ in own if a < number * size}
        assert outer == ({(number - 1) * size + end} if number else set())
        waiting = {b - number * size for a, b in own if a < number * size}
        # Rebuilt tensors come from what is kept; all else that begins a pass waits.
        assert all(graph.operators[i].pass_ != "recompute" for i in waiting)


def test_the_end_is_on_the_way_of_gradients() -> None:
    graph = expert_layers()["backward"]
    end = graph.operators[end_of_pass(graph)]
    assert (end.name, end.pass_) == ("attn.norm", "dgrad")
    # In another order it is the same operator.
    order = sorted(range(len(graph.operators)), key=lambda i: (graph.operators[i].pass_ == "wgrad", i))
    moved = graph.reordered(order)
    assert moved.operators[end_of_pass(moved)] == end
    assert end_of_pass(adjacent([])) == -1

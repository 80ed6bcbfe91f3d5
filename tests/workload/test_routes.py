"""Routes: how many nodes and ranks a token reaches, in closed form and by drawing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.errors import WorkloadError
from overlapsim.workload.routes import Route, distinct


def test_expected_nodes_and_ranks_are_those_of_draws() -> None:
    draw = np.random.default_rng(0)
    picks = np.array([draw.choice(64, 6, replace=False) for _ in range(20_000)])
    nodes = np.mean([len(set(row // 16)) for row in picks])
    ranks = np.mean([len(set(row // 4)) for row in picks])
    route = Route("deepep", 6, 64)
    assert route.nodes_of_token(4) == pytest.approx(nodes, rel=0.01)
    assert route.ranks_of_token(16, 4) == pytest.approx(ranks, rel=0.01)


def test_one_missed_bin_by_counting() -> None:
    # Two bins of four experts, two picks: both in one bin in 2 C(4, 2) of C(8, 2) cases.
    assert distinct(2, 8, 2) == pytest.approx(2 - 2 * math.comb(4, 2) / math.comb(8, 2))


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 8))
def test_bounds_and_limits(nodes: int, top_k: int, limit: int) -> None:
    """At most as many nodes as copies, as there are, and as are allowed; fewer allowed nodes, fewer reached."""
    route = Route("deepep", top_k, 64, limit)
    reached = route.nodes_of_token(nodes)
    allowed = min(nodes, limit) if limit else nodes
    assert 1 - 1e-9 <= reached <= min(top_k, allowed) + 1e-9
    assert reached <= route.ranks_of_token(nodes * 8, nodes) + 1e-9 <= top_k + 1e-6
    assert reached <= Route("deepep", top_k, 64).nodes_of_token(nodes) + 1e-9


@pytest.mark.parametrize(
    ("values", "part"),
    [(("deepep", 9, 8), "9 copies"), (("deepep", 2, 8, -1), "node_limit -1"), (("boat", 2, 8), "'boat' is unknown")],
)
def test_refusals(values: tuple, part: str) -> None:
    with pytest.raises(WorkloadError, match=part):
        Route(*values)

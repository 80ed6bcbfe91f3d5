import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.residuals import NEIGHBOURS, ResidualLayer

GRID = np.stack(np.meshgrid(np.arange(8.0), np.arange(8.0), np.arange(4.0), indexing="ij"), axis=-1).reshape(-1, 3)
quick = settings(deadline=None, max_examples=100)


def plain(points, residuals, low, high, query, octaves):
    """The same from the definition, over all points."""
    distance = np.linalg.norm(points - query, axis=1)
    nearest = np.sort(distance)[NEIGHBOURS - 1]
    assert np.sum(distance <= nearest) == NEIGHBOURS, "a tie: the definition leaves the choice open"
    near = np.argsort(distance)[:NEIGHBOURS]
    weight = 1 / (distance[near] + 0.3) ** 2
    beyond = np.linalg.norm(np.maximum(0, np.maximum(low - octaves, octaves - high)))
    return weight @ residuals[near] / weight.sum() * np.exp(-beyond)


@quick
@given(st.integers(0, 2**32 - 1), st.integers(6, 200), st.integers(1, 7))
def test_search_finds_the_six_nearest(seed, count, axes):
    rng = np.random.default_rng(seed)
    points, residuals = rng.normal(size=(count, axes)), rng.normal(size=count)
    layer = ResidualLayer.of(points, residuals, points)
    queries = rng.normal(scale=1.5, size=(5, axes))
    expected = [plain(points, residuals, points.min(0), points.max(0), query, query) for query in queries]
    assert layer.at(queries, queries) == pytest.approx(expected, rel=1e-12)
    assert [layer.at_one(query, query) for query in queries] == layer.at(queries, queries).tolist()


def test_equal_residuals_come_back_inside_and_fade_outside():
    layer = ResidualLayer.of(GRID, np.full(len(GRID), 0.2), GRID)
    inside = np.array([[3.5, 2.2, 1.1], [0.0, 7.0, 3.0]])
    assert layer.at(inside, inside) == pytest.approx([0.2, 0.2])
    octaves = np.arange(0.0, 6.0)
    outside = np.stack((7 + octaves, np.full(6, 3.0), np.full(6, 1.0)), axis=1)
    assert layer.at(outside, outside) == pytest.approx(0.2 * np.exp(-octaves))
    corner = np.array([[7.0 + 3, 7.0 + 4, 1.0]])
    assert layer.at(corner, corner) == pytest.approx([0.2 * np.exp(-5.0)])


def test_one_cell_several_times_off_does_not_decide_alone():
    residuals = np.zeros(len(GRID))
    place = int(np.flatnonzero((GRID == [3, 3, 1]).all(axis=1))[0])
    residuals[place] = np.log(5.0)
    found = ResidualLayer.of(GRID, residuals, GRID).at(GRID[[place]], GRID[[place]])[0]
    assert 0 < found < 0.9 * np.log(5.0)


def test_order_of_the_points_does_not_matter():
    rng = np.random.default_rng(3)
    residuals, queries = rng.normal(size=len(GRID)), rng.uniform(0, 7, size=(50, 3))
    shuffled = rng.permutation(len(GRID))
    one = ResidualLayer.of(GRID, residuals, GRID)
    other = ResidualLayer.of(GRID[shuffled], residuals[shuffled], GRID[shuffled])
    assert one.at(queries, queries).tolist() == other.at(queries, queries).tolist()

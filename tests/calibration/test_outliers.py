"""Outliers: stalls go, steps of protocol and rough but honest curves stay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.calibration.outliers import MAX_SHARE, find_outliers
from overlapsim.hardware.loading import load_cluster

SIZES = 2.0 ** np.arange(10, 30)


def smooth(latency_us: float = 12.0, rate: float = 200e9, root_us: float = 0.01) -> np.ndarray:
    return latency_us * 1e-6 + root_us * 1e-6 * np.sqrt(SIZES / 1024) + SIZES / rate


@pytest.mark.parametrize("place", [0, 1, 5, 9, 13, 18, 19])
@pytest.mark.parametrize("factor", [3.0, 0.3, 30.0])
def test_one_stray_point_is_found_anywhere(place: int, factor: float) -> None:
    times = smooth()
    times[place] *= factor
    (found,) = find_outliers(SIZES, times)
    assert found.place == place
    assert found.factor == pytest.approx(factor, rel=0.35)


@pytest.mark.parametrize("places", [(4, 12), (4, 5), (12, 13), (0, 10), (3, 9, 15)])
def test_several(places: tuple[int, ...]) -> None:
    times = smooth()
    times[list(places)] *= 5.0
    assert [found.place for found in find_outliers(SIZES, times)] == list(places)


@given(
    st.floats(2.0, 200.0),
    st.floats(5e9, 500e9),
    st.floats(0.0, 1.0),
    st.lists(st.floats(-0.08, 0.08), min_size=20, max_size=20),
)
def test_smooth_curves_with_noise_keep_every_point(
    latency_us: float, rate: float, root_us: float, noise: list[float]
) -> None:
    assert not find_outliers(SIZES, smooth(latency_us, rate, root_us) * np.exp(noise))


@pytest.mark.parametrize("place", [4, 8, 12])
@pytest.mark.parametrize("factor", [0.7, 1.5, 2.0])
def test_a_step_is_not_an_outlier(place: int, factor: float) -> None:
    times = smooth()
    times[place:] *= factor
    assert not find_outliers(SIZES, times)


@pytest.mark.parametrize("name", ["h100-sxm8", "a100-sxm8"])
def test_published_tables_keep_their_points(name: str) -> None:
    """Published sweeps are medians of many calls: hardly a point of them is stray."""
    tables = load_cluster(name).curves.values()
    points = sum(len(table.size_bytes) for table in tables)
    found = sum(len(find_outliers(np.array(t.size_bytes), np.array(t.time_s))) for t in tables)
    assert points > 200
    assert found <= 0.01 * points


@given(st.lists(st.floats(1e-6, 1e-2), min_size=2, max_size=20))
def test_never_more_than_a_quarter(times: list[float]) -> None:
    found = find_outliers(SIZES[: len(times)], np.array(times))
    assert len(found) <= MAX_SHARE * len(times)

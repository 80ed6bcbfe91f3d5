from importlib import resources

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.curve import ABOVE, BELOW, NARROW_GAP, WIDE_GAP, Curve
from overlapsim.errors import ProfileError, UsageError
from overlapsim.hardware.profile import CurveTable, Source
from tests.cost.published import bandwidth_table, published_tau_s

SOURCE = Source("measured", "table of a test")


def curve(sizes, times):
    return Curve(CurveTable(tuple(map(float, sizes)), tuple(map(float, times)), SOURCE))


@st.composite
def rising_tables(draw):
    count = draw(st.integers(1, 12))
    sizes = sorted(draw(st.sets(st.integers(1, 2**34), min_size=count, max_size=count)))
    times = sorted(draw(st.lists(st.floats(1e-7, 1.0), min_size=count, max_size=count)))
    return curve(sizes, times)


def bundled_tables():
    for cluster in ("a100-sxm8", "h100-sxm8"):
        folder = resources.files("overlapsim.hwprofiles") / "tables" / cluster
        for path in sorted(folder.iterdir(), key=lambda p: p.name):
            lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
            yield path.name, np.array([line.split(",") for line in lines[1:]], dtype=float)


@given(rising_tables())
def test_points_are_met_exactly(c):
    assert c.seconds(c.table.size_bytes) == pytest.approx(np.array(c.table.time_s), rel=1e-12)
    assert all(c.in_range(size) for size in c.table.size_bytes)
    assert c.falls == ()


@settings(deadline=None)
@given(rising_tables(), st.lists(st.floats(0, 2.0**40), min_size=2, max_size=30))
def test_time_never_falls_with_size(c, sizes):
    times = c.seconds(np.sort(sizes))
    assert (np.diff(times) >= -1e-12 * times[1:]).all()
    assert (times >= 0).all()


@given(st.floats(1e-7, 1e-3), st.floats(1e-13, 1e-9), st.lists(st.floats(0, 2.0**36), min_size=1, max_size=20))
def test_latency_plus_size_over_rate_is_reproduced_everywhere(alpha, per_byte, asked):
    sizes = 2.0 ** np.arange(10, 31, 2)
    c = curve(sizes, alpha + per_byte * sizes)
    assert c.seconds(asked) == pytest.approx(alpha + per_byte * np.array(asked), rel=1e-6)
    assert c.latency_s == pytest.approx(alpha, rel=1e-6, abs=1e-9)


def test_below_the_table_time_falls_to_a_latency_not_to_a_clamped_bandwidth():
    table = bandwidth_table()
    sizes, times = 2 * table[:, 0], table[:, 2] * 1e-6
    c = curve(sizes, times)
    small = float(c.seconds(sizes[0] / 64))
    assert 0 < c.latency_s < small < times[0]
    clamped_bandwidth = times[0] / 64
    assert small > 20 * clamped_bandwidth
    assert published_tau_s(table[0, 0] / 64) == pytest.approx(clamped_bandwidth, rel=1e-4)


def test_latency_is_bounded_by_nothing_and_the_smallest_time():
    assert curve([1, 2, 3], [1.0, 5.0, 9.0]).latency_s == 0.0
    assert curve([1, 2, 3], [9.0, 5.0, 1.0]).latency_s == 9.0


def test_above_the_table_the_last_octave_goes_on():
    c = curve([1e6, 2e6, 4e6, 6e6, 8e6], [10.0, 11.0, 13.0, 15.5, 17.0])
    assert c.tail_s_per_byte == pytest.approx(1e-6)
    assert float(c.seconds(20e6)) == pytest.approx(29.0)


def test_published_points_agree_with_the_artifacts_own_interpolation():
    table = bandwidth_table()
    c = curve(2 * table[:, 0], table[:, 2] * 1e-6)
    for elements in (8192 * 8192, 212 * 256 * 128, 3.5 * 2**20):
        assert float(c.seconds(2 * elements)) == pytest.approx(published_tau_s(elements), rel=0.01)
    # The artifact holds bandwidth constant above its table; the slope of the last octave is 1.1 % faster here.
    assert float(c.seconds(2 * 32768 * 8192)) == pytest.approx(4.1819e-3, rel=0.015)


def test_published_tau_values():
    assert published_tau_s(8192 * 8192) * 1e3 == pytest.approx(1.0595, abs=6e-5)
    assert published_tau_s(32768 * 8192) * 1e3 == pytest.approx(4.1819, abs=6e-5)


def test_left_out_points_of_bundled_tables():
    """Every second power of two left out; log-log lines, the usual choice, must do worse."""
    ours, log_log = [], []
    for _, rows in bundled_tables():
        kept = np.arange(len(rows)) % 2 == 0
        kept[-1] = True
        size, time = rows[kept].T
        asked, measured = rows[~kept & (rows[:, 0] >= 65536)].T
        ours.append(curve(size, time).seconds(asked) / measured - 1)
        log_log.append(np.exp(np.interp(np.log(asked), np.log(size), np.log(time))) / measured - 1)
    error, other = np.abs(np.concatenate(ours)), np.abs(np.concatenate(log_log))
    assert error.size > 100
    assert np.median(error) < 0.03 and np.quantile(error, 0.9) < 0.15
    assert np.median(error) < np.median(other) and np.quantile(error, 0.9) < np.quantile(other, 0.9)


def test_falling_tables_are_used_as_they_are_and_reported():
    c = curve([1, 2, 4, 8], [1.0, 3.0, 2.0, 4.0])
    assert c.falls == ((2.0, 4.0),)
    assert float(c.seconds(3)) == pytest.approx(2.5)
    ends_falling = curve([1, 2, 4], [1.0, 3.0, 2.0])
    assert ends_falling.tail_s_per_byte == 0.0 and float(ends_falling.seconds(1e9)) == 2.0


def test_one_point_is_constant_below_and_proportional_above():
    c = curve([1000], [5e-6])
    assert c.seconds([0, 10, 1000, 4000]).tolist() == pytest.approx([5e-6, 5e-6, 5e-6, 20e-6])


def test_arrays_keep_their_shape():
    c = curve([1, 2], [1.0, 2.0])
    assert c.seconds(np.ones((3, 4))).shape == (3, 4)
    assert c.seconds(1.5).shape == ()


def test_spread_follows_the_distance_to_measured_points():
    c = curve([1, 2, 8, 16], [1.0, 2.0, 3.0, 4.0])
    assert [c.spread(size) for size in (0.5, 1.5, 5, 9, 17)] == [BELOW, NARROW_GAP, WIDE_GAP, NARROW_GAP, ABOVE]
    low, high = c.spread_ends([0.5, 5.0])
    assert low.tolist() == [BELOW.low, WIDE_GAP.low] and high.tolist() == [BELOW.high, WIDE_GAP.high]
    assert curve([4], [1.0]).spread(4) == NARROW_GAP


def test_best_rate_is_the_least_time_per_byte():
    assert curve([1, 2, 4], [2.0, 3.0, 5.0]).best_s_per_byte() == 1.0
    assert curve([1, 2], [2.0, 2.0]).best_s_per_byte() == 1.0


@pytest.mark.parametrize(
    ("sizes", "times", "words"),
    [
        ([], [], ">= 1"),
        ([1, 2], [1.0], "as many"),
        ([2, 1], [1.0, 1.0], "do not rise"),
        ([1, 1], [1.0, 1.0], "do not rise"),
        ([0, 1], [1.0, 1.0], "> 0"),
        ([1, 2], [1.0, -1.0], "> 0"),
        ([1, 2], [1.0, np.inf], "finite"),
    ],
)
def test_malformed_tables_are_refused(sizes, times, words):
    with pytest.raises(ProfileError, match=words):
        curve(sizes, times)


@pytest.mark.parametrize("size", [-1.0, np.nan, np.inf])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(UsageError, match="sizes >= 0"):
        curve([1, 2], [1.0, 2.0]).seconds([1.0, size])

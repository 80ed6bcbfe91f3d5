"""Quantities in and out: prefixes, refusals, the engine's rounding."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim import units
from overlapsim.errors import UsageError


@pytest.mark.parametrize(
    ("function", "text", "expected"),
    [
        (units.parse_time_s, "2.36ms", 2.36e-3),
        (units.parse_time_s, "62 us", 62e-6),
        (units.parse_time_s, "1e-3", 1e-3),
        (units.parse_time_s, 0.5, 0.5),
        (units.parse_bytes, "80GB", 80e9),
        (units.parse_bytes, "75 GiB", 75 * 2**30),
        (units.parse_bytes, "1048576", 1048576),
        (units.parse_bandwidth_bytes_per_s, "200Gb/s", 25e9),
        (units.parse_bandwidth_bytes_per_s, "2039 GB/s", 2039e9),
        (units.parse_bandwidth_bytes_per_s, "1GiB/s", 2**30),
    ],
)
def test_reads(function, text: str, expected: float) -> None:
    assert function(text) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (units.parse_time_s, "2.36 Ms"),
        (units.parse_time_s, "fast"),
        (units.parse_time_s, ""),
        (units.parse_time_s, "1,5ms"),
        (units.parse_bytes, "80Gb"),
        (units.parse_bytes, "80 GB/s"),
        (units.parse_bandwidth_bytes_per_s, "25 GB"),
        (units.parse_bandwidth_bytes_per_s, "25 Xb/s"),
        (units.dtype_bytes, "float16"),
    ],
)
def test_refuses_and_names_what_was_given(function, text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        function(text)


@given(st.integers(1, 2**46))
def test_picoseconds_round_trip(ps: int) -> None:
    assert abs(units.ps_from_s(units.s_from_ps(ps)) - ps) <= 1


def test_rounding_is_half_up_and_never_zero() -> None:
    assert units.ps_from_s(0.0) == 1
    assert units.ps_from_s(2.5e-12) == 3
    assert units.ps_from_s(2.4e-12) == 2


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, 71.0])
def test_no_time_the_engine_cannot_hold(seconds: float) -> None:
    with pytest.raises(UsageError):
        units.ps_from_s(seconds)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_time(2.5491e-3), "2.55 ms"),
        (units.format_time(9.999e-4), "1.00 ms"),
        (units.format_time(61.875e-6), "61.9 us"),
        (units.format_time(0.0), "0 ps"),
        (units.format_time(123.4), "123 s"),
        (units.format_bytes(128 * 2**20), "128 MiB"),
        (units.format_bandwidth(2.039e12), "2.04 TB/s"),
    ],
)
def test_three_significant_digits(text: str, expected: str) -> None:
    assert text == expected

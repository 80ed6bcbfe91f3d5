from __future__ import annotations

import pytest

from overlapsim.errors import UsageError
from overlapsim.units import parse_flop_per_s, parse_hz


@pytest.mark.parametrize(("text", "value"), [("312 TFLOP/s", 312e12), ("1.2PFLOP/s", 1.2e15), ("5", 5.0), (7e12, 7e12)])
def test_flop_rates(text: str | float, value: float) -> None:
    assert parse_flop_per_s(text) == value


@pytest.mark.parametrize(("text", "value"), [("1410 MHz", 1.41e9), ("1.41GHz", 1.41e9), ("50 Hz", 50.0)])
def test_frequencies(text: str, value: float) -> None:
    assert parse_hz(text) == value


@pytest.mark.parametrize("text", ["312 TFLOPS", "312 TOP/s", "312 T", "fast", "312 TiFLOP/s", "1410 MHz"])
def test_other_flop_units_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a rate such as 312 TFLOP/s"):
        parse_flop_per_s(text)


@pytest.mark.parametrize("text", ["1410 M", "1410 MB", "1410 rpm"])
def test_other_frequency_units_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a frequency such as 1410 MHz"):
        parse_hz(text)

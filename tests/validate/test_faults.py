"""What goes wrong on one rank ends on all, within the time limit, and the rank at fault is named."""

from __future__ import annotations

import pytest

from tests.validate.torchrun import script


@pytest.mark.parametrize(
    "fault, told",
    [
        ("dead", "rank 1 is late or gone"),
        ("late", "rank 1 is late or gone: not heard of within 3 s, last seen at 'a long nap'"),
        ("short", "group 1 counted 4 tiles where its collective waits for 3"),
        ("long", "group 1 reached 4 of 5 tiles: its collective would wait for ever"),
    ],
)
def test_faults_end_in_a_clear_error(fault: str, told: str) -> None:
    outcome = script("faults", fault, ranks=2)
    assert outcome.codes != (0,)
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert any(told in line for line in errors), outcome.err
    assert "rank 1" in "".join(errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, told",
    [
        ("absent", "rank 1 is late or gone: not heard of within 3 s, it never started"),
        ("stuck", "rank 1 is late or gone"),
    ],
)
def test_further_faults(fault: str, told: str) -> None:
    outcome = script("faults", fault, ranks=2)
    assert outcome.codes != (0,)
    assert told in outcome.err

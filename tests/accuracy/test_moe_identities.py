"""Identities of MegaScale-MoE's tables to 0.1 %, and what is rounded to its last digit."""

from __future__ import annotations

import pytest

from overlapsim.accuracy.moe_identities import UNITS, identity_rows, overlap_efficiency

ROWS = {row.id: row for row in identity_rows()[0]}


def test_identities_hold_to_a_tenth_of_a_per_cent() -> None:
    exact = [row for row in ROWS.values() if row.group == "identity"]
    # Three of models, two sums and five volumes of each of the six, three rates of each of four runs.
    assert len(exact) == 3 + 6 * (2 + 5) + 4 * 3
    assert {row.id: row.error for row in exact if abs(row.error) > 1e-3} == {}


def test_rounded_figures() -> None:
    half = {"ms": 1.05e-3, "ratio": 5e-3, "%": 0.035}
    rounded = [row for row in ROWS.values() if row.group == "identity rounded"]
    assert len(rounded) == 5
    for row in rounded:
        assert row.predicted == pytest.approx(row.measured, abs=half[row.unit]), row.id


def test_what_was_corrected_is_said() -> None:
    _, findings = identity_rows()
    assert [finding.code for finding in findings] == ["table_misprint", "table_misprint", "hidden_shared_expert"]
    # The printed 39.94 s would not make the printed tokens a second.
    printed = 720 * 8192 / 39.94
    assert abs(printed / ROWS["identity|gpus=240|system=megatron|tokens"].measured - 1) > 0.02


def test_volumes_are_those_of_tensors_and_not_of_equation_2() -> None:
    """Equation 2 as printed is twice what its tensors hold."""
    for name in UNITS:
        split, copies = (ROWS[f"identity|model={name}|attention={kind}"].predicted for kind in ("tp", "sp"))
        assert copies / split < 0.26


def test_overlap_efficiency() -> None:
    assert overlap_efficiency(total=3.0, gemm=3.0, serial=4.0) == 1.0
    assert overlap_efficiency(total=4.0, gemm=3.0, serial=4.0) == 0.0
    assert overlap_efficiency(total=5.0, gemm=3.0, serial=4.0) == -1.0

"""Dispatch rows of the suite `moe`: tables of DeepEP, exchange against gather, cases C03 and D02."""

from __future__ import annotations

import pytest

from overlapsim.accuracy.moe_dispatch import dispatch_rows, published
from overlapsim.accuracy.moe_dispatch_cases import BASE, QUEUE_ARMS
from overlapsim.accuracy.suite import Row, score

ROWS, FINDINGS = dispatch_rows()


def of(group: str) -> list[Row]:
    found = [row for row in ROWS if row.group.startswith(group)]
    assert found
    return found


def by_name(group: str) -> dict[str, float]:
    return {row.id.partition("|")[2]: row.predicted for row in of(group)}


@pytest.mark.parametrize("row", of("dispatch"), ids=lambda row: row.id)
def test_tables_of_kernels_within_15_percent(row: Row) -> None:
    assert abs(row.error) < 0.15


def test_few_rows_are_fitted() -> None:
    fitted = [entry for entry in published() if entry["fitted"] == "yes"]
    assert len(fitted) == 5 and len(published()) > 30
    assert {row.fitted for row in of("case")} == {False}


def test_internode_dispatch_is_not_monotone_in_ranks() -> None:
    """43, 58 and 51 GB/s at 16, 32 and 64 ranks: bound by NVLink, then by NICs that ever more copies cross."""
    rates = {row.id.split("ranks=")[1].partition("|")[0]: row.predicted for row in of("dispatch normal")
             if row.id.endswith("dispatch")}  # fmt: skip
    assert rates["16"] < rates["64"] < rates["32"]


def test_exchange_and_gather_cross_near_six() -> None:
    """Figure 7 of MegaScale-MoE: 5.97 of eight ranks, an exchange reaches 0.746 of a gather's rate."""
    for row in of("exchange over gather"):
        assert abs(row.error) < 0.09
    times = by_name("exchange (fitted)")
    assert (times["top_k=8"] - times["top_k=1"]) / 7 == pytest.approx(126, rel=0.01)


def test_c03_order_gains_and_memory() -> None:
    """No recompute > overlap at 32 queues > at one > no overlap with recompute; 3.7 and 7.8 % gained."""
    found = by_name("case C03")
    order = sorted(QUEUE_ARMS, key=lambda name: found[name])
    assert order == sorted(QUEUE_ARMS, key=lambda name: QUEUE_ARMS[name].tflop_per_s)
    one, many = (found[f"overlap, recompute, {queues} over {BASE}"] - 1 for queues in ("1 queue", "32 queues"))
    assert 0.02 < one < many - 0.01 and many < 0.12
    for row in of("case C03"):
        assert abs(row.error) < 0.10


def test_d02_the_exchange_beats_the_hybrid_kernel() -> None:
    assert all(row.predicted > 1 and row.sign == 1 for row in of("case D02"))


def test_rows_make_a_suite() -> None:
    suite = score("moe", ROWS, "", findings=FINDINGS)
    assert len({row.id for row in ROWS}) == len(ROWS)
    assert {"table_counts_local", "flight_split_assumed"} <= {finding.code for finding in suite.findings}

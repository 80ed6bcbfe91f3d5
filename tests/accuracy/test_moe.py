"""Suite moe: ids, blank values, which rows enter statistics, and the parts with rows of their own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from overlapsim.accuracy import moe
from overlapsim.accuracy.moe_rows import SHIFTS, Predicted, check_keys
from overlapsim.accuracy.suite import Row, score
from overlapsim.accuracy.value_file import Figure, parse_figures
from overlapsim.errors import CalibrationError

HEADER = "id,value,unit\n"


def write(folder: Path, *lines: str) -> Path:
    path = folder / "mine.csv"
    path.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_ids_have_a_group_and_keys() -> None:
    (row,) = parse_figures(HEADER + "fig12|system=megascale-moe|gpus=480|batch=360|metric=mfu,30.5,%\n", "demo")
    assert (row.group, row.metric, row.value, row.unit) == ("fig12", "mfu", 30.5, "%")
    assert row.keys == {"system": "megascale-moe", "gpus": "480", "batch": "360", "metric": "mfu"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("id,value\n", "header"),
        (HEADER, "no rows"),
        (HEADER + "a|b=1,2\n", "2 cells"),
        (HEADER + "a|b,1,s\n", "group|key=value"),
        (HEADER + "a|b=1|b=2,1,s\n", "each key once"),
        (HEADER + "a|b=1,nought,s\n", "above 0"),
        (HEADER + "a|b=1,-1,s\n", "above 0"),
        (HEADER + "a|b=1,1,s\na|b=1,2,s\n", "twice"),
    ],
)
def test_malformed_rows_are_refused_by_line(text: str, what: str) -> None:
    with pytest.raises(CalibrationError, match=what.replace("|", r"\|")):
        parse_figures(text, "demo")


def test_keys_metric_and_unit_must_be_those_of_the_group() -> None:
    def row(unit: str = "s", **keys: str) -> Figure:
        return Figure("x", "x", keys, 1.0, unit, "x:1")

    needed, units = {"gpus": (), "system": ("a", "b")}, {"iteration": ("s", "ms")}
    check_keys(row(gpus="240", system="a", metric="iteration"), needed, units)
    for wrong, what in (
        (row(gpus="240", metric="iteration"), "keys are"),
        (row(gpus="0", system="a", metric="iteration"), "whole number"),
        (row(gpus="240", system="c", metric="iteration"), "a or b"),
        (row(gpus="240", system="a", metric="speed"), "metric"),
        (row(gpus="240", system="a", metric="iteration", unit="%"), "in '%'"),
    ):
        with pytest.raises(CalibrationError, match=what):
            check_keys(wrong, needed, units)


def test_a_range_adds_deviations_in_quadrature() -> None:
    moved = {("gemm", "low"): -3.0, ("memory", "low"): -4.0, ("launch", "high"): 2.0}
    found = Predicted.of(lambda shift: 10.0 + (0.0 if shift is None else moved.get(shift, 0.0)))
    assert (found.low, found.value, found.high) == pytest.approx((5.0, 10.0, 12.0))
    assert len(SHIFTS) == 10


def test_rows_without_a_value_are_predicted_and_not_counted() -> None:
    rows = [Row("a", "g", 1.0, 1.1, 0.9, 1.2, "s", None), Row("b", "g", math.nan, 7.0, 6.0, 8.0, "s", None)]
    suite = score("demo", rows, "")
    assert suite.groups[0].num_points == 1 and suite.groups[0].mean_abs == pytest.approx(0.1)
    assert [row["predicted"] for row in suite.to_dict()["rows"]] == [1.1, 7.0]


def test_a_table_of_ones_own_is_scored(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "comet-e2e|m=4096|tp=8|ep=1|model=qwen2|system=comet|metric=latency,67,ms",
        "comet-e2e|m=4096|tp=8|ep=1|model=qwen2|system=tutel|metric=latency,104,ms",
        "fig16|model=M6|kernel=qkv_exchange|variant=fused|metric=time,,us",
    )
    suite = moe.evaluate(path)
    latency, kernel = suite.rows
    assert latency.unit == "ms" and 40 < latency.predicted < 90 and latency.low < latency.predicted < latency.high
    assert math.isnan(kernel.measured) and 20 < kernel.predicted < 400
    # Systems without a strategy are named and left out.
    assert "columns_not_predicted" in {finding.code for finding in suite.findings}
    assert suite.overall.num_points == 1


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("table4|a=1|metric=iteration,1,s", "group 'table4' is unknown"),
        ("table3|system=deepspeed|gpus=240|metric=iteration,1,s", "megatron-lm or megascale-moe"),
        ("table3|system=megascale-moe|gpus=250|metric=iteration,1,s", "row table3"),
        ("fig14|model=M7|layout=sp+ep|metric=mfu-ratio,1,ratio", "M1 or M2"),
    ],
)
def test_rows_that_cannot_be_predicted_are_refused(tmp_path: Path, line: str, what: str) -> None:
    with pytest.raises(CalibrationError, match=what.replace("+", r"\+")):
        moe.evaluate(write(tmp_path, line))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="cannot be read"):
        moe.evaluate(tmp_path / "none.csv")


def test_other_parts_exist_and_say_whose_they_are() -> None:
    rows, findings = moe.own_rows("identities")
    assert len(rows) > 20 and all(abs(row.error) < 0.02 for row in rows)
    assert all(finding.code for finding in findings)


@pytest.mark.slow
def test_the_bundled_figures() -> None:
    suite = moe.evaluate()
    by_id = {row.id: row for row in suite.rows}
    assert {row.id for row in suite.rows if row.fitted and row.group.startswith("fig13")} == {moe.CALIBRATED}
    assert abs(by_id[moe.CALIBRATED].error) < 0.02
    for gpus in (240, 1440):
        row = by_id[f"table3|system=megascale-moe|gpus={gpus}|metric=iteration"]
        assert abs(row.error) < 0.08
    for step, measured in (("inter", 1.22), ("intra", 1.28)):
        assert by_id[f"table5|step={step}|metric=throughput"].predicted == pytest.approx(measured, abs=0.04)
    assert all("as published" in text for name, text in suite.notes.items() if name.startswith("fig14 M"))
    assert suite.notes["COMET ahead of both Megatron columns"] == "in 12 of 12 cells"
    parts = {
        (system, part): by_id[f"fig13|gpu=h800|system={system}|metric={part}"].predicted
        for system in ("megatron-lm", "megascale-moe")
        for part in ("exposed", "other", "iteration")
    }
    for part in ("exposed", "other", "iteration"):
        assert parts["megatron-lm", part] > parts["megascale-moe", part]
    assert {"unexplained_1.41", "virtual_stages_assumed", "micro_batch_assumed"} <= {f.code for f in suite.findings}

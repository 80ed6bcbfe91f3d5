"""Plan files: byte-identical, complete, and refused with one clear sentence when they are not plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapsim.errors import PlanError
from overlapsim.plan import (
    Alternative,
    Choice,
    CurveInput,
    Finding,
    OperatorInputs,
    OperatorPlan,
    OperatorSettings,
    Prediction,
    dump_plan,
    load_plan,
    read_plan,
)

PLAN = OperatorPlan(
    kind="operator",
    inputs=OperatorInputs(
        "a800-sxm8", "ab" * 32, 1, 2, 8192, 8192, 4096, "fp16", "fp16", "all_reduce",
        kernel_time_s={"wave_group": 2.36135e-3},
        curve=CurveInput("c.csv", "cd" * 32, (2097152.0, 4194304.0), (6.1875e-5, 7.8248e-05)),
        tile=(256, 128, 32),
    ),
    choice=Choice("wave_group", "overlap", "none", 3.1e-3, 1.5, 1e-5),
    operators=(
        OperatorSettings("gemm", "fwd", "wave_group", {"group_tiles": (212, 140), "x": 8}, {"bm": 256, "ok": True}),
    ),
    predictions={"wave_group": Prediction(1 / 3, 1e-300, 2.0)},
    findings=(Finding("code", "a sentence: with a colon, 'quotes' and ünicode"),),
    alternatives=(Alternative("serial", True, (), Prediction(3.1e-3, 3e-3, 3.2e-3), {}),),
    provenance={"overlapsim": "0"},
)  # fmt: skip


def test_round_trip_keeps_every_bit() -> None:
    again = load_plan(dump_plan(PLAN))
    assert again.inputs == PLAN.inputs
    assert again.predictions["wave_group"].value_s == 1 / 3
    assert dump_plan(again) == dump_plan(PLAN)


def test_provenance_is_the_only_block_that_may_differ() -> None:
    a, b = dump_plan(PLAN), dump_plan(replace(PLAN, provenance={"overlapsim": "1"}))
    assert a.split("provenance:")[0] == b.split("provenance:")[0]
    assert a.splitlines()[0] == "version: 1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no version"),
        ("[1, 2]", "no version"),
        ("a: [", "not readable YAML"),
        ("a: 1\na: 2", "appears twice"),
        ("a: &x [1]\nb: *x", "aliases"),
        ("x: 2024-13-45", "not readable YAML"),
        ("x: !!int abc", "not readable YAML"),
        ("x: !!timestamp abc", "not readable YAML"),
        ("[" * 5000, "not readable YAML"),
        (dump_plan(replace(PLAN, predictions={"wave_group": Prediction(float("nan"), 1.0, 2.0)})), "predicts"),
        (dump_plan(replace(PLAN, predictions={"wave_group": Prediction(0.5, 1.0, 2.0)})), "predicts"),
        ("version: 99\nkind: operator", "version 99"),
        ("version: 1\nkind: operator", "not a valid plan"),
        (dump_plan(PLAN).replace("ranks: 2", "ranks: two"), "ranks"),
        (dump_plan(PLAN)[: len(dump_plan(PLAN)) // 2], "plan"),
    ],
)
def test_refuses(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        load_plan(text, "p.yaml")


def test_missing_and_binary_files(tmp_path) -> None:
    with pytest.raises(PlanError, match="cannot read plan"):
        read_plan(tmp_path / "none.yaml")
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="cannot read plan"):
        read_plan(tmp_path / "x")

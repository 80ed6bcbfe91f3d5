"""Plan files: byte-identical, complete, and refused with one clear sentence when they are not plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapsim.errors import PlanError
from overlapsim.plan import (
    Advice,
    Alternative,
    Choice,
    CurveInput,
    Finding,
    Measurement,
    OperatorInputs,
    OperatorPlan,
    OperatorSettings,
    Prediction,
    SearchCount,
    StepCandidate,
    StepPlan,
    StepPlanInputs,
    StepSettings,
    Trial,
    dump_plan,
    load_plan,
    of_kind,
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


BEST = StepCandidate(
    1,
    StepSettings(
        4, {"tp": 4, "cp_kind": "ring", "sequence_parallel": True}, 1, 16, (7, 8, 8, 7), "1f1b", "blocking", True,
        "selective", ("layernorm", "moe_act"), "uniform", 1, False, "gradients", 160e6, True, "mirrored", ("tp", "dp"),
        (("grad_buckets", {"bucket_bytes": 1e6, "sizes": (1, 2)}),),
    ),
    (OperatorSettings("mlp.fc2", "fwd", "chunked", {"chunks": 2}, {"chunk_rows": (4, 4)}),),
    Prediction(1 / 3, 0.3, 0.4), Prediction(0.4, 0.35, 0.5), 0.1, 1e5, 0.45, {"parameters": 1.0}, {"gemm": 1 / 3},
    (Finding("code", "of this plan"),),
)  # fmt: skip
STEP = StepPlan(
    "step",
    StepPlanInputs("mixtral-8x7b", "ab" * 32, "h800-sxm8", "cd" * 32, 4, 64, 8192, constraints=("tp<=8",)),
    BEST,
    (replace(BEST, rank=2, step=Prediction(0.5, 0.4, 0.6), perturbed=None),),
    replace(BEST, rank=0, operators=()),
    Advice(("why",), (), (), (Trial(1, "predicted best"),), (Measurement("gemm", (1, 2), -0.1, 0.2, "GEMMs"),)),
    SearchCount(100, 7, {"does not fit into memory": 60}),
    (Finding("clock_assumed", "of all plans"),),
    {"overlapsim": "0"},
)


def test_step_plans_keep_every_bit() -> None:
    text = dump_plan(STEP)
    assert text.startswith("version: 1\nkind: step\n")
    again = of_kind(load_plan(text), StepPlan)
    assert dump_plan(again) == text
    assert again.choice.step == STEP.choice.step
    assert again.choice.settings.stage_layers == (7, 8, 8, 7)
    assert (again.inputs, again.advice, again.search) == (STEP.inputs, STEP.advice, STEP.search)
    assert list(again.predictions) == ["plan 1", "plan 2", "the plan without overlap strategies"]
    assert again.candidate(2).step.value_s == 0.5


def test_each_kind_is_asked_for_by_name() -> None:
    with pytest.raises(PlanError, match=r"p\.yaml is of kind step; expected one of kind operator, as `operator -o`"):
        of_kind(STEP, OperatorPlan, "p.yaml")
    with pytest.raises(PlanError, match="expected one of kind step, as `plan -o` writes"):
        of_kind(PLAN, StepPlan)
    assert of_kind(PLAN, OperatorPlan) is PLAN


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
        ("version: 1\nkind: operator", "not a valid plan: .*again with `operator -o`"),
        ("version: 1\nkind: step", "not a valid plan: .*again with `plan -o`"),
        ("version: 1\nkind: sweep", "kind 'sweep'; expected one of operator, step"),
        ("version: 1\nkind: [step]", "expected one of operator, step"),
        ("version: 1", "kind None"),
        (dump_plan(replace(STEP, choice=replace(BEST, step=Prediction(0.5, 1.0, 2.0)))), "for plan 1"),
        (dump_plan(replace(STEP, serial=replace(BEST, step=Prediction(-1.0, -1.0, 2.0)))), "without overlap"),
        (dump_plan(STEP).replace("micro_batch: 1", "micro_batch: one"), "micro_batch"),
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

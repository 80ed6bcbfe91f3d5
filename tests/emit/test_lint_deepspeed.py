"""Checks of DeepSpeed's configurations: one rule at a time, lines, what is emitted has no conflict."""

from __future__ import annotations

import json
from typing import Any

import pytest

from overlapsim.emit.deepspeed import EMITTER, FILE
from overlapsim.emit.lint_base import Checked, Facts
from overlapsim.emit.lint_deepspeed import LINTER
from tests.emit.subjects import PLANS, subject

GOOD: dict[str, Any] = {
    "train_batch_size": 128,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 16,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 500000000},
}


def lint(change: dict[str, Any], world_size: int | None = 8) -> Checked:
    return LINTER.lint(json.dumps({**GOOD, **change}, indent=2), Facts(world_size=world_size))


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {**GOOD["zero_optimization"], **settings}}


def test_a_good_configuration_is_left_alone() -> None:
    checked = lint({})
    assert checked.lints == ()
    assert checked.reading is not None
    assert str(checked.reading.layout) == "dp=8,zero=2"
    assert checked.reading.settings == {"dp_overlap": "gradients", "bucket_bytes": 2e9}


@pytest.mark.parametrize("name", PLANS)
def test_what_is_emitted_has_no_conflict(name: str) -> None:
    checked = LINTER.lint(EMITTER.emit(subject(name)).files[FILE], Facts())
    assert {one.kind for one in checked.lints} <= {"missing"}


@pytest.mark.parametrize(
    ("change", "kind", "line", "message"),
    [
        ({"train_batch_size": 100}, "conflict", 2, "1 x 16 x 8"),
        ({"train_batch_size": None, "train_micro_batch_size_per_gpu": None}, "conflict", None, "neither the batch"),
        ({"train_batch_size": "auto"}, "conflict", 2, "Hugging Face"),
        (zero(stage=4), "conflict", 9, "stage is 4"),
        (zero(reduce_bucket_size="500MB"), "conflict", 11, "'500MB'"),
        (zero(reduce_bucket_size="auto"), "conflict", 11, "Hugging Face"),
        (zero(overlap_com=True), "conflict", 12, "no overlap_com"),
        (zero(mics_shard_size=8), "conflict", 12, "was removed"),
        ({"fp16": {"enabled": True}}, "conflict", 13, "both on"),
        ({"nebula": {}}, "conflict", 13, "was removed"),
        ({"domino": {}}, "unknown", 13, "Domino"),
        ({"gradient_cliping": 1.0}, "unknown", 13, "gradient_cliping"),
        (zero(overlap_comm=None), "missing", 10, "off unless asked for"),
        (zero(overlap_comm=False), "missing", 10, "after the backward"),
        (zero(stage=3, stage3_prefetch_bucket_size=0), "missing", 12, "nothing hides the gathers"),
        (zero(stage=0), "no_effect", 10, "without ZeRO"),
        (zero(stage3_max_live_parameters=1), "no_effect", 12, "does nothing at ZeRO 2"),
        (zero(zero_hpz_partition_size=8), "no_effect", 12, "does nothing at ZeRO 2"),
        ({"tensor_parallel": {"autotp_size": 2}, "train_batch_size": 64}, "missing", 14, "tp=2"),
        ({"tensor_parallel": {"tp_overlap_comm": True}}, "no_effect", 14, "without tensor"),
    ],
)
def test_rules(change: dict[str, Any], kind: str, line: int | None, message: str) -> None:
    found = [one for one in lint(change).lints if one.kind == kind and message in one.message]
    assert [one.line for one in found] == [line]
    assert found[0].fix


def test_ranks_that_are_not_known() -> None:
    assert lint({}, None).lints == ()
    assert [one.kind for one in lint({"train_batch_size": 100}, None).lints] == ["conflict"]


def test_unset_overlap_at_level_3_is_on() -> None:
    checked = lint({"zero_optimization": {"stage": 3}})
    assert checked.lints == ()
    assert checked.reading is not None
    assert checked.reading.settings["dp_overlap"] == "both"


def test_keys_that_stand_twice() -> None:
    text = json.dumps(GOOD).replace('"stage": 2', '"stage": 2, "stage": 3')
    first = LINTER.lint(text, Facts(world_size=8)).lints[0]
    assert first.kind == "conflict"
    assert "twice" in first.message


def test_recognition() -> None:
    assert LINTER.recognises("ds_config.json", json.dumps(GOOD))
    assert not LINTER.recognises("config.json", '{"hidden_size": 4096}')
    assert not LINTER.recognises("ds_config.yaml", json.dumps(GOOD))

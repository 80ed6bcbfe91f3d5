"""DeepSpeed's own parser takes what is emitted; what the linter calls a conflict it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overlapsim.emit.deepspeed import EMITTER, FILE, bucket_elements
from overlapsim.emit.lint_base import Facts
from overlapsim.emit.lint_deepspeed import LINTER
from tests.emit.frameworks.runs import parse
from tests.emit.subjects import PLANS, subject

pytestmark = pytest.mark.frameworks
PARSER = "deepspeed_parser.py"


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_parsed_as_planned(name: str, tmp_path: Path) -> None:
    base = subject(name)
    (tmp_path / FILE).write_text(EMITTER.emit(base).files[FILE], encoding="utf-8")
    found, said = parse("main", PARSER, tmp_path / FILE, base.layout.dp)
    assert found is not None, said
    settings, inputs = base.settings, base.step.inputs
    assert found["batch"] == [inputs.global_batch, settings.micro_batch, settings.num_micro_batches]
    assert found["stage"] == base.layout.zero
    assert found["ep"] == base.layout.ep
    if base.layout.zero:
        assert found["overlap_comm"] is (base.layout.zero == 3 or settings.dp_overlap != "none")
        assert found["reduce_bucket_size"] == bucket_elements(base)


GOOD: dict[str, Any] = {
    "train_batch_size": 128,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 16,
    "bf16": {"enabled": True},
}


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({}, False),
        ({"train_batch_size": 100}, True),
        ({"zero_optimization": {"stage": 4}}, True),
        ({"zero_optimization": {"stage": 2, "reduce_bucket": 1}}, True),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "500MB"}}, True),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}, False),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, True),
        ({"fp16": {"enabled": True}}, True),
        ({"train_batch_size": "auto"}, True),
        ({"nebula": {}}, True),
        ({"elasticity": {}}, True),
        ({"domino": {"enabled": True}}, False),
        ({"gradient_cliping": 1.0}, False),
    ],
)
def test_conflicts_are_what_it_refuses(change: dict[str, Any], refused: bool, tmp_path: Path) -> None:
    text = json.dumps({**GOOD, **change})
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    found, said = parse("main", PARSER, tmp_path / FILE, 8)
    assert (found is None) == refused, said
    kinds = {lint.kind for lint in LINTER.lint(text, Facts(world_size=8)).lints}
    assert ("conflict" in kinds) == refused
    assert ("unknown" in kinds) == (set(change) <= {"domino", "gradient_cliping"} and bool(change))

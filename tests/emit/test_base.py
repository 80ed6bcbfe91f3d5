"""The contract of emitters: pure, named after the plan, versions checked, every plan for every target."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapsim.emit.base import Emitted, Subject, comment
from overlapsim.emit.lint_base import Facts
from overlapsim.emit.registry import EMITTERS, LINTERS, check_targets, linter_of, load_emitter, load_linter
from overlapsim.emit.rules import FRAMEWORKS
from overlapsim.errors import PlanError, UsageError
from tests.emit.subjects import PLANS, subject

STEP_TARGETS = [name for name in EMITTERS if load_emitter(name).kind == "step"]


@pytest.mark.parametrize("target", STEP_TARGETS)
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_is_emitted_for_every_target(plan: str, target: str) -> None:
    emitter = load_emitter(target)
    emitted = emitter.emit(subject(plan))
    assert emitted.files
    assert all(text.endswith("\n") for text in emitted.files.values())
    assert any(subject(plan).digest[:16] in text for text in emitted.files.values()), "the plan is not named"
    assert emitted == emitter.emit(subject(plan)), "not pure"


@pytest.mark.parametrize("target", STEP_TARGETS)
@pytest.mark.parametrize(
    ("version", "code"), [("0.0.1", "framework_version_stale"), ("99", "framework_version_unknown")]
)
def test_a_version_that_is_not_known_is_a_finding(target: str, version: str, code: str) -> None:
    emitted = load_emitter(target).emit(subject("dense"), version)
    assert emitted.findings[0].code == code
    assert version in emitted.findings[0].message


@pytest.mark.parametrize("target", EMITTERS)
def test_every_target_has_a_framework_whose_versions_are_known(target: str) -> None:
    emitter = load_emitter(target)
    assert emitter.name == target
    assert emitter.framework in FRAMEWORKS
    with pytest.raises(UsageError, match="expected numbers such as"):
        emitter.emit(_other_kind(emitter.kind), "latest")


def _other_kind(kind: str) -> Subject:
    if kind == "step":
        return subject("dense")
    from overlapsim.plan import Choice, OperatorInputs, OperatorPlan

    inputs = OperatorInputs("a800-sxm8", "", 1, 2, 64, 64, 64, "fp16", "fp16", "all_reduce")
    return Subject(OperatorPlan("operator", inputs, Choice("serial", "serial", "none", 1.0, 1.0, 1.0), (), {}, (), ()))


@pytest.mark.parametrize("target", EMITTERS)
def test_a_plan_of_another_kind_is_one_clear_error(target: str) -> None:
    emitter = load_emitter(target)
    other = _other_kind("operator" if emitter.kind == "step" else "step")
    with pytest.raises(PlanError, match=f"{target} takes plans of kind {emitter.kind}"):
        emitter.emit(other)


def test_the_digest_names_the_choice_and_not_who_made_it() -> None:
    base = subject("dense")
    again = replace(base, plan=replace(base.step, provenance={"overlapsim": "another"}))
    assert again.digest == base.digest
    other = replace(base, plan=replace(base.step, inputs=replace(base.step.inputs, seq_len=4096)))
    assert other.digest != base.digest


def test_targets_are_named_once_and_known() -> None:
    assert check_targets(["megatron", "megatron"]) == ("megatron",)
    with pytest.raises(UsageError, match="did you mean 'megatron'"):
        check_targets(["megatrn"])
    with pytest.raises(UsageError, match="no target is given"):
        check_targets([])


@pytest.mark.parametrize("name", LINTERS)
def test_linters_have_names_and_versions(name: str) -> None:
    linter = load_linter(name)
    assert linter.name == name
    assert linter.framework in FRAMEWORKS


def test_a_file_of_nobody_is_one_clear_error() -> None:
    with pytest.raises(UsageError, match=r"notes\.txt is a config of none of"):
        linter_of("notes.txt", "buy milk\n")


def test_facts_and_comments() -> None:
    assert Facts().world_size is None
    assert comment(("a",), "//") == "// a\n"
    assert Emitted({}).unexpressed == ()

"""Kernel plans: the file is a plan that runners read and check, and says what runs it."""

from __future__ import annotations

from pathlib import Path

from overlapsim.validate.plans import read_spec

from overlapsim.emit.base import Subject
from overlapsim.emit.wave_group import EMITTER, FILE
from overlapsim.plan import OperatorPlan, load_plan, of_kind, read_plan
from tests.cli.test_commands import arguments, run


def planned(capsys, path: Path, *more: str, **changes: str | None) -> Subject:
    code, _, err = run(capsys, [*arguments(**changes), *more, "-o", str(path)])
    assert code == 0, err
    return Subject(of_kind(read_plan(path), OperatorPlan))


def test_the_file_is_what_runners_read(capsys, tmp_path: Path) -> None:
    subject = planned(
        capsys, tmp_path / "plan.yaml", "--strategy", "wave_group", kernel_time="wave_group=2.36135ms", tile="256x128"
    )
    emitted = EMITTER.emit(subject)
    text = emitted.files[FILE]
    assert emitted.unexpressed == ()
    assert "# torchrun --nproc-per-node 2 -m overlapsim.validate plan kernel_plan.yaml\n" in text
    assert subject.digest[:16] in text
    again = of_kind(load_plan(text), OperatorPlan)
    assert (again.inputs, again.choice, again.operators) == (
        subject.operator.inputs,
        subject.operator.choice,
        subject.operator.operators,
    )
    (tmp_path / FILE).write_text(text)
    spec = read_spec(tmp_path / FILE)
    assert (spec.strategy, spec.ranks, spec.m, spec.n, spec.k) == ("wave_group", 2, 8192, 8192, 4096)
    assert spec.reorder is not None
    assert sum(spec.settings["group_tiles"]) == 2048


def test_a_strategy_without_groups_is_said(capsys, tmp_path: Path) -> None:
    subject = planned(capsys, tmp_path / "plan.yaml", "--strategy", "chunked")
    emitted = EMITTER.emit(subject)
    assert "has no groups of waves" in emitted.unexpressed[0]
    assert emitted.unexpressed[0] in emitted.files[FILE]


def test_another_version_is_a_finding(capsys, tmp_path: Path) -> None:
    subject = planned(capsys, tmp_path / "plan.yaml", "--strategy", "chunked")
    assert EMITTER.emit(subject).findings == ()
    assert EMITTER.emit(subject, "9.0").findings[0].code == "framework_version_unknown"

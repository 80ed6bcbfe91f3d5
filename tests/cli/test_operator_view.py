"""What `operator` and `crossover` tell people: what to run, why, and what was believed."""

from __future__ import annotations

import json

import pytest

from overlapsim.cli.main import main
from overlapsim.cli.operator_view import _CAUSES
from overlapsim.plan.operator import Cause

H100 = "--cluster h100-sxm8 --ranks 8"


def told(capsys: pytest.CaptureFixture[str], text: str) -> str:
    main(text.split())
    return capsys.readouterr().out


def test_every_cause_has_words() -> None:
    assert {*_CAUSES, "none"} == set(Cause.__args__)


def test_a_sure_gain_names_what_may_be_faster(capsys) -> None:
    out = told(capsys, f"operator {H100} --m 4096 --n 4096 --k 8192 --collective reduce_scatter --stack eager")
    assert "verdict: overlap" in out
    (alone,) = [line for line in out.splitlines() if line.startswith("GEMM ")]
    assert "us, reduce_scatter " in alone and " alone" in alone
    (line,) = [line for line in out.splitlines() if line.startswith("run ")]
    (verdict,) = [text for text in out.splitlines() if text.startswith("verdict")]
    assert f"; winner {line.split()[1].rstrip(',')}, " in verdict
    assert "(ceiling: serial over" in line and "(lower bound: FLOP" in line
    assert "as fast as serial" in line and "may be faster, or slower" in line and "ceiling" in line
    assert "findings of others, in full with --json: " in out


def test_findings_of_others_are_names_here_and_whole_in_json(capsys) -> None:
    question = f"operator {H100} --m 4096 --n 4096 --k 2048 --collective reduce_scatter --strategy wave_group"
    out = told(capsys, question)
    assert "kernel_time_assumed (wave_group)" in out and "finding kernel_time_assumed" not in out
    answer = json.loads(told(capsys, f"{question} --json"))
    assert any("wave_group kernel priced" in finding["message"] for finding in answer["findings"])


def test_a_refusal_says_why_in_words(capsys) -> None:
    out = told(
        capsys, "operator --cluster rtx4090-pcie8 --ranks 4 --m 64 --n 8192 --k 7168 --collective reduce_scatter"
    )
    assert "verdict: serial, cause under_one_wave: all tiles of the GEMM run at once" in out
    assert "\nrun serial; at best" in out


def test_a_faster_transport_is_told_as_such(capsys) -> None:
    out = told(capsys, f"operator {H100} --m 256 --n 1024 --k 4096 --collective all_gather --stack eager")
    assert "verdict: serial" in out and "although nothing overlaps" in out


def test_a_tie_is_told_as_one(capsys) -> None:
    out = told(capsys, f"operator {H100} --m 64 --n 8192 --k 8192 --collective all_gather --independent 4GiB")
    assert "verdict: tie, cause link_bound" in out and "bulk is as fast as serial within 2%" in out


def test_crossover_names_rows_behind_the_first_that_do_not_pay(capsys) -> None:
    question = f"crossover {H100} --n 8192 --k 8192 --collective all_gather --independent 64MiB --m 1024,8192,262144"
    assert "overlap pays from m = 1024 (of the row counts tried), but not at m = 262144" in told(capsys, question)
    answer = json.loads(told(capsys, f"{question} --json"))
    assert (answer["pays_from_m"], answer["but_not_at_m"]) == (1024, [262144])


@pytest.mark.parametrize("command", ["operator --m 4096", "crossover --m 256,512"])
@pytest.mark.parametrize(
    ("option", "why"), [("--stack steam", "launch stack 'steam'"), ("--independent 0", "above 0"), ("--ranks 9", "9")]
)
def test_what_cannot_be_used_is_one_line(capsys, command: str, option: str, why: str) -> None:
    with pytest.raises(SystemExit) as error:
        main(f"{command} --n 4096 --k 4096 {H100} {option}".split())
    err = capsys.readouterr().err
    assert error.value.code == 2 and why in err and err.count("\n") == 1

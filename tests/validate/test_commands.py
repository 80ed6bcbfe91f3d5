"""Commands as users start them: ranks of their own, records that are resumed, JSON on stdout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from overlapsim.calibration.records import read_records
from tests.validate.plan_files import write_plan
from tests.validate.torchrun import LIMIT_S, torchrun


def validate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "overlapsim.validate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


def test_collectives_are_recorded_and_not_measured_again(tmp_path: Path) -> None:
    arguments = ("collective", "--ranks", "2", "--collective", "all_gather", "--size", "4KiB,64KiB", "--dtype", "fp32")
    first = validate(*arguments, "--repeats", "3", "--time-budget", "20", "-o", str(tmp_path))
    assert first.returncode == 0, first.stderr
    assert first.stderr.splitlines()[0].startswith("time budget 20.0 s: 1 collectives, 2 sizes, 2 ranks")
    content = read_records(tmp_path / "records.csv")
    assert {record.size_bytes for record in content.records} == {4096, 65536}
    assert content.header.device.startswith("CPU") and "gloo" in content.header.libraries
    # As if all had been valid: nothing is left to measure.
    (tmp_path / "records.csv").write_text((tmp_path / "records.csv").read_text().replace(",false", ",true"))
    second = validate(*arguments, "--time-budget", "20", "-o", str(tmp_path))
    assert second.returncode == 0 and len(second.stderr.splitlines()) == 1, second.stderr


def test_a_plan_runs_under_torchrun_and_writes_its_cases(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.yaml", "wave_group", "all_to_all", ranks=2)
    arguments = ["-m", "overlapsim.validate", "plan", str(path), "--repeats", "2", "--time-budget", "5", "--json"]
    outcome = torchrun([*arguments, "-o", str(tmp_path / "cases.json")], ranks=2)
    assert outcome.codes == (0,), outcome.err
    shown = json.loads(outcome.out)
    written = json.loads((tmp_path / "cases.json").read_text())
    assert shown == written["cases"]
    assert [case["strategy"] for case in shown] == ["serial", "wave_group"]
    assert all(0 <= case["error_over_tolerance"] < 1 and case["measured_s"] > 0 for case in shown)


def test_a_plan_for_other_ranks_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.yaml", "chunked", "all_reduce", ranks=2)
    answer = validate("plan", str(path), "--ranks", "3")
    assert (answer.returncode, answer.stderr.count("\n")) == (2, 1), answer.stderr
    assert "for 2 ranks; 3 are here" in answer.stderr


@pytest.mark.slow
def test_gemms_contention_and_overlap(tmp_path: Path) -> None:
    for arguments in (
        ("gemm", "--shape", "64,128x64x64", "--dtype", "fp32"),
        ("contention", "--shape", "256x256x128", "--collective", "all_reduce", "--dtype", "fp32"),
        ("overlap", "--shape", "256x192x64", "--dtype", "fp32", "--collective", "reduce_scatter", "--tile", "64x64x32"),
    ):
        answer = validate(*arguments, "--ranks", "2", "--repeats", "2", "--time-budget", "10")
        assert answer.returncode == 0, answer.stderr


@pytest.mark.slow
def test_the_loop_ends_in_a_comparison_or_says_what_to_do(tmp_path: Path) -> None:
    """Whether the machine is quiet enough is not ours to say; what is written must be right in both cases."""
    answer = validate("loop", "--ranks", "2", "--time-budget", "60", "--repeats", "3", "-o", str(tmp_path / "loop"))
    assert (tmp_path / "loop" / "records.csv").exists(), answer.stderr
    if answer.returncode:
        assert answer.returncode == 3, answer.stderr
        assert "run the same command again" in answer.stderr or "run it again" in answer.stderr, answer.stderr
        assert not (tmp_path / "loop" / "loop.csv").exists()
    else:
        assert "say nothing about GPUs" in answer.stdout
        assert (tmp_path / "loop" / "loop.csv").exists() and (tmp_path / "loop" / "profile").is_dir()

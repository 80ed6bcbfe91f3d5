from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from overlapsim.accuracy.loop import LoopRow, dump_loop, evaluate, margins_of, notes, parse_loop
from overlapsim.cli.main import cli
from overlapsim.errors import CalibrationError, UsageError

SERIAL = LoopRow(
    *("all_reduce 640x640x384", "serial", "", "all_reduce", 640, 640, 384, "fp32", 2, 1, 1638400.0),
    *(1.05e-2, 0.9e-2, 1.2e-2, 1.0e-2, 0.97e-2, 1.03e-2, 0.02, 36, 3, True),
)
CHUNKED = replace(SERIAL, strategy="chunked", parameters='{"chunks":2}', predicted_s=0.95e-2, measured_s=0.8e-2)
HEADER = {"device": "CPU of nowhere", "libraries": {"torch": "2.13.0"}}


def written(path: Path, *rows: LoopRow) -> Path:
    path.write_text(dump_loop(rows, HEADER))
    return path


def test_rows_come_back_as_they_were_written() -> None:
    rows, header = parse_loop(dump_loop([SERIAL, CHUNKED], HEADER))
    assert (rows, header) == ((SERIAL, CHUNKED), HEADER)


def test_signs_count_beyond_the_noise_only() -> None:
    (margin,) = margins_of([SERIAL, CHUNKED]).values()
    assert margin.measured == pytest.approx(0.25) and margin.predicted == pytest.approx(1.05 / 0.95 - 1)
    assert margin.decided and margin.right
    within = replace(CHUNKED, measured_s=0.99e-2)
    assert not margins_of([SERIAL, within])[within].decided
    wrong = replace(CHUNKED, predicted_s=1.2e-2)
    assert not margins_of([SERIAL, wrong])[wrong].right
    assert margins_of([CHUNKED]) == {}


@pytest.mark.parametrize("noise, error, met", [(0.02, 0.14, True), (0.02, 0.16, False), (0.10, 0.19, True)])
def test_the_bar_is_15_percent_or_twice_the_noise(noise: float, error: float, met: bool) -> None:
    row = replace(SERIAL, noise=noise, predicted_s=(1 + error) * SERIAL.measured_s)
    rows = [replace(row, case=f"case {number}") for number in range(12)]
    assert notes(rows, {})["bar"].endswith("met" if met else "MISSED")
    assert "not judged" in notes(rows[:11], {})["bar"]
    assert "bar" not in notes([replace(row, size_bytes=1e5)], {}), "the bar is for sizes from 1 MB on"


def test_scores_a_folder_or_a_file(tmp_path: Path) -> None:
    path = written(tmp_path / "loop.csv", SERIAL, CHUNKED, replace(SERIAL, case="other", valid=False))
    suite = evaluate(tmp_path)
    assert suite.to_dict() == evaluate(path).to_dict()
    assert [(group.name, group.num_points, group.fitted) for group in suite.groups] == [
        ("serial", 1, False),
        ("chunked", 1, False),
    ]
    assert (suite.overall.sign_right, suite.overall.sign_total) == (1, 1)
    assert [finding.code for finding in suite.findings] == ["not_valid", "says_nothing_about_gpus"]
    answer = CliRunner().invoke(cli, ["accuracy", "--suite", "loop", "--data", str(tmp_path), "--json"])
    assert json.loads(answer.output)["suite"] == "loop"


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "no header"),
        ("size_bytes,time_s\n1,2\n", "no header"),
        ('# {"overlapsim_loop": 9}\n', "version 9"),
        ('# {"overlapsim_loop": 1}\ncase,strategy\n', "line 2: expected the columns"),
        (dump_loop([SERIAL], HEADER).replace(",640,", ",wide,", 1), "line 3: m is 'wide'"),
        (dump_loop([SERIAL], HEADER).replace("0.0105", "-1.0"), "line 3: times must be above 0"),
        (dump_loop([replace(SERIAL, valid=False)], HEADER), "none is valid"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "loop.csv"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=told):
        evaluate(path)


def test_nothing_is_bundled(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--data DIR"):
        evaluate(None)
    with pytest.raises(CalibrationError, match="cannot be read"):
        evaluate(tmp_path / "absent")

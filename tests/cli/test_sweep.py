"""`overlapsim sweep` as users call it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from overlapsim.sweep.spec import parse_sweep
from tests.cli.test_commands import run as run_command
from tests.sweep.parts import Inline, operators

ROOT = Path(__file__).resolve().parent.parent.parent
KEYS = [
    *("command", "spec", "output", "points", "repeated", "done_before", "run", "ok", "infeasible", "failed"),
    *("elapsed_s", "findings"),
]


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No processes: what they do is tested in tests/sweep."""
    monkeypatch.setattr("overlapsim.cli.sweep._workers", lambda workers, scheduler: Inline())


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return run_command(capsys, ["sweep", *arguments])


def test_a_sweep(inline: None, capsys, tmp_path: Path) -> None:
    spec, output = tmp_path / "spec.yaml", tmp_path / "out.csv"
    spec.write_text(operators("[1024, 2048]", "points: [{m: 1024, ranks: 2}]"))
    arguments = (str(spec), "-o", str(output))
    code, out, err = call(capsys, *arguments, "--dry-run")
    assert code == 0 and "4 points of operator: 0 were there, 0 run now, 4 to do" in out
    assert "1 point(s) of the spec are the same as others" in err
    assert not output.exists()
    code, out, err = call(capsys, *arguments)
    assert code == 0 and "4 run now, 0 to do" in out and "2 ok, 2 infeasible, 0 failed" in out
    assert "4 of 4 points, 2 infeasible" in err
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["ranks"], row["m"], row["status"]) for row in rows] == [
        *(("2", "1024", "ok"), ("2", "2048", "ok")),
        *(("16", "1024", "infeasible"), ("16", "2048", "infeasible")),
    ]
    assert "has 8 GPUs" in rows[2]["reason"] and float(rows[0]["best_s"]) > 0
    before = output.read_bytes()
    code, out, err = call(capsys, *arguments, "--json")
    said = json.loads(out)
    assert list(said) == KEYS
    assert (said["points"], said["done_before"], said["run"], said["ok"], said["infeasible"]) == (4, 4, 0, 2, 2)
    assert output.read_bytes() == before


def test_rows_are_put_in_order_where_only_that_was_missing(inline: None, capsys, tmp_path: Path) -> None:
    spec, output = tmp_path / "spec.yaml", tmp_path / "out.csv"
    spec.write_text(operators("[1024, 2048]"))
    call(capsys, str(spec), "-o", str(output))
    header, *lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(header + b"".join(reversed(lines)))
    code, _, _ = call(capsys, str(spec), "-o", str(output))
    assert code == 0 and output.read_bytes() == header + b"".join(lines)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["-o", "out.txt"], "expected a file .csv, or a folder .parquet"),
        (["-o", "out.csv", "--workers", "0"], "--workers is 0"),
        (["-o", "out.csv", "--workers", "2", "--scheduler", "tcp://127.0.0.1:1"], "give one of them"),
        (["-o", "out.csv", "--scheduler", "localhost"], "expected an address such as tcp://"),
        ([], "--output"),
    ],
)
def test_usage(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text(operators("[64]"))
    code, out, err = call(capsys, "spec.yaml", *more)
    assert (code, out) == (2, "") and said in err


def test_the_examples_in_the_docs_are_specs() -> None:
    text = (ROOT / "docs" / "sweep.md").read_text(encoding="utf-8")
    specs = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    sweeps = [parse_sweep(spec) for spec in specs]
    assert {sweep.kind.name for sweep in sweeps} == {"plan", "simulate", "operator"}
    for sweep in sweeps:
        assert f"{len(sweep.points)} points" in text

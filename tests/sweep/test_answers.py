"""A row says what the command says."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from overlapsim.cli.main import main
from overlapsim.workload.layout import Layout
from tests.sweep.parts import operators, run
from tests.sweep.test_spec import STEP


def rows_of(text: str, path: Path) -> list[dict[str, str]]:
    run(text, path)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def answer(capsys: pytest.CaptureFixture[str], text: str) -> dict:
    main([*text.split(), "--json"])
    return json.loads(capsys.readouterr().out)


def test_simulate(capsys, tmp_path: Path) -> None:
    """Two points share the results of cost models; neither may change by that."""
    chunked = "mlp.fc2=chunked:chunks=2", "attn.out=chunked:chunks=4"
    text = STEP + "grid: {layout: ['tp=2,zero=1', 'tp=4,pp=2', 'tp=3']}\n"
    text += f"points: [{{layout: 'tp=4', overlap: '{'; '.join(chunked)}'}}]\n"
    two, four, none, overlapped = rows_of(text, tmp_path / "out.csv")
    for row in (two, four, overlapped):
        given = f"simulate llama2-7b --cluster a100-sxm8 --global-batch 16 --seq 2048 --layout {row['layout']}"
        given += "".join(f" --overlap {entry}" for entry in chunked) if row is overlapped else ""
        said = answer(capsys, given)
        assert (row["status"], row["gpus"]) == ("ok", "8")
        for name in ("step_time_s", "low_s", "high_s", "tokens_per_s", "mfu", "hfu"):
            assert float(row[name]) == said[name]
        assert float(row["tokens_per_s_per_gpu"]) == said["tokens_per_s"] / 8
        assert {f"{kind}_s": str(seconds) for kind, seconds in said["breakdown_s"].items()}.items() <= row.items()
        assert float(row["memory_bytes"]) == pytest.approx(sum(said["memory_bytes"].values()), rel=1e-12)
        assert row["findings"].split() == list(dict.fromkeys(f["code"] for f in said["findings"]))
    assert none["status"] == "infeasible" and "multiple of 3" in none["reason"] and not none["step_time_s"]


def test_a_step_that_does_not_fit_says_what_would(tmp_path: Path) -> None:
    text = STEP + "points: [{model: gpt3-175b}, {model: gpt3-175b, ignore_memory: true, ranges: false}]\n"
    no, anyway = rows_of(text, tmp_path / "out.csv")
    assert no["status"] == "infeasible" and "expected" in no["reason"]
    assert anyway["status"] == "ok" and "memory_exceeded" in anyway["findings"].split()
    assert float(anyway["memory_bytes"]) > 80e9 and anyway["low_s"] == ""


def test_operator(capsys, tmp_path: Path) -> None:
    fits, too_many = rows_of(operators("[4096]").replace("quick", "thorough"), tmp_path / "out.csv")
    said = answer(capsys, "operator --cluster a100-sxm8 --ranks 2 --m 4096 --n 4096 --k 4096")
    best = next(entry for entry in said["strategies"] if entry["name"] == said["best"])
    for name in ("verdict", "cause", "best"):
        assert fits[name] == said[name]
    for name in ("serial_s", "ceiling", "lower_bound_s"):
        assert float(fits[name]) == said[name]
    assert float(fits["best_s"]) == best["predicted_s"] and float(fits["best_low_s"]) == best["low_s"]
    assert float(fits["speedup_high"]) == best["speedup_high"]
    assert json.loads(fits["best_parameters"]) == best["parameters"]
    assert too_many["status"] == "infeasible" and "16" in too_many["reason"]


def test_plan(capsys, tmp_path: Path) -> None:
    """The row is the plan ranked first; a space without a layout has its reason."""
    rules = ("tp<=1", "pp=1", "cp=1", "sp=1", "zero=1", "micro_batch=1")
    text = f"""
kind: sweep
command: plan
common: {{model: gpt2-126m, cluster: a100-sxm8, global_batch: 8, seq: 1024}}
points:
  - {{constraint: "{", ".join(rules)}"}}
  - {{constraint: tp=7}}
"""
    row, none = rows_of(text, tmp_path / "plan.csv")
    assert row["status"] == "ok", row["reason"]
    given = "plan gpt2-126m --cluster a100-sxm8 --global-batch 8 --seq 1024"
    said = answer(capsys, given + "".join(f" --constraint {rule}" for rule in rules))
    best, second = said["plans"][:2]
    for name in ("step_time_s", "low_s", "high_s", "mfu", "lower_bound_s", "memory_bytes"):
        assert float(row[name]) == best[name]
    assert float(row["second_step_time_s"]) == second["step_time_s"]
    assert float(row["serial_step_time_s"]) == said["best_serial"]["step_time_s"]
    assert int(row["searched"]) == said["searched"]
    assert (row["gpus"], row["micro_batch"], row["fp8"]) == ("8", "1", "false")
    assert Layout.parse(row["layout"]) == Layout(dp=8, zero=1)
    assert none["status"] == "infeasible" and "no layout" in none["reason"]

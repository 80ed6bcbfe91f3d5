"""`plan` as users call it: the documented JSON, a folder of files that replays, and one clear error a fault."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from overlapsim.plan import StepPlan, read_plan
from tests.cli.test_commands import run

MODEL = """\
kind: model
family: gpt
num_layers: 4
hidden: 1024
num_heads: 8
vocabulary: 51200
max_positions: 2048
"""
KEYS = {
    *("feasible", "plans", "best_serial", "try_on_hardware", "measure_next", "gains", "pruned", "searched"),
    "elapsed_s",
}
PLAN_KEYS = {
    *("rank", "layout", "strategies", "step_time_s", "low_s", "high_s", "mfu", "memory_bytes", "exposed_s"),
    *("lower_bound_s", "findings", "undisturbed_s", "perturbed_s", "perturbed_low_s", "perturbed_high_s"),
}
FILES = ["plan.yaml", "plans.csv", "plans.json", "plans.png", "timeline.png", "trace.json.gz"]
NARROW = ["--fix", "micro_batch=1", "--fix", "recompute=none", "--fix", "dp_overlap=none", "--fix", "cp=1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.yaml"
    path.write_text(MODEL)
    return path


def arguments(model: Path | str, *more: str) -> list[str]:
    base = ["plan", str(model), "--cluster", "a100-sxm8", "--global-batch", "8", "--seq", "1024"]
    return [*base, *NARROW, "--fix", "sp=1", "--fix", "zero=0", "--schedules", "1f1b", *more]


def test_json_has_the_documented_keys_and_the_folder_replays(capsys, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    code, out, err = run(
        capsys, [*arguments(model, "--constraint", "tp<=4", "--top", "3"), "--json", "-o", str(folder)]
    )
    assert code == 0
    assert "candidates" in err
    answer = json.loads(out)
    assert set(answer) == KEYS
    assert answer["feasible"] is True
    assert [plan["rank"] for plan in answer["plans"]] == [1, 2, 3]
    for plan in (*answer["plans"], answer["best_serial"]):
        assert set(plan) == PLAN_KEYS
        assert plan["lower_bound_s"] <= plan["low_s"] <= plan["step_time_s"] <= plan["high_s"]
        assert plan["layout"]["tp"] <= 4
        assert plan["layout"]["tp"] * plan["layout"]["pp"] * plan["layout"]["dp"] == 8
        assert 0 <= plan["exposed_s"] < plan["step_time_s"]
        assert plan["findings"]
    assert {trial["rank"] for trial in answer["try_on_hardware"]} <= {1, 2, 3}
    assert answer["searched"] > 0 and all(count > 0 for count in answer["pruned"].values())
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert json.loads((folder / "plans.json").read_text()) == answer
    rows = list(csv.DictReader((folder / "plans.csv").open()))
    assert [float(row["step_time_s"]) for row in rows] == [plan["step_time_s"] for plan in answer["plans"]]
    for rank in (1, 2, 3):
        code, out, _ = run(capsys, ["trace", str(folder / "plan.yaml"), "--rank", str(rank), "--json"])
        again = json.loads(out)
        assert (code, again["rank"], again["findings"]) == (0, rank, [])
        assert again["simulated_s"] == again["planned_s"] == answer["plans"][rank - 1]["step_time_s"]


def test_same_questions_give_the_same_plan_file(capsys, model: Path, tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        assert run(capsys, [*arguments(model, "--fix", "tp=2", "--fix", "pp=1"), "-o", str(tmp_path / name)])[0] == 0
        texts.append((tmp_path / name / "plan.yaml").read_bytes())
    assert texts[0] == texts[1]
    plan = read_plan(tmp_path / "a" / "plan.yaml")
    assert isinstance(plan, StepPlan)
    assert plan.inputs.constraints[-2:] == ("tp=2", "pp=1")
    assert plan.inputs.schedules == ("1f1b",)


def test_the_table_explains(capsys, monkeypatch, model: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(capsys, arguments(model, "--constraint", "tp<=4"))
    assert code == 0
    for words in ("best plans", "why the first", "plan 1 is first", "try on hardware first", "left out", "finding "):
        assert words in out


def test_a_robust_plan_names_its_perturbation(capsys, monkeypatch, model: Path) -> None:
    args = arguments(model, "--fix", "pp=1", "--objective", "robust", "--perturb", "slow=0.8@0", "--json")
    code, out, _ = run(capsys, args)
    assert code == 0
    plans = json.loads(out)["plans"]
    highs = [plan["high_s"] for plan in plans]
    assert highs == sorted(highs)
    assert all(plan["undisturbed_s"] < plan["step_time_s"] for plan in plans)
    monkeypatch.setenv("COLUMNS", "220")
    _, out, _ = run(capsys, args[:-1])
    for words in ("perturbed", "undisturbed", "MFU undisturbed", "why the first (of the undisturbed step)"):
        assert words in out


def test_a_perturbation_is_shown_whatever_plans_are_ranked_by(capsys, monkeypatch, model: Path) -> None:
    args = arguments(model, "--fix", "pp=1", "--top", "2", "--perturb", "slow=0.8@0", "--json")
    code, out, _ = run(capsys, args)
    assert code == 0
    for plan in json.loads(out)["plans"]:
        assert plan["step_time_s"] == plan["undisturbed_s"] < plan["perturbed_s"]
        assert plan["perturbed_low_s"] < plan["perturbed_s"] < plan["perturbed_high_s"]
    monkeypatch.setenv("COLUMNS", "220")
    _, out, _ = run(capsys, args[:-1])
    for words in ("best plans undisturbed; --objective robust ranks under slow=0.8@0", "perturbed"):
        assert words in out
    _, out, _ = run(capsys, arguments(model, "--fix", "pp=1", "--fix", "tp=2", "--json"))
    assert {plan["perturbed_s"] for plan in json.loads(out)["plans"]} == {None}


def test_nothing_feasible_exits_1_and_says_what_to_change(capsys, model: Path, tmp_path: Path) -> None:
    code, out, err = run(capsys, [*arguments(model, "--memory", "1GiB"), "--json"])
    assert code == 1
    answer = json.loads(out)
    assert (set(answer), answer["feasible"], answer["plans"]) == (KEYS, False, [])
    assert err.count("error:") == 1
    asked = err.split("--memory ")[1].split()[0].rstrip(";")
    assert not err.strip().endswith(";")
    code, _, err = run(capsys, arguments(model, "--memory", asked, "--top", "1"))
    assert code == 0, err


def test_memory_without_a_unit_is_refused(capsys, model: Path) -> None:
    code, _, err = run(capsys, arguments(model, "--memory", "70"))
    assert (code, "give a unit such as 70GiB" in err) == (2, True)


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--constraint", "tp<8"], 2, "constraint 'tp<8'"),
        (["--constraint", "heads=8"], 2, "heads=8"),
        (["--fix", "recompute=some"], 2, "recompute"),
        (["--fix", "tp<=8"], 2, "NAME=VALUE"),
        (["--dtype", "int3"], 2, "int3"),
        (["--schedules", "2f2b"], 2, "2f2b"),
        (["--allow", "int4"], 2, "int4"),
        (["--memory", "-1GiB"], 2, "above 0"),
        (["--perturb", "slow=2"], 2, "(0, 1]"),
        (["--objective", "speed"], 2, "speed"),
        (["--nodes", "0"], 2, "--nodes is 0"),
        (["--top", "0"], 2, "--top"),
        (["--cluster", "a100-smx8"], 3, "a100-sxm8"),
        (["--recipe", "none"], 2, "none"),
        (["--sustained-clock", "2"], 2, "sustained_clock"),
        (["--stack", "warp"], 2, "warp"),
        (["-o", "plan.yaml"], 2, "expected a folder"),
    ],
)
def test_bad_input_is_one_clear_error(
    capsys, model: Path, tmp_path: Path, monkeypatch, more: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    got, out, err = run(capsys, [*arguments(model), *more])
    assert (got, out) == (code, ""), err
    assert err.count("error:") == 1
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_model_is_named(capsys) -> None:
    code, _, err = run(capsys, arguments("mixtral-8x9b"))
    assert code == 2
    assert "mixtral-8x7b" in err


def test_the_wrong_kind_of_plan_is_said(capsys, model: Path, tmp_path: Path) -> None:
    assert run(capsys, [*arguments(model, "--fix", "tp=2", "--fix", "pp=1"), "-o", str(tmp_path)])[0] == 0
    code, _, err = run(capsys, ["trace", str(tmp_path / "plan.yaml"), "--rank", "40"])
    assert code == 2
    assert "rank 40" in err


def test_a_plan_that_leaves_nodes_free_says_so(capsys, monkeypatch, model: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    more = ["--nodes", "2", "--fix", "pp=1", "--constraint", "tp<=2", "--objective", "tokens_per_s_per_gpu"]
    code, out, _ = run(capsys, arguments(model, *more))
    assert code == 0
    assert "on 1 of 2 nodes" in out

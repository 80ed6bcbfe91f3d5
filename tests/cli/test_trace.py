"""`trace` as users call it: times without a target, both panels, edited plans, a plan beside its own profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_commands import arguments, run

PROFILE = "kind: cluster\nextends: a800-sxm8\n"
MEASURED = {"gemm_time": "2.33ms", "kernel_time": "wave_group=2.36135ms", "tile": "256x128"}


@pytest.fixture
def plan(capsys, tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    assert run(capsys, [*arguments(**MEASURED, strategy="wave_group"), "-o", str(path)])[0] == 0
    return path


def test_without_a_target_it_prints_the_times(capsys, plan: Path) -> None:
    code, out, err = run(capsys, ["trace", str(plan)])
    assert (code, err) == (0, "")
    assert "(plan: " in out
    assert "finding" not in out


def test_the_plot_shows_serial_first(capsys, plan: Path, tmp_path: Path, monkeypatch) -> None:
    drawn: list[list[str]] = []
    monkeypatch.setattr("overlapsim.report.plots.gantt", lambda timelines, path, **more: drawn.append(list(timelines)))
    assert run(capsys, ["trace", str(plan), "--plot", str(tmp_path / "x.png")])[0] == 0
    assert drawn == [["serial", "wave_group"]]


def test_edited_inputs_are_a_finding(capsys, plan: Path) -> None:
    plan.write_text(plan.read_text().replace("wave_group: 0.00236135", "wave_group: 0.002"))
    code, out, _ = run(capsys, ["trace", str(plan), "--json"])
    assert code == 0
    assert [finding["code"] for finding in json.loads(out)["findings"]] == ["plan_differs"]
    assert "finding plan_differs: wave_group takes" in run(capsys, ["trace", str(plan)])[1]


def test_edited_settings_are_an_error(capsys, plan: Path, tmp_path: Path) -> None:
    text = plan.read_text()
    assert text.count("bm: 256") == 1
    plan.write_text(text.replace("bm: 256", "bm: 64"))
    code, out, err = run(capsys, ["trace", str(plan), "-o", str(tmp_path / "t.json")])
    assert (code, out) == (2, "")
    assert "settings.bm is 64" in err
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [("none.yaml", "no such file"), ("picture.png", "not text"), ("folder", "a folder")],
)
def test_unreadable_plans_come_first_and_in_words(capsys, tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff")
    (tmp_path / "folder").mkdir()
    code, _, err = run(capsys, ["trace", str(tmp_path / name), "-o", "/nowhere/t.txt"])
    assert code == 2
    assert message in err
    assert "Errno" not in err
    assert "codec" not in err


def test_a_profile_beside_the_plan_is_found_from_elsewhere(capsys, tmp_path: Path, monkeypatch) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "mine.yaml").write_text(PROFILE)
    monkeypatch.chdir(home)
    assert run(capsys, [*arguments(cluster="./mine.yaml", strategy="serial"), "-o", "plan.yaml"])[0] == 0
    monkeypatch.chdir(elsewhere)
    code, out, err = run(capsys, ["trace", str(home / "plan.yaml")])
    assert (code, err) == (0, "")
    assert "finding" not in out
    (home / "mine.yaml").unlink()
    code, _, err = run(capsys, ["trace", str(home / "plan.yaml")])
    assert code == 3
    assert "mine.yaml" in err

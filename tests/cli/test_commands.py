"""Commands as users call them: answers, exit codes, one clear error a fault, nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from overlapsim.cli.main import main

CURVE = "size_bytes,time_s\n1048576,4e-5\n16777216,1.8e-4\n134217728,1.06e-3\n"
BASE = {
    "--cluster": "a800-sxm8",
    "--ranks": "2",
    "--m": "8192",
    "--n": "8192",
    "--k": "4096",
    "--dtype": "fp16",
    "--accumulate": "fp16",
}


def arguments(**changes: str | None) -> list[str]:
    options = {**BASE, **{"--" + key.replace("_", "-"): value for key, value in changes.items()}}
    return ["operator", *(part for key, value in options.items() if value is not None for part in (key, value))]


def run(capsys: pytest.CaptureFixture[str], args: list[str]) -> tuple[int, str, str]:
    code = 0
    try:
        main(args)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_operator_json_has_the_documented_keys(capsys, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("plan.yaml", "trace.json", "plot.png")]
    args = [*arguments(kernel_time="wave_group=2.36135ms", tile="256x128"), "--json"]
    args += ["-o", str(files[0]), "--trace", str(files[1]), "--plot", str(files[2])]
    code, out, err = run(capsys, args)
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert set(answer) == {"serial_s", "ceiling", "lower_bound_s", "verdict", "cause", "best", "strategies", "findings"}
    names = [entry["name"] for entry in answer["strategies"]]
    # The baseline first, then every strategy of single pairs; those that arrange whole graphs are not asked.
    assert names[0] == "serial" and {"chunked", "wave_group"} <= set(names) and "grad_buckets" not in names
    wave_group = next(entry for entry in answer["strategies"] if entry["name"] == "wave_group")
    assert sum(wave_group["parameters"]["group_tiles"]) == 2048
    assert {"applies", "reasons", "predicted_s", "low_s", "high_s", "speedup", "parameters", "findings"} <= set(
        wave_group
    )
    assert all(file.stat().st_size > 500 for file in files)
    code, out, _ = run(capsys, ["trace", str(files[0]), "--json"])
    assert code == 0
    again = json.loads(out)
    best = next(entry for entry in answer["strategies"] if entry["name"] == answer["best"])
    assert again["simulated_s"] == again["planned_s"] == best["predicted_s"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.yaml", "plot.png", "trace.json"]


def test_operator_table_names_verdict_and_baseline(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    code, out, _ = run(capsys, arguments())
    assert code == 0
    assert "verdict: overlap" in out
    assert "SMs taken as CTAs retire" in out
    assert "1 groups" not in out
    assert "best serial" in out


def test_serial_is_always_considered(capsys) -> None:
    code, out, _ = run(capsys, [*arguments(strategy="wave_group"), "--json"])
    assert code == 0
    assert [entry["name"] for entry in json.loads(out)["strategies"]] == ["serial", "wave_group"]


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"m": "0"}, 2, "m is 0"),
        ({"n": "-8"}, 2, "n is -8"),
        ({"k": "x"}, 2, "--k"),
        ({"m": "4294967296000"}, 2, "m is 4294967296000"),
        ({"ranks": "16"}, 2, "expected 2 to 8"),
        ({"ranks": "0"}, 2, "expected 2 to 8"),
        ({"nodes": "0"}, 2, "nodes"),
        ({"dtype": "float"}, 2, "dtype 'float'"),
        ({"collective": "all_sum"}, 2, "all_sum"),
        ({"cluster": "a800-smx8"}, 3, "a800-sxm8"),
        ({"cluster": "/nowhere/x.yaml"}, 3, "/nowhere/x.yaml"),
        ({"strategy": "wave_groop"}, 2, "wave_group"),
        ({"tile": "256"}, 2, "BMxBN"),
        ({"tile": "16384x128"}, 2, None),
        ({"tile": "256x128", "m": "128"}, 2, "larger"),
        ({"gemm_time": "-1"}, 2, "above 0"),
        ({"gemm_time": "2.1"}, 2, "check the unit"),
        ({"gemm_time": "2.1us"}, 2, "check the unit"),
        ({"gemm_time": "2 parsec"}, 2, "parsec"),
        ({"kernel_time": "2ms"}, 2, "STRATEGY=TIME"),
        ({"kernel_time": "none=2ms"}, 2, "none"),
        ({"kernel_time": "chunked=2ms"}, 2, "give --gemm-time"),
        ({"kernel_time": "wave_group=nan"}, 2, "expected"),
        ({"comm_sms": "108"}, 0, None),
        ({"comm_sms": "109"}, 2, "109"),
        ({"curve": "/nowhere.csv"}, 3, "/nowhere.csv"),
        ({"trace": "/nowhere/t.json"}, 2, "/nowhere"),
        ({"plot": "p.doc"}, 2, ".doc"),
        ({"trace": "t.txt"}, 2, ".json"),
        ({"trace": "plan.yaml"}, 2, ".json"),
    ],
)
def test_bad_input_is_one_clear_error(
    capsys, tmp_path: Path, monkeypatch, changes, code: int, message: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    got, out, err = run(capsys, [*arguments(**changes), "-o", "plan.yaml"])
    assert got == code, err
    if code:
        assert message is None or message in err
        assert err.count("error:") == 1
        assert out == ""
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("bytes,time_s\n1,1\n", "size_bytes"),
        ("size_bytes,time_s\n2,1e-6\n1,2e-6\n", "line 3"),
        ("size_bytes,time_s\n1,1e-6\n1,2e-6\n", "line 3"),
        ("size_bytes,time_s\n1,-1e-6\n", "line 2"),
        ("size_bytes,time_s\n1,fast\n", "line 2"),
        ("size_bytes,time_s\n1024\n", "line 2"),
        ("size_bytes,time_s\n1024,nan\n", "line 2"),
    ],
)
def test_bad_curves(capsys, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "curve.csv"
    path.write_text(text)
    code, _, err = run(capsys, arguments(curve=str(path)))
    assert code == 3
    assert message in err
    assert str(path) in err


def test_a_curve_replaces_the_clusters(capsys, tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text(CURVE)
    code, out, _ = run(capsys, [*arguments(curve=str(path), gemm_time="2ms"), "--json"])
    assert code == 0
    assert json.loads(out)["serial_s"] == pytest.approx(2e-3 + 1.06e-3, rel=1e-6)


@pytest.mark.parametrize(
    "args",
    [
        ["profiles", "list"],
        ["profiles", "list", "--json"],
        ["profiles", "show", "h100-sxm8"],
        ["profiles", "show", "rtx4090-pcie8", "--json"],
        ["profiles", "check", "a100-sxm8"],
        ["strategies", "list"],
        ["strategies", "list", "--json"],
        ["strategies", "show", "wave_group"],
        ["strategies", "show", "serial", "--json"],
        ["operator", "--help"],
        ["--version"],
    ],
)
def test_other_commands_answer(capsys, args: list[str]) -> None:
    code, out, err = run(capsys, args)
    assert (code, err) == (0, "")
    if "--json" in args:
        json.loads(out)
    assert out.strip()


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["plann"], 2, "plann"),
        (["operator"], 2, "Missing option"),
        (["profiles", "show", "b200"], 3, "b200"),
        (["strategies", "show", "x"], 2, "known strategies"),
        (["trace", "missing.yaml", "--json"], 2, "missing.yaml"),
        (["trace", "missing.yaml"], 2, "no such file"),
    ],
)
def test_wrong_calls(capsys, args: list[str], code: int, message: str) -> None:
    got, _, err = run(capsys, args)
    assert got == code
    assert message in err


@pytest.mark.parametrize("args", [[], ["profiles"], ["strategies"]])
def test_a_bare_group_shows_its_help(capsys, args: list[str]) -> None:
    code, out, err = run(capsys, args)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: overlapsim")
    assert "Commands:" in out


def test_an_exit_code_of_a_command_is_kept(capsys, monkeypatch) -> None:
    monkeypatch.setattr("overlapsim.cli.profiles.contradictions", lambda machine: ["one and one are three"])
    code, out, _ = run(capsys, ["profiles", "check", "a800-sxm8"])
    assert code == 3
    assert "contradiction: one and one are three" in out


def test_crossover_prints_round_rows_and_its_limits(capsys) -> None:
    code, out, err = run(
        capsys,
        ["crossover", "--cluster", "a800-sxm8", "--ranks", "2", "--m", "1024:2048", "--n", "8192", "--k", "4096"],
    )
    assert (code, err) == (0, "")
    assert " 1536 " in out
    assert "fewer candidates than operator" in out.splitlines()[-1]


def test_module_entry_point() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "overlapsim.cli.main", "strategies", "list"], capture_output=True, text=True, check=True
    )
    assert "wave_group" in done.stdout

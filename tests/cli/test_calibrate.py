"""`calibrate` and `compare` as commands: files in, a profile, tables, JSON and exit codes out."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from overlapsim.calibration.readers.reading import Hints
from overlapsim.cli.calibrate import command as calibrate_command
from overlapsim.cli.compare import command as compare_command
from overlapsim.errors import OverlapSimError
from overlapsim.hardware.loading import load_cluster
from tests.calibration.logs import SECRETS, TIMES_US, log

DATA = Path(__file__).parent.parent / "calibration" / "data"
E06 = ["--ranks-per-node", "8", "--collective", "all_reduce", "--ranks", "8"]
BASE = ["--cluster", "h100-sxm8"]


def run(command: click.Command, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def good(command: click.Command, *arguments: object) -> Result:
    result = run(command, *arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def refused(command: click.Command, *arguments: object) -> OverlapSimError:
    result = run(command, *arguments)
    assert isinstance(result.exception, OverlapSimError), repr(result.exception)
    return result.exception


def test_case_e06(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    result = good(calibrate_command, DATA / "e06_all_reduce_8xh100.csv", *BASE, *E06, "-o", out)
    assert "2.00 MiB took 291 us, expected about 41.4 us" in result.stdout
    assert f"use it as --cluster {out}" in result.stdout
    assert "curve 1 of 1" in result.stderr
    compared = good(compare_command, DATA / "e06_all_reduce_8xh100.csv", "--cluster", out, *E06, "--json")
    rows = {row["size_bytes"]: row for row in json.loads(compared.stdout)["rows"]}
    assert rows[4194304]["error"] == pytest.approx(0, abs=1e-9)
    assert rows[2097152]["error"] == pytest.approx(41.4 / 290.7 - 1, abs=0.01)


def test_json_has_units_in_its_keys_and_progress_on_stderr(tmp_path: Path) -> None:
    result = good(
        calibrate_command, DATA / "two_tests.log", *BASE, "--ranks-per-node", 4, "-o", tmp_path / "m", "--json"
    )
    content = json.loads(result.stdout)
    assert {curve["collective"] for curve in content["curves"]} == {"all_reduce", "all_to_all"}
    assert {"latency_s", "algbw_bytes_per_s", "regimes", "outliers", "points"} <= set(content["curves"][0])
    assert content["profile"].endswith("h100-sxm8-calibrated.yaml")
    assert load_cluster(content["profile"]).calibrated
    assert "records from nccl-tests text" in result.stderr


def test_nothing_private_leaves_a_log(tmp_path: Path) -> None:
    file = tmp_path / "zeus.log"
    text = f"{SECRETS[3]} {SECRETS[2]}\n" + log(ranks=16).replace("# Avg bus", "# ").replace(
        "# Collective test con", "# "
    )
    file.write_text(text, encoding="utf-8")
    result = good(calibrate_command, file, *BASE, "--ranks-per-node", 8, "-o", tmp_path / "m")
    assert "finding cut_off: zeus.log" in result.stdout
    for path in (tmp_path / "m").rglob("*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert not any(secret in text for secret in (*SECRETS, "mallory", "zeus")), path


def test_topology_is_never_guessed(tmp_path: Path) -> None:
    error = refused(calibrate_command, DATA / "two_tests.log", *BASE, "-o", tmp_path / "m")
    assert "--ranks-per-node" in str(error)
    assert error.exit_code == 3
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("column", ["time_s", "time_ms"])
def test_wrong_units_write_nothing(tmp_path: Path, column: str) -> None:
    file = tmp_path / "t.csv"
    rows = "\n".join(f"{size},{time}" for size, time in TIMES_US)
    file.write_text(f"size_bytes,{column}\n{rows}\n", encoding="utf-8")
    error = refused(calibrate_command, file, *BASE, *E06, "-o", tmp_path / "m")
    assert f"us in a column of {column.removeprefix('time_')}" in str(error)
    assert not (tmp_path / "m").exists()


def test_the_output_is_checked_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x", encoding="utf-8")
    assert "expected a folder" in str(refused(calibrate_command, tmp_path / "none.csv", *BASE, "-o", tmp_path / "x"))
    assert "does not exist" in str(refused(calibrate_command, "none.csv", *BASE, "-o", tmp_path / "a" / "b"))


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--ranks-per-node", "0"], "expected at least 1"), (["--ranks", "1"], "expected at least 2")],
)
def test_usage(tmp_path: Path, options: list[str], message: str) -> None:
    error = refused(calibrate_command, DATA / "two_tests.log", *BASE, *options, "-o", tmp_path / "m")
    assert message in str(error)
    assert error.exit_code == 2


def test_several_files_of_several_formats(tmp_path: Path) -> None:
    file = tmp_path / "g.log"
    file.write_text(log("all_gather"), encoding="utf-8")
    table = tmp_path / "a.csv"
    table.write_text(
        "collective,ranks,size_bytes,time_us\n" + "\n".join(f"all_reduce,8,{s},{t}" for s, t in TIMES_US),
        encoding="utf-8",
    )
    result = good(calibrate_command, file, table, *BASE, "--ranks-per-node", 8, "-o", tmp_path / "m", "--json")
    assert {curve["collective"] for curve in json.loads(result.stdout)["curves"]} == {"all_gather", "all_reduce"}


def test_files_of_two_devices(tmp_path: Path) -> None:
    for name in ("A", "B"):
        (tmp_path / name).write_text(log().replace("Example GPU", f"GPU {name}"), encoding="utf-8")
    error = refused(
        calibrate_command, tmp_path / "A", tmp_path / "B", *BASE, "--ranks-per-node", 8, "-o", tmp_path / "m"
    )
    assert "2 devices" in str(error)


def test_compare_table_and_plot(tmp_path: Path) -> None:
    plot = tmp_path / "p.svg"
    result = good(compare_command, DATA / "two_tests.log", *BASE, "--ranks-per-node", 4, "--plot", plot)
    assert "all_reduce fp32 over 4 ranks on 1 node" in result.stdout
    assert "bias" in result.stdout
    assert plot.read_text(encoding="utf-8").count("<use ") >= 6
    assert "expected a name that ends in" in str(
        refused(compare_command, DATA / "two_tests.log", *BASE, "--ranks-per-node", 4, "--plot", tmp_path / "p.gif")
    )


def test_records_written_by_calibrate_can_be_compared(tmp_path: Path) -> None:
    out = tmp_path / "m"
    good(calibrate_command, DATA / "two_tests.log", *BASE, "--ranks-per-node", 4, "-o", out)
    content = json.loads(good(compare_command, out / "records.csv", "--cluster", out, "--json").stdout)
    solo = [row for row in content["rows"] if not row["in_place"]]
    assert len(solo) == 6
    assert max(abs(row["error"]) for row in solo) < 1e-9


def test_hints_default_to_nothing() -> None:
    assert Hints() == Hints(None, None, None, None)

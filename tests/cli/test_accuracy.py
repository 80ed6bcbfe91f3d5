"""`overlapsim accuracy`: what is printed, written and refused; and the flashoverlap suite against its bars."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from overlapsim.accuracy import flashoverlap
from overlapsim.accuracy.suite import Row, Suite, score
from overlapsim.cli.accuracy import SUITES
from overlapsim.errors import CalibrationError
from overlapsim.plan import Finding
from tests.cli.test_commands import run as run_command


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    return run_command(capsys, ["accuracy", *map(str, args)])


ROWS = (
    Row("a", "seen", 1.0, 1.02, 0.9, 1.1, "ms", True),
    Row("b", "held out", 2.0, 1.8, 1.7, 2.1, "ms", False, 1),
    Row("c", "held out", 4.0, 4.4, 4.1, 4.6, "ms", False, 0),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path | None]]:
    """Three rows in place of the suite; what it was asked to score."""
    calls: list[Path | None] = []

    def evaluate(data: Path | None) -> Suite:
        calls.append(data)
        if data is not None and not data.exists():
            raise CalibrationError(f"cannot read {data}")
        notes = {"a reference [predictor]": 0.05}
        return score("demo", ROWS, "ab" * 32, findings=[Finding("tile_assumed", "a tile was assumed")], notes=notes)

    module = types.ModuleType("tests.cli.demo_suite")
    module.evaluate = evaluate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(SUITES, "flashoverlap", module.__name__)
    yield calls


DEMO = ("--suite", "flashoverlap")


def test_table_has_groups_overall_notes_and_findings(capsys, asked) -> None:
    code, out, err = run(capsys, *DEMO)
    assert (code, err, asked) == (0, "", [None])
    lines = {line.split("│")[1].strip(): line for line in out.splitlines() if line.startswith("│")}
    assert set(lines) == {"seen", "held out", "overall"}
    cells = [cell.strip() for cell in lines["held out"].split("│")[2:-1]]
    assert cells == ["2", "no", "+0.0", "10.0", "10.0", "10.0", "10.0", "50 %", "1/2"]
    assert lines["overall"].split("│")[2:5] == lines["held out"].split("│")[2:5], "fitted rows count in no overall"
    assert "a reference [predictor]: 0.05" in out
    assert "finding tile_assumed: a tile was assumed" in out


def test_json_has_the_documented_keys(capsys, asked) -> None:
    code, out, err = run(capsys, *DEMO, "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert list(answer) == ["suite", "split_sha256", "groups", "overall", "rows", "findings", "notes"]
    group_keys = (
        "name num_points fitted median_signed median_abs mean_abs p90_abs p95_abs sign_right sign_total coverage90"
    )
    assert all(list(group) == group_keys.split() for group in (*answer["groups"], answer["overall"]))
    row_keys = "id group measured predicted low high unit fitted error"
    assert all(list(row) == row_keys.split() for row in answer["rows"])
    assert [group["mean_abs"] for group in answer["groups"]] == pytest.approx([0.02, 0.1])
    assert [row["error"] for row in answer["rows"]] == pytest.approx([0.02, -0.1, 0.1])
    assert [group["fitted"] for group in answer["groups"]] == [True, False]


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_plot_is_written_and_json_stays_pure(capsys, asked, tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    code, out, _ = run(capsys, *DEMO, "--plot", target)
    assert code == 0
    assert f"plot written to {target}" in out
    first = target.read_bytes()
    code, out, _ = run(capsys, *DEMO, "--plot", target, "--json")
    assert code == 0
    assert json.loads(out)["suite"] == "demo"
    assert target.read_bytes() == first
    assert len(first) > 5000


def test_data_goes_to_the_suite_and_into_the_title(capsys, asked, tmp_path: Path) -> None:
    table, target = tmp_path / "mine.csv", tmp_path / "a.svg"
    table.write_text("x\n")
    assert run(capsys, *DEMO, "--data", table, "--plot", target)[0] == 0
    assert asked == [table]
    assert "accuracy of demo on mine.csv" in target.read_text()


@pytest.mark.parametrize(
    ("args", "code", "message", "calls"),
    [
        ((), 2, "--suite", 0),
        (("--suite", "flashoverlop"), 2, "flashoverlap", 0),
        ((*DEMO, "--plot", "a.pdf"), 2, ".png or .svg", 0),
        ((*DEMO, "--plot", "missing/a.png"), 2, "does not exist", 0),
        ((*DEMO, "--plot", "."), 2, ".png or .svg", 0),
        ((*DEMO, "--data", "missing.csv"), 3, "missing.csv", 1),
        ((*DEMO, "--data", "missing.csv", "--plot", "a.png"), 3, "missing.csv", 1),
    ],
)
def test_wrong_calls_are_one_clear_error(
    capsys, asked, tmp_path: Path, monkeypatch, args: tuple[str, ...], code: int, message: str, calls: int
) -> None:
    monkeypatch.chdir(tmp_path)
    got, out, err = run(capsys, *args)
    assert (got, out) == (code, ""), err
    assert message in err
    assert err.count("error:") == 1
    assert len(asked) == calls, "output files are checked before any work"
    assert list(tmp_path.iterdir()) == []


HEADER = "M,N,K,primitive,gpu,baseline,decomposition,flashoverlap\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lacks columns M, N, K"),
        ("M,N,K,primitive,gpu\n1,1,1,all_reduce,2\n", "lacks column baseline"),
        (HEADER, "no rows"),
        (HEADER + "8192,8192,4096,all_reduce,2,,,\n", "line 2"),
        (HEADER + "8192,8192,4096,all_reduce,2,3.1,,\n8192,8192,0,all_reduce,2,3.1,,\n", "line 3"),
        (HEADER + "8192,8192,four,all_reduce,2,3.1,,\n", "line 2"),
        (HEADER + "8192,8192,4096,all_reduce,2,3.1,-1,\n", "line 2: time '-1' is not positive"),
        (HEADER + "8192,8192,4096,all_reduce,2,nan,,\n", "line 2"),
    ],
)
def test_flashoverlap_refuses_a_malformed_table(capsys, tmp_path: Path, text: str, message: str) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(text)
    code, out, err = run(capsys, *DEMO, "--data", table)
    assert (code, out) == (3, "")
    assert message in err
    assert "mine.csv" in err


def test_flashoverlap_refuses_what_is_no_table(capsys, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "mine.csv", tmp_path / "missing.csv", tmp_path):
        code, _, err = run(capsys, *DEMO, "--data", path)
        assert code == 3
        assert f"cannot read {path}" in err


# The real suite: about a minute and a half of computing.


@pytest.fixture(scope="module")
def bundled() -> Suite:
    return flashoverlap.evaluate(None)


def errors(suite: Suite, strategy: str) -> np.ndarray:
    return np.array([row.error for row in suite.rows if row.id.startswith(strategy)])


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "bar", "points"), [("wave_group", 0.034, 64), ("chunked", 0.030, 64)])
def test_flashoverlap_error_of_shapes_left_out(bundled: Suite, strategy: str, bar: float, points: int) -> None:
    size = np.abs(errors(bundled, strategy))
    assert len(size) == points
    assert size.mean() <= bar
    assert size.mean() < bundled.notes["constant speed-up predictor (mean abs error)"][strategy]
    assert size.mean() == pytest.approx(bundled.notes["mean abs error by strategy"][strategy], abs=1e-4)


@pytest.mark.slow
def test_flashoverlap_heat_map(bundled: Suite) -> None:
    cells = [row for row in bundled.rows if row.id.startswith("heatmap")]
    assert len(cells) == 49
    assert all(row.fitted is None for row in cells)
    mean_abs, constant = bundled.notes["heatmap mean abs error, best constant's"]
    assert mean_abs == pytest.approx(np.mean(np.abs([row.error for row in cells])), abs=1e-4)
    assert mean_abs < 0.052
    assert constant == pytest.approx(0.052, abs=1.5e-3)
    assert bundled.notes["heatmap rank correlation (Spearman)"] >= 0.6
    measured, predicted = bundled.notes["heatmap speed-up at M N = 16 Mi over the rest, measured and predicted"]
    assert measured < 1
    assert predicted < 1


@pytest.mark.slow
def test_flashoverlap_ranges_and_choice(bundled: Suite) -> None:
    assert 0.80 <= bundled.overall.coverage90 <= 0.97
    assert bundled.overall.fitted is False
    regret = bundled.notes["choice by prediction (mean and worst regret)"]
    assert regret["by prediction"][0] < regret["always chunked"][0]
    assert len({row.id for row in bundled.rows}) == len(bundled.rows)


@pytest.mark.slow
def test_flashoverlap_scores_a_table_of_ones_own(capsys, tmp_path: Path, monkeypatch) -> None:
    # Three sets of constants to choose from instead of all: what is asked here does not depend on the fit.
    monkeypatch.setattr(flashoverlap, "SPECS", flashoverlap.SPECS[::70])
    table, target = tmp_path / "mine.csv", tmp_path / "a.png"
    # Times of nobody: a shape that is in no bundled row, one strategy left blank, one row without both.
    table.write_text(
        HEADER
        + "12288,8192,4096,all_reduce,4,5.20,4.60,\n"
        + "12288,8192,2048,reduce_scatter,8,2.90,,2.60\n"
        + "12288,8192,8192,all_reduce,2,7.60,,\n"
    )
    code, out, err = run(capsys, *DEMO, "--data", table, "--json", "--plot", target)
    # Progress may be on stderr: how long the fit takes is the machine's affair.
    assert code == 0, err
    answer = json.loads(out)
    assert [row["id"] for row in answer["rows"]] == [
        "chunked-all_reduce-4-12288x8192x4096", "wave_group-reduce_scatter-8-12288x8192x2048",
    ]  # fmt: skip
    assert [row["measured"] for row in answer["rows"]] == pytest.approx([4.60e-3, 2.60e-3])
    assert all(row["low"] < row["predicted"] < row["high"] for row in answer["rows"])
    assert all(0.7 < row["predicted"] / row["measured"] < 1.3 for row in answer["rows"])
    assert all(row["fitted"] is False for row in answer["rows"])
    assert target.stat().st_size > 5000
    assert not any("heatmap" in key for key in answer["notes"])


def test_timelines_of_both_orders(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from overlapsim.accuracy import moe_order

    monkeypatch.setattr(moe_order, "compare_orders", lambda: [moe_order.compare_order("M6", "backward")])
    code, out, _ = run(capsys, "--suite", "moe", "--timelines")
    assert code == 0
    assert "M6 backward, 1 layer(s): by hand" in out and "M6 backward, 1 layer(s): found" in out
    code, _, err = run(capsys, "--suite", "gemm", "--timelines")
    assert code == 2 and "only moe" in err

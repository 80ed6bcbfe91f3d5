"""The check of one GPU, as far as it goes without one: its plan, its figures, and a rehearsal in the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from overlapsim.validate.one_gpu.cases import LARGE_TILE, SECTIONS, TILE, Case, fit_budget, plan_cases
from overlapsim.validate.one_gpu.report import figures, profile_of

from overlapsim.calibration.compare import compare
from overlapsim.calibration.records import Record, read_records
from overlapsim.cost.gemm import gemm_cost, template_gemm_cost
from overlapsim.hardware.loading import load_device, nearest_cluster
from overlapsim.hardware.profile import DeviceSpec
from overlapsim.workload.operators import GemmOp

H200 = load_device("h200-sxm-141gb")
TIMEOUT_S = 600


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    return subprocess.run(
        [sys.executable, "-m", "overlapsim.validate.gpu_check", *arguments],
        env=clean,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("num_sms", [4, 58, 108, 132, 148])
def test_every_case_has_conditions_of_its_own(num_sms: int) -> None:
    cases = plan_cases(num_sms)
    assert {case.section for case in cases} == set(SECTIONS)
    for own in (False, True):
        kept = [case.recorded for case in cases if case.own_kernel is own]
        assert len(set(kept)) == len(kept)
    assert all(case.like.sms_left is None or 0 < case.like.sms_left <= num_sms for case in cases)
    # What is not the library's kernel must never be fitted as if it were.
    assert {case.recorded.op for case in cases if not case.own_kernel and case.like.kind == "gemm"} == {"gemm"}
    assert not {case.recorded.op for case in cases if case.own_kernel} & {"gemm", "rmsnorm", "add"}


def test_all_cases_fit_six_minutes_and_fewer_fit_less() -> None:
    cases = plan_cases(132)
    assert fit_budget(cases, 360 - 75 - 15) == (cases, ())
    counts = [len(fit_budget(cases, seconds)[0]) for seconds in (0, 10, 60, 120, 1000)]
    assert counts == sorted(counts) and counts[0] == 0 < counts[1] and counts[-1] == len(cases)


def planted(case: Case, device: DeviceSpec) -> float:
    """Times of a machine that is exactly as its profile says, with known costs of what the profile does not hold."""
    record = case.like
    if record.kind == "launch":
        return {"kernel": 2e-6, "event": 3e-6, "wait_group": 4e-6, "signal": 5e-6}[record.op]
    if record.kind == "memory":
        assert record.m and record.n
        seconds = record.m * record.n * 1e-12
        if case.variant == "subtile":
            return seconds * 1.09 / 4
        return seconds * {"tile": 1.08}.get(case.variant, 1.0) * (1.5 if record.concurrent else 1.0)
    assert record.m and record.n and record.k
    op = GemmOp(record.m, record.n, record.k, record.dtype)
    if case.section == "wave_group":
        return {"copy": 1.0, "serial": 3.0, "overlapped": 3.0 - 0.1 * case.groups}[case.variant] * 1e-3
    if record.op == "gemm":
        seconds = gemm_cost(op, device, sms=record.sms_left).duration_s
        return seconds * (1.25 if record.concurrent else 1.0)
    if case.section in ("sms", "waves"):
        return template_gemm_cost(op, device, sms=record.sms_left, tile=case.tile).duration_s
    factor = {"template_gemm": 1.3, "reordered_gemm": 1.3 * 1.01, "signalled_gemm": 1.3 * 1.01 * 1.02}[record.op]
    return gemm_cost(op, device).duration_s * factor * (1.1 if case.tile == LARGE_TILE else 1.0)


def test_figures_give_back_what_was_planted() -> None:
    measured = {
        case: replace(case.recorded, median_s=planted(case, H200), p10_s=None, p90_s=None) for case in plan_cases(132)
    }
    found = {figure.name: figure for figure in figures(measured, H200)}
    signalled = 1.3 * 1.01 * 1.02
    expected = {
        "template over vendor GEMM": signalled,
        "the same with the large tile": signalled * 1.1,
        "reordered over plain template": 1.01,
        "signalled over reordered template": 1.02,
        "restored_rmsnorm by tile over row order": 1.08,
        "restored_add by subtile over row order": 1.09,
        "GEMM beside a copy over alone": 1.25,
        "copy beside GEMMs over alone": 1.5,
        "2 wave groups with copies over vendor GEMM, then copy": 2.8 / 3,
        "8 wave groups with copies over vendor GEMM, then copy": 2.2 / 3,
        "launch: kernel": 2e-6,
        "launch: signal": 5e-6,
    }
    for name, value in expected.items():
        assert found[name].measured == pytest.approx(value), name
    assert found["template over vendor GEMM"].predicted == H200.kernels.template_slowdown
    assert found["launch: kernel"].predicted == H200.kernels.gemm_launch_s
    assert found["launch: signal"].predicted == H200.kernels.signal_wait_s
    on_fewer = [figure for name, figure in found.items() if name.startswith("persistent template on")]
    waves = [figure for name, figure in found.items() if name.startswith("a column of tiles more")]
    assert len(on_fewer) == 4 and len(waves) == 3
    for figure in (*on_fewer, *waves):
        assert figure.error == pytest.approx(0.0)
    # One column of tiles more than one wave is two waves.
    assert found["a column of tiles more than 1 waves"].measured > 1.5
    lines = compare([record for case, record in measured.items() if not case.own_kernel], nearest_cluster(H200.name))
    alone = [line for line in lines.lines if line.group == "gemm bf16"]
    assert alone and all(abs(line.median_signed) < 0.05 for line in alone)


def test_figures_pass_over_what_is_not_valid_or_missing() -> None:
    measured = {
        case: replace(case.recorded, median_s=planted(case, H200), valid=case.tile != TILE) for case in plan_cases(132)
    }
    names = {figure.name for figure in figures(measured, None)}
    assert "the same with the large tile" in names and "template over vendor GEMM" not in names
    assert all(figure.predicted is None for figure in figures(measured, None))
    assert figures({}, H200) == ()


@pytest.mark.parametrize(
    ("product", "profile"),
    [
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA B200", "b200-sxm-180gb"),
        ("Quadro K600", None),
        ("CPU of some kind", None),
        ("", None),
    ],
)
def test_product_names(product: str, profile: str | None) -> None:
    assert profile_of(product) == profile


def test_a_dry_run_needs_no_torch() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom overlapsim.validate.gpu_check import command\n"
        "result = CliRunner().invoke(command, ['--dry-run', '--json', '--time-budget', '150'])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert not {'torch', 'triton'} & set(sys.modules)\nprint(result.output)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    plan = json.loads(answer.stdout)
    assert plan["estimate_s"] <= plan["time_budget_s"] == 150
    assert plan["cases"] and plan["dropped"]
    assert "numerics" in run("--dry-run").stdout


def test_refusals(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    assert "give -o DIR" in run().stderr
    answer = run("-o", str(tmp_path), "--rehearse")
    assert answer.returncode == 2 and "set TRITON_INTERPRET=1" in answer.stderr
    answer = run("-o", str(tmp_path), TRITON_INTERPRET="1")
    assert answer.returncode == 2 and "--rehearse" in answer.stderr


def test_a_rehearsal_runs_everything_and_is_resumed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    answer = run("-o", str(tmp_path), "--rehearse", "--json", TRITON_INTERPRET="1")
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert report["num_timed"] == report["num_cases"] == len(plan_cases(4, scale=64))
    codes = {finding["code"] for finding in report["findings"]}
    assert {"rehearsal", "no_profile"} <= codes and "case_failed" not in codes
    assert len(report["figures"]) >= 20
    records = read_records(tmp_path / "records.csv").records
    own = read_records(tmp_path / "kernels.csv").records
    assert len(records) + len(own) == report["num_timed"]
    kinds = {(record.kind, record.op) for record in records}
    assert {("gemm", "gemm"), ("memory", "rmsnorm"), ("launch", "kernel")} <= kinds
    assert any(record.concurrent == "copy" for record in records) and any(record.sms_left for record in records)
    # Nothing is measured twice: records stay as they are.
    again = run("-o", str(tmp_path), "--rehearse", "--json", TRITON_INTERPRET="1")
    assert again.returncode == 0, again.stderr
    assert read_records(tmp_path / "records.csv").records == records
    assert read_records(tmp_path / "kernels.csv").records == own


def test_records_of_a_case_are_plain_records() -> None:
    for case in plan_cases(132):
        assert isinstance(case.recorded, Record) and case.estimate_s > 0 and case.name

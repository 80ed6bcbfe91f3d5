"""`overlapsim simulate --phase`: serving steps as users call them."""

from __future__ import annotations

import json

import pytest

from tests.cli.test_commands import run as run_command

KEYS = [
    *("phase", "tokens", "time_s", "low_s", "high_s", "tokens_per_s", "memory_bytes", "cache_tokens"),
    *("breakdown_s", "findings"),
]
ON = "llama3-8b --cluster h200-sxm8"


def run(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, str, str]:
    return run_command(capsys, ["simulate", *text.split()])


def answer(capsys: pytest.CaptureFixture[str], text: str) -> dict:
    code, out, err = run(capsys, f"{ON} {text} --json")
    assert (code, err) == (0, "")
    found: dict = json.loads(out)
    assert list(found) == KEYS
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["time_s"], rel=1e-9)
    assert found["low_s"] < found["time_s"] < found["high_s"]
    return found


def test_phases(capsys) -> None:
    prefill = answer(capsys, "--phase prefill --batch 2 --seq 1024")
    decode = answer(capsys, "--phase decode --batch 16 --context 1024 --layout tp=2")
    mixed = answer(capsys, "--phase mixed --seq 512 --past 512 --decodes 15 --context 1024")
    assert [found["phase"] for found in (prefill, decode, mixed)] == ["prefill", "decode", "mixed"]
    assert [found["tokens"] for found in (prefill, decode, mixed)] == [2048, 16, 527]
    assert decode["breakdown_s"]["exposed_tp"] > 0 == prefill["breakdown_s"]["exposed_tp"]


def test_cache_type_and_imbalance(capsys) -> None:
    plain = answer(capsys, "--phase decode --batch 8 --context 4096")
    small = answer(capsys, "--phase decode --batch 8 --context 4096 --kv-dtype fp8")
    assert small["memory_bytes"]["kv_cache"] == plain["memory_bytes"]["kv_cache"] / 2
    code, out, _ = run(capsys, f"{ON} --phase decode --context 512 --perturb imbalance=1.5")
    assert code == 0 and "finding sampling_left_out" in out


def test_dispatch_of_a_serving_step(capsys) -> None:
    """Low latency pays for few tokens; its buffers count, and what is believed is said."""
    text = "simulate qwen3-30b-a3b --cluster h100-sxm8 --nodes 2 --layout ep=16,dp=16 --phase decode --batch 64"
    text += " --context 1024 --json"
    plain, latency = (
        json.loads(run_command(capsys, [*text.split(), *more])[1])
        for more in ([], ["--dispatch", "deepep_low_latency:dtype=fp8", "--perturb", "routing=zipf:0.2"])
    )
    assert latency["breakdown_s"]["exposed_ep"] < plain["breakdown_s"]["exposed_ep"]
    assert latency["memory_bytes"]["context"] > plain["memory_bytes"]["context"]
    codes = {finding["code"] for finding in latency["findings"]}
    assert {"dispatch_kernels_assumed", "accuracy_affecting", "routing_skewed"} <= codes
    _, out, _ = run(capsys, f"{ON} --phase decode --context 512 --perturb routing=zipf:1")
    assert "imbalance_not_applied" in out


def test_tables(capsys) -> None:
    code, out, err = run(capsys, f"{ON} --phase decode --batch 4 --context 2048")
    assert (code, err) == (0, "")
    for part in ("llama3-8b on 1 GPU(s)", "tokens/s", "room for", "attention", "finding"):
        assert part in out


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("--phase decode", "without --context"),
        ("--phase prefill", "without --seq"),
        ("--phase mixed --seq 5", "without --decodes, --context"),
        ("", "without --global-batch, --seq"),
        ("--phase decode --context 5 --global-batch 8", "--global-batch with --phase decode"),
        ("--phase decode --context 5 --seq 8", "--seq with --phase decode"),
        ("--phase prefill --seq 5 --recompute full", "--recompute with --phase prefill"),
        ("--global-batch 8 --seq 5 --batch 8", "--batch with --phase train"),
        ("--phase decode --context 5 --perturb jitter=0.1", "expected imbalance or routing alone"),
        ("--phase decode --context 5 --layout cp=2", "splits sequences"),
        ("--phase decode --context 0", "decode of 1 token"),
    ],
)
def test_refusals(capsys, text: str, part: str) -> None:
    code, out, err = run(capsys, f"{ON} {text}")
    assert code == 2 and out == "" and part in err


def test_an_unknown_operator_is_refused(capsys) -> None:
    text = f"{ON} --phase prefill --batch 4 --seq 2048 --layout tp=8 --overlap"
    code, _, err = run(capsys, f"{text} mlp.fc9=chunked:chunks=2")
    assert (code, "operator 'mlp.fc9' is unknown: did you mean 'mlp.fc2'?" in err) == (2, True)
    assert run(capsys, f"{text} mlp.fc2=chunked:chunks=2")[0] == 0


@pytest.mark.parametrize("option", ["--fp8", "--compress tp-fp8", "--dp-sync flat"])
def test_options_of_training_are_not_passed_over(capsys, option: str) -> None:
    code, out, err = run(capsys, f"{ON} --phase decode --context 512 {option}")
    assert (code, out) == (2, "")
    assert f"{option.split()[0]} with --phase decode" in err

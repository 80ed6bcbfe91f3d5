"""Questions that users asked in public about whole training steps, as the command line and the library answer them."""

from __future__ import annotations

import functools
import json

import pytest

from overlapsim.cli.main import main
from overlapsim.hardware.loading import load_cluster
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import simulate_step
from overlapsim.strategy.compose import Composition
from overlapsim.strategy.overlaps import composition
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.model_count import step_flop_per_token
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import Recipe
from overlapsim.workload.recompute import Recompute
from overlapsim.workload.utilization import utilization


def simulate(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, dict, str]:
    code = 0
    try:
        main(["simulate", *text.split(), "--json"])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


# aliyun/SimAI#166: one V100S, GPT 126M (12 layers, hidden 768), sequence 2048, micro-batch 8, fp16, recompute:
# 680 to 740 ms measured, simulated 6042 ms
V100S = (
    "gpt2-126m --cluster v100s-pcie8 --layout dp=1 --seq 2048 --micro-batch 8 --global-batch 8 --dtype fp16 "
    "--recompute full --recipe megatron-2021 --stack eager"
)


def test_simai_issue_166_a_gpu_without_calibration(capsys) -> None:
    """Within 30 % of the middle of what was measured, which the range holds, and loud about having no calibration."""
    code, answer, err = simulate(capsys, V100S)
    assert (code, err) == (0, "")
    assert answer["step_time_s"] == pytest.approx(0.710, rel=0.30)
    assert answer["low_s"] < 0.680 < answer["high_s"]
    assert answer["findings"][0]["code"] == "device_not_calibrated"
    assert answer["findings"][0]["message"].startswith("NOT CALIBRATED")


def test_simai_issue_166_run_and_workload_must_agree(capsys) -> None:
    """Eight sequences as one micro-batch or as eight are other steps; heads that do not divide are refused."""
    code, answer, _ = simulate(capsys, V100S)
    _, other, _ = simulate(capsys, V100S.replace("--micro-batch 8", "--micro-batch 1"))
    assert code == 0
    assert other["step_time_s"] != answer["step_time_s"]
    assert other["memory_bytes"]["activations"] == pytest.approx(answer["memory_bytes"]["activations"] / 8)
    code, _, err = simulate(capsys, V100S.replace("dp=1", "tp=5"))
    assert code == 2
    assert "5" in err and err.count("error:") == 1


# foundation-model-stack/fms-fsdp#89: 7B at 9600 tokens/s on an H100 is 46 % of the dense peak, not 24 %


def test_fms_fsdp_issue_89_utilization_is_of_the_dense_peak() -> None:
    model = load_preset("llama2-7b")
    peak = load_cluster("h100-sxm8").device.peak("bf16")
    assert peak == pytest.approx(989e12, rel=1e-3)
    # The reporter's count: six a parameter, the input embedding's too, and attention in full.
    flop = step_flop_per_token(model, 4096, "full") + 6 * model.vocabulary * model.hidden
    assert flop == pytest.approx(6 * 6.74e9 + 12 * 32 * 4096 * 4096, rel=2e-3)
    assert utilization(flop, 9600, 1, peak) == pytest.approx(0.46, abs=0.01)
    # The figure with sparsity halves it.
    assert utilization(flop, 9600, 1, 2 * peak) == pytest.approx(0.23, abs=0.01)


def test_a_step_counts_as_that_arithmetic_does(capsys) -> None:
    """What `simulate` calls MFU is that share, with attention counted under its mask."""
    code, answer, _ = simulate(
        capsys, "llama2-7b --cluster h100-sxm8 --nodes 4 --layout zero=1 --seq 4096 --global-batch 64"
    )
    assert code == 0
    each = answer["tokens_per_s"] / 32
    flop = step_flop_per_token(load_preset("llama2-7b"), 4096)
    assert answer["mfu"] == pytest.approx(utilization(flop, each, 1, 989.4e12), rel=1e-3)


# aliyun/SimAI#202: 1472 GPUs, TP 8, PP 8, 13B, global batch 32, micro-batch 1: the total was not the sum of its parts

GPT_13B = "gpt-13b --cluster a100-sxm8 --nodes 184 --layout tp=8,pp=8 --seq 2048 --micro-batch 1"


def test_simai_issue_202_replicas_that_do_not_divide(capsys) -> None:
    """23 replicas cannot share 32 sequences: one clear reason."""
    code, answer, err = simulate(capsys, f"{GPT_13B} --global-batch 32")
    assert (code, answer) == (2, {})
    assert err.count("error:") == 1
    assert "a global batch of 32 sequences does not divide into 23 data-parallel replicas" in err


@pytest.mark.parametrize("batch", [23, 46, 184, 23 * 32])
def test_simai_issue_202_totals_are_the_sum_of_the_breakdown(capsys, batch: int) -> None:
    code, answer, _ = simulate(capsys, f"{GPT_13B} --global-batch {batch}")
    assert code == 0
    assert sum(answer["breakdown_s"].values()) == pytest.approx(answer["step_time_s"], rel=1e-9)
    assert answer["tokens_per_s"] * answer["step_time_s"] == pytest.approx(batch * 2048)


# aliyun/SimAI#300: TP 2 with large compute times hangs (nanoseconds in 32 bits overflow at 4.3 s)


@pytest.mark.parametrize(("seq", "batch"), [(8192, 8), (32768, 64), (131072, 256)])
def test_simai_issue_300_long_steps(capsys, seq: int, batch: int) -> None:
    """A pass of one GPU takes minutes, a step hours: times stay in proportion."""
    text = f"llama3-70b --cluster l4-pcie8 --layout tp=2,dp=1 --seq {seq} --ignore-memory --no-contention"
    code, once, _ = simulate(capsys, f"{text} --global-batch {batch}")
    assert code == 0
    _, twice, _ = simulate(capsys, f"{text} --global-batch {2 * batch}")
    assert once["step_time_s"] > 4.3 * batch
    rest = once["breakdown_s"]["optimizer"] + once["breakdown_s"]["exposed_dp"]
    assert twice["step_time_s"] - rest == pytest.approx(2 * (once["step_time_s"] - rest), rel=1e-6)
    for kind, seconds in once["breakdown_s"].items():
        if kind not in ("optimizer", "exposed_dp") and seconds:
            assert twice["breakdown_s"][kind] == pytest.approx(2 * seconds, rel=1e-6)


# pytorch/torchtitan#1299: asynchronous tensor parallelism beside FSDP on H100 (500 W), tokens/s a GPU without and with

PREFETCH = "step=fsdp_prefetch:layers_per_group=1,depth=2,rate_limit=true,reshard_after_forward=true,keep_last=true"
ROWS = {
    # model, FSDP degree, sequences a replica, full recompute, fp8; measured without and with
    "70b bf16": ("llama3-70b", 32, 16, True, False, 597, 652),
    "70b fp8 tensorwise": ("llama3-70b", 32, 16, True, True, 810, 942),
    "8b bf16": ("llama3-8b", 8, 12, False, False, 4378, 4809),
}


@functools.cache
def async_tp_gain(row: str) -> tuple[float, float]:
    """Gain of async TP in percent, predicted and measured; operators of every pass but weight gradients."""
    name, dp, batch, full, fp8, without, with_ = ROWS[row]
    passes = ("fwd", "dgrad", "recompute") if full else ("fwd", "dgrad")
    pairs = [
        f"{operator}:{pass_}=async_tp:method=decomposed,co_run=false"
        for operator in ("attn.qkv", "attn.out", "mlp.fc1", "mlp.fc2")
        for pass_ in passes
    ]
    seconds = []
    for chosen in (composition([PREFETCH]), composition([PREFETCH, *pairs])):
        assert isinstance(chosen, Composition)
        inputs = StepInputs(
            load_preset(name),
            load_cluster("h100-sxm8").with_nodes(dp),
            Layout(tp=8, dp=dp, zero=3),
            Job(8192, batch, batch * dp),
            recompute=Recompute("full" if full else "none"),
            recipe=Recipe(fp8=fp8),
            composition=chosen,
        )
        seconds.append(simulate_step(inputs, ranges=False).step_time_s)
    return 100 * (seconds[0] / seconds[1] - 1), 100 * (with_ / without - 1)


TOO_HIGH = pytest.mark.xfail(
    reason="predicted +15.0 %, measured +9.2 %: the step without it is predicted far faster than the measured 597 "
    "tokens/s a GPU (parts held to 500 W, the profile is of 700 W), so communication has too large a share to hide",
    strict=True,
)


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param("70b bf16", marks=TOO_HIGH), "70b fp8 tensorwise", "8b bf16"])
def test_torchtitan_pull_1299_within_three_points(row: str) -> None:
    predicted, measured = async_tp_gain(row)
    assert predicted == pytest.approx(measured, abs=3)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_torchtitan_pull_1299_pays(row: str) -> None:
    """The sign is right in every row, and more where fp8 leaves more to hide."""
    predicted, measured = async_tp_gain(row)
    assert predicted > 3
    assert abs(predicted - measured) < 8
    assert async_tp_gain("70b fp8 tensorwise")[0] > async_tp_gain("70b bf16")[0]

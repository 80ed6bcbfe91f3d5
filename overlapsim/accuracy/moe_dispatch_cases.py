"""Dispatchers as users reported them: queues beside an overlapped exchange, and a hybrid kernel that does not pay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Final, NamedTuple

from overlapsim.accuracy.suite import Row
from overlapsim.hardware.loading import load_cluster
from overlapsim.plan import Finding
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import StagePieces
from overlapsim.step.queues import with_queues
from overlapsim.step.simulate import simulate_step, step_prices, step_schedule
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.model import ModelSpec
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import RECIPES, with_dispatch
from overlapsim.workload.recompute import Recompute

FINDINGS: Final = (
    Finding(
        "queues_case_assumed",
        "NVIDIA/Megatron-LM pull request 6311 (C03) says 14 layers of DeepSeek-V3's shape with one of multi-token "
        "prediction, two to each of seven chunks; three dense layers, as the model has them, and eager launches are "
        "assumed",
    ),
    Finding(
        "hybrid_case_without_pipeline",
        "NVIDIA-NeMo/Megatron-Bridge pull request 3561 (D02) overlaps the forward of one micro-batch with the backward "
        "of another without a pipeline, which no schedule here has: pairs are simulated by "
        "themselves, one after another",
    ),
    Finding(
        "hybrid_setup_assumed",
        "HybridEP's set-up is priced as a gather of a byte for each token and expert; what its kernels prepare "
        "besides is left out, and its rate over NVLink is that of DeepEP's table",
    ),
)


class Arm(NamedTuple):
    """One run of C03 as measured: schedule, recompute, hardware queues, TFLOP/s of a GPU, peak GB."""

    schedule: str
    recompute: str
    queues: int
    tflop_per_s: float
    peak_gb: float


QUEUE_ARMS: Final = {
    "no overlap, no recompute": Arm("interleaved", "none", 1, 225.1, 68.704),
    "no overlap, recompute": Arm("interleaved", "full", 1, 184.2, 60.154),
    "overlap, recompute, 1 queue": Arm("interleaved_pairs", "full", 1, 191.1, 60.518),
    "overlap, recompute, 32 queues": Arm("interleaved_pairs", "full", 32, 198.5, 60.518),
}
BASE: Final = "no overlap, recompute"
HYBRID: Final = {"bf16": 423.6 / 406.6, "fp8": 438.5 / 431.0}
"""TFLOP/s with the exchange over that with HybridEP."""


def case_rows() -> Iterator[Row]:
    """Rows of both cases."""
    yield from _queue_rows()
    for precision, measured in HYBRID.items():
        ratio = hybrid_ratio(fp8=precision == "fp8")
        group = "case D02"
        sign = int((ratio > 1) == (measured > 1))
        yield Row(f"{group}|{precision}", group, measured, ratio, ratio, ratio, "ratio", False, sign)


def _queue_rows() -> Iterator[Row]:
    group = "case C03"
    found = {name: queue_arm(name) for name in QUEUE_ARMS}
    for name, arm in QUEUE_ARMS.items():
        (low, rate, high), peak_gb = found[name]
        yield Row(f"{group}|{name}", group, arm.tflop_per_s, rate, low, high, "TFLOP/s", False)
        yield Row(f"{group}|{name}, memory", group, arm.peak_gb, peak_gb, peak_gb, peak_gb, "GB", False)
    for name in QUEUE_ARMS:
        if name == BASE:
            continue
        measured = QUEUE_ARMS[name].tflop_per_s / QUEUE_ARMS[BASE].tflop_per_s
        ratio = found[name][0][1] / found[BASE][0][1]
        sign = int((ratio > 1) == (measured > 1))
        yield Row(f"{group}|{name} over {BASE}", group, measured, ratio, ratio, ratio, "ratio", False, sign)


def queue_model() -> ModelSpec:
    """DeepSeek-V3 of 14 layers."""
    model = load_preset("deepseek-v3")
    return replace(model, layers=model.layers[:14], name="deepseek-v3 of 14 layers")


@cache
def queue_arm(name: str) -> tuple[tuple[float, float, float], float]:
    """TFLOP/s of a GPU (low, predicted, high) and peak GB of one arm of C03, 64 H100."""
    arm = QUEUE_ARMS[name]
    inputs = StepInputs(
        queue_model(),
        load_cluster("h100-sxm8").with_nodes(8),
        Layout.parse("ep=16,pp=4,vpp=2,dp=16,zero=1"),
        Job(2048, 1, 256, stage_layers=(2,) * 7 + (0,)),
        schedule=arm.schedule,
        recompute=Recompute.parse(arm.recompute),
        stack="eager",
        dp_overlap="both",
    )
    result = simulate_step(with_queues(inputs, arm.queues))
    flop = result.mfu * inputs.cluster.device.peak(inputs.model.dtype) * result.step_time_s
    times = (result.high_s, result.step_time_s, result.low_s)
    low, rate, high = (flop / seconds / 1e12 for seconds in times)
    return (low, rate, high), result.fullest.total_bytes / 1e9


@cache
def hybrid_ratio(*, fp8: bool) -> float:
    """Throughput with the exchange over that with HybridEP: pairs of D02's micro-batches, 64 GB200 of one rack."""
    seconds = {}
    for dispatcher in ("all_to_all", "hybrid_ep"):
        inputs = StepInputs(
            load_preset("gpt-oss-120b"),
            load_cluster("gb200-nvl72"),
            Layout.parse("ep=64,dp=64,zero=1"),
            Job(4096, 4, 1280),
            recompute=Recompute.parse("layernorm+moe_act"),
            recipe=replace(with_dispatch(RECIPES["modern"], dispatcher), fp8=fp8),
            stack="eager",
        )
        pieces = StagePieces(inputs, step_prices(inputs), step_schedule(inputs))
        seconds[dispatcher] = pieces.pair(0, 0).duration_s
    return seconds["hybrid_ep"] / seconds["all_to_all"]

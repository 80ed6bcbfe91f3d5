"""What a step believed is said: GPUs and groups without measurements, hosts, clocks, routing, idle GPUs, memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlapsim.hardware.loading import load_cluster
from overlapsim.step.capacity import memory_shortfall
from overlapsim.step.inputs import StepInputs
from overlapsim.step.queues import with_queues
from overlapsim.step.simulate import simulate_step, step_memory, step_schedule
from overlapsim.workload.families import gpt
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.presets import load_preset
from overlapsim.workload.recipe import RECIPES
from overlapsim.workload.recompute import Recompute
from tests.step.steps import GPT, MOE, ask, step


def found(cluster: str, layout: str, *, nodes: int = 1, model=GPT, batch: int = 8, **more) -> dict[str, str]:
    machine = load_cluster(cluster).with_nodes(nodes)
    read = Layout.parse(layout, None if "dp" in layout else machine.num_devices)
    inputs = StepInputs(model, machine, read, Job(1024, global_batch=batch), **more)
    return {finding.code: finding.message for finding in simulate_step(inputs, ranges=False).findings}


def test_a_gpu_without_a_measured_kernel_is_said_loudly_and_first() -> None:
    inputs = StepInputs(
        replace(GPT, dtype="fp16"), load_cluster("v100s-pcie8"), Layout(dp=8), Job(1024, global_batch=8)
    )
    first = simulate_step(inputs, ranges=False).findings[0]
    assert first.code == "device_not_calibrated"
    assert first.message.startswith("NOT CALIBRATED: no kernel of this step was measured on v100s-pcie-32gb")
    # It says more than the general words on profiles.
    codes = [finding.code for finding in simulate_step(inputs, ranges=False).findings]
    assert "profile_not_calibrated" not in codes
    assert len(codes) == len(set(codes)) + codes.count("prices_assumed") - 1


def test_what_was_measured_is_not_called_a_guess() -> None:
    codes = found("a100-sxm8", "tp=8")
    assert "device_not_calibrated" not in codes
    assert "groups_not_calibrated" not in codes
    # Backward attention and norms have no table of an A100.
    assert "memory-bound kernels" in codes["prices_assumed"] or "attention" in codes["prices_assumed"]


def test_groups_across_nodes_without_a_fit_are_named() -> None:
    message = found("h800-sxm8", "tp=8", nodes=2, batch=16)["groups_not_calibrated"]
    assert "dp_cp (2 ranks on 2 nodes): all_reduce" in message
    assert "tp (8 ranks)" in message
    assert "pp" not in message


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ({}, "launch_assumed", "no host time a kernel (a CUDA graph: 8.00 us to start one, 1.00 us between kernels)"),
        ({"stack": "eager"}, "launch_assumed", "12.0 us of host time a kernel"),
        ({}, "clock_assumed", "the sustained share"),
        ({"model": MOE}, "routing_assumed", "the same number of tokens"),
        ({"layout": "dp=2"}, "devices_idle", "6 of 8 GPUs are not in the layout"),
        ({}, "memory_allowance_assumed", "assumed, not measured"),
    ],
)
def test_settings_that_stand_for_something(more: dict, code: str, said: str) -> None:
    assert said in found("a100-sxm8", **{"layout": "", **more})[code]


def test_settings_that_were_given_are_not_findings() -> None:
    codes = found("a100-sxm8", "", sustained_clock=0.9)
    assert not {"clock_assumed", "routing_assumed", "devices_idle", "attention_kernel_missing"} & set(codes)


def test_flash_attention_on_volta() -> None:
    model = replace(GPT, dtype="fp16")
    assert "volta" in found("v100-dgx1", "", model=model)["attention_kernel_missing"]
    unfused = found("v100-dgx1", "", model=model, recipe=RECIPES["megatron-2021"])
    assert "attention_kernel_missing" not in unfused


# Memory


def shortfall(inputs: StepInputs) -> str | None:
    return memory_shortfall(inputs, step_memory(inputs, step_schedule(inputs)))


def test_a_step_that_fits_has_no_shortfall() -> None:
    assert shortfall(ask(GPT, "dp=8")) is None


def test_a_step_that_does_not_fit_names_kinds_and_what_helps() -> None:
    model = load_preset("llama3-8b")
    text = shortfall(ask(model, "dp=8", seq=8192, batch=16))
    assert text is not None
    assert "every GPU needs 1" in text
    assert "a100-sxm4-80gb has 74.5 GiB" in text
    assert text.index("optimizer") < text.index("gradients") < text.index("parameters")
    # What it names fits.
    assert "zero=3" in text
    assert shortfall(ask(model, "dp=8,zero=3", seq=8192, batch=16)) is None
    assert "full recompute" not in text.partition("such as")[2]
    assert shortfall(ask(model, "dp=8", seq=8192, batch=16, recompute=Recompute("full"))) is not None


def test_the_fullest_stage_is_named() -> None:
    text = shortfall(ask(load_preset("gpt3-175b"), "tp=8,pp=4", seq=2048, batch=16))
    assert text is not None
    assert "stage 0 of 4 needs" in text


def test_where_no_single_change_helps_the_best_one_is_named() -> None:
    text = shortfall(ask(load_preset("gpt3-175b"), "dp=8", seq=2048, batch=8))
    assert text is not None
    assert "more GPUs a copy of the model (tp, pp or ep); of single changes zero=3 leaves least" in text
    alone = shortfall(ask(load_preset("gpt3-175b"), "dp=1", seq=2048, batch=8))
    assert alone is not None
    assert "more GPUs a copy of the model" in alone


def test_unfused_attention_is_offered_selective_recompute() -> None:
    model = gpt(num_layers=24, hidden=2048, num_heads=32, vocabulary=51200, max_positions=2048)
    inputs = ask(model, "dp=8", seq=2048, micro=8, batch=64, recipe=RECIPES["megatron-2022"])
    text = shortfall(inputs)
    assert text is not None
    assert "selective recompute" in text
    assert "a micro-batch of 1" in text


def test_findings_are_there_once() -> None:
    for layout in ("tp=8,pp=2", "dp=16", "tp=2,pp=4,dp=2"):
        findings = step(GPT, layout, 16).findings
        assert len(findings) == len(set(findings))


@pytest.mark.parametrize(
    ("layout", "queues", "overlaps", "said"),
    [("dp=8,zero=1", 1, "both", True), ("dp=8,zero=1", 8, "both", False), ("dp=8,zero=1", 1, "none", False),
     ("tp=2,dp=4,zero=1", 1, "both", False)],
)  # fmt: skip
def test_one_queue_is_said_where_it_only_serialises(layout: str, queues: int, overlaps: str, said: bool) -> None:
    """C01 as a step: at one queue overlapped gradients slow the kernels that wait behind them."""
    plain = StepInputs(
        GPT, load_cluster("h100-sxm8"), Layout.parse(layout), Job(1024, global_batch=16), dp_overlap=overlaps
    )
    found = simulate_step(with_queues(plain, queues), ranges=False)
    assert ("one_queue_serialises" in [finding.code for finding in found.findings]) == said
    assert found.step_time_s >= simulate_step(plain, ranges=False).step_time_s

"""Megatron's arguments: goldens, every flag in the parser's own table, the same layout when read back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from overlapsim.emit.megatron import ARGUMENTS, EMITTER, ENVIRONMENT
from overlapsim.emit.megatron_env import Run, queues
from overlapsim.emit.megatron_layout import stages_text
from overlapsim.emit.megatron_model_read import read_model
from overlapsim.emit.megatron_options import megatron_options
from overlapsim.emit.megatron_read import read_megatron, read_script, stages_of
from overlapsim.emit.rules import Version
from overlapsim.emit.transformer_engine import FILE
from overlapsim.strict_yaml import parse
from overlapsim.workload.model import Layer, MoE
from overlapsim.workload.presets import list_presets, load_model
from tests.emit.subjects import PLANS, as_text, changed, check_golden, subject


@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str) -> None:
    check_golden(f"megatron-{name}", EMITTER.emit(subject(name)))


@pytest.mark.parametrize("version", ["0.13", "0.14", "0.15", "0.16", "0.17", "0.18", "0.19.2"])
@pytest.mark.parametrize("name", PLANS)
def test_every_flag_is_one_that_the_version_has(name: str, version: str) -> None:
    script = read_script(EMITTER.emit(subject(name), version).files[ARGUMENTS])
    options, at = megatron_options(), Version.parse(version)
    assert len(script.arguments) > 20
    for argument in script.arguments:
        option = options[argument.flag]
        assert option.spelt(at) == argument.flag
        assert bool(argument.values) == (option.form != "switch")
        assert not option.choices or set(argument.values) <= set(option.takes(at))


CHANGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ulysses": ("long_context", {"tp": 1, "etp": 1, "cp": 1, "sp": 8, "dp": 4, "cp_kind": "ulysses"}, {}),
    "hybrid": ("long_context", {"tp": 1, "etp": 1, "cp": 2, "sp": 4, "dp": 4, "cp_kind": "hybrid"}, {}),
    "gathered": ("long_context", {"cp_kind": "allgather"}, {}),
    "uneven": ("dense", {"vpp": 1}, {"stage_layers": (19, 21, 21, 19), "schedule": "1f1b"}),
    "uneven chunks": ("dense", {"vpp": 2}, {"stage_layers": (9, 10, 10, 10, 10, 10, 10, 11)}),
    "whole norms": ("dense", {"sequence_parallel": False}, {}),
    "hsdp": ("fsdp", {"hsdp": 2}, {}),
    "zero 2": ("fsdp", {"zero": 2}, {}),
    "whole experts": ("moe", {"tp": 2, "etp": 1, "dp": 16}, {}),
    "replicas": ("moe", {"hsdp": 2}, {}),
}


@pytest.mark.parametrize("case", [*PLANS, *CHANGES])
def test_the_layout_is_the_same_when_read_back(case: str) -> None:
    plan = subject(case) if case in PLANS else changed(CHANGES[case][0], CHANGES[case][1], **CHANGES[case][2])
    reading = read_megatron(read_script(EMITTER.emit(plan).files[ARGUMENTS]))
    settings, inputs = plan.settings, plan.step.inputs
    assert reading.layout == plan.layout
    assert reading.world_size == plan.layout.world_size
    assert (reading.micro_batch, reading.global_batch, reading.seq_len) == (
        settings.micro_batch,
        inputs.global_batch,
        inputs.seq_len,
    )
    assert reading.settings["recompute"] == settings.recompute
    assert tuple(reading.settings.get("stage_layers", ())) == settings.stage_layers


@pytest.mark.parametrize("name", PLANS)
def test_the_model_is_the_same_when_read_back(name: str) -> None:
    plan = subject(name)
    model = read_model(read_script(EMITTER.emit(plan).files[ARGUMENTS]), plan.spec.name)
    assert model is not None
    assert model.layers == plan.spec.layers
    for part in ("hidden", "vocabulary", "positions", "norm", "tied_embeddings", "num_mtp_layers", "dtype"):
        assert getattr(model, part) == getattr(plan.spec, part)


def one_shared(layer: Layer) -> Layer:
    """A layer whose shared experts count as one: arguments hold their summed width."""
    if not isinstance(layer.mlp, MoE) or layer.mlp.shared is None:
        return layer
    return replace(layer, mlp=replace(layer.mlp, num_shared_experts=1))


@pytest.mark.parametrize("name", list_presets())
def test_presets_are_written_whole_or_named(name: str) -> None:
    base, (model, _) = subject("dense"), load_model(name)
    emitted = EMITTER.emit(replace(base, model=model))
    again = read_model(read_script(emitted.files[ARGUMENTS]), model.name)
    assert again is not None
    assert again.num_layers == model.num_layers
    parts = (
        "only one|windows|no causal|activation|biases|of several sizes|norm of queries|softmax scores|keys and values"
    )
    said = any(any(word in sentence for word in parts.split("|")) for sentence in emitted.unexpressed)
    assert said or [one_shared(layer) for layer in again.layers] == [one_shared(layer) for layer in model.layers]


def test_queues_follow_what_is_to_overlap() -> None:
    for architecture in ("ampere", "hopper", None):
        assert queues(Run(True, False, False, architecture))[0] == "one"
        assert queues(Run(False, False, False, architecture))[0] == "unset"
        assert queues(Run(True, True, False, architecture))[0] == "unset"
        assert queues(Run(True, False, True, architecture))[0] == "unset"
    assert queues(Run(True, False, False, "blackwell"))[0] == "unset"


@pytest.mark.parametrize(("name", "line"), [("dense", "export CUDA_DEVICE_MAX_CONNECTIONS=1"), ("fsdp", "unset CUDA_")])
def test_the_environment_has_the_queue_count_and_says_why(name: str, line: str) -> None:
    text = EMITTER.emit(subject(name)).files[ENVIRONMENT]
    assert line in text
    assert "#" in text.splitlines()[-1]


def test_older_versions_spell_fsdp_as_they_did_and_say_what_they_lack() -> None:
    emitted = EMITTER.emit(subject("fsdp"), "0.13")
    assert "--use-custom-fsdp\n" in emitted.files[ARGUMENTS]
    pairs = changed(
        "moe", {"pp": 4, "vpp": 2, "dp": 8}, schedule="interleaved_pairs", arranging=(("wgrad_delay", {"pending": 2}),)
    )
    assert "--overlap-moe-expert-parallel-comm\n--delay-wgrad-compute\n" in EMITTER.emit(pairs).files[ARGUMENTS]
    old = EMITTER.emit(pairs, "0.13")
    assert (
        "--overlap-moe-expert-parallel-comm"
        not in old.files[ARGUMENTS].replace("# not expressed", "").split("--num-layers")[1]
    )
    assert any("it came with 0.14" in sentence for sentence in old.unexpressed)


def test_what_megatron_cannot_run_is_said() -> None:
    said = "\n".join(EMITTER.emit(subject("pipeline")).unexpressed)
    assert "the schedule zb_h" in said
    assert "fused_tiles" in said
    assert "CUDA graph" in said


def test_buckets_are_in_elements() -> None:
    script = read_script(EMITTER.emit(changed("dense", bucket_bytes=4e8)).files[ARGUMENTS])
    assert script.number("--ddp-bucket-size") == 100_000_000


@pytest.mark.parametrize("stages", [(3, 4, 4, 3), (0, 5, 5, 0), (1, 2), (20,) * 4])
def test_stages_are_read_back(stages: tuple[int, ...]) -> None:
    assert stages_of(read_script(f'--pipeline-model-parallel-layout "{stages_text(stages)}"')) == stages


def test_the_userbuffer_file_is_yaml_that_names_the_switches() -> None:
    files = EMITTER.emit(subject("tp_overlap")).files
    assert f"--tp-comm-overlap-cfg {FILE}\n" in files[ARGUMENTS]
    assert set(parse(files[FILE])) <= {"qkv_fprop", "proj_fprop", "fc1_fprop", "fc2_fprop", "fc2_dgrad", "proj_dgrad"}
    assert "# beside it: --tp-comm-overlap" in files[FILE]


def test_dispatchers_that_megatron_has_are_flags_and_others_are_told() -> None:
    """DeepEP is the flexible dispatcher's backend; a hierarchical exchange and narrow gradients have no flag."""
    names = {"all_to_all": "alltoall", "all_gather": "allgather", "deepep": "flex"}
    for dispatcher, flag in names.items():
        text = as_text(EMITTER.emit(changed("moe", dispatcher=dispatcher)))
        assert f"--moe-token-dispatcher-type {flag}" in text
        assert ("--moe-flex-dispatcher-backend deepep" in text) == (dispatcher == "deepep")
    text = as_text(EMITTER.emit(changed("moe", dispatcher="hierarchical", compress=("grads-bf16",))))
    assert "unexpressed: Megatron has no setting for dispatch by hierarchical" in text
    assert "unexpressed: Megatron has no setting for grads-bf16" in text


def test_shared_experts_beside_exchanges_are_a_flag() -> None:
    """Whole-graph strategies that Megatron has are not told as missing; an order of operators is."""
    arranging = (("shared_expert", {"beside": True}), ("operator_order", {"beam": 16}))
    text = as_text(EMITTER.emit(changed("moe", arranging=arranging)))
    assert "--moe-shared-expert-overlap" in text
    assert "no setting for shared_expert" not in text
    assert "unexpressed: Megatron has no setting for operator_order" in text

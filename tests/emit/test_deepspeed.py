"""DeepSpeed: golden files, the way back to a layout, batches, buckets, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from overlapsim.emit.deepspeed import EMITTER, FILE
from overlapsim.emit.deepspeed_read import read_json, reading
from overlapsim.errors import PlanError, UsageError
from tests.emit.subjects import PLANS, changed, check_golden, subject


@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str) -> None:
    check_golden(f"deepspeed-{name}", EMITTER.emit(subject(name)))


@pytest.mark.parametrize("name", PLANS)
def test_reading_gives_back_what_json_can_say(name: str) -> None:
    layout = subject(name).layout
    emitted = EMITTER.emit(subject(name))
    found = reading(read_json(emitted.files[FILE]), None)
    # Pipeline and ring attention are in the model's code, which the sentences say.
    said = " ".join(emitted.unexpressed)
    assert ("pipelines in code" in said) == (layout.pp > 1)
    assert ("(cp)" in said) == (layout.cp > 1)
    seen = replace(layout, pp=1, vpp=1, cp=1, cp_kind="ring", sequence_parallel=layout.tp == 1)
    assert found.layout == seen
    assert found.micro_batch == subject(name).settings.micro_batch
    assert found.global_batch == subject(name).step.inputs.global_batch


def test_fully_sharded_plan_comes_back_whole() -> None:
    assert reading(read_json(EMITTER.emit(subject("fsdp")).files[FILE]), None).layout == subject("fsdp").layout


def test_batches_agree_as_deepspeed_asserts() -> None:
    for name in PLANS:
        content = json.loads(EMITTER.emit(subject(name)).files[FILE])
        product = content["train_micro_batch_size_per_gpu"] * content["gradient_accumulation_steps"]
        assert content["train_batch_size"] == product * subject(name).layout.dp


def test_buckets_count_elements_of_fp32() -> None:
    content = json.loads(EMITTER.emit(changed("dense", bucket_bytes=400e6)).files[FILE])
    assert content["zero_optimization"]["reduce_bucket_size"] == 100_000_000
    assert content["communication_data_type"] == "fp32"


@pytest.mark.parametrize(("overlap", "on"), [("none", False), ("gradients", True), ("both", True)])
def test_overlap_of_reductions_is_always_said(overlap: str, on: bool) -> None:
    content = json.loads(EMITTER.emit(changed("dense", dp_overlap=overlap)).files[FILE])
    assert content["zero_optimization"]["overlap_comm"] is on


def test_a_pipeline_takes_no_more_than_zero_1() -> None:
    with pytest.raises(PlanError, match="ZeRO 2 and 3 with a pipeline"):
        EMITTER.emit(changed("dense", {"zero": 2}))


def test_experts_and_ulysses() -> None:
    content = json.loads(EMITTER.emit(subject("moe")).files[FILE])
    assert content["expert_parallel"] == {"enabled": True, "autoep_size": 8, "expert_tensor_parallel_size": 1}
    content = json.loads(EMITTER.emit(changed("fsdp", {"sp": 4, "dp": 4, "cp_kind": "ulysses"})).files[FILE])
    assert content["sequence_parallel_size"] == 4


def test_what_is_no_configuration() -> None:
    with pytest.raises(UsageError, match="line 1"):
        read_json("{")
    with pytest.raises(UsageError, match="object"):
        read_json("[]")

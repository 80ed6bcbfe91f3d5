"""PyTorch's module: golden files, compiled and run on a fake process group, schedules, versions."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

from overlapsim.emit.base import Subject
from overlapsim.emit.pytorch import EMITTER, FILE, SCHEDULE_FILE
from overlapsim.errors import PlanError
from overlapsim.workload.layout import Layout
from tests.emit.subjects import PLANS, changed, check_golden, subject


def names_of(base: Subject, version: str | None = None) -> dict[str, Any]:
    """Names that the module defines."""
    pytest.importorskip("torch")
    found: dict[str, Any] = {}
    exec(compile(EMITTER.emit(base, version).files[FILE], FILE, "exec"), found)
    return found


def layout_of(found: dict[str, Any]) -> dict[str, int]:
    """Degrees that a module says."""
    mesh = found["MESH"]
    dp = mesh.get("replicate", 1) * mesh.get("shard", 1)
    inner = {name: mesh.get(name, 1) for name in ("tp", "cp", "pp")}
    return {**inner, "dp": dp, "vpp": found["STAGES_PER_RANK"]}


@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str) -> None:
    check_golden(f"pytorch-{name}", EMITTER.emit(subject(name)))


@pytest.mark.parametrize("name", PLANS)
def test_degrees_come_back(name: str) -> None:
    base = subject(name)
    found = names_of(base)
    assert Layout(**layout_of(found)).world_size == base.layout.world_size
    assert layout_of(found) == {key: getattr(base.layout, key) for key in ("tp", "cp", "pp", "dp", "vpp")}
    assert found["NUM_MICRO_BATCHES"] == base.settings.num_micro_batches


@pytest.fixture
def fake_ranks() -> Any:
    """Start process groups without a network: all ranks of a job, seen from the first."""
    torch = pytest.importorskip("torch")
    store = pytest.importorskip("torch.testing._internal.distributed.fake_pg").FakeStore

    def start(world_size: int) -> None:
        torch.distributed.init_process_group("fake", store=store(), rank=0, world_size=world_size)

    yield start
    torch.distributed.destroy_process_group()


def toy(torch: Any) -> tuple[Any, list[Any]]:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
    return model, list(model)


@pytest.mark.parametrize(
    "base",
    [
        pytest.param(lambda: subject("fsdp"), id="fsdp"),
        pytest.param(lambda: subject("dense"), id="dense"),
        pytest.param(lambda: subject("long_context"), id="cp"),
        pytest.param(lambda: changed("fsdp", {"hsdp": 2}), id="hsdp"),
        pytest.param(lambda: changed("long_context", {"zero": 3, "dp": 4, "hsdp": 2}), id="hsdp-cp"),
        pytest.param(lambda: changed("long_context", {"zero": 3, "dp": 2, "hsdp": 2}), id="replicas-cp"),
    ],
)
def test_a_model_is_sharded_as_planned(base: Any, fake_ranks: Any) -> None:
    torch = pytest.importorskip("torch")
    plan = base()
    found = names_of(plan)
    fake_ranks(plan.layout.world_size)
    mesh = found["make_mesh"]("cpu")
    assert prod(mesh.shape) == plan.layout.world_size
    model, blocks = toy(torch)
    found["shard"](model, blocks, mesh)
    parts = plan.layout.dp // plan.layout.hsdp * plan.layout.cp
    for block in blocks:
        assert block.weight.to_local().shape[0] == 64 // parts
        assert block.weight.device_mesh.size() == parts * plan.layout.hsdp


def test_replicas_are_reduced_in_the_plans_buckets(fake_ranks: Any) -> None:
    torch = pytest.importorskip("torch")
    plan = changed("fsdp", {"zero": 0}, bucket_bytes=64 * 2.0**20)
    found = names_of(plan)
    fake_ranks(16)
    model, _ = toy(torch)
    wrapped = found["replicate"](model, found["make_mesh"]("cpu"))
    assert wrapped.bucket_bytes_cap == 64 * 2**20
    assert "shard" not in found


def test_layers_are_split_along_the_sequence(fake_ranks: Any) -> None:
    torch = pytest.importorskip("torch")
    found = names_of(subject("dense"))
    fake_ranks(64)
    mesh = found["make_mesh"]("cpu")
    block = torch.nn.ModuleDict(
        {"norm": torch.nn.RMSNorm(64), "up": torch.nn.Linear(64, 64), "down": torch.nn.Linear(64, 64)}
    )
    found["split"](block, mesh, ["up"], ["down"], ["norm"])
    assert block["up"].weight.to_local().shape == (8, 64)
    assert block["down"].weight.to_local().shape == (64, 8)


def test_async_tp_is_switched_on_where_it_is_planned() -> None:
    text = EMITTER.emit(subject("dense")).files[FILE]
    assert "_micro_pipeline_tp = True" in text
    config = pytest.importorskip("torch._inductor.config")
    assert hasattr(config, "_micro_pipeline_tp")
    assert "_micro_pipeline_tp" not in EMITTER.emit(subject("fsdp")).files[FILE]
    assert "enable_symm_mem_for_group" not in text
    assert "enable_symm_mem_for_group(mesh" in EMITTER.emit(subject("dense"), "2.8").files[FILE]


def test_schedules_by_name_and_by_file(tmp_path: Path) -> None:
    assert 'get_schedule_class("Interleaved1F1B")' in EMITTER.emit(subject("dense")).files[FILE]
    emitted = EMITTER.emit(subject("pipeline"))
    assert "_load_csv(actions" in emitted.files[FILE]
    assert emitted.files[SCHEDULE_FILE].count("\n") == 4
    assert not any(f.code == "schedule_not_looked_at" for f in emitted.findings)
    assert any(f.code == "schedule_not_looked_at" for f in EMITTER.emit(subject("pipeline"), "2.8").findings)


def test_two_copies_and_ulysses_are_refused() -> None:
    with pytest.raises(PlanError, match="two copies"):
        EMITTER.emit(changed("dense", {"vpp": 1}, schedule="dualpipe"))
    with pytest.raises(PlanError, match="Ulysses"):
        EMITTER.emit(changed("fsdp", {"sp": 2, "dp": 8}))

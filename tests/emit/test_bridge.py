"""Megatron Bridge's file: goldens, and the function run against stand-ins of the classes it sets."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest

from overlapsim.emit.megatron_bridge import CLASSES, EMITTER, FILE
from tests.emit.subjects import PLANS, check_golden, subject


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's module with classes that keep what they are given."""
    module = types.ModuleType("megatron.bridge.training.comm_overlap")
    for name in (*CLASSES.values(), "CommOverlapConfig", "TransformerLayerTPOverlapCfg"):
        setattr(module, name, type(name, (SimpleNamespace,), {}))
    for name in ("megatron", "megatron.bridge", "megatron.bridge.training"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch = types.ModuleType("torch")
    torch.bfloat16, torch.float16 = "bf16", "fp16"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str) -> None:
    check_golden(f"megatron_bridge-{name}", EMITTER.emit(subject(name)))


@pytest.mark.parametrize("name", PLANS)
def test_the_function_sets_the_layout(name: str, stand_ins: None) -> None:
    plan = subject(name)
    scope: dict[str, object] = {}
    exec(compile(EMITTER.emit(plan).files[FILE], FILE, "exec"), scope)
    config = SimpleNamespace(**{part: SimpleNamespace() for part in ("model", "train", "ddp", "dist", "checkpoint")})
    configured = scope["configure"](config)  # type: ignore[operator]
    layout = plan.layout
    assert configured.model.tensor_model_parallel_size == layout.tp
    assert configured.model.pipeline_model_parallel_size == layout.pp
    assert getattr(configured.model, "context_parallel_size", 1) == layout.context
    assert getattr(configured.model, "virtual_pipeline_model_parallel_size", 1) == layout.vpp
    assert getattr(configured.model, "expert_model_parallel_size", 1) == layout.ep
    assert configured.train.global_batch_size == plan.step.inputs.global_batch
    assert hasattr(configured.ddp, "use_megatron_fsdp") == (layout.zero >= 2)
    assert configured.comm_overlap.tp_comm_overlap is (layout.tp > 1 and layout.sequence_parallel)


def test_gemms_left_to_the_library_are_none(stand_ins: None) -> None:
    text = EMITTER.emit(subject("tp_overlap")).files[FILE]
    assert "    qkv_fprop=RingExchangeOverlapCfg(" in text.replace("        ", "    ") or "qkv_fprop=None" in text
    assert text.count("=None,") + text.count("OverlapCfg(aggregate") + text.count("OverlapCfg(num_sm") == 10

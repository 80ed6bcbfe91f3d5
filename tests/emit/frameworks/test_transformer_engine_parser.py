"""Transformer Engine's own `initialize_ub` takes what is emitted: its code at five versions, CUDA layer recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlapsim.emit.fill import fill, one_layer
from overlapsim.emit.rules import Version
from overlapsim.emit.transformer_engine import EMITTER, FILE
from overlapsim.emit.userbuffers import userbuffers, yaml_text
from overlapsim.hardware.loading import load_cluster
from overlapsim.workload.layout import Layout
from tests.emit.frameworks.runs import folder, parse_all
from tests.emit.subjects import PLANS, subject
from tests.emit.test_te import pipeline

pytestmark = pytest.mark.frameworks
PARSER = "torch_userbuffers.py"
BUFFERS = {"1.11": 10, "2.2": 10, "2.8": 12, "2.11": 12, "2.18": 12}


@pytest.mark.parametrize("version", BUFFERS)
def test_files_are_accepted(version: str, tmp_path: Path) -> None:
    base = folder() / "te" / f"{version}.py"
    if not base.exists():
        pytest.skip(f"{base.parent} has no {base.name}")
    files = []
    for name in PLANS:
        if subject(name).layout.tp > 1:
            files.append(tmp_path / f"{name}.yaml")
            files[-1].write_text(EMITTER.emit(subject(name), version).files[FILE])
    filled = fill(one_layer(18432), load_cluster("h100-sxm8"), 8, 1, 4096, Version.parse(version))
    files.append(tmp_path / "filled.yaml")
    files[-1].write_text(filled.text)
    both = tuple(pipeline(name, "dgrad", overlap_first_gemm=True) for name in ("attn.qkv", "mlp.fc1"))
    files.append(tmp_path / "scattering.yaml")
    files[-1].write_text(yaml_text(userbuffers(both, Layout(tp=8), Version.parse(version)).gemms))
    found, said = parse_all("main", PARSER, base, 8, *files)
    assert found, said
    for entry in found:
        assert entry["error"] == "", entry["file"]
        assert len(entry["buffers"]) == BUFFERS[version]
    made = {entry["file"]: entry["buffers"] for entry in found}["filled.yaml"]
    for name, gemm in filled.gemms.items():
        assert gemm.best is not None
        assert made[name]["kind"] == ("ring" if gemm.best.strategy.name == "ring_exchange" else "kernel")
        if version == "2.18" and gemm.best.strategy.name != "ring_exchange":
            assert made[name]["num_comm_sm"] == gemm.best.parameters["comm_sms"]

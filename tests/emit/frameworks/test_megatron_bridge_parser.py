"""Megatron Bridge's own overlap config takes what is emitted, and settles on what the plan says."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlapsim.emit.megatron_bridge import EMITTER, FILE
from tests.emit.frameworks.runs import folder, parse_all
from tests.emit.subjects import PLANS, subject

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("version", ["0.3.1", "0.6.2"])
def test_plans_settle_as_planned(version: str, tmp_path: Path) -> None:
    packages = folder() / "bridge" / version
    if not packages.exists():
        pytest.skip(f"{packages.parent} has no {version}")
    files: list[object] = []
    for name in PLANS:
        path = tmp_path / f"{name}.py"
        path.write_text(EMITTER.emit(subject(name), version).files[FILE])
        files += [subject(name).layout.world_size, path]
    found, said = parse_all("main", "megatron_bridge_parser.py", packages, *files)
    assert found, said
    for entry in found:
        plan = subject(Path(entry["file"]).stem)
        layout, overlap = plan.layout, plan.settings.dp_overlap
        assert entry["error"] == "", entry["file"]
        assert entry["tp_comm_overlap"] is (layout.tp > 1)
        assert set(entry["gemms"]) <= {"qkv_fprop", "proj_fprop", "fc1_fprop", "fc2_fprop", "fc2_dgrad", "proj_dgrad"}
        if layout.dp * layout.context > 1:
            assert entry["ddp"]["overlap_grad_reduce"] == (overlap != "none")
            assert entry["ddp"]["overlap_param_gather"] == (overlap == "both")
            if layout.zero < 2 and overlap != "none":
                assert entry["ddp"]["bucket_size"] == round(plan.settings.bucket_bytes / 4)

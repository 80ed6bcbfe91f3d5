"""Schedules that torch makes under a name have the same actions in the same order; the others go through its reader."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from overlapsim.emit.torch_schedules import CLASSES, PLACED_AS, schedule_class, schedule_file, splits_backward
from overlapsim.errors import PlanError
from overlapsim.schedule.pipeline_csv import schedule_to_csv
from overlapsim.schedule.pipeline_kinds import SCHEDULES, make_schedule, schedule_kind
from tests.emit.subjects import changed

SHAPES = [(2, 4), (2, 16), (4, 8), (4, 32)]


def stage(torch: Any, index: int, pp: int, stages: int) -> SimpleNamespace:
    """What torch's schedules ask of a stage when they order their actions."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=stages,
        group_size=pp,
        group_rank=0,
        has_backward=True,
        is_first=index == 0,
        is_last=index == stages - 1,
        submod=torch.nn.Identity(),
        stage_index_to_group_rank={},
    )


def actions_of_torch(name: str, pp: int, vpp: int, rounds: int) -> list[list[str]]:
    torch = pytest.importorskip("torch")
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = [stage(torch, index, pp, pp * vpp) for index in range(vpp)]
    made = schedules.get_schedule_class(CLASSES[name])(
        stages if vpp > 1 else stages[0], rounds, loss_fn=lambda output, _: output
    )
    rows = [[str(action) for action in made.pipeline_order[rank] if action is not None] for rank in range(pp)]
    # Single-stage schedules list the reduction of gradients; it is no action of a compute-only file.
    return [[action for action in row if "REDUCE_GRAD" not in action] for row in rows]


def test_every_schedule_has_a_name_a_file_or_a_reason() -> None:
    assert set(CLASSES) | set(PLACED_AS) | {"dualpipe"} == set(SCHEDULES)
    with pytest.raises(PlanError, match="dualpipev"):
        schedule_class(changed("dense", {"vpp": 1}, schedule="dualpipe").settings)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("pp", "rounds"), SHAPES)
def test_named_schedules_are_torchs_own(name: str, pp: int, rounds: int) -> None:
    vpp = schedule_kind(name).stages_per_device or 3
    ours = make_schedule(name, pp, rounds, stages_per_device=vpp)
    rows = [line.split(",") for line in schedule_to_csv(ours).splitlines()]
    theirs = actions_of_torch(name, pp, vpp, rounds)
    if name == "1f1b":
        # What torch lists for the last rank of 1F1B begins with micro-batch 1 and ends with one too many; it is not
        # what it runs.
        assert theirs.pop()[0] == f"{pp - 1}F1"
        assert rows.pop()[:3] == [f"{pp - 1}F0", f"{pp - 1}B0", f"{pp - 1}F1"]
    assert rows == theirs


@pytest.mark.parametrize("name", PLACED_AS)
@pytest.mark.parametrize(("pp", "rounds"), SHAPES)
def test_files_are_read_by_torch(name: str, pp: int, rounds: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    vpp = schedule_kind(name).stages_per_device or 2
    plan = changed("dense", {"pp": pp, "vpp": vpp}, schedule=name, num_micro_batches=rounds).settings
    text = schedule_file(plan, pp, vpp)
    assert text is not None
    path = tmp_path / "schedule.csv"
    path.write_text(text, encoding="utf-8")
    own = [stage(torch, index, pp, pp * vpp) for index in range(vpp)]
    runtime = schedules._PipelineScheduleRuntime(own, n_microbatches=rounds, loss_fn=lambda output, _: output)
    runtime._load_csv(str(path), format="compute_only")
    read = [[str(a) for a in runtime.pipeline_order[rank] if a is not None] for rank in range(pp)]
    assert read == [line.split(",") for line in text.splitlines()]
    assert schedules.get_schedule_class(PLACED_AS[name]) is not None


def test_a_pipeline_of_one_stage_has_no_file() -> None:
    settings = changed("fsdp").settings
    assert schedule_file(settings, 1, 1) is None
    assert not splits_backward(settings, 1)

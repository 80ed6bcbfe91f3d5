"""Checks of torchtitan's configs: one rule at a time, lines, both dialects, what is emitted has no conflict."""

from __future__ import annotations

import pytest

from overlapsim.emit.lint_base import Checked, Facts, Lint
from overlapsim.emit.lint_torchtitan import LINTER
from overlapsim.emit.torchtitan import EMITTER
from overlapsim.errors import UsageError
from tests.emit.subjects import PLANS, subject

GOOD = """\
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 16
seq_len = 8192
[parallelism]
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_layers_per_stage = 10
pipeline_parallel_first_stage_less_layers = 0
pipeline_parallel_last_stage_less_layers = 0
[compile]
enable = true
[activation_checkpoint]
mode = "selective"
"""


def lint(text: str, world_size: int | None = 64, version: str | None = "0.2.2") -> Checked:
    return LINTER.lint(text, Facts(world_size=world_size), version)


def conflicts(checked: Checked) -> list[Lint]:
    return [one for one in checked.lints if one.kind == "conflict"]


def test_a_good_config_is_left_alone() -> None:
    checked = lint(GOOD)
    assert checked.lints == ()
    assert checked.reading is not None
    assert str(checked.reading.layout) == "tp=8,pp=4,vpp=2,dp=2,zero=2"
    assert checked.reading.micro_batch == 1
    assert checked.reading.model is not None
    assert checked.reading.model.name == "llama3-70b"
    assert checked.reading.settings["schedule"] == "interleaved"


@pytest.mark.parametrize("version", ["0.2.2", "0.3.0"])
@pytest.mark.parametrize("name", PLANS)
def test_what_is_emitted_has_no_conflict(name: str, version: str) -> None:
    base = subject(name)
    file = "torchtitan.toml" if version == "0.2.2" else "torchtitan_plan.py"
    text = EMITTER.emit(base, version).files[file]
    checked = LINTER.lint(text, Facts(world_size=base.layout.world_size), version)
    assert {one.kind for one in checked.lints} <= {"missing"}
    assert checked.findings == ()


@pytest.mark.parametrize(
    ("old", "new", "kind", "line", "message"),
    [
        ("tensor_parallel_degree = 8", "tensor_paralel_degree = 8", "unknown", 8, "tensor_paralel_degree"),
        ("tensor_parallel_degree = 8", 'tensor_parallel_degree = "8"', "conflict", 8, "'8'"),
        ('"Interleaved1F1B"', '"Interleaved2F1B"', "conflict", 11, "no pipeline schedule"),
        ("per_stage = 10", "per_stage = 9", "conflict", 12, "do not divide over 4"),
        ('"Interleaved1F1B"', '"1F1B"', "conflict", 11, "does not run with 2 stages"),
        ('"Interleaved1F1B"', '"ZBVZeroBubble"', "conflict", 16, "splits the backward"),
        ("enable = true", "enable = false", "conflict", 9, "compiled models alone"),
        ("seq_len = 8192", "seq_len = 8190", "conflict", 6, "do not divide by"),
        ("local_batch_size = 16", "local_batch_size = 2", "missing", 5, "cannot fill 4 stages"),
        ("local_batch_size = 16", "local_batch_size = 16\nglobal_batch_size = 33", "conflict", 6, "no multiple"),
        ('mode = "selective"', 'mode = "sometimes"', "conflict", 18, "sometimes"),
        ("enable_async_tensor_parallel = true", "", "missing", 8, "nothing hides them"),
        ("tensor_parallel_degree = 8", "tensor_parallel_degree = 1", "no_effect", 9, "does nothing"),
        ("pipeline_parallel_degree = 4", "pipeline_parallel_degree = 1", "no_effect", 11, "parallel_schedule does"),
        ("[compile]", 'fsdp_reshard_after_forward = "always"\n[compile]', "missing", 15, "every micro-batch"),
        ("[compile]", 'context_parallel_rotate_method = "alltoall"\n[compile]', "no_effect", 15, "context parallel"),
        ("[compile]", "data_parallel_shard_degree = 3\n[compile]", "conflict", 15, "there are 64 ranks"),
        ("[compile]", "expert_parallel_degree = 3\n[compile]", "conflict", None, "expert grid"),
        (
            "[compile]",
            "expert_parallel_degree = 4\nexpert_tensor_parallel_degree = 2\n[compile]",
            "conflict",
            16,
            "2 r",
        ),
    ],
)
def test_rules(old: str, new: str, kind: str, line: int | None, message: str) -> None:
    assert old in GOOD
    found = [one for one in lint(GOOD.replace(old, new)).lints if one.kind == kind and message in one.message]
    assert [one.line for one in found] == [line]
    assert found[0].fix


def test_experts_beside_pairs() -> None:
    text = (
        "[parallelism]\npipeline_parallel_degree = 2\nexpert_parallel_degree = 2\ndata_parallel_shard_degree = 2\n"
        'pipeline_parallel_schedule = "DualPipeV"\n[activation_checkpoint]\nmode = "full"\n'
    )
    found = {one.line: one.message for one in conflicts(lint(text, 4))}
    assert "activation checkpointing" in found[7]
    text = text.replace("[parallelism]", "[training]\nlocal_batch_size = 3\n[parallelism]")
    assert any("2 x pp" in one.message for one in conflicts(lint(text, 4)))


def test_replicas_alone_do_not_combine() -> None:
    text = (
        "[parallelism]\ndata_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 1\n"
        "tensor_parallel_degree = 2\n"
    )
    assert any("(DDP)" in one.message for one in conflicts(lint(text, 8)))


def test_unknown_ranks_silence_what_depends_on_them() -> None:
    assert conflicts(lint(GOOD, None)) == []


def test_toml_for_a_later_version_is_a_finding() -> None:
    assert [f.code for f in lint(GOOD, version=None).findings] == ["framework_version_stale"]


PYTHON = """\
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.models.llama3.config_registry import llama3_70b


def plan():
    c = llama3_70b()
    c.training.local_batch_size = 16
    c.training.seq_len = 8192
    c.training.disable_cuda_graphs = True
    c.parallelism = ParallelismConfig(
        tensor_parallel_degree=8,
        pipeline_parallel_degree=4,
        pipeline_parallel_schedule="Interleaved1F1B",
        pipeline_parallel_layers_per_stage=10,
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=0,
    )
    c.compile = CompileConfig(enable=True, enable_async_tensor_parallel=True)
    return c
"""


def test_python_is_read_without_running_it() -> None:
    checked = lint("raise SystemExit\n" + PYTHON, version="0.3.0")
    assert checked.lints == ()
    assert checked.reading is not None
    assert str(checked.reading.layout) == "tp=8,pp=4,vpp=2,dp=2,zero=2"


@pytest.mark.parametrize(
    ("old", "new", "kind", "line", "message"),
    [
        ("    c.training.disable_cuda_graphs = True\n", "", "conflict", None, "CUDA graphs"),
        (
            "pipeline_parallel_degree=4",
            "expert_tensor_parallel_degree=8",
            "unknown",
            12,
            "expert_tensor_parallel_degree",
        ),
        ("enable=True, ", "", "conflict", 18, "compiled models alone"),
    ],
)
def test_rules_of_python(old: str, new: str, kind: str, line: int | None, message: str) -> None:
    found = [one for one in lint(PYTHON.replace(old, new), version="0.3.0").lints if message in one.message]
    assert [(one.kind, one.line) for one in found] == [(kind, line)]


def test_settings_that_moved_are_named() -> None:
    moved = GOOD.replace("[compile]\n", "[compile]\nenable_async_tensor_parallel = true\n")
    (one,) = [one for one in lint(moved).lints if one.kind == "unknown"]
    assert one.fix == "write parallelism.enable_async_tensor_parallel"


def test_recognition() -> None:
    assert LINTER.recognises("train.toml", GOOD)
    assert LINTER.recognises("plan.py", PYTHON)
    assert not LINTER.recognises("pyproject.toml", '[project]\nname = "x"\n')
    assert not LINTER.recognises("x.py", "import torch\n")


@pytest.mark.parametrize("text", ["[parallelism\n", "def plan(:\n"])
def test_what_is_neither(text: str) -> None:
    with pytest.raises(UsageError):
        lint(text)

"""`emit` as users call it: plans into configs, a layer's file from its sizes, configs checked; documented JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from overlapsim.strict_yaml import parse
from tests.cli.test_commands import run
from tests.emit.test_lint_megatron import LLAMA, ONE_QUEUE

PLANS = Path(__file__).parents[1] / "emit" / "plans"
DENSE = str(PLANS / "dense.yaml")
SMALL = """\
# world_size=8
# env CUDA_DEVICE_MAX_CONNECTIONS=1
--num-layers 4
--hidden-size 1024
--num-attention-heads 8
--seq-length 1024
--max-position-embeddings 1024
--vocab-size 51200
--bf16
--tensor-model-parallel-size 8
--micro-batch-size 1
--global-batch-size 8
--recompute-granularity full
--recompute-method uniform
--recompute-num-layers 1
"""


def test_files_go_into_a_folder_of_each_target(capsys, tmp_path: Path) -> None:
    code, out, err = run(capsys, ["emit", DENSE, "--to", "megatron,transformer_engine", "-o", str(tmp_path / "new")])
    assert code == 0
    assert {path.name for path in (tmp_path / "new" / "megatron").iterdir()} >= {"megatron.args", "megatron.env"}
    assert (tmp_path / "new" / "transformer_engine" / "tp_comm_overlap.yaml").exists()
    assert "megatron written to" in out
    assert "not expressed in megatron:" in err


def test_files_are_printed_without_a_folder(capsys) -> None:
    code, out, _ = run(capsys, ["emit", DENSE, "--to", "megatron"])
    assert code == 0
    assert "--- megatron: megatron.args" in out
    assert "--tensor-model-parallel-size 8\n" in out


def test_json_has_the_documented_keys(capsys) -> None:
    code, out, _ = run(capsys, ["emit", DENSE, "--to", "megatron", "--framework-version", "0.9", "--json"])
    assert code == 0
    answer = json.loads(out)
    assert set(answer) == {"plan", "rank", "targets"}
    (target,) = answer["targets"]
    assert set(target) == {"target", "files", "unexpressed", "findings"}
    assert target["findings"][0]["code"] == "framework_version_stale"
    assert answer["plan"][:16] in target["files"]["megatron.args"]


def test_versions_belong_to_targets(capsys) -> None:
    both = ["emit", DENSE, "--to", "megatron,transformer_engine"]
    code, _, err = run(capsys, [*both, "--framework-version", "0.18"])
    assert (code, "expected TARGET=VERSION" in err) == (2, True)
    code, out, _ = run(
        capsys, [*both, "--framework-version", "megatron=0.18", "--framework-version", "transformer_engine=2.2"]
    )
    assert code == 0
    assert "for Megatron-Core 0.18\n" in out
    assert "for Transformer Engine 2.2\n" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected a plan file and"),
        ([DENSE], "no target is given"),
        ([DENSE, "--to", "megatrn"], "did you mean 'megatron'"),
        ([DENSE, "--to", "wave_group"], "takes plans of kind operator"),
        ([DENSE, "--to", "megatron", "--rank", "9"], "rank 9 is not in the plan"),
        ([DENSE, "--to", "megatron", "--framework-version", "newest"], "expected numbers such as"),
        ([DENSE, "--to", "megatron", "--framework-version", "nccl=2.3"], "names 'nccl'"),
        (["nowhere.yaml", "--to", "megatron"], "there is no such file"),
        ([DENSE, "--check", DENSE], "expected one of them"),
        (["--check", "nowhere.sh"], "cannot read nowhere.sh"),
        (["--hidden", "4096", "--to", "megatron"], "fill transformer_engine's file only"),
        (["--hidden", "4096", "--to", "transformer_engine", "--seq", "4096"], "--cluster is missing"),
        (["--hidden", "4096", "--to", "transformer_engine", "--cluster", "h100-sxm8"], "--seq is missing"),
    ],
)
def test_faults_are_one_clear_error(capsys, arguments: list[str], said: str) -> None:
    code, out, err = run(capsys, ["emit", *arguments])
    assert code == 2
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("word", ["dp_overlap", "recompute", "schedule"])
def test_a_plan_edited_into_nonsense_is_not_emitted(capsys, tmp_path: Path, word: str) -> None:
    edited = tmp_path / "plan.yaml"
    text = Path(DENSE).read_text()
    edited.write_text(re.sub(rf"^(    {word}): .*$", r"\1: boat", text, count=1, flags=re.MULTILINE))
    assert edited.read_text() != text
    code, out, err = run(capsys, ["emit", str(edited), "--to", "megatron"])
    assert (code, out) == (2, "")
    assert "boat" in err and err.count("\n") == 1


def test_a_layers_file_is_filled_from_its_sizes(capsys) -> None:
    sizes = ["--hidden", "18432", "--tp", "8", "--micro-batch", "1", "--seq", "4096", "--cluster", "h100-sxm8"]
    code, out, _ = run(capsys, ["emit", "--to", "transformer_engine", *sizes, "--json"])
    assert code == 0
    (target,) = json.loads(out)["targets"]
    gemms = parse(target["files"]["tp_comm_overlap.yaml"])
    assert len(gemms) == 10
    assert gemms["qkv_fprop"]["method"] == "ring_exchange"
    assert gemms["fc1_dgrad"]["method"] == "bulk"
    assert "hidden 18432, ffn 73728, tp 8" in target["files"]["tp_comm_overlap.yaml"]


def test_a_layers_file_is_filled_for_a_model(capsys) -> None:
    asked = ["--model", "llama3-8b", "--tp", "4", "--seq", "8192", "--cluster", "h100-sxm8"]
    code, out, _ = run(capsys, ["emit", "--to", "transformer_engine", *asked])
    assert code == 0
    assert "hidden 4096, ffn 14336, tp 4" in out


def test_one_queue_is_the_conflict_of_a_launch_script(capsys, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(ONE_QUEUE)
    code, out, _ = run(capsys, ["emit", "--check", str(script), "--cluster", "h100-sxm8"])
    assert code == 3
    assert f"{script}:2: conflict: CUDA_DEVICE_MAX_CONNECTIONS=1 with tp = 1, cp = 1" in out
    assert "fix: unset CUDA_DEVICE_MAX_CONNECTIONS" in out


def test_a_clean_config_says_so(capsys, tmp_path: Path) -> None:
    path = tmp_path / "llama.args"
    path.write_text(LLAMA)
    code, out, err = run(capsys, ["emit", "--check", str(path)])
    assert (code, err) == (0, "")
    assert out == f"{path}: nothing to remark (megatron)\n"


def test_what_the_planner_would_change_is_named_with_its_gain(capsys, tmp_path: Path) -> None:
    path = tmp_path / "small.args"
    path.write_text(SMALL)
    code, out, err = run(capsys, ["emit", "--check", str(path), "--cluster", "a100-sxm8", "--json"])
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert set(answer) == {"file", "checked_as", "lints", "findings"}
    kinds = [lint["kind"] for lint in answer["lints"]]
    assert kinds.count("gain") == 1
    (gain,) = [lint for lint in answer["lints"] if lint["kind"] == "gain"]
    assert "% less" in gain["message"]
    assert "`plan` writes it" in gain["fix"]

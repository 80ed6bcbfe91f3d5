"""Megatron launches checked: configs that its parsers accepted are clean, known conflicts are named on their line."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from overlapsim.emit.lint_base import Checked, Facts
from overlapsim.emit.lint_megatron import LINTER
from overlapsim.emit.megatron import ARGUMENTS, EMITTER
from overlapsim.emit.megatron_read import read_script
from overlapsim.emit.registry import linter_of
from overlapsim.errors import UsageError
from tests.emit.subjects import PLANS, subject

KNOWN_GOOD = sorted((Path(__file__).parent / "known_good").glob("megatron_*.args"))
HOPPER = Facts(architecture="hopper")
LLAMA = (Path(__file__).parent / "known_good" / "megatron_llama3_70b_64gpu.args").read_text()
MIXTRAL = (Path(__file__).parent / "known_good" / "megatron_mixtral_8x7b_32gpu.args").read_text()
# NVIDIA/Megatron-LM issue 1468: an 8B model, tp = pp = cp = 1, 64 ranks, one hardware queue; nothing overlaps.
ONE_QUEUE = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32
    --seq-length 8192 --max-position-embeddings 8192 --bf16
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
)
torchrun --nnodes 8 --nproc_per_node $GPUS_PER_NODE pretrain_gpt.py ${MODEL_ARGS[@]} \\
    --micro-batch-size 1 --global-batch-size 128 \\
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
"""


def lint(text: str, facts: Facts = HOPPER, version: str | None = None) -> Checked:
    return LINTER.lint(text, facts, version)


def edited(text: str, *added: str, drop: tuple[str, ...] = ()) -> str:
    """A config with lines left out (by their beginning) and others added."""
    kept = [line for line in text.splitlines() if not any(line.startswith(start) for start in drop)]
    return "\n".join((*kept, *added)) + "\n"


@pytest.mark.parametrize("path", KNOWN_GOOD, ids=lambda path: path.stem)
@pytest.mark.parametrize("version", ["0.16.1", "0.18.2", "0.19.2"])
def test_configs_that_parsers_accepted_are_clean(path: Path, version: str) -> None:
    checked = lint(path.read_text(), version=version)
    assert checked.lints == ()
    assert checked.findings == ()
    assert checked.reading is not None
    assert checked.reading.model is not None


@pytest.mark.parametrize("name", PLANS)
def test_what_we_emit_is_free_of_conflicts(name: str) -> None:
    text = EMITTER.emit(subject(name)).files[ARGUMENTS]
    kinds = {entry.kind for entry in lint(text, Facts(architecture=subject(name).architecture)).lints}
    assert kinds <= {"missing"}


def test_one_queue_with_one_rank_a_model_is_the_named_conflict() -> None:
    (conflict,) = lint(ONE_QUEUE).lints
    assert (conflict.kind, conflict.line) == ("conflict", 2)
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1 with tp = 1, cp = 1" in conflict.message
    assert "--overlap-grad-reduce and --overlap-param-gather" in conflict.message
    assert conflict.fix == "unset CUDA_DEVICE_MAX_CONNECTIONS"
    checked = lint(ONE_QUEUE.replace("export CUDA_DEVICE_MAX_CONNECTIONS=1\n", ""))
    assert checked.lints == ()
    assert checked.reading is not None
    assert str(checked.reading.layout) == "dp=64,zero=1"


NAMED = {
    "queues not set": (edited(LLAMA, drop=("# env",)), "GPUs before Blackwell need communication launched first"),
    "overlap without split sequences": (edited(LLAMA, drop=("--sequence-parallel",)), "--tp-comm-overlap without"),
    "ranks": (LLAMA.replace("world_size=64", "world_size=60"), "60 ranks do not divide by tp x cp x pp = 32"),
    "batch": (LLAMA.replace("--global-batch-size 128", "--global-batch-size 129"), "129 does not divide"),
    "gather without reduce": (edited(LLAMA, drop=("--overlap-grad-reduce",)), "without --overlap-grad-reduce"),
    "gather without shards": (edited(LLAMA, drop=("--use-distributed-optimizer",)), "no parameters to gather"),
    "experts": (MIXTRAL.replace("--num-experts 8", "--num-experts 12"), "12 experts do not divide by ep = 8"),
    "layers of virtual stages": (LLAMA.replace("stage 5", "stage 3"), "20 layers of a stage do not divide by 3"),
    "two spellings": (edited(LLAMA, "--num-virtual-stages-per-pipeline-rank 4"), "say the same"),
    "layout of fewer layers": (
        edited(MIXTRAL, '--pipeline-model-parallel-layout "Ettt|(tt|)*13,t|tL"', drop=("--num-virtual",)),
        "the layout has 31 layers of 32",
    ),
    "layout of fewer stages": (
        edited(MIXTRAL, '--pipeline-model-parallel-layout "Etttt|(tt|)*13,ttL"', drop=("--num-virtual",)),
        "the layout has 15 stages for pp = 4",
    ),
    "pairs without virtual stages": (edited(MIXTRAL, drop=("--num-virtual",)), "no virtual stages"),
    "pairs with full recompute": (
        edited(MIXTRAL, "--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"),
        "with full recompute",
    ),
    "pairs with shared experts beside": (edited(MIXTRAL, "--moe-shared-expert-overlap"), "fill the same time"),
    "pairs with gathered tokens": (MIXTRAL.replace("type alltoall", "type allgather"), "a dispatcher that gathers"),
    "pairs with moe rebuilt": (
        edited(MIXTRAL, "--recompute-granularity selective", "--recompute-modules core_attn moe"),
        "with recompute of moe",
    ),
    "delay alone": (edited(MIXTRAL, drop=("--overlap-moe",)), "--delay-wgrad-compute without"),
    "heads": (
        LLAMA.replace("--num-attention-heads 64", "--num-attention-heads 60"),
        "60 heads do not divide by tp = 8",
    ),
    "FSDP with one queue": (
        edited(LLAMA, "--use-megatron-fsdp", "--ckpt-format fsdp_dtensor"),
        "with FSDP: gathers wait for scatters",
    ),
    "gather with the step": (
        edited(LLAMA, "--overlap-param-gather-with-optimizer-step"),
        "is refused with distributed checkpoints",
    ),
    # accepted by the parsers although wrong
    "expert grid": (
        edited(MIXTRAL.replace("world_size=32", "world_size=16"), "--pipeline-model-parallel-size 4"),
        "16 ranks do not divide by etp x ep x pp = 32",
    ),
    "tokens": (LLAMA.replace("--seq-length 8192", "--seq-length 8190"), "8190 tokens on a rank do not divide"),
    "experts without split sequences": (
        edited(
            "# env CUDA_DEVICE_MAX_CONNECTIONS=1\n"
            + MIXTRAL.replace("--tensor-model-parallel-size 1", "--tensor-model-parallel-size 2"),
            "--expert-tensor-parallel-size 1",
            drop=("--overlap-moe", "--delay"),
        ),
        "dispatch the same tokens",
    ),
    "too few micro-batches": (LLAMA.replace("batch-size 128", "batch-size 4"), "2 micro-batches do not make rounds"),
    "small rounds": (
        edited(LLAMA, "--microbatch-group-size-per-virtual-pipeline-stage 2"),
        "rounds of 2 micro-batches",
    ),
    "cancelling": (
        edited(LLAMA, "--no-overlap-p2p-communication", "--overlap-p2p-communication-warmup-flush"),
        "cancel each other",
    ),
    "pairs in one queue": ("# env CUDA_DEVICE_MAX_CONNECTIONS=1\n" + MIXTRAL, "exchanges wait for the kernels"),
    "bad choice": (edited(LLAMA, "--tp-comm-bootstrap-backend tcp"), "--tp-comm-bootstrap-backend is tcp"),
    "no value": (edited(LLAMA, "--ddp-bucket-size"), "takes a value and has none"),
    "twice": (edited(LLAMA, "--global-batch-size 256"), "--global-batch-size is given 2 times"),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_known_conflict_is_named(case: str) -> None:
    text, said = NAMED[case]
    found = [entry for entry in lint(text).lints if said in entry.message]
    assert len(found) == 1, lint(text).lints
    assert found[0].kind == "conflict"
    assert found[0].fix


STALE = {
    "gone": (edited(LLAMA, "--use-custom-fsdp"), "0.19.2", "is gone since Megatron-Core 0.14", "--use-megatron-fsdp"),
    "not yet": (MIXTRAL, "0.13", "--overlap-moe-expert-parallel-comm came with Megatron-Core 0.14", "leave it out"),
    "misspelt": (edited(LLAMA, "--overlap-grad-reduse"), None, "no option of Megatron-Core", "--overlap-grad-reduce"),
    "of nobody": (edited(LLAMA, "--my-own-flag 3"), None, "--my-own-flag is no option", "a script of yours"),
}


@pytest.mark.parametrize("case", STALE)
def test_flags_of_other_versions_are_named(case: str) -> None:
    text, version, said, fix = STALE[case]
    found = [entry for entry in lint(text, version=version).lints if entry.kind == "unknown"]
    assert len(found) == 1
    assert said in found[0].message
    assert fix in found[0].fix


def test_an_unknown_version_is_a_finding() -> None:
    assert [finding.code for finding in lint(LLAMA, version="1.0").findings] == ["framework_version_unknown"]


WITHOUT_EFFECT = {
    "--tp-comm-overlap": edited(MIXTRAL, "--tp-comm-overlap"),
    "--sequence-parallel": edited(MIXTRAL, "--sequence-parallel"),
    "--tp-comm-overlap-cfg": edited(MIXTRAL, "--tp-comm-overlap-cfg x.yaml"),
    "--ddp-bucket-size": edited(MIXTRAL, "--ddp-bucket-size 1000", drop=("--overlap-grad", "--overlap-param")),
    "--data-parallel-sharding-strategy": edited(LLAMA, "--data-parallel-sharding-strategy optim"),
    "--no-overlap-p2p-communication": edited(LLAMA, "--no-overlap-p2p-communication", drop=("--num-layers-per",)),
    "--moe-shared-expert-overlap": edited(MIXTRAL, "--moe-shared-expert-overlap"),
    "--moe-enable-deepep": edited(MIXTRAL, "--moe-enable-deepep"),
}


@pytest.mark.parametrize("flag", WITHOUT_EFFECT)
def test_flags_that_do_nothing_are_named(flag: str) -> None:
    found = [entry for entry in lint(WITHOUT_EFFECT[flag]).lints if entry.kind == "no_effect"]
    assert [entry.message.split()[0] for entry in found] == [flag]


MISSING = {
    "gradients": (edited(LLAMA, drop=("--overlap-grad", "--overlap-param")), "gradients of 2 data-parallel ranks"),
    "parameters": (edited(LLAMA, drop=("--overlap-param",)), "parameters of the distributed optimizer"),
    "tensor": (edited(LLAMA, drop=("--tp-comm-overlap",)), "gathers and reduce-scatters of tp = 8"),
    "sequences": (
        edited(LLAMA, drop=("--tp-comm-overlap", "--sequence-parallel")),
        "tp = 8 without sequence parallelism",
    ),
    "stages": (edited(LLAMA, drop=("--num-layers-per",)), "pp = 4 without virtual stages"),
    "exchanges": (edited(MIXTRAL, drop=("--overlap-moe", "--delay")), "exchanges of ep = 8 are exposed"),
}


@pytest.mark.parametrize("case", MISSING)
def test_overlap_that_is_not_asked_for_is_named(case: str) -> None:
    text, said = MISSING[case]
    found = [entry for entry in lint(text).lints if entry.kind == "missing"]
    assert len(found) == 1
    assert said in found[0].message


def test_facts_count_where_the_file_is_silent() -> None:
    silent = edited(LLAMA, drop=("# world_size",))
    assert lint(silent).reading.layout.dp == 1  # type: ignore[union-attr]
    assert lint(silent, Facts(64, "hopper")).reading.layout.dp == 2  # type: ignore[union-attr]
    assert lint(edited(LLAMA, drop=("# env",)), Facts(64, "blackwell")).lints == ()


def test_recipes_in_yaml_and_shell_variables_are_read() -> None:
    script = read_script(
        "ENV_VARS:\n  CUDA_DEVICE_MAX_CONNECTIONS: 1\nMODEL_ARGS:\n  --num-layers: 12\n  --bf16: true\n"
        "  --swiglu: false\n  --recompute-modules: core_attn moe_act\n"
    )
    assert script.number("--num-layers") == 12
    assert script.has("--bf16")
    assert not script.has("--swiglu")
    assert script.by_flag["--recompute-modules"].values == ("core_attn", "moe_act")
    assert script.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == ("1", 2)
    shell = read_script("TP=${TP:-4}\nX=2\nrun --tensor-model-parallel-size ${X} --seq-length=4096 \\\n  --bf16\n")
    assert shell.number("--tensor-model-parallel-size") == 2
    assert shell.number("--seq-length") == 4096
    assert [argument.line for argument in shell.arguments] == [3, 3, 4]


def test_files_are_recognised() -> None:
    assert linter_of("train.sh", ONE_QUEUE) is LINTER
    with pytest.raises(UsageError, match="the file has no --flags"):
        lint("hello\n")


@pytest.mark.parametrize(
    ("tp", "queues", "dispatcher", "recompute", "virtual", "version"),
    list(
        itertools.product(
            (1, 2), ("", "1", "32"), ("alltoall", "allgather"), ("", "full", "moe"), (True, False), ("0.13", "0.19.2")
        )
    ),
)
def test_what_is_recommended_is_no_conflict_then(
    tp: int, queues: str, dispatcher: str, recompute: str, virtual: bool, version: str
) -> None:
    rebuilt = {
        "": (),
        "full": ("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"),
        "moe": ("--recompute-granularity selective", "--recompute-modules core_attn moe"),
    }[recompute]
    text = edited(
        MIXTRAL.replace("size 1\n--expert", f"size {tp}\n--expert").replace("type alltoall", f"type {dispatcher}"),
        *(("--sequence-parallel", "--expert-tensor-parallel-size 1") if tp > 1 else ()),
        *rebuilt,
        *((f"# env CUDA_DEVICE_MAX_CONNECTIONS={queues}",) if queues else ()),
        drop=("--overlap", "--delay", *(() if virtual else ("--num-virtual",))),
    )
    there = {entry.message for entry in lint(text, version=version).lints if entry.kind in ("conflict", "unknown")}
    for entry in lint(text, version=version).lints:
        if entry.kind != "missing":
            continue
        flags = [
            f"{flag} 2" if "virtual-stages" in flag else flag
            for flag in re.findall(r"--[a-z][a-z0-9-]+", entry.fix.partition(";")[0])
        ]
        assert flags
        fixed = edited(text, *flags, drop=("# env",) if "unset" in entry.fix else ())
        new = [e for e in lint(fixed, version=version).lints if e.kind in ("conflict", "unknown")]
        assert [e.message for e in new if e.message not in there] == [], entry.fix


def test_pairs_with_tensor_parallelism_are_left_to_the_user() -> None:
    both = edited(
        MIXTRAL.replace("--tensor-model-parallel-size 1", "--tensor-model-parallel-size 2"),
        "--sequence-parallel",
        "--expert-tensor-parallel-size 1",
    )
    for queues in ("1", "32"):
        said = lint(edited(both, f"# env CUDA_DEVICE_MAX_CONNECTIONS={queues}")).lints
        assert [entry.kind for entry in said] == ["missing"], "Megatron warns, and takes either"
    assert [entry.kind for entry in lint(edited(MIXTRAL, "# env CUDA_DEVICE_MAX_CONNECTIONS=1")).lints] == ["conflict"]

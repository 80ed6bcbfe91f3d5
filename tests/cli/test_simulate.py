"""`overlapsim simulate` as users call it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from overlapsim.cli.main import main
from overlapsim.errors import StrategyError, UsageError
from overlapsim.strategy.base import Strategy
from overlapsim.strategy.overlaps import composition
from overlapsim.strategy.parameter_words import parameter_example, parameter_words
from overlapsim.strategy.registry import load_strategies
from overlapsim.testing.traces import check_trace
from tests.cli.test_commands import run as run_command

KEYS = [
    *("step_time_s", "low_s", "high_s", "tokens_per_s", "mfu", "hfu", "model_flop"),
    *("memory_bytes", "breakdown_s", "findings"),
]
BREAKDOWN = [
    *("gemm", "attention", "other_compute", "optimizer"),
    *("exposed_tp", "exposed_sp", "exposed_ep", "exposed_cp", "exposed_pp", "exposed_dp", "bubble", "host"),
]
MEMORY = ["parameters", "gradients", "optimizer", "activations", "logits", "buffers", "allowance"]
SMALL = "llama3-8b --cluster h100-sxm8 --layout tp=2,pp=2,zero=1 --global-batch 8 --seq 4096"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def run(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, str, str]:
    return run_command(capsys, ["simulate", *text.split()])


def answer(capsys: pytest.CaptureFixture[str], text: str) -> dict:
    code, out, err = run(capsys, f"{text} --json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_json_has_the_documented_keys(capsys) -> None:
    found = answer(capsys, SMALL)
    assert list(found) == KEYS
    assert list(found["breakdown_s"]) == BREAKDOWN
    assert list(found["memory_bytes"]) == MEMORY
    assert set(found["findings"][0]) == {"code", "message"}
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["step_time_s"], rel=1e-9)
    assert found["low_s"] < found["step_time_s"] < found["high_s"]
    assert found["tokens_per_s"] == pytest.approx(8 * 4096 / found["step_time_s"])
    assert found["mfu"] == pytest.approx(found["model_flop"] / found["step_time_s"] / 8 / 989e12, rel=1e-3)


def test_for_people(capsys) -> None:
    code, out, err = run(capsys, f"{SMALL} --recompute full --dp-overlap gradients")
    assert (code, err) == (0, "")
    assert "llama3-8b bf16 on 8 GPUs of h100-sxm8: tp=2,pp=2,dp=2,zero=1" in out
    assert "MFU" in out and "HFU" in out
    assert "8 sequences of 4096 tokens, 4 micro-batch(es) of 1 a replica, schedule 1f1b with blocking transfers" in out
    for words in ("GEMMs", "exposed: tensor parallel", "bubble", "optimizer", "stage 0", "stage 1", "activations"):
        assert words in out
    assert "finding clock_assumed:" in out
    rows = [line.split("│")[3].strip() for line in out.splitlines() if line.count("│") == 4]
    shares = [float(cell.rstrip("%")) for cell in rows if cell.endswith("%")]
    assert sum(shares) == pytest.approx(100, abs=1.0)


def test_what_the_layout_leaves_to_a_default_is_said(capsys) -> None:
    _, out, _ = run(capsys, f"{EXPERTS} --layout tp=2,ep=4,dp=4")
    assert "tp=2,ep=4,dp=4 (etp=2, as tp)" in out
    _, out, _ = run(capsys, f"{EXPERTS} --layout tp=2,ep=4,etp=1,dp=4")
    assert "(etp" not in out


def test_a_graph_has_gaps_and_no_host_time_a_kernel(capsys) -> None:
    _, out, _ = run(capsys, f"{EXPERTS} --overlap step=operator_order")
    assert "nothing runs (launches, gaps of kernels)" in out
    assert "no host time a kernel (a CUDA graph: 8.00 us to start one" in out
    assert "ktokens/s a GPU" in out


def test_narrow_tables_cut_no_words(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = run(capsys, SMALL)
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    assert "exposed: pipeline" in out and "transfers" in out


def test_one_stage_has_one_column_and_no_pipeline(capsys) -> None:
    code, out, _ = run(capsys, "gpt2-126m --cluster a100-sxm8 --layout dp=1 --global-batch 8 --seq 1024")
    assert code == 0
    assert "of the stage" not in out
    assert "schedule" not in out
    assert "finding devices_idle: 7 of 8 GPUs are not in the layout" in out


def test_loud_findings_come_first(capsys) -> None:
    code, out, _ = run(capsys, "gpt2-126m --cluster v100s-pcie8 --dtype fp16 --global-batch 8 --seq 1024")
    assert code == 0
    assert out.startswith("finding device_not_calibrated: NOT CALIBRATED: no kernel of this step was measured")


@pytest.mark.parametrize(
    "more",
    [
        "--schedule zb_h1",
        "--virtual 2",
        "--virtual 2 --schedule zbv",
        "--virtual 2 --p2p overlapped",
        "--micro-batch 2",
        "--stage-layers 15,17",
        "--recompute sar",
        "--recompute core_attn+layernorm",
        "--recipe megatron-2022 --ignore-memory",
        "--stack eager",
        "--dp-overlap both --bucket-size 25MB",
        "--rings one_way",
        "--sustained-clock 0.8",
        "--no-contention",
        "--compress grads-bf16",
        "--compress tp-fp8",
        "--fp8 --compress params-fp8",
        "--perturb slow=0.8@3,jitter=0.02",
        "--overlap mlp.fc2=chunked:chunks=4 --overlap attn.out=chunked:chunks=2",
    ],
)
def test_every_option_changes_the_step(capsys, more: str) -> None:
    """No option is taken and not applied."""
    plain, changed = answer(capsys, SMALL), answer(capsys, f"{SMALL} {more}")
    if more in ("--rings one_way", "--bucket-size 25MB"):
        assert changed["step_time_s"] >= plain["step_time_s"]
    else:
        assert changed["step_time_s"] != plain["step_time_s"]
    assert sum(changed["breakdown_s"].values()) == pytest.approx(changed["step_time_s"], rel=1e-9)


def test_compression_is_said_and_refused_where_it_cannot_be(capsys) -> None:
    found = answer(capsys, f"{SMALL} --compress grads-bf16,tp-fp8")
    said = [entry["message"].partition(":")[0] for entry in found["findings"] if entry["code"] == "accuracy_affecting"]
    assert said == ["grads-bf16", "tp-fp8"]
    code, _, err = run(capsys, f"{SMALL} --compress params-fp8")
    assert code == 2 and "expected fp8 as well" in err
    code, _, err = run(capsys, f"{SMALL} --compress bf16")
    assert code == 2 and "expected some of grads-bf16, tp-fp8, params-fp8" in err


def test_copies_in_a_node_are_synchronised_there_first(capsys) -> None:
    text = "llama3-8b --cluster h100-sxm8 --nodes 2 --layout sp=8,zero=1 --global-batch 4 --seq 4096 --recompute full"
    levels, flat = (answer(capsys, f"{text} --dp-sync {how}") for how in ("hierarchical", "flat"))
    assert levels["step_time_s"] < flat["step_time_s"]
    assert levels["breakdown_s"]["exposed_dp"] < flat["breakdown_s"]["exposed_dp"]
    assert levels["memory_bytes"] == flat["memory_bytes"]


def test_sharded_parameters_are_hidden_by_a_strategy(capsys) -> None:
    """FSDP: gathered right before each layer unless a strategy prefetches; or kept over the step."""
    sharded = "llama3-8b --cluster h100-sxm8 --nodes 2 --layout zero=3 --global-batch 32 --seq 4096"
    prefetch = "step=fsdp_prefetch:layers_per_group=1,depth=2,rate_limit=true,reshard_after_forward=true,keep_last=true"
    serial, hidden = answer(capsys, sharded), answer(capsys, f"{sharded} --overlap {prefetch}")
    assert hidden["breakdown_s"]["exposed_dp"] < 0.5 * serial["breakdown_s"]["exposed_dp"]
    assert "gathers_serial" in [finding["code"] for finding in serial["findings"]]
    assert "gathers_serial" not in [finding["code"] for finding in hidden["findings"]]
    kept = answer(capsys, f"{sharded} --no-reshard")
    assert kept["memory_bytes"]["parameters"] > serial["memory_bytes"]["parameters"]
    assert kept["breakdown_s"]["exposed_dp"] < serial["breakdown_s"]["exposed_dp"]


def test_rank_order_decides_what_crosses_nodes(capsys) -> None:
    """Stages beside each other in a node, gradients across: transfers are cheap and reductions are not."""
    two = SMALL.replace("--layout", "--nodes 2 --layout") + " --no-contention"
    usual, pipelines_inside = answer(capsys, two), answer(capsys, f"{two} --rank-order tp-cp-ep-pp-dp")
    found = usual["breakdown_s"], pipelines_inside["breakdown_s"]
    assert found[1]["exposed_pp"] < found[0]["exposed_pp"]
    assert found[1]["exposed_dp"] > found[0]["exposed_dp"]


def test_dtype_and_layout_follow_the_machine(capsys) -> None:
    code, out, _ = run(capsys, "gpt2-126m --cluster a100-sxm8 --nodes 2 --global-batch 32 --seq 1024 --dtype fp16")
    assert code == 0
    assert "gpt2-126m fp16 on 16 GPUs of a100-sxm8: dp=16" in out


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_traces_open(capsys, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    code, out, _ = run(capsys, f"{SMALL} --dp-overlap gradients --trace {path}")
    assert code == 0
    assert f"trace written to {path}" in out
    data = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    trace = json.loads(data)
    assert check_trace(trace["traceEvents"]) == []
    assert trace["otherData"]["title"] == "llama3-8b in tp=2,pp=2,dp=2,zero=1 on h100-sxm8, one GPU of each stage"
    names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"forward 0 0F0", "backward 1 1B3", "p2p 0F0 to 1", "optim.step 0 optimizer"} <= names


# Memory


def test_memory_that_does_not_fit(capsys) -> None:
    big = "llama3-8b --cluster h100-sxm8 --layout dp=8 --global-batch 8 --seq 8192"
    code, out, err = run(capsys, big)
    assert (code, out) == (1, "")
    assert err.count("error:") == 1
    assert "llama3-8b in dp=8 does not fit: every GPU needs" in err
    for kind in ("optimizer", "gradients", "parameters", "activations"):
        assert f"{kind} " in err
    assert "such as with" in err
    assert err.rstrip().endswith("--ignore-memory simulates it all the same")
    found = answer(capsys, f"{big} --ignore-memory")
    assert sum(found["memory_bytes"].values()) > 80e9
    # What is ignored is a finding.
    assert found["findings"][0]["code"] == "memory_exceeded"


# Bad input


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("llama3-9b --cluster h100-sxm8 --global-batch 8 --seq 4096", 2, "did you mean llama3-"),
        ("llama3-8b --cluster h100 --global-batch 8 --seq 4096", 3, "h100"),
        ("llama3-8b --cluster h100-sxm8 --global-batch 0 --seq 4096", 2, "global_batch is 0"),
        ("llama3-8b --cluster h100-sxm8 --global-batch -8 --seq 4096", 2, "global_batch is -8"),
        ("llama3-8b --cluster h100-sxm8 --global-batch 8 --seq 0", 2, "seq_len is 0"),
        ("llama3-8b --cluster h100-sxm8 --global-batch 8 --seq 4096 --nodes 0", 3, "--nodes is 0"),
        ("llama3-8b --cluster h100-sxm8 --global-batch 8 --seq 4096 --micro-batch 3", 2, "does not divide"),
        ("llama3-8b --cluster h100-sxm8 --global-batch 9 --seq 4096", 2, "does not divide into 8"),
        (f"{SMALL} --schedule 2f2b", 2, "pipeline schedule '2f2b' is unknown"),
        (f"{SMALL} --schedule zbv", 2, "vpp is the stages of a device"),
        (f"{SMALL} --virtual 3", 2, "32 layers do not divide into pp x vpp = 2 x 3"),
        (f"{SMALL},vpp=2 --virtual 2", 2, "4096,vpp=2"),
        (f"{SMALL} --recompute everything", 2, "recompute modules everything are unknown"),
        (f"{SMALL} --stack windows", 2, "launch stack 'windows' is unknown"),
        (f"{SMALL} --dp-overlap some", 2, "'some' is not one of"),
        (f"{SMALL} --bucket-size 0", 2, "expected a size above 0"),
        (f"{SMALL} --sustained-clock 1.5", 2, "sustained_clock is 1.5"),
        (f"{SMALL} --rank-order tp-dp", 2, "rank order is 'tp-dp'"),
        (f"{SMALL} --stage-layers 16,x", 2, "--stage-layers is '16,x'"),
        (f"{SMALL} --stage-layers 16,17", 2, "with the sum 32"),
        (f"{SMALL} --perturb slow=2", 2, "expected a share in (0, 1]"),
        (f"{SMALL} --overlap mlp.fc2", 2, "expected OPERATOR[:PASS]=STRATEGY"),
        (f"{SMALL} --overlap moe.fc2=chunked:chunks=2", 2, "operator 'moe.fc2' is unknown"),
        (f"{SMALL} --trace step.txt", 2, "expected a name that ends in .json or .json.gz"),
        (f"{SMALL} --trace nowhere/step.json", 2, "nowhere"),
        ("llama3-8b --cluster h100-sxm8 --layout tp=3 --global-batch 8 --seq 4096", 2, "8 ranks do not divide"),
        ("llama3-8b --cluster h100-sxm8 --layout tp=16 --global-batch 8 --seq 4096", 2, "8 ranks do not divide"),
        ("llama3-8b --cluster h100-sxm8 --layout tp=8,dp=4 --global-batch 8 --seq 4096", 2, "32 ranks and h100-sxm8"),
        ("llama3-8b --cluster h100-sxm8 --layout ep=8 --global-batch 8 --seq 4096", 2, "has no experts"),
        ("mixtral-8x7b --cluster h100-sxm8 --nodes 2 --layout ep=16 --global-batch 16 --seq 4096", 2, "8 experts"),
        ("llama3-8b --cluster h100-sxm8 --layout cp=8 --global-batch 8 --seq 4095", 2, "does not divide by 2 x cp"),
        ("llama3-8b --cluster h100-sxm8 --layout tpp=2 --global-batch 8 --seq 4096", 2, "'tpp=2' is no part"),
        ("llama3-8b --cluster v100s-pcie8 --global-batch 8 --seq 4096 --ignore-memory", 3, "no bf16 rate; it has fp16"),
        ("llama3-8b --cluster h100-sxm8 --seq 4096", 2, "--global-batch"),
        ("--cluster h100-sxm8 --global-batch 8 --seq 4096", 2, "MODEL"),
    ],
)
def test_bad_input_is_one_clear_error(capsys, tmp_path, monkeypatch, text: str, code: int, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    found, out, err = run(capsys, text)
    assert (found, out) == (code, ""), err
    assert message in err
    assert err.count("error:") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (json.dumps(CONFIG)[:60], "is not JSON"),
        (json.dumps([CONFIG]), "is a list"),
        (json.dumps({**CONFIG, "num_hidden_layers": 10**12}), "num_hidden_layers"),
        (json.dumps({**CONFIG, "num_attention_heads": 7}), "hidden"),
        (json.dumps({key: value for key, value in CONFIG.items() if key != "hidden_size"}), "hidden_size"),
        (json.dumps({**CONFIG, "vocab_size": -3}), "vocab_size"),
        (json.dumps({**CONFIG, "hidden_size": "wide"}), "hidden_size"),
    ],
)
def test_bad_configurations_are_one_clear_error(capsys, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    code, out, err = run(capsys, f"{path} --cluster h100-sxm8 --global-batch 8 --seq 1024")
    assert (code, out) == (2, "")
    assert err.count("error:") == 1
    assert message in err


def test_findings_of_a_configuration_are_in_the_answer(capsys, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "unheard_of": 3}))
    found = answer(capsys, f"{path} --cluster h100-sxm8 --global-batch 8 --seq 1024")
    assert "config_field_ignored" in [finding["code"] for finding in found["findings"]]


# --overlap


def test_overlaps_are_read() -> None:
    found = composition(
        ["mlp.fc2=chunked:chunks=4", "mlp.fc2:dgrad=serial", "attn.out=wave_group:group_tiles=[8,8],sms=steal"][:2]
    ).pairs
    assert {key: (chosen.strategy.name, chosen.parameters) for key, chosen in found.items()} == {
        ("mlp.fc2", "fwd"): ("chunked", {"chunks": 4}),
        ("mlp.fc2", "dgrad"): ("serial", {}),
    }
    text = "attn.out=wave_group:tile=[128,256,32],swizzle=1,sms=steal,group_tiles=[8,8]"
    (chosen,) = composition([text]).pairs.values()
    (whole,) = composition(["step=wgrad_delay:pending=2"]).arranging
    assert (whole.strategy.name, whole.parameters) == ("wgrad_delay", {"pending": 2})
    assert chosen.parameters == {"tile": [128, 256, 32], "swizzle": 1, "sms": "steal", "group_tiles": [8, 8]}


@pytest.mark.parametrize("strategy", load_strategies(), ids=lambda strategy: strategy.name)
def test_the_example_of_a_strategy_is_taken(strategy: Strategy) -> None:
    example = parameter_example(strategy.parameter_type)
    where = "step" if strategy.scope == "graph" else "mlp.fc2"
    found = composition([f"{where}={strategy.name}:{example}"])
    (chosen,) = (*found.pairs.values(), *found.arranging)
    # What was left out is filled in.
    assert set(chosen.parameters) == set(parameter_words(strategy.parameter_type))


def test_tiles_are_read_as_tables_print_them() -> None:
    texts = ("tile=128x256x64,comm_rows=1024", "tile=[128,256,64],comm_rows=1024")
    printed, listed = (composition([f"mlp.fc2=fused_tiles:{text}"]).pairs["mlp.fc2", "fwd"] for text in texts)
    assert printed.parameters == listed.parameters


def test_an_unknown_operator_is_named_before_missing_parameters(capsys) -> None:
    code, _, err = run(capsys, f"{SMALL} --overlap mlp.fc9=fused_tiles")
    assert code == 2
    assert "operator 'mlp.fc9' is unknown: did you mean 'mlp.fc2'? expected one of attn.out (" in err
    assert "tile" not in err.replace("fused_tiles", "")


def test_missing_parameters_are_answered_with_those_there_are() -> None:
    with pytest.raises(StrategyError, match=r"comm_rows: whole number.*such as fused_tiles:tile=128x256x64"):
        composition(["mlp.fc2=fused_tiles"])


def test_strategies_show_lists_parameters(capsys) -> None:
    main(["strategies", "show", "fused_tiles"])
    out = capsys.readouterr().out
    assert "comm_rows: whole number" in out
    assert "OPERATOR=fused_tiles:tile=128x256x64,comm_rows=1024" in out


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        (["mlp.fc2"], UsageError, r"expected OPERATOR\[:PASS\]=STRATEGY"),
        (["=chunked"], UsageError, "expected OPERATOR"),
        (["mlp.fc2="], UsageError, "expected OPERATOR"),
        (["mlp.fc2:back=chunked:chunks=2"], UsageError, "names the pass 'back'; expected one of fwd, dgrad"),
        (["mlp.fc2=chunked:chunks"], UsageError, "with the parameter 'chunks'"),
        (["mlp.fc2=chunked:chunks=2,chunks=3"], UsageError, "each parameter once"),
        (["mlp.fc2=chunked:chunks=2", "mlp.fc2:fwd=chunked:chunks=3"], UsageError, "mlp.fc2:fwd twice"),
        (["step:fwd=wgrad_delay:pending=0"], UsageError, "names the pass 'fwd'; expected none with step"),
        (["step=wgrad_delay:pending=0", "step=wgrad_delay:pending=1"], UsageError, "wgrad_delay twice"),
        (["mlp.fc2=chunk:chunks=2"], StrategyError, "did you mean 'chunked'"),
        (["mlp.fc2=chunked"], StrategyError, "chunks"),
        (["mlp.fc2=chunked:chunks=many"], StrategyError, "parameters of chunked cannot be used"),
        (["mlp.fc2=chunked:pieces=2"], StrategyError, "no parameter 'pieces'"),
    ],
)
def test_bad_overlaps(entries: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        composition(entries)


EXPERTS = "qwen3-30b-a3b --cluster h100-sxm8 --layout ep=8 --global-batch 8 --seq 2048 --ignore-memory"


def test_dispatchers_and_routing_of_a_file(capsys, tmp_path: Path) -> None:
    even = answer(capsys, EXPERTS)
    fast = answer(capsys, f"{EXPERTS} --dispatch deepep:dtype=fp8")
    assert fast["breakdown_s"]["exposed_ep"] < even["breakdown_s"]["exposed_ep"]
    assert {"dispatch_kernels_assumed", "accuracy_affecting"} <= {entry["code"] for entry in fast["findings"]}
    counts = tmp_path / "counts.csv"
    counts.write_text("expert,tokens\n" + "".join(f"{n},{1 + 3 * (n < 16)}\n" for n in range(128)))
    given = answer(capsys, f"{EXPERTS} --perturb routing={counts}")
    spelled = answer(
        capsys, f"{EXPERTS} --perturb routing=counts:{':'.join(str(1 + 3 * (n < 16)) for n in range(128))}"
    )
    assert given["step_time_s"] == spelled["step_time_s"] > even["step_time_s"]
    assert given["memory_bytes"]["activations"] > even["memory_bytes"]["activations"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("--dispatch boat", "boat"),
        ("--perturb routing=zipf:x", "zipf:EXPONENT"),
        ("--perturb routing=none.csv", "cannot be read"),
        ("--perturb slow=0.9@" + "9" * 5000, "number of a rank"),
        ("--stage-layers " + "9" * 5000, "whole numbers"),
        ("--dispatch deepep:sms=" + "9" * 5000, "whole number"),
        ("--dispatch deepep:sms=200", "132"),
        ("--dispatch deepep:sms=0", "expected at least 1, or leave sms out"),
        ("--dispatch deepep:node_limit=0", "expected at least 1, or leave node_limit out"),
        ("--perturb routing=counts:1:2", "2 recorded counts and 128 experts"),
        ("--queues 0", "0 hardware queues"),
    ],
)
def test_refusals_of_experts(capsys, text: str, part: str) -> None:
    code, out, err = run(capsys, f"{EXPERTS} {text}")
    assert code == 2 and out == "" and part in err

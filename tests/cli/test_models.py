"""`overlapsim models` as users call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_commands import run as run_command

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "unheard_of": 3,
}


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    return run_command(capsys, ["models", *args])


def test_list_names_every_model(capsys) -> None:
    code, out, err = run(capsys, "list")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) > 40
    assert "internal-352b             352 B parameters, 45.3 B active,  60 layers, hidden  4096, gqa moe" in lines
    code, out, _ = run(capsys, "list", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["name"] for row in rows] == [line.split()[0] for line in lines]
    keys = {"name", "num_parameters", "num_active_parameters", "num_layers", "hidden", "kinds", "dtype"}
    assert all(set(row) == keys for row in rows)


def test_show_has_the_documented_keys(capsys) -> None:
    code, out, err = run(capsys, "show", "deepseek-v3", "--seq-len", "4096", "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert set(answer) == {
        *("name", "num_parameters", "num_active_parameters", "num_layers", "hidden", "kinds", "dtype", "source"),
        *(
            "spec",
            "parameters_by_operator",
            "gemm_parameters_per_token",
            "mtp_parameters",
            "flop_per_token",
            "findings",
        ),
    }
    assert answer["num_parameters"] == sum(answer["parameters_by_operator"].values()) == 671_026_419_200
    assert answer["kinds"] == ["mla dense", "mla moe"]
    assert [layer["count"] for layer in answer["spec"]["layers"]] == [3, 58]
    flop = answer["flop_per_token"]
    assert flop["seq_len"] == 4096
    assert flop["step_masked_flop"] == pytest.approx(250e9, rel=5e-3)
    assert flop["step_masked_flop"] == pytest.approx(3 * flop["forward_masked_flop"])
    assert flop["scores_masked_flop"] == flop["scores_full_flop"] / 2
    assert flop["forward_full_flop"] == pytest.approx(sum(flop["by_operator_flop"].values()) + flop["scores_full_flop"])
    assert flop["step_full_recompute_flop"] > flop["step_full_flop"] > flop["step_masked_flop"]


def test_show_for_people(capsys) -> None:
    code, out, _ = run(capsys, "show", "internal-352b")
    assert code == 0
    assert "352 B parameters, 45.3 B active a token, 60 layers, hidden 4096, bf16" in out
    assert (
        "60 x gqa 32 heads of 128, 8 for keys and values, 32 experts top-3, each gated silu ffn 14336, 1 shared" in out
    )
    assert "283 GFLOP a step" in out
    assert "source      MegaScale-MoE" in out
    for name, said in (
        ("gpt-oss-120b", "window 128"),
        ("hunyuan-large", "keys and values of the layer before"),
        ("deepseek-v3", "mtp         1 more for training, 11.6 B parameters"),
        ("wan2.1-t2v-14b", "512 context tokens"),
    ):
        assert said in run(capsys, "show", name)[1]


def test_show_reads_a_config_and_prints_findings(capsys, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    code, out, err = run(capsys, "show", str(path))
    assert (code, err) == (0, "")
    assert "8.03 B parameters" in out
    assert "finding: unheard_of is 3 in the configuration" in out
    assert "[dtype_assumed]" in out
    _, out, _ = run(capsys, "show", str(tmp_path), "--json")
    assert [finding["code"] for finding in json.loads(out)["findings"]] == ["dtype_assumed", "config_field_ignored"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("show", "llama3-8"), "did you mean llama3-8b"),
        (("show", "nowhere.json"), "there is no such file"),
        (("show", "empty.json"), "empty.json is empty"),
        (("show", "cut.json"), "cut.json is not JSON: line 1"),
        (("show", "list.json"), "list.json is a list"),
        (("show", "text.yaml"), "text.yaml is not a model file"),
        (("show", "llama3-8b", "--seq-len", "0"), "--seq-len is 0"),
        (("show", "llama3-8b", "--seq-len", "x"), "--seq-len"),
        (("show",), "MODEL"),
    ],
)
def test_bad_input_is_one_clear_error(capsys, tmp_path: Path, monkeypatch, args, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.json").write_text("")
    Path("cut.json").write_text(json.dumps(CONFIG)[:50])
    Path("list.json").write_text(json.dumps([CONFIG]))
    Path("text.yaml").write_text("hello")
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("error:") == 1

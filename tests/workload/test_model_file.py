"""Model files of our own: what they may hold, and one error for each fault."""

from __future__ import annotations

import pytest

from overlapsim.errors import WorkloadError
from overlapsim.workload.families import gpt
from overlapsim.workload.model import Attention, Layer, Mlp, MoE
from overlapsim.workload.model_file import parse_model

DENSE = """
kind: model
source: a test
hidden: 512
vocabulary: 1000
max_positions: 128
attention: {num_heads: 8, num_kv_heads: 2}
mlp: {ffn: 1024, gated: true, activation: silu}
moe: {num_experts: 4, top_k: 2, expert: {ffn: 256}, num_shared_experts: 1, shared: {ffn: 512}}
layers:
  - {count: 2}
  - {count: 5, block: moe, windows: [16, null], shared_kv: [false, true, true]}
"""
GPT = "{kind: model, family: gpt, num_layers: 2, hidden: 64, num_heads: 4, vocabulary: 99, max_positions: 8}"


def test_runs_of_layers_take_windows_and_shared_keys_in_turn() -> None:
    model = parse_model(DENSE, "mine")
    assert (model.name, model.source, model.num_layers) == ("mine", "a test", 7)
    assert model.layers[0] == model.layers[1] == Layer(Attention(8, 2, 64), Mlp(1024, gated=True, activation="silu"))
    assert model.layers[2].mlp == MoE(4, 2, Mlp(256), num_shared_experts=1, shared=Mlp(512))
    assert [layer.attention.window for layer in model.layers] == [None, None, 16, None, 16, None, 16]
    assert [layer.attention.shared_kv for layer in model.layers[2:]] == [False, True, True, False, True]


def test_a_family_is_its_constructor() -> None:
    assert parse_model(GPT, "m") == gpt(2, 64, 4, 99, 8, name="m")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "model f is empty"),
        ("[1, 2]", "model f is not a model file"),
        ("kind: cluster", "model f is not a model file"),
        ("kind: model", "missing keys hidden, vocabulary, max_positions, attention, layers"),
        ("kind: model\nhidden: [", "model f is not YAML: line "),
        ("kind: model\nkind: model", "appears twice"),
        (GPT.replace("gpt,", "bert,"), "family is 'bert'; expected gpt"),
        (GPT.replace("num_layers: 2, ", ""), "missing key num_layers"),
        (GPT.replace("num_layers", "layers"), "unknown key layers; did you mean num_layers?"),
        (GPT.replace("64", "65"), "hidden is 65 and num_heads is 4"),
        (GPT.replace("99", "'99'"), "vocabulary is '99'"),
        (DENSE.replace("hidden: 512", "hidden: 0"), "hidden is 0"),
        (DENSE.replace("hidden: 512", "hidden: 500"), "hidden is 500 and num_heads is 8"),
        (DENSE.replace("hidden: 512", "hiden: 512"), "unknown key hiden; did you mean hidden?"),
        (DENSE.replace("num_heads: 8", "heads: 8"), "missing key attention.num_heads"),
        (DENSE.replace("num_kv_heads: 2", "num_kv_heads: 3"), "attention: num_heads is 8 and num_kv_heads is 3"),
        (DENSE.replace("{ffn: 1024", "{fnn: 1024"), "unknown key mlp.fnn; did you mean ffn?"),
        (DENSE.replace("expert: {ffn: 256}", "expert: 256"), "moe.expert is 256; expected a section"),
        (DENSE.replace("top_k: 2", "top_k: 9"), "moe: top_k is 9 of 4 experts"),
        (DENSE.replace("{count: 2}", "2"), "layers[0] is 2"),
        (DENSE.replace("{count: 2}", "{count: -2}"), "layers[0].count is -2"),
        (DENSE.replace("{count: 2}", "{count: 1e9}"), "layers[0].count is"),
        (DENSE.replace("{count: 2}", "{count: 2, block: sparse}"), "layers[0].block is 'sparse'"),
        (DENSE.replace("{count: 2}", "{count: 2, blok: moe}"), "unknown key layers[0].blok; did you mean block?"),
        (DENSE.replace("[16, null]", "16"), "layers[1].windows is 16"),
        (DENSE.replace("[16, null]", "[-1]"), "attention: window is -1"),
        (DENSE.replace("{count: 2}", "{count: 2, modulation: 6.5}"), "modulation is 6.5"),
        (DENSE.replace("source: a test", "source: 7"), "source is 7; expected a text"),
        (DENSE + "diffusion: {patch_inputs: 4}\n", "missing keys diffusion.patch_outputs"),
        (DENSE[: DENSE.index("layers:")] + "layers: {count: 2}\n", "layers is {'count': 2}; expected a list"),
        (DENSE[: DENSE.index("attention:")], "missing keys attention, layers"),
    ],
)
def test_one_error_a_fault(text: str, message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        parse_model(text, "f")
    assert message in str(error.value)
    assert str(error.value).startswith("model f")
    assert "\n" not in str(error.value)

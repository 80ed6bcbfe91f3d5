"""Published configurations are the presets; what is wrong is one error, what is not read a finding."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.errors import WorkloadError
from overlapsim.workload.hf_config import parse_config
from overlapsim.workload.hf_families import FAMILIES
from overlapsim.workload.model import Attention, LatentAttention, Mlp, ModelSpec, MoE
from overlapsim.workload.model_count import parameters
from overlapsim.workload.presets import load_model, load_preset

BF16 = {"torch_dtype": "bfloat16"}


def common(hidden: int, layers: int, heads: int, kv: int, ffn: int, vocabulary: int, longest: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "max_position_embeddings": longest,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "architectures": ["SomeForCausalLM"],
        "transformers_version": "4.40.0",
        "use_cache": True,
        **BF16,
    }


DEEPSEEK_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "model_type": "llama",
        **common(4096, 32, 32, 8, 14336, 128256, 8192),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "rope_scaling": None,
    },
    "llama2-7b": {"model_type": "llama", **common(4096, 32, 32, 32, 11008, 32000, 4096)},
    "mixtral-8x7b": {
        "model_type": "mixtral",
        **common(4096, 32, 32, 8, 14336, 32000, 32768),
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "router_aux_loss_coef": 0.02,
    },
    "qwen1.5-moe-a2.7b": {
        "model_type": "qwen2_moe",
        **common(2048, 24, 16, 16, 5632, 151936, 8192),
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "max_window_layers": 21,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        **common(2048, 48, 32, 4, 6144, 151936, 40960),
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "sliding_window": None,
    },
    "deepseek-moe-16b": {
        "model_type": "deepseek",
        **common(2048, 28, 16, 16, 10944, 102400, 4096),
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
    },
    "deepseek-v2": {
        "model_type": "deepseek_v2",
        **common(5120, 60, 128, 128, 12288, 102400, 163840),
        **DEEPSEEK_MLA,
        "q_lora_rank": 1536,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "routed_scaling_factor": 16.0,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **common(7168, 61, 128, 128, 18432, 129280, 163840),
        **DEEPSEEK_MLA,
        "q_lora_rank": 1536,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        **common(2880, 36, 64, 8, 2880, 201088, 131072),
        "head_dim": 64,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "swiglu_limit": 7.0,
    },
    "phi-3.5-moe": {
        "model_type": "phimoe",
        **common(4096, 32, 32, 8, 6400, 32064, 131072),
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": 131072,
        "original_max_position_embeddings": 4096,
    },
    "hunyuan-large": {
        "model_type": "hunyuan",
        **common(6400, 64, 80, 8, 18304, 128512, 131072),
        "num_experts": 16,
        "moe_topk": 1,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "use_qk_norm": True,
        "attention_head_dim": 80,
        "tie_word_embeddings": True,
    },
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
LLAMA, V3 = CONFIGS["llama3-8b"], CONFIGS["deepseek-v3"]


def read(config: object, name: str = "m") -> tuple[ModelSpec, list[str]]:
    model, findings = parse_config(json.dumps(config), "config.json", name)
    return model, [finding.code for finding in findings]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_configuration_is_the_preset(name: str) -> None:
    model, findings = read(CONFIGS[name], name)
    assert model == load_preset(name)
    assert findings == (["quantized_weights"] if name == "deepseek-v3" else [])


def test_gpt_oss_slides_on_every_second_layer_where_its_file_does_not_say() -> None:
    config = {key: value for key, value in CONFIGS["gpt-oss-120b"].items() if key != "layer_types"}
    assert read(config, "gpt-oss-120b") == (load_preset("gpt-oss-120b"), [])


def test_gpt2_and_gpt3_style() -> None:
    model, findings = read({**GPT2, "torch_dtype": "float32", "activation_function": "gelu_new", "n_ctx": 1024})
    assert parameters(model).total == 124_439_808
    assert (model.dtype, model.positions, model.norm, model.tied_embeddings) == ("fp32", "learned", "layernorm", True)
    assert findings == []
    large = {**GPT2, "n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048, "n_inner": None}
    gpt3, findings = read(large, "gpt3-175b")
    assert gpt3 == load_preset("gpt3-175b")
    assert findings == ["dtype_assumed"]


def test_families_that_have_no_preset() -> None:
    # Mistral 7B: a window below its longest sequence, on every layer.
    mistral, _ = read({"model_type": "mistral", **common(4096, 32, 32, 8, 14336, 32000, 32768), "sliding_window": 4096})
    assert parameters(mistral).total == 7_241_732_096
    assert {layer.attention.window for layer in mistral.layers} == {4096}
    # Qwen2 7B: biases on queries, keys and values alone.
    qwen2, _ = read({"model_type": "qwen2", **common(3584, 28, 28, 4, 18944, 152064, 131072)})
    assert parameters(qwen2).total == 7_615_616_512
    # Qwen3 8B: heads of 128, norms within each.
    qwen3, _ = read({"model_type": "qwen3", **common(4096, 36, 32, 8, 12288, 151936, 40960), "head_dim": 128})
    assert parameters(qwen3).total == 8_190_735_360
    # DeepSeek-V2-Lite: queries in one step.
    lite = {**CONFIGS["deepseek-v2"], **common(2048, 27, 16, 16, 10944, 102400, 163840), "q_lora_rank": None}
    lite |= {"n_routed_experts": 64, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1}
    model, _ = read(lite)
    assert model.layers[0].attention == Attention(16, 16, 192, 128, LatentAttention(None, 512, 128, 64))
    assert parameters(model).total == 15_706_484_224


def test_layers_that_are_dense_among_experts() -> None:
    config = {**CONFIGS["qwen3-30b-a3b"], "decoder_sparse_step": 2, "mlp_only_layers": [1, 5]}
    model, _ = read(config)
    sparse = [index for index, layer in enumerate(model.layers) if isinstance(layer.mlp, MoE)]
    assert sparse == [index for index in range(48) if index % 2 == 1 and index not in (1, 5)]
    assert model.layers[0].mlp == Mlp(6144, gated=True, activation="silu")
    model, _ = read({**V3, "moe_layer_freq": 2})
    assert [index for index, layer in enumerate(model.layers) if layer.kind == "moe"] == list(range(4, 61, 2))


def test_windows_of_qwen_start_at_a_layer_and_only_where_used() -> None:
    config = {"model_type": "qwen2", **common(3584, 28, 28, 4, 18944, 152064, 131072), "sliding_window": 4096}
    off, _ = read({**config, "use_sliding_window": False, "max_window_layers": 20})
    on, _ = read({**config, "use_sliding_window": True, "max_window_layers": 20})
    assert [layer.attention.window for layer in off.layers] == [None] * 28
    assert [layer.attention.window for layer in on.layers] == [None] * 20 + [4096] * 8


def test_sizes_of_each_layer() -> None:
    config = {**CONFIGS["hunyuan-large"], "num_hidden_layers": 3, "num_experts": [16, 8, 1], "moe_topk": [1, 2, 1]}
    config |= {"num_shared_expert": [1, 2, 1], "moe_intermediate_size": [64, 128, 256]}
    model, _ = read(config)
    first, second = model.layers[0].mlp, model.layers[1].mlp
    assert isinstance(first, MoE)
    assert isinstance(second, MoE)
    assert (first.num_experts, first.top_k, first.expert.ffn) == (16, 1, 64)
    assert (second.num_experts, second.top_k, second.expert.ffn, second.num_shared_experts) == (8, 2, 128, 2)
    assert second.shared is not None
    assert second.shared.ffn == 2 * 18304
    assert model.layers[2].mlp == Mlp(256, gated=True, activation="silu")
    assert [layer.attention.shared_kv for layer in model.layers] == [False, True, False]


def test_other_spellings_of_newer_frameworks() -> None:
    config = dict(CONFIGS["qwen3-30b-a3b"])
    config["num_local_experts"] = config.pop("num_experts")
    config["dtype"] = config.pop("torch_dtype")
    config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
    assert read(config, "qwen3-30b-a3b") == (load_preset("qwen3-30b-a3b"), [])


def test_the_language_part_of_a_multi_modal_model() -> None:
    model, findings = read({"model_type": "some_vl", "text_config": LLAMA, "vision_config": {"depth": 32}})
    assert replace(model, name="llama3-8b") == load_preset("llama3-8b")
    assert findings == ["text_part_only"]


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"torch_dtype": None}, ["dtype_assumed"]),
        ({"num_key_value_heads": None}, ["kv_heads_assumed"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantized_weights"]),
        ({"attn_logit_softcapping": 30.0}, ["config_field_ignored"]),
        ({"hc_mult": 4, "cross_layer": [1]}, ["config_field_ignored"] * 2),
        ({"some_switch": False, "other": None}, []),
    ],
)
def test_what_is_assumed_or_not_read_is_a_finding(changes: dict[str, Any], codes: list[str]) -> None:
    _, findings = read({**LLAMA, **changes})
    assert findings == codes


def test_a_finding_names_the_field_and_its_value() -> None:
    _, findings = parse_config(json.dumps({**LLAMA, "hc_mult": 4}), "config.json")
    assert findings[0].message.startswith("hc_mult is 4 in the configuration and is not modelled")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([LLAMA], "is a list; expected the JSON object"),
        ("llama", "is a text"),
        (7, "is a number"),
        (None, "is null"),
        ({}, "model_type is missing; expected one of llama, mistral"),
        ({**LLAMA, "model_type": "mamba"}, "model_type is 'mamba'; expected one of"),
        ({**LLAMA, "model_type": ["llama"]}, "model_type is ['llama']; expected a text"),
        ({"model_type": "llama"}, "intermediate_size is missing; expected a whole number"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0; expected a whole number from 1"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({**LLAMA, "hidden_size": "4096"}, "hidden_size is '4096'"),
        ({**LLAMA, "hidden_size": 4096.5}, "hidden_size is 4096.5"),
        ({**LLAMA, "hidden_size": -4096}, "hidden_size is -4096"),
        ({**LLAMA, "hidden_size": 4100}, "hidden is 4100 and num_heads is 32"),
        ({**LLAMA, "hidden_size": 2**40}, "hidden_size is 1099511627776"),
        ({**LLAMA, "num_key_value_heads": 5}, "num_kv_heads is 5"),
        ({**LLAMA, "vocab_size": None}, "vocab_size is missing"),
        ({**LLAMA, "vocab_size": True}, "vocab_size is True"),
        ({**LLAMA, "head_dim": {}}, "head_dim is {}"),
        ({**LLAMA, "hidden_act": "xielu"}, "hidden_act is 'xielu'; expected one of silu"),
        ({**LLAMA, "torch_dtype": "float8"}, "dtype is 'float8'"),
        ({**LLAMA, "torch_dtype": 16}, "torch_dtype is 16; expected a text"),
        ({**LLAMA, "tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
        ({**LLAMA, "layer_types": ["full_attention"]}, "expected sliding_attention or full_attention for each of 32"),
        ({**LLAMA, "layer_types": ["linear_attention"] * 32}, "layer_types is"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        ({**V3, "num_experts_per_tok": 300}, "top_k is 300 of 256 experts"),
        ({**V3, "n_group": 7}, "256 experts stand in 7 groups"),
        ({**V3, "scoring_func": "tanh"}, "scoring_func is 'tanh'"),
        ({**V3, "v_head_dim": None}, "v_head_dim is missing"),
        ({**V3, "n_shared_experts": -1}, "n_shared_experts is -1"),
        ({**V3, "num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ({**V3, "n_routed_experts": None}, "n_routed_experts (or num_experts, num_local_experts) is missing"),
        ({**CONFIGS["qwen3-30b-a3b"], "mlp_only_layers": 3}, "mlp_only_layers is 3; expected a list"),
        ({**CONFIGS["qwen3-30b-a3b"], "mlp_only_layers": ["1"]}, "mlp_only_layers is '1'"),
        (
            {**CONFIGS["hunyuan-large"], "num_experts": [16, 16]},
            "num_experts has 2 entries; expected one for each of 64",
        ),
        ({**GPT2, "n_head": 7}, "hidden is 768 and num_heads is 7"),
        ({**GPT2, "n_positions": None}, "max_position_embeddings (or n_positions, n_ctx) is missing"),
    ],
)
def test_one_error_a_fault(config: object, message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        read(config)
    assert message in str(error.value)
    assert str(error.value).startswith("configuration config.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        (json.dumps(LLAMA, indent=1)[:-40], "is not JSON: line "),
        ("{'model_type': 'llama'}", "is not JSON: line 1"),
        ('{"hidden_size": NaN}', "NaN is no JSON number"),
        ('{"hidden_size": 1, "hidden_size": 2}', "field 'hidden_size' appears twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"hidden_size": ' + "9" * 10_000 + "}", "is not JSON that we read"),
        ("<html>not found</html>", "is not JSON: line 1"),
    ],
)
def test_text_that_is_no_configuration(text: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=r"^configuration broken\.json ") as error:
        parse_config(text, "broken.json")
    assert message in str(error.value)
    assert len(str(error.value)) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 2**40) | st.floats(allow_nan=False) | st.text("ab1", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab1", max_size=3), inner, max_size=3),
    max_leaves=4,
)


@given(st.sampled_from(sorted(CONFIGS)), st.data())
def test_any_value_in_any_field_is_a_model_or_one_error(name: str, data: st.DataObject) -> None:
    config = dict(CONFIGS[name])
    for field in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3)):
        config[field] = data.draw(JSON)
    try:
        model, _ = read(config)
    except WorkloadError as error:
        assert "\n" not in str(error)
    else:
        assert parameters(model).total > 0


@given(st.sampled_from([*FAMILIES, "unknown"]), JSON)
def test_any_json_is_a_model_or_one_error(model_type: str, rest: object) -> None:
    config = {**(rest if isinstance(rest, dict) else {"hidden_size": rest}), "model_type": model_type}
    with pytest.raises(WorkloadError):
        read(config)


def test_a_configuration_takes_its_name_from_file_or_folder(tmp_path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text("\ufeff" + json.dumps(LLAMA), encoding="utf-8")
    (tmp_path / "other.json").write_text(json.dumps(LLAMA))
    named = [load_model(path)[0].name for path in (folder, folder / "config.json", tmp_path / "other.json")]
    assert named == ["my-llama", "my-llama", "other"]

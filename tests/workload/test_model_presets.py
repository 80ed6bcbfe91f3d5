"""The models that ship: published totals to the parameter, sources, and how a name is looked up."""

from __future__ import annotations

import pytest

from overlapsim.errors import WorkloadError
from overlapsim.workload.families import gpt
from overlapsim.workload.model import MoE
from overlapsim.workload.model_count import parameters
from overlapsim.workload.presets import list_presets, load_model, load_preset

# Parameters in the published weights, as their hubs count them.
EXACT = {
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "phi-3.5-moe": 41_873_153_344,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-moe-16b": 16_375_728_128,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-120b": 116_829_156_672,
}
# Totals and active parameters of papers, in billions, as printed.
PRINTED = {
    "mixtral-8x7b": (47, 13),
    "mixtral-8x22b": (141, 39),
    "phi-3.5-moe": (42, 6.6),
    "qwen1.5-moe-a2.7b": (14.3, 2.7),
    "qwen2-57b-a14b": (57, 14),
    "qwen3-30b-a3b": (30.5, 3.3),
    "hunyuan-large": (389, 52),
    "deepseek-moe-16b": (16.4, 2.8),
    "deepseek-v2": (236, 21),
    "deepseek-v3": (671, 37),
    "internal-352b": (352, None),
    "wan2.1-t2v-14b": (14.3, None),
    "gpt3-175b": (175, None),
    "gpt-13b": (13, None),
    "gpt2-126m": (0.126, None),
    "sc21-3.6b": (3.6, None),
    "sc21-18.4b": (18.4, None),
    "sc21-39.1b": (39.1, None),
    "sc21-76.1b": (76.1, None),
    "sc21-145.6b": (145.6, None),
    "sc21-310.1b": (310.1, None),
    "sc21-529.6b": (529.6, None),
    "sc21-1t": (1008.0, None),
    "korthikanti-22b": (22, None),
    "korthikanti-530b": (530, None),
    "megascale-175b": (175, None),
    "megascale-530b": (530, None),
    "vtrain-3.6b": (3.6, None),
    "vtrain-18.4b": (18.4, None),
    "vtrain-39.1b": (39.1, None),
    "vtrain-175b": (175, None),
}


@pytest.mark.parametrize("name", EXACT)
def test_published_weights_to_the_parameter(name: str) -> None:
    assert parameters(load_preset(name)).total == EXACT[name]


@pytest.mark.parametrize("name", PRINTED)
def test_printed_totals_to_their_last_digit(name: str) -> None:
    total, active = PRINTED[name]
    count = parameters(load_preset(name))
    for printed, ours in ((total, count.total), (active, count.active)):
        if printed is not None:
            digits = len(str(printed).partition(".")[2])
            # 37.55 is printed 37, 51.3 is printed 52, 3.559 is 3.6: one unit of the last digit.
            assert abs(ours / 1e9 - printed) <= 10.0**-digits, ours


def test_active_parameters_of_gpt_oss_without_its_embedding() -> None:
    model = load_preset("gpt-oss-120b")
    active = parameters(model).active - model.vocabulary * model.hidden
    assert active / 1e9 == pytest.approx(5.13, abs=0.005)


def test_mtp_layer_of_deepseek_v3_beside_its_11_5_billion() -> None:
    assert parameters(load_preset("deepseek-v3")).mtp / 1e9 == pytest.approx(11.5, rel=0.01)


def test_step_video_is_within_what_its_uncertain_widths_allow() -> None:
    model = load_preset("step-video-t2v")
    assert "Not certain" in model.source
    assert parameters(model).total / 1e9 == pytest.approx(30, rel=0.03)


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_has_its_name_and_a_source(name: str) -> None:
    model = load_preset(name)
    assert model.name == name
    assert len(model.source) > 40


def test_table_2_of_megascale_moe() -> None:
    """Layers, hidden, heads, queries for each key, expert width, experts, top-k as printed."""
    rows = {
        "internal-352b": (60, 4096, 32, 4, 14336, 32, 3),
        "megascale-mixtral-8x7b": (32, 4096, 32, 4, 14336, 8, 2),
        "megascale-mixtral-8x22b": (56, 6144, 48, 6, 16384, 8, 2),
        "megascale-hunyuan-large": (64, 6400, 80, 10, 18304, 16, 1),
        "megascale-phi-3.5-moe": (32, 4096, 32, 4, 6400, 16, 2),
        "megascale-deepseekmoe": (28, 2048, 16, 1, 1408, 64, 6),
    }
    for name, (layers, hidden, heads, m, ffn, experts, top_k) in rows.items():
        model = load_preset(name)
        (layer,) = model.kinds
        attention, moe = layer.attention, layer.mlp
        assert isinstance(moe, MoE)
        assert (model.num_layers, model.hidden, model.vocabulary, model.max_positions) == (layers, hidden, 65536, 8192)
        assert (attention.num_heads, attention.num_heads // attention.num_kv_heads) == (heads, m)
        assert (moe.expert.ffn, moe.num_experts, moe.top_k, moe.expert.gated) == (ffn, experts, top_k, True)


def test_a_family_makes_the_single_node_models_of_vtrain() -> None:
    model = gpt(num_layers=24, hidden=1024, num_heads=16, vocabulary=50257, max_positions=1024)
    assert parameters(model).total / 1e6 == pytest.approx(354.8, abs=0.1)  # GPT-2 medium


def test_names_and_paths(tmp_path, monkeypatch) -> None:
    assert load_model("llama3-8b") == (load_preset("llama3-8b"), ())
    with pytest.raises(WorkloadError, match="did you mean llama3-8b"):
        load_model("llama3-8B")
    with pytest.raises(WorkloadError, match="there is no such file"):
        load_model("nowhere/model.yaml")
    with pytest.raises(WorkloadError, match="there is no such file"):
        load_model(tmp_path)  # a folder without a config.json
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="not UTF-8"):
        load_model(tmp_path / "mine.yaml")
    with pytest.raises(WorkloadError, match="cannot read model"):
        load_model("x" * 5000 + ".yaml")
    # A preset goes before a file of its name; with a slash the file is meant.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama3-8b").mkdir()
    assert load_model("llama3-8b")[0].num_layers == 32
    with pytest.raises(WorkloadError, match="there is no such file"):
        load_model("./llama3-8b")

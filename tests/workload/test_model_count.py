"""Parameters and FLOP against closed forms and published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.errors import WorkloadError
from overlapsim.units import dtype_bytes
from overlapsim.workload.families import gpt
from overlapsim.workload.model import Attention, Layer, Mlp, ModelSpec, MoE
from overlapsim.workload.model_count import (
    flop_per_token,
    layer_flop_per_token,
    layer_parameters,
    parameters,
    step_flop_per_token,
)
from overlapsim.workload.operators import check_name
from overlapsim.workload.presets import list_presets, load_preset
from overlapsim.workload.utilization import megatron_step_flop, tokens_per_s, utilization
from overlapsim.workload.weights import Matrix, layer_weights, model_weights, mtp_weights

SIZES = st.integers(1, 6)
A100_FLOP_PER_S = 312e12
H800_FLOP_PER_S = 989e12


@st.composite
def gpts(draw) -> ModelSpec:
    heads, head_dim = draw(SIZES), draw(st.integers(1, 96))
    layers, vocabulary = draw(st.integers(1, 12)), draw(st.integers(1, 60_000))
    return gpt(layers, heads * head_dim, heads, vocabulary, draw(st.integers(1, 4096)))


# Closed forms


@given(gpts())
def test_parameters_of_a_gpt_are_narayanans_formula(model: ModelSpec) -> None:
    """SC'21, equation 2: 12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)), and the last norm, which it leaves out."""
    h, layers, table = model.hidden, model.num_layers, model.vocabulary + model.max_positions
    assert parameters(model).total == layers * (12 * h**2 + 13 * h) + table * h + 2 * h


@given(gpts(), st.integers(1, 8192), st.integers(1, 64))
def test_a_step_with_full_recompute_is_megatrons_formula(model: ModelSpec, seq_len: int, batch: int) -> None:
    ours = batch * seq_len * step_flop_per_token(model, seq_len, "full", "full")
    assert ours == pytest.approx(
        megatron_step_flop(batch, seq_len, model.num_layers, model.hidden, model.vocabulary), rel=1e-12
    )


@given(gpts(), st.integers(1, 8192))
def test_model_flop_are_korthikantis_formula(model: ModelSpec, seq_len: int) -> None:
    """72 B l s h^2 (1 + s/(6h) + v/(12 h l)) without recompute (arXiv 2205.05198, appendix)."""
    h, layers, v = model.hidden, model.num_layers, model.vocabulary
    expected = 72 * layers * h**2 * (1 + seq_len / (6 * h) + v / (12 * h * layers))
    assert step_flop_per_token(model, seq_len, "full") == pytest.approx(expected, rel=1e-12)


@given(st.integers(1, 4096), st.integers(1, 5000))
def test_a_causal_window_lets_through_what_a_count_of_pairs_says(window: int, seq_len: int) -> None:
    def seen(attention: Attention) -> float:
        model = ModelSpec("m", 4, (Layer(attention, Mlp(4)),), 1, 1)
        return flop_per_token(model, seq_len).scores_masked / 4

    pairs = sum(min(token + 1, window) for token in range(seq_len))
    # Papers take s / 2 for (s + 1) / 2: half a token at most.
    assert abs(seen(Attention(1, 1, 1, window=window)) - pairs / seq_len) <= 0.5 + 1e-9
    assert seen(Attention(1, 1, 1, window=window, causal=False)) == min(window, seq_len)


@pytest.mark.parametrize("name", list_presets())
def test_sums_agree_and_names_join(name: str) -> None:
    model = load_preset(name)
    count, flop = parameters(model), flop_per_token(model, 4096)
    assert sum(count.by_operator.values()) == count.total
    assert count.matrices <= count.active <= count.total + model.vocabulary * model.hidden
    layers = sum(sum(layer_parameters(model, layer).values()) for layer in model.layers)
    assert layers + sum(weight.parameters for weight in model_weights(model)) == count.total
    # 2 FLOP for each weight that a token meets; what a context or a whole sequence meets is spread over its tokens.
    assert sum(flop.by_operator.values()) >= 2 * count.matrices
    if model.diffusion is None:
        assert sum(flop.by_operator.values()) == pytest.approx(2 * count.matrices, rel=1e-12)
    assert flop.scores_masked <= flop.scores_full
    for weight in (*model_weights(model), *mtp_weights(model), *layer_weights(model, model.layers[-1])):
        check_name(weight.operator, "fwd")
    one = layer_flop_per_token(model, model.layers[0], 4096)
    assert one.forward("full") - one.forward("masked") == one.scores_full - one.scores_masked


def test_recompute_adds_one_forward_pass_of_what_it_names() -> None:
    model, seq_len = load_preset("korthikanti-22b"), 2048
    none, selective, full = (
        step_flop_per_token(model, seq_len, "full", mode) for mode in ("none", "selective", "full")
    )
    count = flop_per_token(model, seq_len)
    logits = count.by_operator["logits"]
    assert none == 3 * count.forward("full")
    assert selective == none + count.scores_full
    assert full == none + count.forward("full") - logits
    with pytest.raises(WorkloadError, match="recompute is 'all'"):
        step_flop_per_token(model, seq_len, "full", "all")  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match="scores is 'causal'"):
        count.forward("causal")  # type: ignore[arg-type]
    with pytest.raises(WorkloadError, match="seq_len is 0"):
        flop_per_token(model, 0)


def test_mtp_layers_count_where_they_are_asked_for() -> None:
    model = load_preset("deepseek-v3")
    plain, extra = step_flop_per_token(model, 4096), step_flop_per_token(model, 4096, mtp=True)
    last = layer_flop_per_token(model, model.layers[-1], 4096)
    join, logits = 4.0 * model.hidden**2, 2.0 * model.hidden * model.vocabulary
    assert extra - plain == pytest.approx(3 * (last.forward() + join + logits), rel=1e-12)
    assert parameters(replace(model, num_mtp_layers=0)).total == parameters(model).total


# MegaScale-MoE (EuroSys'26, arXiv 2505.11432): attention under its mask, embedding left out, peak 989 TFLOP/s


def test_internal_352b_has_its_parameters_and_flop() -> None:
    model = load_preset("internal-352b")
    assert parameters(model).total == pytest.approx(351.86e9, rel=1e-4)
    assert step_flop_per_token(model, 8192) == pytest.approx(282.46e9, rel=1e-3)
    # The printed table alone, without the shared expert.
    layer = model.layers[0]
    assert isinstance(layer.mlp, MoE)
    printed = replace(layer, mlp=replace(layer.mlp, num_shared_experts=0, shared=None))
    bare = replace(model, layers=(printed,) * 60)
    assert parameters(bare).total == pytest.approx(341.3e9, rel=1e-3)
    assert step_flop_per_token(bare, 8192) == pytest.approx(219.0e9, rel=1e-3)


@pytest.mark.parametrize(
    ("gpus", "step_s", "tokens", "mfu"),
    [(240, 21.61, 272.9e3, 0.3248), (1440, 4.19, 1407.7e3, 0.2789), (240, 39.04, 151.1e3, 0.1798)],
)
def test_mfu_of_the_352b_model(gpus: int, step_s: float, tokens: float, mfu: float) -> None:
    rate = tokens_per_s(step_s, 720, 8192)
    assert rate == pytest.approx(tokens, rel=1e-3)
    flop = step_flop_per_token(load_preset("internal-352b"), 8192)
    # The printed 27.89 % differs from its own tokens per second by 0.1 %.
    assert utilization(flop, rate, gpus, H800_FLOP_PER_S) == pytest.approx(mfu, rel=2e-3)


def test_mixtral_at_8192_and_its_global_batch() -> None:
    model = load_preset("megascale-mixtral-8x7b")
    flop = step_flop_per_token(model, 8192)
    assert flop == pytest.approx(83.75e9, rel=1e-3)
    # Figure 13: 32 H800, 64 sequences; read from the figure, to half a per cent of its axes.
    for step_s, mfu in ((7.80, 0.178), (4.93, 0.281)):
        assert utilization(flop, tokens_per_s(step_s, 64, 8192), 32, H800_FLOP_PER_S) == pytest.approx(mfu, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "queries_per_kv", "experts", "top_k"),
    [
        ("internal-352b", 4, 32, 3),
        ("megascale-mixtral-8x7b", 4, 8, 2),
        ("megascale-mixtral-8x22b", 6, 8, 2),
        ("megascale-hunyuan-large", 10, 16, 1),
        ("megascale-phi-3.5-moe", 4, 16, 2),
        ("megascale-deepseekmoe", 1, 64, 6),
    ],
)
def test_widths_that_the_volumes_of_a_layer_follow_from(
    name: str, queries_per_kv: int, experts: int, top_k: int
) -> None:
    """Bytes of one token through a layer's collectives, by shapes: with n ranks, SP over TP is (1 + 1/m)/n, EP k/n."""
    model = load_preset(name)
    layer = model.layers[-1]
    matrices = {(w.operator, w.part): w for w in layer_weights(model, layer) if isinstance(w, Matrix)}
    element = dtype_bytes(model.dtype)
    hidden_bytes = model.hidden * element
    qkv_bytes = matrices["attn.qkv", "qkv"].outputs * element
    out_bytes = matrices["attn.out", "out"].inputs * element
    assert qkv_bytes == pytest.approx(hidden_bytes * (1 + 2 / queries_per_kv))
    assert out_bytes == hidden_bytes
    n = 8
    tp = 2 * hidden_bytes * (n - 1) / n
    sp = (qkv_bytes + out_bytes) / n * (n - 1) / n
    assert sp / tp == pytest.approx((1 + 1 / queries_per_kv) / n)
    up = matrices["moe.fc1", "up"]
    assert (up.copies, up.used) == (experts, top_k)
    ep = 2 * up.used * hidden_bytes / n * (n - 1) / n
    assert ep / tp == pytest.approx(top_k / n)


# Megatron-LM (SC'21), Korthikanti et al., MegaScale (NSDI'24): attention in full, peak 312 TFLOP/s


@pytest.mark.parametrize(
    ("name", "printed", "batch", "gpus", "tflop_per_gpu", "pflop"),
    [
        ("sc21-1.7b", 1.7, 512, 32, 137, 4.4),
        ("sc21-7.5b", 7.5, 512, 128, 142, 18.2),
        ("sc21-39.1b", 39.1, 1536, 512, 138, 70.8),
        ("sc21-145.6b", 145.6, 2304, 1536, 148, 227.1),
        ("sc21-529.6b", 529.6, 2520, 2520, 163, 410.2),
    ],
)
def test_sc21_rows(name: str, printed: float, batch: int, gpus: int, tflop_per_gpu: float, pflop: float) -> None:
    model = load_preset(name)
    # 1.7 is printed of 1.65.
    assert parameters(model).total / 1e9 == pytest.approx(printed, rel=1e-3, abs=0.05)
    step_s = batch * 2048 * step_flop_per_token(model, 2048, "full", "full") / (pflop * 1e15)
    rate = tokens_per_s(step_s, batch, 2048)
    share = utilization(step_flop_per_token(model, 2048, "full", "full"), rate, gpus, A100_FLOP_PER_S)
    assert share * 312 == pytest.approx(tflop_per_gpu, rel=5e-3)


def test_sc21_trains_gpt3_in_the_34_days_it_states() -> None:
    """Section 5.1: 300 billion tokens, 1024 A100, 140 TFLOP/s each; its 8TP/(nX) counts 8 FLOP a parameter."""
    flop = step_flop_per_token(load_preset("gpt3-175b"), 2048, "full", "full")
    days = 300e9 * flop / (1024 * 140e12) / 86400
    assert days == pytest.approx(34, rel=0.03)


@pytest.mark.parametrize(
    ("name", "gpus", "batch", "step_s", "mfu", "hfu"),
    [("korthikanti-22b", 8, 4, 1.10, 0.415, 0.437), ("korthikanti-175b", 64, 64, 13.75, 0.514, 0.528)],
)
def test_korthikanti_utilization(name: str, gpus: int, batch: int, step_s: float, mfu: float, hfu: float) -> None:
    model = load_preset(name)
    rate = tokens_per_s(step_s, batch, 2048)
    step_tolerance = 0.006 / step_s + 0.002
    model_flop = step_flop_per_token(model, 2048, "full")
    assert utilization(model_flop, rate, gpus, A100_FLOP_PER_S) == pytest.approx(mfu, rel=step_tolerance)
    # The paper's hardware FLOP have s/(3h) for s/(6h): attention's scores twice, as if recompute were as long as the
    # whole pass. One more forward pass is s/(4.5h), which is ours; its HFU is below the printed one.
    printed = model_flop + 3 * flop_per_token(model, 2048).scores_full
    assert utilization(printed, rate, gpus, A100_FLOP_PER_S) == pytest.approx(hfu, rel=step_tolerance)
    ours = utilization(step_flop_per_token(model, 2048, "full", "selective"), rate, gpus, A100_FLOP_PER_S)
    assert mfu < ours < hfu


@pytest.mark.parametrize(
    ("batch", "gpus", "step_s", "tokens", "mfu"),
    [
        (768, 256, 40.0, 39.3e3, 0.530),
        (768, 1024, 11.9, 132.7e3, 0.447),
        (6144, 3072, 29.02, 433.6e3, 0.487),
        (6144, 12288, 8.57, 1466.8e3, 0.412),
    ],
)
def test_megascales_rows_of_megatron(batch: int, gpus: int, step_s: float, tokens: float, mfu: float) -> None:
    rate = tokens_per_s(step_s, batch, 2048)
    assert rate == pytest.approx(tokens, rel=4e-3)
    flop = step_flop_per_token(load_preset("megascale-175b"), 2048, "full")
    assert utilization(flop, rate, gpus, A100_FLOP_PER_S) == pytest.approx(mfu, rel=4e-3)


@pytest.mark.parametrize(
    ("batch", "gpus", "step_s", "mfu"),
    [(768, 256, 32.0, 0.653), (768, 1024, 8.9, 0.590), (6144, 3072, 23.66, 0.591), (6144, 12288, 6.34, 0.552)],
)
def test_megascales_own_rows_use_windows_of_a_width_that_is_not_printed(
    batch: int, gpus: int, step_s: float, mfu: float
) -> None:
    model = load_preset("megascale-175b")
    rate = tokens_per_s(step_s, batch, 2048)
    full, none = step_flop_per_token(model, 2048, "full"), 6 * parameters(model).matrices
    most, least = (utilization(flop, rate, gpus, A100_FLOP_PER_S) for flop in (full, none))
    # Steps are printed to 0.1 s at 768 sequences.
    assert least * (1 - 0.05 / step_s) <= mfu <= most * (1 + 0.05 / step_s)


def test_flop_of_deepseek_v3_are_the_250_gflop_it_states() -> None:
    """arXiv 2505.09343, Table 2: 250 GFLOP a token in training, sequences of 4096."""
    assert step_flop_per_token(load_preset("deepseek-v3"), 4096) == pytest.approx(250e9, rel=5e-3)


@pytest.mark.parametrize("wrong", [{"tokens_per_s": 0.0}, {"num_devices": 0}, {"peak_flop_per_s": float("inf")}])
def test_utilization_refuses_what_is_no_rate(wrong: dict[str, float]) -> None:
    given = {"flop_per_token": 1.0, "tokens_per_s": 1.0, "num_devices": 1, "peak_flop_per_s": 1.0, **wrong}
    with pytest.raises(WorkloadError, match=next(iter(wrong))):
        utilization(**given)  # type: ignore[arg-type]

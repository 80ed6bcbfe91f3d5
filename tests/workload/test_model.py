"""ModelSpec refuses what no model is, with one error that names field, value and range."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from overlapsim.errors import WorkloadError
from overlapsim.workload.families import gpt
from overlapsim.workload.model import Attention, Diffusion, LatentAttention, Layer, Mlp, ModelSpec, MoE, head_dim_of

ATTENTION = Attention(8, 2, 64)
LATENT = LatentAttention(None, 32, 48, 16)
EXPERT = Mlp(256, gated=True, activation="silu")
LAYER = Layer(ATTENTION, EXPERT)


def spec(**changes) -> ModelSpec:
    values = {"name": "m", "hidden": 512, "layers": (LAYER,) * 3, "vocabulary": 1000, "max_positions": 128}
    return ModelSpec(**{**values, **changes})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: spec(hidden=0), "hidden is 0; expected a whole number from 1"),
        (lambda: spec(hidden="512"), "hidden is '512'"),
        (lambda: spec(hidden=512.0), "hidden is 512.0"),
        (lambda: spec(hidden=True), "hidden is True"),
        (lambda: spec(hidden=2**31), "hidden is 2147483648"),
        (lambda: spec(hidden=10**5000), "a number of 16610 bits"),
        (lambda: spec(layers=()), "num_layers is 0"),
        (lambda: spec(layers=(LAYER,) * 5000), "num_layers is 5000; expected a whole number from 1 to 4096"),
        (lambda: spec(vocabulary=0), "vocabulary is 0"),
        (lambda: spec(vocabulary=-5), "vocabulary is -5"),
        (lambda: spec(max_positions=None), "max_positions is None"),
        (lambda: spec(positions="alibi"), "positions is 'alibi'; expected one of learned, rotary, none"),
        (lambda: spec(norm="batchnorm"), "norm is 'batchnorm'"),
        (lambda: spec(dtype="float8"), "dtype is 'float8'"),
        (lambda: spec(tied_embeddings="no"), "tied_embeddings is 'no'; expected true or false"),
        (lambda: spec(num_mtp_layers=-1), "num_mtp_layers is -1"),
        (lambda: spec(diffusion=Diffusion(4, 4, 8, 8, 8)), "expected 0 of both"),
        (lambda: spec(layers=(replace(LAYER, cross=ATTENTION),)), "attends to a context and the model has none"),
        (lambda: replace(ATTENTION, num_kv_heads=3), "num_heads is 8 and num_kv_heads is 3"),
        (lambda: replace(ATTENTION, num_kv_heads=16), "num_kv_heads is 16"),
        (lambda: replace(ATTENTION, head_dim=-1), "head_dim is -1"),
        (lambda: replace(ATTENTION, window=0), "window is 0"),
        (lambda: replace(ATTENTION, qk_norm="both"), "qk_norm is 'both'"),
        (lambda: Attention(8, 8, 80, 64, LATENT), "head_dim is 80 with latent parts of 48 and 16"),
        (lambda: Attention(8, 2, 64, 64, LATENT), "num_kv_heads is 2 of 8 heads with latent attention"),
        (lambda: replace(LATENT, q_rank=0), "q_rank is 0"),
        (lambda: Mlp(0), "ffn is 0"),
        (lambda: Mlp(8, activation="tanh"), "activation is 'tanh'"),
        (lambda: MoE(4, 5, EXPERT), "top_k is 5 of 4 experts"),
        (lambda: MoE(4, 0, EXPERT), "top_k is 0"),
        (lambda: MoE(4, 2, EXPERT, num_shared_experts=1), "num_shared_experts is 1 and their block is missing"),
        (lambda: MoE(4, 2, EXPERT, shared=EXPERT), "num_shared_experts is 0 and their block is given"),
        (lambda: MoE(6, 2, EXPERT, num_groups=4), "6 experts stand in 4 groups"),
        (lambda: MoE(6, 2, EXPERT, num_groups=2, top_groups=3), "2 groups of which 3"),
        (lambda: MoE(6, 2, EXPERT, capacity_factor=0), "capacity_factor is 0"),
        (lambda: MoE(6, 2, EXPERT, capacity_factor=float("nan")), "capacity_factor is nan"),
        (lambda: MoE(6, 2, EXPERT, router="hash"), "router is 'hash'"),
        (lambda: Layer(ATTENTION, EXPERT, modulation=-1), "modulation is -1"),
        (lambda: head_dim_of(768, 10), "hidden is 768 and num_heads is 10"),
        (lambda: gpt(0, 64, 4, 10, 10), "num_layers is 0"),
        (lambda: gpt(10**12, 64, 4, 10, 10), "num_layers is 1000000000000"),
        (lambda: gpt(2, 64, 5, 10, 10), "hidden is 64 and num_heads is 5"),
    ],
)
def test_what_no_model_is_is_refused(build, message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        build()
    assert message in str(error.value)
    assert len(str(error.value)) < 250


def test_kinds_of_attention_and_layers() -> None:
    assert [Attention(8, kv, 64).kind for kv in (8, 2, 1)] == ["mha", "gqa", "gqa"]
    assert Attention(8, 8, 64, 128, LATENT).kind == "mla"
    assert (Attention(8, 8, 64, 128, LATENT).v_dim, ATTENTION.v_dim) == (128, 64)
    assert (LAYER.kind, Layer(ATTENTION, MoE(4, 2, EXPERT)).kind) == ("dense", "moe")


def test_equal_layers_stand_for_each_other_in_order() -> None:
    moe = Layer(ATTENTION, MoE(4, 2, EXPERT))
    sliding = replace(LAYER, attention=replace(ATTENTION, window=16))
    model = spec(layers=(LAYER, moe, sliding, moe, LAYER, moe))
    assert model.num_layers == 6
    assert dict(model.kinds) == {LAYER: 2, moe: 3, sliding: 1}
    assert list(model.kinds) == [LAYER, moe, sliding]


def test_a_spec_is_frozen_hashable_and_does_not_compare_its_source() -> None:
    model = spec()
    assert hash(model) == hash(spec())
    assert model == replace(model, source="elsewhere")
    assert model != replace(model, vocabulary=1001)
    with pytest.raises(FrozenInstanceError):
        model.hidden = 1  # type: ignore[misc]

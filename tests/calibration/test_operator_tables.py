import pytest

from overlapsim.calibration.operator_rows import LinearOp
from overlapsim.calibration.operator_tables import from_seconds, parse_rows, parse_table, to_seconds
from overlapsim.errors import CalibrationError
from overlapsim.workload.attention import AttentionOp
from overlapsim.workload.memory_bound import MemoryOp


def work(id_, value="10", unit="us"):
    (row,) = parse_rows(f"id,value,unit\n{id_},{value},{unit}\n", "mine.csv")
    return row.work()


def test_prefill_rows_are_causal_attention():
    op = work("aic_h100_sxm_attention_prefill_bf16|batch=2|seq=4096|heads=32|kv_heads=8|head_dim=128").op
    assert op == AttentionOp(2, 4096, 4096, 32, 8, 128)


def test_latent_decode_shares_keys_and_values():
    found = work(
        "infersim_h800_attention|kind=mla|phase=decode|heads_kv_dim=128-512-64|dtype=bf16|kv_dtype=bf16|batch=16|seq_or_kv_len=4096"
    )
    assert found.op == AttentionOp(16, 1, 4096, 128, 1, 576, 512, causal=False, shared_kv=True)
    assert found.key == "decode_mla_bf16"


def test_decode_with_an_fp8_cache_has_a_fit_of_its_own():
    found = work(
        "infersim_h20_attention|kind=mha|phase=decode|heads_kv_dim=32-8-128|dtype=bf16|kv_dtype=fp8|batch=1|seq_or_kv_len=1024"
    )
    assert (found.key, found.op.kv_dtype) == ("decode_bf16_kv_fp8", "fp8")


def test_experts_are_gate_and_up_together_or_down():
    shape = "|num_local_experts=24|hidden_size=2048|intermediate_size=1560|tokens_per_expert=43"
    up = work(f"infersim_h20_grouped_gemm_decode|op=up_proj{shape}")
    down = work(f"infersim_h20_grouped_gemm_prefill|op=down_proj{shape}")
    assert up.op == LinearOp(24, 43, 3120, 2048, uneven=0.3)
    assert down.op == LinearOp(24, 43, 2048, 1560)
    assert (up.key, down.key) == ("deepgemm_masked_fp8", "deepgemm_contiguous_fp8")


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("input_layernorm", MemoryOp("rmsnorm", 1024, 8192, "fp16")),
        ("attn_rope", MemoryOp("rope", 1024, (8192 + 1024) // 4, "fp16")),
        ("mlp_act", MemoryOp("silu_mul", 1024, 7168, "fp16")),
        ("add", MemoryOp("add", 1024, 8192, "fp16")),
        ("attn_pre_proj", LinearOp(1, 1024, (8192 + 2048) // 4, 8192)),
        ("attn_post_proj", LinearOp(1, 1024, 8192, 2048)),
        ("mlp_up_proj", LinearOp(1, 1024, 14336, 8192)),
        ("mlp_down_proj", LinearOp(1, 1024, 8192, 7168)),
    ],
)
def test_layer_operators_of_a_grouped_query_model(op, expected):
    assert work(f"vidur_a100_llama-2-70b_ops|op={op}|tp=4|num_tokens=1024|hidden=8192|ffn=28672").op == expected


def test_key_heads_can_be_given():
    shape = "|op=attn_rope|tp=1|num_tokens=8|hidden=4096|ffn=14336"
    assert work(f"vidur_a100_mymodel_ops{shape}").op.columns == 8192
    assert work(f"vidur_a100_mymodel_ops{shape}|kv_heads=8").op.columns == 4096 + 1024


def test_weight_gradients_swap_sizes_and_add_to_fp32():
    found = work(
        "simumax_b200_op_efficiency|op=group_matmul|stage=bwd_grad_w|ng=160|M=154|N=3072|K=5120|main_grad_dtype=fp32",
        "210",
        "TFLOP/s",
    )
    assert found.op == LinearOp(160, 3072, 5120, 154, output_bytes=8.0)
    assert found.flop == 2 * 160 * 154 * 3072 * 5120


def test_rates_and_times_are_inverse():
    found = work("deepgemm_h800_fp8_2025-04-09|kind=normal|groups=1|m=4096|n=4096|k=7168", "1410", "TFLOP/s")
    seconds = to_seconds(1410.0, "TFLOP/s", found)
    assert seconds == pytest.approx(2 * 4096 * 4096 * 7168 / 1410e12)
    assert from_seconds(seconds, "TFLOP/s", found) == pytest.approx(1410)
    assert from_seconds(seconds, "us", found) == pytest.approx(seconds * 1e6)


def test_blank_columns_do_not_count_and_order_is_kept():
    header = "kind,phase,heads_kv_dim,dtype,kv_dtype,batch,seq_or_kv_len,value,unit"
    text = f"{header}\nmha,prefill,16-1-256,bf16,,1,1024,90,us\n"
    (row,) = parse_table(text, "infersim_h20_attention")
    assert (
        row.id
        == "infersim_h20_attention|kind=mha|phase=prefill|heads_kv_dim=16-1-256|dtype=bf16|batch=1|seq_or_kv_len=1024"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,value\n", "expected id,value,unit"),
        ("id,value,unit\n", "no rows"),
        ("id,value,unit\naic|a=1,5\n", "line 2: expected three fields"),
        ("id,value,unit\naic,5,us\n", "line 2: id is 'aic'"),
        ("id,value,unit\naic|a=1,-5,us\n", "value of aic|a=1 is '-5'"),
        ("id,value,unit\naic|a=1,nan,us\n", "expected a number above 0"),
        ("id,value,unit\naic|a=1,5,minutes\n", "unit of aic"),
    ],
)
def test_malformed_files_name_the_line(text, message):
    with pytest.raises(CalibrationError) as error:
        parse_rows(text, "mine.csv")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("id_", "message"),
    [
        ("mystery_h100_table|a=1", "no known kind"),
        ("aic_h100_sxm_attention_prefill_bf16|batch=2", "column seq is missing"),
        ("aic_h100_sxm_attention_prefill_bf16|batch=x|seq=1|heads=1|kv_heads=1|head_dim=64", "invalid literal"),
        ("aic_h100_sxm_attention_prefill_bf16|batch=1|seq=1|heads=3|kv_heads=2|head_dim=64", "do not divide"),
        ("vidur_a100_m_ops|op=softmax|tp=1|num_tokens=1|hidden=4096|ffn=4096", "op is 'softmax'"),
        ("vidur_a100_m_ops|op=add|tp=0|num_tokens=1|hidden=4096|ffn=4096", "expected the columns"),
    ],
)
def test_rows_that_are_no_operator_are_refused(id_, message):
    with pytest.raises(CalibrationError) as error:
        work(id_)
    assert message in str(error.value)


def test_a_rate_does_not_fit_every_operator():
    found = work("torchao_h100_quant_membound|kernel=x|rows=32768|cols=4096")
    with pytest.raises(CalibrationError, match="does not fit this operator"):
        to_seconds(1.0, "TFLOP/s", found)

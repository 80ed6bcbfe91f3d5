import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.attention import (
    attention_cost,
    attention_findings,
    attention_prices,
    attention_seconds,
    fit_keys,
    lower_bound_s,
)
from overlapsim.cost.unfused_attention import unfused_attention_costs
from overlapsim.errors import StrategyError, UsageError, WorkloadError
from overlapsim.hardware.loading import load_device
from overlapsim.workload.attention import AttentionOp, AttentionShapes

DEVICES = {
    name: load_device(name) for name in ("a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm-180gb", "h20-sxm-96gb", "l40s")
}
BARE = replace(DEVICES["h100-sxm5-80gb"], fits={})
quick = settings(deadline=None, max_examples=150)


def prefill(batch=1, seq=4096, heads=32, kv_heads=8, dim=128, **other):
    return AttentionOp(batch, seq, seq, heads, kv_heads, dim, **other)


def decode(batch=32, kv=8192, heads=32, kv_heads=8, dim=128, **other):
    return AttentionOp(batch, 1, kv, heads, kv_heads, dim, causal=False, **other)


def mla_decode(batch=64, kv=8192):
    return AttentionOp(batch, 1, kv, 128, 1, 576, 512, causal=False, shared_kv=True)


@st.composite
def ops(draw):
    kv_heads = draw(st.sampled_from([1, 2, 8]))
    seq = draw(st.integers(1, 20000))
    is_decode = draw(st.booleans())
    return AttentionOp(
        batch=draw(st.integers(1, 64)),
        q_len=1 if is_decode else seq,
        kv_len=seq + 1 if is_decode else seq,
        heads=kv_heads * draw(st.sampled_from([1, 4, 16])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 96, 128, 256])),
        causal=draw(st.booleans()),
        pass_="fwd" if is_decode else draw(st.sampled_from(["fwd", "bwd"])),
    )


devices = st.sampled_from([*DEVICES.values(), BARE])


def test_flop_and_bytes_are_the_closed_forms():
    op = prefill(batch=2, seq=1024, heads=16, kv_heads=4, dim=64)
    assert op.flop == 2 * 2 * 16 * (1024 * 1025 / 2) * 128
    assert op.hbm_bytes == 2 * 2 * 1024 * (2 * 16 + 2 * 4) * 64
    full = replace(op, causal=False)
    assert full.flop == 4 * 2 * 16 * 1024**2 * 64
    back = replace(op, pass_="bwd")
    assert back.flop == 2.5 * op.flop
    assert back.hbm_bytes == 2 * op.hbm_bytes


def test_chunked_prefill_sees_the_whole_cache():
    op = AttentionOp(1, 512, 4096, 8, 8, 128)
    visible = sum(4096 - 512 + position + 1 for position in range(512))
    assert op.shapes.pairs[0] == visible


def test_latent_attention_reads_one_shared_head():
    op = mla_decode(batch=2, kv=1000)
    assert op.shapes.kv_bytes[0] == 2 * 2 * 1000 * 576
    assert op.flop == 2 * 2 * 128 * 1000 * (576 + 512)
    assert decode(kv_dtype="fp8").shapes.kv_bytes[0] == decode().shapes.kv_bytes[0] / 2


@quick
@given(ops(), devices)
def test_never_below_peak_or_memory(op, device):
    cost = attention_cost(op, device)
    assert cost.duration_s >= op.flop / device.peak("bf16")
    assert cost.duration_s >= op.hbm_bytes / device.hbm_bandwidth_bytes_per_s
    assert cost.spread.low <= 1 <= cost.spread.high
    assert cost.family == "attention"
    price = attention_prices(op.shapes, device)
    assert price.low_s[0] >= lower_bound_s(op.shapes, device)[0] * (1 - 1e-12)


# Head dimensions are other kernels, a few queries against a cache are the decode kernel: across those edges time may
# fall. Within a kernel it never does.
@quick
@given(ops(), devices, st.sampled_from(["batch", "heads", "length"]), st.floats(1.0, 4.0))
def test_time_never_falls_when_work_grows(op, device, what, factor):
    if what == "batch":
        more = replace(op, batch=math.ceil(op.batch * factor))
    elif what == "heads":
        more = replace(op, heads=op.heads * math.ceil(factor), kv_heads=op.kv_heads * math.ceil(factor))
    elif op.q_len == op.kv_len:
        longer = math.ceil(op.kv_len * factor)
        more = replace(op, q_len=longer, kv_len=longer)
    else:
        more = replace(op, kv_len=math.ceil(op.kv_len * factor))
    assert attention_cost(more, device).duration_s >= attention_cost(op, device).duration_s * (1 - 1e-12)


@quick
@given(st.lists(ops(), min_size=1, max_size=12), devices)
def test_many_at_once_are_each_alone(several, device):
    together = attention_seconds(several, device)
    alone = [attention_cost(op, device).duration_s for op in several]
    assert together == pytest.approx(alone, rel=1e-12)


# TFLOP/s of published causal prefill, 32 heads over 8, dim 128 (hwprofiles/SOURCES.md, AIC-ATTENTION).
@pytest.mark.parametrize(
    ("device", "seq", "published"),
    [
        ("a100-sxm4-80gb", 512, 52),
        ("a100-sxm4-80gb", 16384, 176),
        ("h100-sxm5-80gb", 512, 98),
        ("h100-sxm5-80gb", 16384, 664),
        ("b200-sxm-180gb", 512, 112),
        ("b200-sxm-180gb", 16384, 1244),
    ],
)
def test_prefill_reaches_the_published_rates(device, seq, published):
    op = prefill(seq=seq)
    halved = 4 * 32 * seq**2 * 128 / 2
    assert halved / attention_cost(op, DEVICES[device]).duration_s / 1e12 == pytest.approx(published, rel=0.15)


def test_decode_streams_the_cache():
    op = decode(batch=256, kv=8192)
    cost = attention_cost(op, load_device("h800-sxm5-80gb"))
    rate = op.hbm_bytes / cost.duration_s
    assert 0.85 * 3.35e12 < rate < 3.35e12
    assert cost.in_range
    assert cost.spread.origin == "residual"
    assert cost.demands[0].amount == op.hbm_bytes


def test_what_is_not_measured_says_so():
    op = decode()
    assert attention_findings(op, load_device("h800-sxm5-80gb")) == ()
    (finding,) = attention_findings(op, DEVICES["b200-sxm-180gb"])
    assert finding.code == "operator_not_measured"
    assert "decode_bf16" in finding.message
    cost = attention_cost(op, BARE)
    assert not cost.in_range
    assert cost.spread.origin == "prior"
    assert cost.source.layer == "prior"
    assert cost.spread.high >= 1.5


def test_outside_the_measured_box_is_out_of_range():
    device = DEVICES["h100-sxm5-80gb"]
    assert attention_cost(prefill(), device).in_range
    assert not attention_cost(prefill(seq=65536), device).in_range
    assert not attention_cost(prefill(dim=256), device).in_range


def test_backward_without_a_table_is_slower_than_its_flop_say():
    device = DEVICES["h100-sxm5-80gb"]
    forward, backward = (
        attention_cost(prefill(seq=8192), device),
        attention_cost(prefill(seq=8192, pass_="bwd"), device),
    )
    assert 2.5 < backward.duration_s / forward.duration_s < 4.5
    assert backward.spread.origin == "prior"


def test_fewer_sms_take_longer():
    device = DEVICES["h100-sxm5-80gb"]
    alone, capped = attention_cost(prefill(seq=8192), device), attention_cost(prefill(seq=8192), device, sms=66)
    assert 1.7 < capped.duration_s / alone.duration_s <= 2
    assert capped.sm == 66
    with pytest.raises(StrategyError, match="133 SMs"):
        attention_cost(prefill(), device, sms=133)


def test_keys_fall_back_within_the_phase():
    assert fit_keys(prefill(dtype="fp16")) == ("prefill_bf16",)
    assert fit_keys(prefill(dtype="fp8")) == ("prefill_fp8", "prefill_bf16")
    assert fit_keys(mla_decode())[0] == "decode_mla_bf16"
    assert fit_keys(decode(kv_dtype="fp8"))[0] == "decode_bf16_kv_fp8"


def test_malformed_shapes_are_refused():
    with pytest.raises(WorkloadError, match="divide"):
        prefill(heads=6, kv_heads=4)
    with pytest.raises(WorkloadError, match="causal"):
        AttentionOp(1, 20, 10, 8, 8, 128)
    with pytest.raises(WorkloadError, match="expected fwd or bwd"):
        prefill(pass_="wgrad")
    with pytest.raises(UsageError, match="mix decode and prefill"):
        attention_prices(AttentionShapes.of([prefill(), decode()]), BARE)
    with pytest.raises(UsageError, match="no fit"):
        attention_cost(prefill(), BARE, key="mine")


def test_unfused_attention_pays_for_its_scores():
    device = DEVICES["a100-sxm4-80gb"]
    op = prefill(seq=4096, heads=16, kv_heads=16)
    parts = unfused_attention_costs(op, device, dropout=True)
    assert list(parts) == ["scores", "softmax", "dropout", "context"]
    assert sum(cost.duration_s for cost in parts.values()) > 3 * attention_cost(op, device).duration_s
    scores = 16 * 4096**2
    # Half of the scores read and all written; dropout moves five bytes a score.
    assert parts["softmax"].demands[0].amount == pytest.approx(3 * scores)
    assert parts["dropout"].demands[0].amount == pytest.approx(5 * scores)
    backward = unfused_attention_costs(replace(op, pass_="bwd"), device, dropout=True)
    assert list(backward) == ["context", "dropout", "softmax", "scores"]
    assert backward["context"].duration_s == pytest.approx(2 * parts["context"].duration_s)
    loose = unfused_attention_costs(op, device, fused_softmax=False)["softmax"]
    assert loose.duration_s > 3 * parts["softmax"].duration_s


def test_pricing_is_vectorised():
    shapes = AttentionShapes(*(np.full(20000, value) for value in (1, 4096, 4096, 32, 8, 128, 128, 1, 2, 2, 0, 0.0)))
    seconds = attention_prices(shapes, DEVICES["h100-sxm5-80gb"]).seconds
    assert seconds.shape == (20000,)
    assert np.ptp(seconds) == 0

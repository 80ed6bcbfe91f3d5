from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.memory_bound import memory_cost, memory_findings, memory_prices, memory_seconds
from overlapsim.errors import StrategyError, WorkloadError
from overlapsim.hardware.loading import load_device
from overlapsim.hardware.profile import Fit, Source
from overlapsim.workload.memory_bound import MEMORY_KINDS, TRAFFIC, MemoryOp, memory_bytes, traffic_of

A100, H100 = load_device("a100-sxm4-80gb"), load_device("h100-sxm5-80gb")
devices = st.sampled_from([A100, H100, load_device("rtx-4090"), replace(H100, fits={})])
lines = st.sampled_from(sorted(TRAFFIC))
quick = settings(deadline=None, max_examples=200)


# Bytes a published training step is reproduced with, in units of x = tokens x hidden x 2 bytes (SOURCES.md, OP-BYTES).
@pytest.mark.parametrize(
    ("kind", "pass_", "in_x"),
    [
        ("layernorm", "fwd", 2),
        ("layernorm", "bwd", 5),
        ("bias_dropout_add", "fwd", 3.5),
        ("bias_dropout_add", "bwd", 2.5),
        ("bias_gelu", "fwd", 2),
        ("bias_gelu", "bwd", 3),
        ("add", "bwd", 2),
        ("causal_softmax", "fwd", 1.5),
        ("causal_softmax", "bwd", 1.5),
        ("dropout", "fwd", 2.5),
        ("dropout", "bwd", 2.5),
        ("silu_mul", "fwd", 3),
        ("rope", "fwd", 2),
    ],
)
def test_traffic_in_units_of_the_activation(kind, pass_, in_x):
    size = memory_bytes(kind, 8192, 12288, "bf16", pass_)
    assert size == pytest.approx(in_x * 8192 * 12288 * 2, rel=5e-4)


def test_traffic_of_loss_optimizer_and_gradients():
    logits = 2048 * 51200
    loss = sum(memory_bytes("cross_entropy", 2048, 51200, "fp16", pass_) for pass_ in ("fwd", "bwd"))
    assert loss == pytest.approx(54 * logits, rel=1e-3)
    assert memory_bytes("optimizer_step", 10**9, 1) == 60e9
    assert memory_bytes("grad_accumulate", 10**9, 1) == 10e9
    assert memory_bytes("adam", 10**9, 1) == 30e9


def test_unpermute_reads_a_copy_for_each_expert():
    one, eight = (float(memory_bytes("moe_unpermute", 4096, 7168, topk=topk)) for topk in (1, 8))
    token = 4096 * 7168 * 2
    assert one == pytest.approx(2 * token, rel=1e-3)
    assert eight == pytest.approx(9 * token, rel=1e-3)


@quick
@given(lines, st.integers(1, 200000), st.integers(1, 60000), devices, st.sampled_from(["bf16", "fp32"]))
def test_never_below_the_sheet(line, rows, columns, device, dtype):
    op = MemoryOp(line[0], rows, columns, dtype, line[1])
    cost = memory_cost(op, device)
    assert cost.duration_s >= op.hbm_bytes / device.hbm_bandwidth_bytes_per_s
    assert cost.spread.low <= 1 <= cost.spread.high
    assert cost.demands[0].amount == op.hbm_bytes
    assert cost.family == "memory"


@quick
@given(lines, st.integers(1, 100000), st.integers(1, 40000), st.integers(0, 100000), st.integers(0, 40000), devices)
def test_time_never_falls_when_the_grid_grows(line, rows, columns, more_rows, more_columns, device):
    kind, pass_ = line
    small, large = (
        memory_cost(MemoryOp(kind, r, c, "bf16", pass_), device).duration_s
        for r, c in ((rows, columns), (rows + more_rows, columns + more_columns))
    )
    assert large >= small * (1 - 1e-12)


def test_floor_ramp_and_plateau():
    tiny, huge = (memory_seconds("add", rows, 4096, A100) for rows in (1, 65536))
    assert 1e-6 < tiny < 4e-6
    size = memory_bytes("add", 65536, 4096)
    assert 0.8 < size / huge / A100.hbm_bandwidth_bytes_per_s <= 1
    # Chains of kernels pay the floor for each.
    chain = memory_seconds("cross_entropy", 1, 16, A100)
    assert chain > 7 * memory_seconds("gelu", 1, 16, A100)


def test_vectorised_equals_one_at_a_time():
    rows = [1, 64, 4096, 65536]
    together = memory_seconds("silu_mul", rows, 14336, H100)
    assert together == pytest.approx([memory_cost(MemoryOp("silu_mul", r, 14336), H100).duration_s for r in rows])


def test_few_sms_cannot_draw_the_whole_memory():
    op = MemoryOp("copy", 65536, 8192)
    alone, four = memory_cost(op, H100), memory_cost(op, H100, sms=4)
    assert four.duration_s > 5 * alone.duration_s
    assert memory_cost(op, H100, sms=131).duration_s == pytest.approx(alone.duration_s)
    with pytest.raises(StrategyError, match="0 SMs"):
        memory_cost(op, H100, sms=0)


def test_measured_operators_and_priors_are_told_apart():
    measured = memory_cost(MemoryOp("add", 4096, 8192), A100)
    assert (measured.in_range, measured.spread.origin, measured.source.layer) == (True, "residual", "derived")
    assert not memory_cost(MemoryOp("add", 10**7, 8192), A100).in_range
    assert memory_findings(MemoryOp("add", 4096, 8192), A100) == ()
    guess = memory_cost(MemoryOp("router", 4096, 256), A100)
    assert (guess.in_range, guess.spread.origin, guess.source.layer) == (False, "prior", "prior")
    (finding,) = memory_findings(MemoryOp("router", 4096, 256), A100)
    assert "memory.router" in finding.message


def test_own_fit_of_an_operator_comes_first():
    constants = {
        "floor_s": 9e-6,
        "column_s": 0.0,
        "hbm_efficiency": 0.5,
        "l2_efficiency": 0.5,
        "row_s": 0.0,
        "norm": 2.0,
    }
    own = {
        f"memory.{key}": Fit("memory", key, constants, Source("measured", "x"), 50) for key in ("default", "gelu_bwd")
    }
    device = replace(H100, fits=own)
    assert memory_prices("router", 8, 8, device).fit.key == "default"
    assert memory_prices("gelu", 8, 8, device, pass_="bwd").fit.key == "gelu_bwd"
    assert memory_prices("gelu", 8, 8, device).fit.key == "default"
    assert not memory_prices("router", 8, 8, device).in_range
    assert memory_prices("gelu", 8, 8, device, pass_="bwd").in_range


def test_unknown_operators_are_refused():
    assert "rmsnorm" in MEMORY_KINDS
    with pytest.raises(WorkloadError, match="is unknown; expected one of"):
        MemoryOp("norm", 1, 1)
    with pytest.raises(WorkloadError, match="gather has no pass 'bwd'; expected fwd"):
        traffic_of("gather", "bwd")
    with pytest.raises(WorkloadError, match="rows of 0"):
        MemoryOp("add", 0, 1)

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.grouped_fit import GroupedShapes, grouped_cost, grouped_prices, lower_bound_s
from overlapsim.errors import StrategyError, UsageError
from overlapsim.hardware.loading import load_device

H20, H800, B200 = (load_device(name) for name in ("h20-sxm-96gb", "h800-sxm5-80gb", "b200-sxm-180gb"))
STACKS = [
    (H20, "deepgemm_masked_fp8", "fp8"),
    (H20, "deepgemm_contiguous_fp8", "fp8"),
    (H800, "deepgemm_masked_fp8", "fp8"),
    (B200, "simumax_bf16", "bf16"),
    (B200, "nobody_measured_this", "bf16"),
]
stacks = st.sampled_from(STACKS)
sizes = st.tuples(st.integers(1, 64), st.integers(1, 5000), st.integers(16, 9000), st.integers(16, 9000))
quick = settings(deadline=None, max_examples=120)


def seconds(stack, shape, uneven):
    device, key, dtype = stack
    return float(grouped_prices(GroupedShapes.of(*shape, uneven=uneven), device, key, dtype=dtype).seconds[0])


@quick
@given(stacks, sizes, st.sampled_from([0.0, 0.3]))
def test_never_below_peak_or_memory(stack, shape, uneven):
    device, key, dtype = stack
    shapes = GroupedShapes.of(*shape, uneven=uneven)
    price = grouped_prices(shapes, device, key, dtype=dtype)
    assert price.seconds >= lower_bound_s(shapes, device, dtype)
    assert price.seconds >= shapes.flop / device.peak(dtype)
    assert price.low <= 1 <= price.high


@quick
@given(stacks, sizes, st.integers(1, 3), st.integers(0, 3000), st.sampled_from([0.0, 0.3]))
def test_time_never_falls_when_work_grows(stack, shape, which, more, uneven):
    larger = list(shape)
    larger[which] += more
    assert seconds(stack, larger, uneven) >= seconds(stack, shape, uneven) * (1 - 1e-12)


@quick
@given(stacks, sizes, st.integers(2, 8))
def test_more_groups_take_longer(stack, shape, factor):
    assert seconds(stack, (shape[0] * factor, *shape[1:]), 0.0) >= seconds(stack, shape, 0.0) * (1 - 1e-12)


def test_masked_experts_without_tokens_read_no_weights():
    one, two = (GroupedShapes.of(96, m, 3120, 2048, uneven=0.3) for m in (1, 2))
    # At a mean of one token half of the draws truncate to none and read no weights (published: 167 and 350 us).
    assert one.hbm_bytes(1)[0] == pytest.approx(0.5 * two.hbm_bytes(1)[0], rel=0.01)
    ratio = seconds(STACKS[0], (96, 1, 3120, 2048), 0.3) / seconds(STACKS[0], (96, 3, 3120, 2048), 0.3)
    assert 0.4 < ratio < 0.65


def test_flop_and_bytes_are_the_closed_forms():
    shapes = GroupedShapes.of(8, 4096, 4096, 7168)
    assert shapes.flop[0] == 2 * 8 * 4096 * 4096 * 7168
    assert shapes.hbm_bytes(1)[0] == 8 * (4096 * 7168 + 4096 * 7168 + 2 * 4096 * 4096)
    accumulating = GroupedShapes.of(1, 4096, 4096, 7168, output_bytes=8)
    assert accumulating.hbm_bytes(2)[0] == 2 * 2 * 4096 * 7168 + 8 * 4096 * 4096


def test_a_deep_narrow_gemm_splits_k():
    narrow = seconds((load_device("a100-sxm4-80gb"), "vidur_fp16", "fp16"), (1, 16, 1280, 8192), 0.0)
    # Published: 19 us; twenty tiles of full depth would take twice that.
    assert narrow == pytest.approx(19e-6, rel=0.25)


def test_prior_is_never_in_range():
    price = grouped_prices(GroupedShapes.of(1, 4096, 4096, 4096), B200, "nobody_measured_this")
    assert not price.in_range.any()
    assert price.fit.num_points == 0
    assert grouped_prices(GroupedShapes.of(1, 4096, 8192, 8192), B200, "simumax_bf16").in_range.all()


def test_cost_says_what_it_takes():
    shapes = GroupedShapes.of(8, 4096, 4096, 7168)
    cost = grouped_cost(shapes, H800, "deepgemm_contiguous_fp8", dtype="fp8", sms=120)
    assert (cost.family, cost.sm, cost.spread.origin) == ("gemm", 120, "residual")
    assert cost.demands[0].amount == shapes.hbm_bytes(1)[0]
    # Published: 1346 TFLOP/s on all SMs.
    assert shapes.flop[0] / cost.duration_s / 1e12 == pytest.approx(1346 * 120 / 132, rel=0.15)


def test_arrays_and_refusals():
    shapes = GroupedShapes.of([1, 8], 128, 4096, 4096)
    assert len(shapes) == 2
    assert len(shapes[np.array([True, False])]) == 1
    with pytest.raises(UsageError, match="positive"):
        GroupedShapes.of(1, 0, 16, 16)
    with pytest.raises(UsageError, match="uneven"):
        GroupedShapes.of(1, 16, 16, 16, uneven=1.0)
    with pytest.raises(StrategyError, match="999 SMs"):
        grouped_prices(shapes, B200, "simumax_bf16", sms=999)

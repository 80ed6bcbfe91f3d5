import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.base import MEASURED, hbm_rate
from overlapsim.cost.gemm import checked_tile, gemm_cost, hbm_bytes, lower_bound_s, template_gemm_cost
from overlapsim.cost.prices import PriceBook
from overlapsim.errors import ProfileError, StrategyError, UsageError
from overlapsim.hardware.loading import load_cluster, load_device
from overlapsim.workload.operators import GemmOp
from tests.cost.machines import A100, H100, TILES
from tests.cost.published import COMM_SMS, RANKS, published_tau_s, stored_plans

sizes = st.integers(1, 20000)
ops = st.builds(GemmOp, sizes, sizes, sizes, st.just("fp16"))
devices = st.sampled_from([A100, H100])
tiles = st.sampled_from(TILES)
quick = settings(deadline=None, max_examples=200)


def tflop_per_s(device, m, n, k):
    op = GemmOp(m, n, k, "bf16")
    return op.flop / gemm_cost(op, device).duration_s / 1e12


# Library linear layers, bf16, TFLOP/s (hwprofiles/SOURCES.md, AIC-GEMM); the residual layer smooths single cells.
@pytest.mark.parametrize(
    ("device", "size", "published", "tolerance"),
    [
        ("a100-sxm4-80gb", 4096, 267, 0.08),
        ("a100-sxm4-80gb", 8192, 263, 0.04),
        ("h100-sxm5-80gb", 4096, 789, 0.05),
        ("h100-sxm5-80gb", 8192, 783, 0.04),
    ],
)
def test_large_squares_reach_the_published_rate(device, size, published, tolerance):
    assert tflop_per_s(load_device(device), size, size, size) == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize(("device", "published_us"), [("a100-sxm4-80gb", 3.3), ("h100-sxm5-80gb", 2.7)])
def test_tiny_shapes_sit_at_the_launch_floor(device, published_us):
    spec = load_device(device)
    time_us = gemm_cost(GemmOp(16, 32, 128), spec).duration_s * 1e6
    assert time_us == pytest.approx(published_us, rel=0.3)
    assert time_us > spec.kernels.gemm_launch_s * 1e6


@pytest.mark.parametrize("plan", stored_plans(), ids=lambda plan: f"m{plan.m}")
def test_unmeasured_kernels_come_near_the_artifact(plan):
    # Vendor time there: series baseline less the collective, 2.04 and (scaled by m) about 7.9 ms; with the signalled
    # epilogue 1.15 x.
    op = GemmOp(plan.m, plan.n, plan.k, "fp16", "fp16")
    book = PriceBook(load_cluster("a800-sxm8"), RANKS)
    kernel = book.kernel_gemm(op, "wave_group", (plan.bm, plan.bn))
    assert kernel.duration_s * 1e3 == pytest.approx(plan.gemm_ms, rel=0.1)
    assert kernel.tile == (256, 128, 64)


@pytest.mark.parametrize(
    ("m", "tau_ms", "predicted_ms", "serial_ms"), [(8192, 1.0595, 2.6033, 3.4209), (32768, 4.1819, 9.2432, 12.8628)]
)
def test_published_formula_from_our_waves(m, tau_ms, predicted_ms, serial_ms):
    plan = next(plan for plan in stored_plans() if plan.m == m)
    op = GemmOp(plan.m, plan.n, plan.k, "fp16", "fp16")
    alone = gemm_cost(op, A100, tile=(plan.bm, plan.bn), measured_s=plan.gemm_ms * 1e-3)
    beside = gemm_cost(op, A100, sms=A100.num_sms - COMM_SMS, tile=(plan.bm, plan.bn), measured_s=plan.gemm_ms * 1e-3)
    tau_s = published_tau_s(m * plan.n)
    assert tau_s * 1e3 == pytest.approx(tau_ms, abs=6e-5)
    assert (alone.duration_s + tau_s) * 1e3 == pytest.approx(serial_ms, abs=6e-5)
    elements = beside.grid.group_elements(plan.group_tiles, 4)
    computed = communicated = 0.0
    for count, size in zip(plan.group_tiles, elements.tolist(), strict=True):
        computed += math.ceil(count / beside.sm) * beside.tile_time_s
        communicated = max(computed, communicated) + published_tau_s(size)
    assert communicated * 1e3 == pytest.approx(predicted_ms, abs=6e-5)
    assert computed == pytest.approx(beside.duration_s)


def test_measured_time_fixes_the_wave_on_any_number_of_sms():
    op = GemmOp(8192, 8192, 4096, "fp16")
    alone = gemm_cost(op, A100, tile=(256, 128), measured_s=2.361e-3)
    assert (alone.waves, alone.duration_s, alone.spread) == (19, pytest.approx(2.361e-3), MEASURED)
    assert alone.source.layer == "override" and alone.in_range
    fewer = gemm_cost(op, A100, sms=54, tile=(256, 128), measured_s=2.361e-3)
    assert fewer.tile_time_s == alone.tile_time_s
    assert fewer.duration_s == pytest.approx(2.361e-3 * 38 / 19)
    assert template_gemm_cost(op, A100, tile=(256, 128), measured_s=2.361e-3) == alone


def test_model_in_closed_form_at_one_tile():
    # One wave of 8 tiles, compute far above memory: steps * step + fill, last tile stored, launch.
    op = GemmOp(512, 512, 65536, "fp16")
    cost = gemm_cost(op, A100, tile=(128, 256, 64))
    main_loop_s = 1024 * 2 * 128 * 256 * 64 / (312e12 * 0.873 / 108)
    store_s = 128 * 256 * 2 / (2.039e12 * 0.794 / 108)
    compute_s = main_loop_s + 0.5e-6 + store_s
    memory_s = max(
        (2 * 512 * 65536 + 512 * 512) * 2 / (2.039e12 * 0.794),
        2 * 65536 * 8 * 384 / (108 * 1.41e9 * 96),
    )
    # Operands of 134 MB do not fit in L2, but the tiles in flight are all there are: each byte is read once.
    assert hbm_bytes(op, A100, (128, 256), 108) == op.operand_bytes + op.output_bytes
    assert cost.duration_s == pytest.approx(2.6e-6 + math.hypot(compute_s, memory_s))
    assert cost.waves == 1 and cost.tile_time_s == cost.duration_s


@quick
@given(ops, devices, st.data())
def test_never_below_flop_or_memory(op, device, data):
    bound = lower_bound_s(op, device)
    sms = data.draw(st.integers(1, device.num_sms))
    for cost in (
        gemm_cost(op, device),
        gemm_cost(op, device, sms=sms),
        template_gemm_cost(op, device, tile=data.draw(tiles), sms=sms),
    ):
        assert cost.duration_s >= bound
        assert cost.duration_s >= op.flop / (device.peak(op.dtype) * cost.sm / device.num_sms) * (1 - 1e-12)
        assert cost.duration_s == pytest.approx(cost.waves * cost.tile_time_s)
        (memory,) = cost.demands
        assert (memory.resource, memory.capacity) == ("hbm[0]", hbm_rate(device))
        assert op.operand_bytes + op.output_bytes <= memory.amount <= cost.duration_s * memory.capacity * (1 + 1e-12)


# Whole 16-byte rows: a size that is not aligned may cost more than one that is a little larger.
aligned_ops = st.builds(GemmOp, sizes, sizes.map(lambda n: 8 * n), sizes.map(lambda k: 8 * k), st.just("fp16"))


@quick
@given(aligned_ops, devices, tiles, st.integers(1, 132), st.sampled_from("mnk"), st.integers(2, 5))
def test_monotone_in_each_size_at_one_tile(op, device, tile, sms, grown, times):
    sms = min(sms, device.num_sms)
    larger = GemmOp(**{**{d: getattr(op, d) for d in "mnk"}, grown: getattr(op, grown) * times}, dtype=op.dtype)
    before = gemm_cost(op, device, sms=sms, tile=tile)
    after = gemm_cost(larger, device, sms=sms, tile=tile)
    assert after.duration_s >= before.duration_s * (1 - 1e-12)
    assert after.demands[0].amount >= before.demands[0].amount


@quick
@given(ops, devices, tiles, st.integers(1, 107))
def test_an_sm_more_is_never_slower_at_one_tile(op, device, tile, sms):
    fewer = gemm_cost(op, device, sms=sms, tile=tile)
    more = gemm_cost(op, device, sms=sms + 1, tile=tile)
    assert more.duration_s <= fewer.duration_s * (1 + 1e-12)


@quick
@given(ops, devices)
def test_library_takes_the_fastest_tile_and_splits_k_in_one_wave_only(op, device):
    chosen = gemm_cost(op, device)
    assert chosen.tile in device.kernels.gemm_tiles
    assert chosen.duration_s <= min(gemm_cost(op, device, tile=tile).duration_s for tile in TILES)
    if chosen.split_k > 1:
        assert chosen.waves == 1 and chosen.grid.num_tiles * chosen.split_k <= device.num_sms


def test_split_k_fills_idle_sms():
    op = GemmOp(64, 1024, 16384)
    chosen = gemm_cost(op, A100)
    assert chosen.split_k > 1
    assert chosen.duration_s < 0.6 * gemm_cost(op, A100, tile=(64, 64)).duration_s


@quick
@given(ops, devices, tiles)
def test_template_is_the_vendor_model_times_the_slowdown(op, device, tile):
    vendor, template = gemm_cost(op, device, tile=tile), template_gemm_cost(op, device, tile=tile)
    assert template.duration_s == pytest.approx(vendor.duration_s * device.kernels.template_slowdown)
    assert template.demands == vendor.demands and template.split_k == 1


def test_template_keeps_its_tile_on_fewer_sms():
    op = GemmOp(2048, 8192, 4096)
    assert {template_gemm_cost(op, A100, sms=sms).tile for sms in (108, 106, 88, 17)} == {
        template_gemm_cost(op, A100).tile
    }


def test_ragged_output_costs_as_much_as_whole_tiles():
    ragged = gemm_cost(GemmOp(4097, 8192, 4096), A100, tile=(128, 128))
    whole = gemm_cost(GemmOp(4224, 8192, 4096), A100, tile=(128, 128))
    assert ragged.grid.ragged and ragged.waves == whole.waves
    assert ragged.duration_s == pytest.approx(whole.duration_s, rel=1e-3)


def test_one_tile_over_the_edge_costs_a_wave():
    full = gemm_cost(GemmOp(128 * 12, 128 * 9, 8192), A100, tile=(128, 128))
    over = gemm_cost(GemmOp(128 * 109, 128, 8192), A100, tile=(128, 128))
    assert (full.waves, over.waves) == (1, 2)
    assert over.duration_s > 1.8 * full.duration_s


def test_operands_larger_than_l2_are_read_again():
    small, large = GemmOp(2048, 2048, 2048), GemmOp(16384, 16384, 16384)
    assert hbm_bytes(small, A100, (128, 128), 108) == small.operand_bytes + small.output_bytes
    assert hbm_bytes(large, A100, (128, 128), 108) > 2 * (large.operand_bytes + large.output_bytes)


def test_scaled_moves_the_wave_with_the_kernel():
    cost = gemm_cost(GemmOp(4096, 4096, 4096), A100)
    slower = cost.scaled(1.25)
    assert slower.duration_s == pytest.approx(1.25 * cost.duration_s)
    assert slower.tile_time_s == pytest.approx(1.25 * cost.tile_time_s)
    assert (slower.grid, slower.demands) == (cost.grid, cost.demands)


def test_range_flag_and_spread_follow_the_measured_box():
    inside, outside = gemm_cost(GemmOp(16, 4096, 4096), A100), gemm_cost(GemmOp(8, 4096, 4096), A100)
    assert inside.in_range and not outside.in_range
    assert inside.spread.origin == "prior" and inside.source.layer == "derived"
    assert gemm_cost(GemmOp(8192, 8192, 8192), A100).spread.high < inside.spread.high


def test_tile_without_depth_takes_the_listed_one():
    op = GemmOp(512, 512, 512)
    assert checked_tile(op, (128, 128), A100) == (128, 128, 64)
    assert checked_tile(op, (96, 160), A100) == (96, 160, 64)
    assert checked_tile(op, (96, 160, 32), A100) == (96, 160, 32)
    # A listed tile may overhang: a small C has no other.
    assert checked_tile(GemmOp(16, 16, 16), (64, 64), A100) == (64, 64, 64)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"tile": (512, 512)}, StrategyError, "512x512 is larger than the output 256x256; expected at most 256x256"),
        ({"tile": (96, 257)}, StrategyError, "choose a smaller tile"),
        ({"tile": (96,)}, StrategyError, "BMxBN"),
        ({"tile": (0, 64)}, StrategyError, "at least 1"),
        ({"sms": 0}, StrategyError, "A100-SXM4-80 has 108"),
        ({"sms": 109}, StrategyError, "1 to that many"),
        ({"measured_s": 0.0}, UsageError, "> 0"),
        ({"measured_s": math.nan}, UsageError, "finite"),
        ({"measured_s": 1e-9}, UsageError, "below .* check the unit"),
    ],
)
def test_errors_say_what_was_expected(arguments, error, words):
    with pytest.raises(error, match=words):
        gemm_cost(GemmOp(256, 256, 4096), A100, **arguments)


def test_measured_time_below_the_memory_bound_is_refused():
    op = GemmOp(16, 8192, 8192)
    assert lower_bound_s(op, A100) == pytest.approx((op.operand_bytes + op.output_bytes) / 2.039e12)
    with pytest.raises(UsageError, match="L2"):
        gemm_cost(op, A100, measured_s=0.9 * lower_bound_s(op, A100))


def test_dtype_without_a_rate_is_refused():
    with pytest.raises(ProfileError, match="fp8"):
        gemm_cost(GemmOp(256, 256, 256, "fp8"), A100)


@pytest.mark.parametrize("device", [A100, load_device("h100-sxm5-80gb")], ids=["profile", "fit"])
def test_odd_vocabularies_take_about_three_times_as_long(device):
    odd, even = (gemm_cost(GemmOp(8192, n, 4096), device) for n in (50257, 50264))
    assert 2.4 < odd.duration_s / even.duration_s < 3.2
    assert even.in_range is odd.in_range or not odd.in_range
    assert not odd.in_range
    # 16 bytes are 8 elements of bf16 and 16 of fp8.
    fp8 = [gemm_cost(GemmOp(8192, n, 4096, "fp8"), H100).duration_s for n in (50264, 50272)]
    assert fp8[0] > 2.4 * fp8[1]


def test_consumer_parts_take_the_rate_of_their_accumulate_type():
    device = load_device("rtx-4090")
    full, half = (gemm_cost(GemmOp(8192, 8192, 8192, "fp16", accumulate), device) for accumulate in ("fp32", "fp16"))
    assert full.duration_s == pytest.approx(2 * half.duration_s, rel=0.1)

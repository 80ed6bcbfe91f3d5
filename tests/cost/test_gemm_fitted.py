import math
import time
from dataclasses import replace

import numpy as np
import pytest

from overlapsim.cost.gemm import gemm_cost, hbm_bytes, linear_gemm_cost, lower_bound_s, template_gemm_cost
from overlapsim.cost.gemm_fitted import UNKNOWN, bundled_rows, fitted_gemm, machine_of, regime, residual_layer
from overlapsim.hardware.loading import load_device
from overlapsim.hardware.profile import Fit, Source
from overlapsim.workload.operators import GemmOp
from tests.cost import machines

H100, H200, A100 = (load_device(name) for name in ("h100-sxm5-80gb", "h200-sxm-141gb", "a100-sxm4-80gb"))
RNG = np.random.default_rng(7)
SHAPES = [tuple(int(8 * 2 ** RNG.uniform(1, 11)) for _ in range(3)) for _ in range(200)]


def test_scalar_prices_equal_the_vectorised_ones():
    for device in (H100, H200, A100):
        fitted = fitted_gemm(device, "bf16")
        many = fitted.seconds(*np.array(SHAPES).T)
        one = [gemm_cost(GemmOp(*shape), device).duration_s for shape in SHAPES]
        assert one == pytest.approx(many.tolist(), rel=1e-9)


def test_prices_stay_above_the_bound_and_inside_their_own_arithmetic():
    for sms in (H100.num_sms, 100, 7, 1):
        for m, n, k in SHAPES:
            op = GemmOp(m, n, k)
            for cost in (gemm_cost(op, H100, sms=sms), template_gemm_cost(op, H100, sms=sms, tile=(64, 64))):
                assert cost.duration_s >= lower_bound_s(op, H100)
                assert cost.duration_s >= op.flop / (H100.peak("bf16") * sms / H100.num_sms) * (1 - 1e-12)
                assert cost.duration_s == pytest.approx(cost.waves * cost.tile_time_s)
                (memory,) = cost.demands
                assert (
                    0
                    < memory.amount
                    <= min(hbm_bytes(op, H100, cost.tile, sms), cost.duration_s * memory.capacity) * (1 + 1e-12)
                )


def test_a_fit_is_used_where_there_is_one_and_fp16_shares_bf16s():
    op = GemmOp(4096, 4096, 4096)
    fitted = gemm_cost(op, A100)
    assert fitted.source.reference == "gemm/a100-sxm4-80gb.csv" and fitted.source.layer == "measured"
    assert fitted.spread.origin == "residual" and fitted.in_range
    assert gemm_cost(replace(op, dtype="fp16"), A100).duration_s == fitted.duration_s
    bare = gemm_cost(op, replace(A100, fits={}))
    assert bare.source.layer == "derived" and bare.duration_s != fitted.duration_s
    # tf32 has no fit: the profile's constants.
    assert gemm_cost(replace(op, dtype="tf32"), A100).source.layer == "derived"


def test_a_sister_is_priced_by_the_table_times_the_ratio_of_models():
    rows = bundled_rows("gemm/h100-sxm5-80gb.csv", "bf16")
    m, n, k = rows.m[:50], rows.n[:50], rows.k[:50]
    one, other = fitted_gemm(H100, "bf16"), fitted_gemm(H200, "bf16")
    ratio = other.seconds(m, n, k, residual=False) / one.seconds(m, n, k, residual=False)
    assert other.seconds(m, n, k) == pytest.approx(one.seconds(m, n, k) * ratio, rel=0.02)
    # Weights stream 4.8 / 3.35 times as fast; large products run as on the H100.
    memory, large = GemmOp(16, 16384, 16384), GemmOp(8192, 8192, 8192)
    assert gemm_cost(memory, H100).duration_s / gemm_cost(memory, H200).duration_s == pytest.approx(1.43, abs=0.05)
    assert gemm_cost(large, H200).duration_s == pytest.approx(gemm_cost(large, H100).duration_s, rel=0.02)
    cost = gemm_cost(large, H200)
    assert not cost.in_range and cost.spread.origin == "prior" and cost.source.layer == "derived"
    own = gemm_cost(large, H100).spread
    assert cost.spread.low < own.low and cost.spread.high > own.high


def test_small_m_is_flat_and_out_of_range():
    costs = [gemm_cost(GemmOp(m, 4096, 4096), H100) for m in (1, 4, 15, 16)]
    assert len({cost.duration_s for cost in costs}) == 1
    assert [cost.in_range for cost in costs] == [False, False, False, True]
    assert costs[0].spread.low <= UNKNOWN.low and costs[0].spread.high >= UNKNOWN.high


def test_far_outside_only_the_parametric_form_is_left():
    fitted = fitted_gemm(H100, "bf16")
    m = 2.0 ** np.arange(15, 22)
    ratio = np.log(fitted.seconds(m, 4096, 4096) / fitted.seconds(m, 4096, 4096, residual=False))
    assert abs(ratio[-1]) < 0.01
    assert np.all(np.abs(ratio[1:]) <= np.abs(ratio[0]) * 1.5 + 0.02)
    assert not gemm_cost(GemmOp(2**17, 4096, 4096), H100).in_range


def test_quantised_linear_layers_and_kernels_are_two_operators():
    small, large = GemmOp(16, 512, 512, "fp8"), GemmOp(802816, 192, 768, "fp8")
    # Published: floor near 12 us with quantising, 1917 us model against 1947 measured; 357 the kernel alone.
    assert linear_gemm_cost(small, H100).duration_s == pytest.approx(12e-6, rel=0.2)
    assert gemm_cost(small, H100).duration_s < 5e-6
    assert linear_gemm_cost(large, H100).duration_s == pytest.approx(1947e-6, rel=0.1)
    assert gemm_cost(large, H100).duration_s == pytest.approx(357e-6, rel=0.15)
    inside = GemmOp(4096, 4096, 4096, "fp8")
    assert linear_gemm_cost(inside, H100).in_range and not gemm_cost(inside, H100).in_range
    assert linear_gemm_cost(replace(inside, dtype="bf16"), H100) == gemm_cost(replace(inside, dtype="bf16"), H100)


@pytest.mark.parametrize(
    ("size", "tflop_per_s"), [(2048, 1011.3), (4096, 1216.9), (8192, 1290.1), (16384, 1377.3), (32768, 1382.2)]
)
def test_fp8_kernels_come_near_a_benchmark_of_kernels(size, tflop_per_s):
    # cuBLASLt on a thermally settled H100 (AI-benchmarking-guide): the tables behind the fit ran cooler, up to 15 %.
    op = GemmOp(size, size, size, "fp8")
    assert op.flop / gemm_cost(op, H100).duration_s / 1e12 == pytest.approx(tflop_per_s, rel=0.17)


def test_a_users_fit_without_a_table_is_parametric_alone():
    fit = A100.fits["gemm.bf16"]
    own = Fit("gemm", "bf16", fit.parameters, Source("measured", "records.csv", "high"), 100)
    device = replace(A100, name="my-a100", fits={"gemm.bf16": own})
    fitted = fitted_gemm(device, "bf16")
    assert fitted.layer is None
    cost = gemm_cost(GemmOp(4096, 4096, 4096), device)
    assert cost.spread == UNKNOWN and cost.in_range
    assert cost.duration_s == pytest.approx(float(fitted.seconds(4096, 4096, 4096, residual=False)))


def test_devices_without_fits_are_untouched():
    assert fitted_gemm(machines.A100, "bf16") is None
    assert fitted_gemm(machines.A100, "bf16") is None


def test_a_devices_fit_is_found_anew_when_the_device_changes():
    slower = replace(A100, hbm_bandwidth_bytes_per_s=1e12)
    op = GemmOp(16, 16384, 16384)
    assert gemm_cost(op, slower).duration_s > 1.5 * gemm_cost(op, A100).duration_s


def test_residuals_are_of_the_warm_benchmark_where_it_was_warm():
    device = load_device("l40s")
    fitted, rows = fitted_gemm(device, "bf16"), bundled_rows("gemm/l40s.csv", "bf16")
    assert fitted.parameters.warm_rate > 2 and fitted.parameters.hbm_efficiency < 0.9
    cold = replace(fitted.parameters, warm_rate=1.0)
    machine = machine_of(device, "bf16")
    # m = 32: without the term the layer would say that cold weights stream faster than the sheet.
    warm_bias = np.median(residual_layer(rows, machine, fitted.parameters).residuals)
    cold_bias = np.quantile(residual_layer(rows, machine, cold).residuals, 0.05)
    assert abs(warm_bias) < 0.03 and cold_bias < -0.3
    weights = GemmOp(32, 4096, 4096)
    assert gemm_cost(weights, device).duration_s >= weights.operand_bytes / device.hbm_bandwidth_bytes_per_s


def test_regimes_cover_all_shapes():
    assert regime(1, 64) == "m16.short_k" and regime(32768, 65536) == "large_m.long_k"
    for device in (A100, H100, load_device("b200-sxm-180gb")):
        for key in ("bf16", "fp8"):
            if (fit := device.fits.get(f"gemm.{key}")) is not None:
                assert set(fit.spread) == {regime(m, k) for m in (16, 256, 4096, 8192) for k in (512, 1024)}
                assert all(0.5 < low < 1 < high < 1.6 for low, high in fit.spread.values())
                assert all(math.isfinite(value) for value in fit.parameters.values())


@pytest.mark.benchmark
def test_hundred_thousand_shapes_with_residuals_in_a_second():
    rng = np.random.default_rng(0)
    m, n, k = (8 * np.ceil(2 ** rng.uniform(1, 12, 100_000)) for _ in range(3))
    fitted = fitted_gemm(H100, "bf16")
    fitted.seconds(m[:1], n[:1], k[:1])
    start = time.perf_counter()
    fitted.seconds(m, n, k)
    assert time.perf_counter() - start < 1.0


@pytest.mark.benchmark
def test_one_price_takes_tens_of_microseconds():
    ops = [GemmOp(8 * m, 4096, 4096) for m in range(1, 2001)]
    gemm_cost(ops[0], H100)
    start = time.perf_counter()
    for op in ops:
        gemm_cost(op, H100)
    assert (time.perf_counter() - start) / len(ops) < 60e-6

from dataclasses import replace

import numpy as np
import pytest

from overlapsim.calibration.fit_gemm import RANGES, anchors, fit_gemm, modelled, predicted, spread_by_regime
from overlapsim.calibration.fit_gemm_device import fit_table, sister_fit
from overlapsim.calibration.gemm_splits import blocked, hash_share, hashed, large_m, splits
from overlapsim.cost.gemm_fitted import GemmRows, bundled_rows, fitted_gemm, machine_of
from overlapsim.cost.gemm_model import GemmParameters
from overlapsim.errors import CalibrationError, ProfileError
from overlapsim.hardware.loading import load_device

H100 = load_device("h100-sxm5-80gb")
TRUTH = GemmParameters(
    launch_s=2.2e-6,
    compute_efficiency=0.80,
    hbm_efficiency=0.75,
    sm_load_bytes_per_s=220e9,
    fill_s=0.7e-6,
    split_s=3e-6,
    epilogue_s=0.8e-6,
    tile_64x64=0.75,
    tile_64x128=0.85,
    tile_128x128=0.95,
    tile_128x192=0.95,
    l2_bytes_per_s=12e12,
    reread=0.3,
)


def made_up(count=400, seed=1, noise=0.02, truth=TRUTH):
    rng = np.random.default_rng(seed)
    m, n, k = (32 * np.ceil(2 ** rng.uniform(0, 9, count)) for _ in range(3))
    rows = GemmRows(m, n, k, np.ones(count))
    times = modelled(rows, machine_of(H100, "bf16"), truth) * np.exp(rng.normal(0, noise, count))
    return GemmRows(m, n, k, times)


def median_error(times, rows):
    return float(np.median(np.abs(times / rows.time_s - 1)))


def test_known_constants_come_back_where_they_are_identified():
    rows = made_up(noise=0.0)
    fit = fit_gemm(rows, H100)
    assert median_error(predicted(fit, H100, rows), rows) < 0.005
    found = fit.parameters
    assert found["hbm_efficiency"] == pytest.approx(0.75, rel=0.03)
    assert found["launch_s"] + found["fill_s"] == pytest.approx(2.9e-6, rel=0.05)
    assert (fit.family, fit.key, fit.num_points, fit.source.layer) == ("gemm", "bf16", 400, "measured")


def test_a_hundred_and_twenty_shapes_tell_a_device():
    few, rest = made_up(120, noise=0.03), made_up(2000, seed=2, noise=0.0)
    assert median_error(predicted(fit_gemm(few, H100), H100, rest), rest) < 0.03


def test_some_wild_cells_do_not_move_the_fit():
    rows = made_up()
    wild = rows.time_s.copy()
    wild[::25] *= 4
    spoiled = fit_gemm(replace(rows, time_s=wild), H100)
    assert median_error(predicted(spoiled, H100, rows), rows) < 0.025


def test_fits_are_deterministic_and_in_physical_ranges():
    rows = made_up(60, noise=0.3, seed=5)
    one, other = fit_gemm(rows, H100), fit_gemm(rows, H100)
    assert one == other
    for name in ("compute_efficiency", "hbm_efficiency"):
        assert RANGES[name][1] <= one.parameters[name] <= RANGES[name][2] == 1.0


def test_quantised_rows_keep_the_kernel_floor_given():
    truth = replace(TRUTH, quantise_launch_s=6e-6, quantise_floor_s=3e-6, quantise_efficiency=0.3)
    rng = np.random.default_rng(3)
    m, n, k = (32 * np.ceil(2 ** rng.uniform(0, 9, 600)) for _ in range(3))
    shapes = GemmRows(m, n, k, np.ones(600))
    rows = replace(shapes, time_s=modelled(shapes, machine_of(H100, "fp8"), truth))
    fit = fit_gemm(rows, H100, "fp8", quantised=True, launch_s=2.2e-6)
    assert fit.parameters["launch_s"] == 2.2e-6
    assert median_error(predicted(fit, H100, rows), rows) < 0.01
    together = fit.parameters["quantise_launch_s"] + fit.parameters["quantise_floor_s"]
    assert together == pytest.approx(9e-6, rel=0.15)


def test_a_device_far_below_the_peak_of_its_profile_is_fitted_without_bias():
    # A CPU whose vector units and clock nobody wrote down reaches a third of the profile's peak, or a tenth.
    cpu = load_device("cpu-rank")
    m, n, k = np.array(
        [(m, n, k) for m in (128, 256, 512, 1024, 1536) for n in (128, 512, 1024) for k in (192, 512)], float
    ).T
    for rate in (95e9, 30e9):
        rows = GemmRows(m, n, k, 2 * m * n * k / rate)
        errors = predicted(fit_gemm(rows, cpu, "fp32"), cpu, rows) / rows.time_s - 1
        assert abs(np.median(errors)) < 0.03


def test_too_little_or_broken_data_is_refused():
    rows = made_up(29)
    with pytest.raises(CalibrationError, match="29 GEMM shapes were given; expected at least 30"):
        fit_gemm(rows, H100)
    rows = made_up(40)
    rows.time_s[3] = -1
    with pytest.raises(CalibrationError, match="not positive and finite"):
        fit_gemm(rows, H100)
    with pytest.raises(ProfileError, match="no fp4 rate"):
        fit_gemm(made_up(40), H100, "fp4")


def test_residuals_of_fitted_rows_help_rows_between():
    rows = bundled_rows("gemm/h100-sxm5-80gb.csv", "bf16")
    seen, unseen = hashed(rows)
    fit = fit_gemm(rows[seen], H100)
    alone, both = predicted(fit, H100, rows[unseen]), predicted(fit, H100, rows[unseen], rows[seen])
    assert median_error(both, rows[unseen]) < 0.8 * median_error(alone, rows[unseen])
    # A layer needs enough points to be more than their noise.
    few = anchors(rows, 120)
    assert np.array_equal(predicted(fit, H100, rows[unseen], rows[few]), alone)


def test_splits_hide_what_they_say():
    rows = bundled_rows("gemm/a100-sxm4-80gb.csv", "bf16")
    seen, unseen = hashed(rows)
    assert np.array_equal(seen, ~unseen) and 0.45 < seen.mean() < 0.55
    assert hash_share(rows).min() >= 0 and hash_share(rows).max() < 1
    assert hash_share(rows)[:5].tolist() == hash_share(rows[np.arange(5)]).tolist()
    assert hash_share(rows, "range").tolist() != hash_share(rows).tolist()
    hidden = np.zeros(len(rows), dtype=int)
    for seen, unseen in blocked(rows):
        for axis in ("n", "k"):
            assert not set(getattr(rows, axis)[seen]) & set(getattr(rows, axis)[unseen])
        hidden += unseen
    assert hidden.max() == 1 and 0.3 < hidden.mean() < 0.37
    seen, unseen = large_m(rows)
    assert rows.m[seen].max() == 2048 and rows.m[unseen].min() == 4096
    assert set(splits(rows)) == {"hashed", "large_m", "blocked_0", "blocked_1", "blocked_2"}


def test_anchors_are_spread_and_deterministic():
    rows = bundled_rows("gemm/h100-sxm5-80gb.csv", "bf16")
    mask = anchors(rows, 60)
    assert mask.sum() == 60 and np.array_equal(mask, anchors(rows, 60))
    assert {rows.m[mask].min(), rows.m[mask].max()} == {16, 32768}
    assert anchors(rows[np.arange(10)], 60).sum() == 10


def test_ranges_hold_nine_tenths():
    rng = np.random.default_rng(0)
    ratio, m, k = np.exp(rng.normal(0, 0.05, 4000)), np.full(4000, 64.0), rng.choice([512.0, 4096.0], 4000)
    m[:10] = 16.0
    spread = spread_by_regime(ratio, m, k)
    low, high = spread["small_m.long_k"]
    assert low == pytest.approx(0.92, abs=0.01) and high == pytest.approx(1.085, abs=0.01)
    assert spread["m16.long_k"] == pytest.approx(np.quantile(ratio, (0.05, 0.95)))


def test_a_sister_keeps_rates_of_its_own_and_wider_ranges():
    h200 = load_device("h200-sxm-141gb")
    fit = H100.fits["gemm.bf16"]
    sister = sister_fit(fit, H100, h200)
    for name in ("l2_bytes_per_s", "sm_load_bytes_per_s", "hbm_efficiency", "compute_efficiency"):
        assert sister.parameters[name] == fit.parameters[name]
    assert (sister.num_points, sister.source.layer, sister.source.reference) == (0, "derived", fit.source.reference)
    for regime, (low, high) in sister.spread.items():
        assert low <= fit.spread[regime][0] and high >= fit.spread[regime][1]
    # What ships for the H200 is exactly this.
    shipped = h200.fits["gemm.bf16"]
    assert shipped.parameters == pytest.approx(dict(sister.parameters), rel=1e-3)
    pcie = load_device("a100-pcie-80gb")
    slower = sister_fit(load_device("a100-sxm4-80gb").fits["gemm.bf16"], load_device("a100-sxm4-80gb"), pcie)
    assert slower.parameters["compute_efficiency"] < 0.95


@pytest.mark.parametrize(
    ("name", "bar"), [("a100-sxm4-80gb", 0.06), ("h100-sxm5-80gb", 0.06), ("b200-sxm-180gb", 0.06)]
)
def test_a_real_device_calibrates_from_120_shapes(name, bar):
    device, rows = load_device(name), bundled_rows(f"gemm/{name}.csv", "bf16")
    few = anchors(rows, 120)
    fit = fit_gemm(rows[few], device)
    assert median_error(predicted(fit, device, rows[~few]), rows[~few]) <= bar


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("h100-sxm5-80gb", "bf16"), ("h100-sxm5-80gb", "fp8")])
def test_shipped_fits_come_from_the_bundled_tables(name, dtype):
    device = load_device(name)
    rows = bundled_rows(f"gemm/{name}.csv", dtype)
    kept = device.fits["gemm.bf16"].parameters["launch_s"] if dtype == "fp8" else None
    told = []
    found = fit_table(
        rows,
        device,
        dtype,
        reference=f"gemm/{name}.csv",
        quantised=dtype == "fp8",
        launch_s=kept,
        progress=told.append,
    )
    shipped = device.fits[f"gemm.{dtype}"]
    assert len(told) == 6
    assert (found.fit.num_points, found.fit.notes) == (shipped.num_points, shipped.notes)
    model = fitted_gemm(device, dtype)
    again = modelled(rows, model.machine, GemmParameters.from_mapping(found.fit.parameters))
    # Constants that are not identified may end elsewhere; times may not.
    assert again == pytest.approx(modelled(rows, model.machine, model.parameters), rel=0.01)

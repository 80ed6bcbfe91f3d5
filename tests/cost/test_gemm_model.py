import math
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.gemm_model import (
    TILES,
    GemmMachine,
    GemmParameters,
    constants,
    kernel_seconds,
    model_seconds,
    price_one,
    warm_scale,
)
from overlapsim.errors import ProfileError

MACHINE = GemmMachine(132, 989.4e12, 3.35e12, 50 * 2**20, 2.0)
PARAMETERS = GemmParameters(
    launch_s=1.7e-6,
    compute_efficiency=0.95,
    hbm_efficiency=0.86,
    sm_load_bytes_per_s=250e9,
    fill_s=1e-6,
    split_s=2.3e-6,
    epilogue_s=1e-6,
    tile_64x64=0.8,
    tile_64x128=0.9,
    tile_128x128=1.1,
    tile_128x192=1.05,
    l2_bytes_per_s=16e12,
    reread=0.4,
)
FP8 = replace(PARAMETERS, quantise_launch_s=5e-6, quantise_floor_s=5e-6, quantise_efficiency=0.35)
sizes = st.integers(1, 4096).map(lambda size: 8 * size)
quick = settings(deadline=None, max_examples=200)


def seconds(parameters=PARAMETERS, m=4096, n=4096, k=4096, **changes):
    return float(model_seconds(constants(replace(MACHINE, **changes), parameters), m, n, k))


def test_one_kernel_in_closed_form():
    # 4096 / 128 x 4096 / 256 = 512 tiles: four waves on 132 SMs; 64 steps of 64.
    c = constants(MACHINE, PARAMETERS)
    step_s = max(2 * 128 * 256 * 64 / (989.4e12 * 0.95 / 132), 384 * 64 * 2 / 250e9)
    compute_s = 4 * (64 * step_s + 1e-6) + 1e-6
    memory_s = max((2 * 4096 * 8192 + 2 * 4096**2) / (3.35e12 * 0.86), 2 * 4096 * 512 * 384 / 16e12)
    expected = 1.7e-6 + math.hypot(compute_s, memory_s)
    assert kernel_seconds(4096.0, 4096.0, 4096.0, 1.0, 128.0, 256.0, 1.0, 1, c) == pytest.approx(expected, rel=1e-12)


def test_split_k_pays_where_few_tiles_leave_sms_idle():
    time_s, tile, split = price_one(64.0, 1024.0, 16384.0, 1.0, constants(MACHINE, PARAMETERS))
    assert split > 1
    unsplit = min(
        kernel_seconds(64.0, 1024.0, 16384.0, 1.0, bm, bn, efficiency, 1, constants(MACHINE, PARAMETERS))
        for (bm, bn), efficiency in zip(TILES, PARAMETERS.tile_efficiency, strict=True)
    )
    assert time_s < 0.7 * unsplit and TILES[tile][0] * TILES[tile][1] <= 128 * 128
    # A grid that fills the SMs is never split, nor is a short k.
    assert price_one(8192.0, 8192.0, 16384.0, 1.0, constants(MACHINE, PARAMETERS))[2] == 1
    assert price_one(64.0, 64.0, 256.0, 1.0, constants(MACHINE, PARAMETERS))[2] == 1


@quick
@given(sizes, sizes, sizes, st.sampled_from("mnk"), st.integers(2, 4))
def test_never_below_hardware_and_never_falls_at_one_kernel(m, n, k, grown, times):
    c = constants(MACHINE, PARAMETERS)
    found = float(model_seconds(c, m, n, k))
    assert found >= max(2 * m * n * k / 989.4e12, (2 * k * (m + n) + 2 * m * n) / 3.35e12)
    larger = {"m": m, "n": n, "k": k}
    larger[grown] *= times
    for (bm, bn), efficiency in zip(TILES, PARAMETERS.tile_efficiency, strict=True):
        before = kernel_seconds(float(m), float(n), float(k), 1.0, float(bm), float(bn), efficiency, 1, c)
        after = kernel_seconds(*(float(larger[d]) for d in "mnk"), 1.0, float(bm), float(bn), efficiency, 1, c)
        assert after >= before * (1 - 1e-12)
        assert found <= before * (1 + 1e-12)


@quick
@given(sizes, sizes, sizes, st.integers(8, 131))
def test_more_of_anything_is_never_slower_at_one_kernel(m, n, k, sms):
    shape = float(m), float(n), float(k), 1.0, 128.0, 256.0, 1.0, 1
    base = kernel_seconds(*shape, constants(MACHINE, PARAMETERS))
    assert kernel_seconds(*shape, constants(MACHINE, PARAMETERS, sms)) >= base * (1 - 1e-12)
    for field in ("peak_flop_per_s", "hbm_bandwidth_bytes_per_s"):
        better = replace(MACHINE, **{field: 1.5 * getattr(MACHINE, field)})
        assert kernel_seconds(*shape, constants(better, PARAMETERS)) <= base * (1 + 1e-12)


def test_rows_below_sixteen_cost_what_sixteen_do():
    assert {seconds(m=m) for m in (1, 2, 7, 15, 16)} == {seconds(m=16)}


def test_quantising_is_a_term_of_its_own():
    kernel, linear = seconds(FP8.kernel_alone(), element_bytes=1.0), seconds(FP8, element_bytes=1.0)
    moved_s = 3 * 4096 * 4096 / (0.35 * 3.35e12)
    assert linear - kernel == pytest.approx(5e-6 + max(5e-6, moved_s))
    small = seconds(FP8, m=16, k=512) - seconds(FP8.kernel_alone(), m=16, k=512)
    assert small == pytest.approx(10e-6)
    assert seconds(PARAMETERS.kernel_alone()) == seconds(PARAMETERS)


def test_l2_rate_does_not_follow_hbm():
    # Tile traffic from L2 decides here: a sister with faster HBM gains nothing.
    slow_l2 = replace(PARAMETERS, l2_bytes_per_s=4e12)
    assert seconds(slow_l2) == seconds(slow_l2, hbm_bandwidth_bytes_per_s=4.8e12)
    assert seconds(replace(PARAMETERS, l2_bytes_per_s=40e12)) < seconds(slow_l2)


def test_operands_beyond_l2_are_read_again_only_if_the_term_is_on():
    off = replace(PARAMETERS, reread=0.0)
    skinny = {"m": 32768, "n": 32768, "k": 32768}
    hungry = replace(off, l2_bytes_per_s=1e15, hbm_efficiency=0.1)
    assert seconds(replace(hungry, reread=1.0), **skinny) > seconds(hungry, **skinny)
    assert seconds(replace(PARAMETERS, reread=1.0), m=1024, n=1024) == seconds(off, m=1024, n=1024)


def test_warm_weights_are_those_whose_copies_just_fill_l2():
    machine, parameters = GemmMachine(142, 362e12, 0.864e12, 96 * 2**20, 2.0), replace(PARAMETERS, warm_rate=3.0)
    # 25.2 MB of weights: four copies are 100.7 MB, L2's size; 29.4 MB: four are 117 MB.
    k = np.array([12582912.0 / 2048, 14680064.0 / 2048])
    warm, cold = warm_scale(machine, parameters, np.full(2, 32.0), np.full(2, 2048.0), k).tolist()
    assert warm < 0.45 and cold > 0.75
    far = warm_scale(machine, parameters, np.array([32.0]), np.array([16384.0]), np.array([16384.0]))
    assert far == pytest.approx(1.0, abs=1e-3)
    assert warm_scale(machine, PARAMETERS, np.full(1, 32.0), np.full(1, 64.0), np.full(1, 64.0)) == pytest.approx(1.0)


def test_efficiency_of_other_tiles_goes_by_area():
    assert PARAMETERS.efficiency_of(256, 128) == 1.0
    assert PARAMETERS.efficiency_of(128, 64) == PARAMETERS.tile_64x128
    assert PARAMETERS.efficiency_of(32, 32) == PARAMETERS.tile_64x64
    assert 0.9 < PARAMETERS.efficiency_of(96, 128) < 1.1


def test_parameters_survive_a_mapping_and_refuse_nonsense():
    assert GemmParameters.from_mapping(FP8.to_mapping()) == FP8
    bare = {name: value for name, value in PARAMETERS.to_mapping().items() if not name.startswith(("quantise", "warm"))}
    assert GemmParameters.from_mapping(bare) == PARAMETERS
    with pytest.raises(ProfileError, match=r"lacks \['fill_s'\]"):
        GemmParameters.from_mapping({name: value for name, value in bare.items() if name != "fill_s"})
    with pytest.raises(ProfileError, match=r"unknown \['speed'\]"):
        GemmParameters.from_mapping({**bare, "speed": 1.0})
    with pytest.raises(ProfileError, match=r"not finite \['launch_s'\]"):
        GemmParameters.from_mapping({**bare, "launch_s": math.nan})


def test_shapes_broadcast():
    c = constants(MACHINE, PARAMETERS)
    m, n = np.array([[64], [4096]]), np.array([512, 1024, 2048])
    found = model_seconds(c, m, n, 4096)
    assert found.shape == (2, 3)
    assert found[1, 2] == price_one(4096.0, 2048.0, 4096.0, 1.0, c)[0]


@pytest.mark.benchmark
def test_hundred_thousand_shapes_in_a_second():
    rng = np.random.default_rng(0)
    m, n, k = (8 * np.ceil(2 ** rng.uniform(1, 12, 100_000)) for _ in range(3))
    c = constants(MACHINE, PARAMETERS)
    model_seconds(c, m[:1], n[:1], k[:1])
    start = time.perf_counter()
    model_seconds(c, m, n, k)
    assert time.perf_counter() - start < 1.0

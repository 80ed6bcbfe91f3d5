import dataclasses

import numpy as np
import pytest

from overlapsim.calibration.fit_files import fit_text
from overlapsim.calibration.fit_operators import adopt, fit_device_memory, fit_works
from overlapsim.calibration.operator_rows import LinearOp, Work
from overlapsim.cost.attention import DECODE_PRIOR, PREFILL_PRIOR
from overlapsim.cost.memory_bound import PRIOR, memory_seconds
from overlapsim.errors import CalibrationError, WorkloadError
from overlapsim.hardware.documents import parse_document
from overlapsim.hardware.fits import read_fits
from overlapsim.hardware.loading import load_device
from overlapsim.hardware.profile import Fit, Source
from overlapsim.workload.attention import AttentionOp

DEVICE = dataclasses.replace(load_device("h100-sxm5-80gb"), fits={})
SOURCE = Source("measured", "made up")
ROWS = np.tile(2.0 ** np.arange(0, 17), 3)
COLUMNS = np.repeat([2048, 4096, 12288], 17)


def with_fit(fit):
    return dataclasses.replace(DEVICE, fits={f"{fit.family}.{fit.key}": fit})


def made_up_memory(**constants):
    return with_fit(Fit("memory", "rmsnorm", {**PRIOR, **constants}, SOURCE, 1))


def noise(count, size, seed=0):
    return np.exp(np.random.default_rng(seed).normal(0, size, count))


def attention_works(decode):
    works = []
    for batch in (1, 2, 8, 32, 128):
        for length in (512, 1024, 4096, 8192, 16384):
            for heads, kv_heads in ((8, 1), (32, 8), (64, 8), (16, 16)):
                for dim in (128,) if decode else (64, 128):
                    q_len = 1 if decode else length
                    op = AttentionOp(batch, q_len, length, heads, kv_heads, dim, causal=not decode)
                    works.append(Work(op, "decode_bf16" if decode else "prefill_bf16", "bf16"))
    return works


def priced(works, constants, family="attention"):
    from overlapsim.calibration.operator_models import group_works

    (group,) = group_works(works)
    return group.seconds(constants, DEVICE)


def test_memory_constants_are_found_again():
    truth = made_up_memory(floor_s=4e-6, hbm_efficiency=0.55, l2_efficiency=0.9)
    times = memory_seconds("rmsnorm", ROWS, COLUMNS, truth) * noise(len(ROWS), 0.01)
    fit = fit_device_memory(DEVICE, "rmsnorm", ROWS, COLUMNS, "bf16", times)
    assert fit.parameters["hbm_efficiency"] == pytest.approx(0.55, rel=0.05)
    assert fit.num_points == len(ROWS)
    again = memory_seconds("rmsnorm", ROWS, COLUMNS, with_fit(fit))
    assert np.median(np.abs(again / times - 1)) < 0.02


def test_prefill_and_decode_constants_are_found_again():
    for decode, prior, name, value in (
        (False, PREFILL_PRIOR, "tensor_efficiency", 0.72),
        (True, DECODE_PRIOR, "hbm_efficiency", 0.7),
    ):
        works = attention_works(decode)
        truth = {**prior, name: value, "floor_s": 15e-6}
        times = priced(works, truth) * noise(len(works), 0.01)
        fit = fit_works(DEVICE, works, times, SOURCE)
        assert fit.parameters[name] == pytest.approx(value, rel=0.05)
        assert fit.parameters["floor_s"] == pytest.approx(15e-6, rel=0.1)
        assert np.median(np.abs(priced(works, fit.parameters) / times - 1)) < 0.02
        assert (fit.parameters["length_low"], fit.parameters["length_high"]) == (512, 16384)


def test_wild_points_do_not_bend_the_fit():
    works = attention_works(decode=True)
    times = priced(works, DECODE_PRIOR)
    wild = times.copy()
    wild[::10] *= 5
    clean, robust = (fit_works(DEVICE, works, t, SOURCE) for t in (times, wild))
    ratio = priced(works, robust.parameters) / priced(works, clean.parameters)
    assert np.abs(ratio - 1).max() < 0.1


def test_the_spread_is_that_of_points_not_fitted():
    works = attention_works(decode=False)
    times = priced(works, PREFILL_PRIOR) * noise(len(works), 0.1)
    fit = fit_works(DEVICE, works[::2], times[::2], SOURCE)
    for low, high in fit.spread.values():
        assert 0.7 < low < 0.95
        assert 1.05 < high < 1.4
    new = times[1::2] / priced(works[1::2], fit.parameters)
    low, high = (np.median([ends[side] for ends in fit.spread.values()]) for side in (0, 1))
    assert 0.8 <= np.mean((new >= low) & (new <= high)) <= 0.99


def test_the_same_times_give_the_same_fit():
    works = attention_works(decode=True)
    times = priced(works, DECODE_PRIOR) * noise(len(works), 0.05)
    assert fit_works(DEVICE, works, times, SOURCE) == fit_works(DEVICE, works, times, SOURCE)


def test_what_points_do_not_say_stays_near_the_prior():
    works = [work for work in attention_works(decode=False) if work.op.head_dim == 128]
    fit = fit_works(DEVICE, works, priced(works, PREFILL_PRIOR), SOURCE)
    assert fit.parameters["narrow_efficiency"] == pytest.approx(PREFILL_PRIOR["narrow_efficiency"], rel=1e-3)
    assert fit.parameters["broad_efficiency"] == pytest.approx(PREFILL_PRIOR["broad_efficiency"], rel=1e-3)


def test_refusals():
    works = attention_works(decode=True)
    with pytest.raises(CalibrationError, match="at least 4"):
        fit_works(DEVICE, works[:3], [1, 1, 1], SOURCE)
    with pytest.raises(CalibrationError, match="positive number of seconds"):
        fit_works(DEVICE, works[:4], [1, 1, 0, 1], SOURCE)
    with pytest.raises(CalibrationError, match="several fits"):
        fit_works(DEVICE, [*works[:4], Work(LinearOp(1, 1, 1, 1), "x", "bf16")], np.ones(5), SOURCE)
    with pytest.raises(WorkloadError, match="is unknown"):
        fit_device_memory(DEVICE, "norm", ROWS, COLUMNS, "bf16", ROWS)


def test_a_sister_takes_constants_and_not_confidence():
    works = attention_works(decode=True)
    fit = fit_works(DEVICE, works, priced(works, DECODE_PRIOR), SOURCE)
    sister = adopt(fit, "h100", "SISTER")
    assert (sister.num_points, sister.spread, sister.source.trust) == (0, {}, "low")
    assert "length_low" not in sister.parameters
    assert sister.parameters["floor_s"] == fit.parameters["floor_s"]


def test_files_are_read_back_as_they_were():
    times = memory_seconds("rmsnorm", ROWS, COLUMNS, made_up_memory()) * noise(len(ROWS), 0.03)
    fit = fit_device_memory(DEVICE, "rmsnorm", ROWS, COLUMNS, "bf16", times)
    text = fit_text(DEVICE.name, [fit])
    document = parse_document(DEVICE.name, "memory.yaml", text.encode())
    fits, problems = read_fits(document, DEVICE.name)
    assert problems == []
    again = fits["memory.rmsnorm"]
    assert again.num_points == fit.num_points
    for name, value in fit.parameters.items():
        assert again.parameters[name] == pytest.approx(value, rel=1e-3)
    for regime, ends in fit.spread.items():
        assert again.spread[regime] == pytest.approx(ends, abs=1e-3)

import math
from dataclasses import replace

import pytest

from overlapsim.cost import contention
from overlapsim.cost.contention import Ranged, compute_slowdown, hbm_per_wire_byte, stolen_sms
from overlapsim.errors import UsageError
from overlapsim.hardware.loading import list_profiles, load_cluster, load_device
from overlapsim.hardware.profile import Fit, Source
from overlapsim.hardware.wire import hbm_bytes, ring_wire_bytes
from overlapsim.workload.operators import COLLECTIVES

H100 = load_device("h100-sxm5-80gb")
RANGES = [value for value in vars(contention).values() if isinstance(value, Ranged)]


@pytest.mark.parametrize("value", RANGES, ids=lambda value: value.source.reference)
def test_every_range_is_ordered_and_says_what_disagrees(value):
    assert 0 <= value.low <= value.typical <= value.high
    assert value.note
    assert value.source.reference


def test_one_stolen_wave_reproduces_the_published_fall():
    # 132 CTAs on 132 SMs are one wave; beside 24 CTAs two: half the rate if nothing else changed, 47 of 80 % measured.
    waves = math.ceil(132 / (132 - 24))
    assert waves == 2
    measured = contention.EXTRA_WAVE_RATE.typical
    assert measured == pytest.approx(47 / 80, abs=0.005)
    assert contention.EXTRA_WAVE_RATE.low == 1 / waves


@pytest.mark.parametrize("name", list_profiles("device"))
def test_no_engine_steals_more_sms_than_there_are(name):
    device = load_device(name)
    for engine in ("kernel", "nvls", "copy_engine"):
        assert 0 <= stolen_sms(device, engine).high <= device.num_sms
    assert stolen_sms(device, "copy_engine").high == 0


def test_newer_libraries_hold_fewer_sms_on_blackwell():
    assert stolen_sms(load_device("b200-sxm-180gb")).typical < stolen_sms(H100).typical
    with pytest.raises(UsageError, match="'dma' is unknown"):
        stolen_sms(H100, "dma")


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_memory_traffic_agrees_with_the_ring(kind):
    cluster = load_cluster("h100-sxm8")
    sent = max(ring_wire_bytes(cluster, 8, kind, 1e9).values())
    memory = hbm_bytes(cluster, 8, kind, 1e9)["hbm[0]"]
    allowed = hbm_per_wire_byte(kind)
    assert allowed.low * sent * 0.99 <= memory <= allowed.high * sent * 1.01


def test_copy_engines_do_not_reduce():
    assert hbm_per_wire_byte("all_gather", "copy_engine").typical == 2
    with pytest.raises(UsageError, match="cannot reduce"):
        hbm_per_wire_byte("all_reduce", "copy_engine")
    assert hbm_per_wire_byte("all_reduce", "nvls").typical < hbm_per_wire_byte("all_reduce").typical


def test_an_own_measurement_replaces_the_published_slowdown():
    assert compute_slowdown(H100) is contention.COMPUTE_SLOWDOWN
    fit = Fit("contention", "gemm_beside_all_reduce", {"slowdown": 1.08}, Source("measured", "mine"), 12)
    mine = compute_slowdown(replace(H100, fits={"contention.gemm_beside_all_reduce": fit}))
    assert (mine.typical, mine.source.reference) == (1.08, "mine")
    assert mine.low < 1.08 < mine.high

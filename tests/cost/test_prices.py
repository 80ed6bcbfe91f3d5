from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapsim.cost.base import hbm_rate
from overlapsim.cost.beliefs import check_curve
from overlapsim.cost.collective import CollectiveModel
from overlapsim.cost.curve import Curve
from overlapsim.cost.gemm import gemm_cost, lower_bound_s, template_gemm_cost
from overlapsim.cost.gemm_prices import PIECES, TEMPLATE
from overlapsim.cost.launch_prices import LAUNCH
from overlapsim.cost.prices import PriceBook
from overlapsim.errors import ProfileError, StrategyError, UsageError
from overlapsim.hardware.profile import CurveKey, CurveTable, Source
from overlapsim.workload.operators import COLLECTIVES, CollectiveOp, GemmOp, gemm_and_collective
from tests.cost.machines import A100, nvlink_cluster

POD = nvlink_cluster()
OP = GemmOp(8192, 8192, 4096, "fp16")
CHUNK = GemmOp(2048, 8192, 4096, "fp16")
MIB = 2.0**20
TABLE = CurveTable((MIB, 16 * MIB, 256 * MIB), (60e-6, 180e-6, 2100e-6), Source("measured", "nccl-tests log"))
BARE = PriceBook(POD, 8)
MEASURED = PriceBook(
    POD,
    8,
    gemm=OP,
    kind="all_reduce",
    gemm_time_s=2.04e-3,
    kernel_time_s={"wave_group": 2.361e-3},
    curve=TABLE,
    tile=(256, 128),
)
quick = settings(deadline=None, max_examples=60)
families = st.sampled_from(["gemm", "collective", "launch"])


def codes(findings):
    return [finding.code for finding in findings]


def test_without_measurements_prices_are_the_models():
    assert BARE.vendor_gemm(OP) == gemm_cost(OP, A100)
    # A signalled kernel: the vendor's time on the fastest tile, the slowdown, and the store of every wave on top.
    kernel, model = BARE.kernel_gemm(OP, "wave_group"), template_gemm_cost(OP, A100)
    store_s = BARE.overlap.epilogue_factor * 108 * kernel.grid.bm * kernel.grid.bn * 2 / hbm_rate(A100)
    expected_s = gemm_cost(OP, A100).duration_s * A100.kernels.template_slowdown + kernel.waves * store_s
    assert kernel.tile == model.tile
    assert kernel.duration_s == pytest.approx(expected_s)
    assert BARE.collective(CollectiveOp("all_reduce", MIB, 8)).source.layer == "prior"
    assert BARE.comm_sms("all_reduce") == 16
    assert BARE.signal_wait_s == 2e-6


def test_measured_times_replace_the_model_where_they_belong():
    assert MEASURED.vendor_gemm(OP).duration_s == pytest.approx(2.04e-3)
    kernel = MEASURED.kernel_gemm(OP, "wave_group")
    assert kernel.duration_s == pytest.approx(2.361e-3)
    assert kernel.tile_time_s == pytest.approx(2.361e-3 / 19)
    assert (kernel.tile, kernel.spread.origin) == ((256, 128, 64), "measured")
    assert MEASURED.collective(CollectiveOp("all_reduce", MIB, 8)).duration_s == pytest.approx(60e-6)


def test_names_do_not_decide_what_was_measured():
    named = replace(OP, name="mlp.fc2", pass_="dgrad")
    assert MEASURED.vendor_gemm(named).duration_s == pytest.approx(2.04e-3)


def test_other_shapes_and_tiles_are_scaled_by_the_measured_ratio():
    ratio = 2.04e-3 / gemm_cost(OP, A100).duration_s
    assert MEASURED.vendor_gemm(CHUNK).duration_s == pytest.approx(gemm_cost(CHUNK, A100).duration_s * ratio)
    # A strategy that was not measured: the vendor's time, longer by the model's ratio of the tiles, plus the stores.
    other = MEASURED.kernel_gemm(OP, "other", (128, 128))
    times = [template_gemm_cost(OP, A100, tile=tile).duration_s for tile in ((128, 128), (256, 128))]
    store_s = MEASURED.overlap.epilogue_factor * 108 * 128 * 128 * 2 / hbm_rate(A100)
    expected_s = 2.04e-3 * A100.kernels.template_slowdown * times[0] / times[1] + other.waves * store_s
    assert other.duration_s == pytest.approx(expected_s)
    # The measured strategy on another tile: its own ratio.
    ratio = 2.361e-3 / template_gemm_cost(OP, A100, tile=(256, 128)).duration_s
    tile = MEASURED.kernel_gemm(OP, "wave_group", (128, 128))
    assert tile.duration_s == pytest.approx(template_gemm_cost(OP, A100, tile=(128, 128)).duration_s * ratio)
    assert tile.spread.origin == "prior"


def test_a_fast_measurement_does_not_push_other_shapes_below_the_bound():
    fast = PriceBook(POD, 8, gemm=OP, gemm_time_s=lower_bound_s(OP, A100) * 1.0001)
    for op in (CHUNK, GemmOp(16384, 16384, 16384, "fp16"), GemmOp(16, 8192, 8192, "fp16")):
        assert fast.vendor_gemm(op).duration_s >= lower_bound_s(op, A100)
        assert fast.kernel_gemm(op, "wave_group").duration_s >= lower_bound_s(op, A100)


def test_kernel_tiles():
    assert MEASURED.kernel_tiles(OP, "wave_group") == MEASURED.kernel_tiles(OP, "other") == ((256, 128, 64),)
    assert BARE.kernel_tiles(OP, "wave_group") == A100.kernels.gemm_tiles
    assert BARE.kernel_tiles(GemmOp(100, 8192, 8192), "wave_group") == ((64, 128, 64), (64, 64, 64))
    tiny = GemmOp(16, 32, 4096)
    assert BARE.kernel_tiles(tiny, "wave_group") == ((64, 64, 64),)
    assert BARE.kernel_gemm(tiny, "wave_group", (64, 64, 64)).waves == 1


def test_tiles_that_differ_in_depth_alone_are_one_candidate():
    kernels = replace(A100.kernels, gemm_tiles=((128, 256, 32), (128, 256, 64), (128, 128, 64), (128, 128, 32)))
    book = PriceBook(nvlink_cluster(replace(A100, kernels=kernels)), 8)
    assert book.kernel_tiles(OP, "wave_group") == ((128, 256, 64), (128, 128, 64))
    assert book.vendor_gemm(OP).tile == (128, 256, 64)


def test_best_kernel_is_the_vendors_or_a_measured_one():
    assert MEASURED.best_gemm_s(OP) == pytest.approx(2.04e-3)
    quick_kernel = replace(MEASURED, kernel_time_s={"wave_group": 1.9e-3})
    assert quick_kernel.best_gemm_s(OP) == pytest.approx(1.9e-3)


def test_serial_is_the_sum_with_vendor_kernels():
    graph = gemm_and_collective(OP, "all_reduce", 8)
    collective_s = MEASURED.collective(CollectiveOp("all_reduce", OP.output_bytes, 8)).duration_s
    assert MEASURED.serial_s(graph) == pytest.approx(2.04e-3 + collective_s)


@quick
@given(st.sampled_from(COLLECTIVES), st.sampled_from([2, 4, 8, 16]), st.lists(st.floats(1, 1e10), min_size=1))
def test_many_sizes_at_once_are_what_each_costs(kind, ranks, sizes):
    for book in (replace(BARE, ranks=ranks), replace(MEASURED, ranks=ranks), BARE.scaled("collective", 1.3)):
        together = book.collective_seconds(kind, sizes, book.ranks)
        each = [book.collective(CollectiveOp(kind, size, book.ranks)).duration_s for size in sizes]
        assert together == pytest.approx(np.array(each))


def test_the_books_curve_serves_its_own_kind_and_ranks_only():
    measured_s = Curve(TABLE).seconds(16 * MIB)
    assert MEASURED.collective_seconds("all_reduce", 16 * MIB, MEASURED.ranks) == pytest.approx(measured_s)
    for kind, ranks in (("all_gather", 8), ("all_reduce", 4)):
        op = CollectiveOp(kind, 16 * MIB, ranks)
        expected = CollectiveModel(POD, kind, ranks).seconds(op.size_bytes)
        assert MEASURED.collective(op).duration_s == pytest.approx(float(expected))


def test_the_clusters_curve_is_used_where_the_book_has_none():
    cluster = POD.with_curve(CurveKey("all_reduce", 8), TABLE)
    assert PriceBook(cluster, 8).collective_seconds("all_reduce", MIB, 8) == pytest.approx(60e-6)


@quick
@given(families, st.floats(0.1, 10), st.floats(0.1, 10))
def test_factors_scale_one_family_and_multiply(family, first, second):
    for book in (BARE, MEASURED):
        moved = book.scaled(family, first).scaled(family, second)
        op = CollectiveOp("all_reduce", 8 * MIB, 8)
        ratios = {
            "gemm": [
                moved.vendor_gemm(OP).duration_s / book.vendor_gemm(OP).duration_s,
                moved.kernel_gemm(OP, "wave_group").tile_time_s / book.kernel_gemm(OP, "wave_group").tile_time_s,
            ],
            "collective": [moved.collective(op).duration_s / book.collective(op).duration_s],
            "launch": [moved.signal_wait_s / book.signal_wait_s],
        }
        for name, values in ratios.items():
            assert values == pytest.approx([first * second if name == family else 1.0] * len(values))


@pytest.mark.parametrize("book", [BARE, MEASURED], ids=["model", "measured"])
def test_ends_follow_each_costs_own_spread(book):
    op = CollectiveOp("all_reduce", 8 * MIB, 8)
    for end in ("low", "high"):
        vendor, kernel = book.vendor_gemm(OP), book.kernel_gemm(OP, "wave_group")
        moved = book.at("gemm", end)
        bound = lower_bound_s(OP, A100)
        assert moved.vendor_gemm(OP).duration_s == pytest.approx(
            max(bound, vendor.duration_s * getattr(vendor.spread, end))
        )
        # A measured kernel is a measurement of its own; an unmeasured one moves with the vendor's.
        measured = "wave_group" in book.kernel_time_s
        with_vendor = kernel.duration_s if measured else kernel.duration_s * getattr(vendor.spread, end)
        assert moved.kernel_gemm(OP, "wave_group").duration_s == pytest.approx(max(bound, with_vendor))
        # What other architectures' templates lose beside the vendor may not be lost at all here.
        lower = replace(TEMPLATE, low=TEMPLATE.low / max(1.0, A100.kernels.template_slowdown))
        own = kernel.spread if measured else lower
        assert book.at("kernel", end).kernel_gemm(OP, "wave_group").duration_s == pytest.approx(
            max(bound, kernel.duration_s * getattr(own, end))
        )
        assert book.at("kernel", end).vendor_gemm(OP) == vendor
        assert moved.collective(op) == book.collective(op) and moved.signal_wait_s == book.signal_wait_s
        cost = book.collective(op)
        assert book.at("collective", end).collective(op).duration_s == pytest.approx(
            cost.duration_s * getattr(cost.spread, end)
        )
        assert book.at("launch", end).signal_wait_s == pytest.approx(2e-6 * getattr(LAUNCH, end))


def test_a_measurement_carries_over_to_pieces_and_leaves_their_ratio_open():
    """A measured GEMM narrows what is scaled by it: pieces keep the spread of a ratio, not of the model."""
    piece = MEASURED.vendor_gemm(CHUNK).duration_s
    assert MEASURED.at("gemm", "high").vendor_gemm(CHUNK).duration_s == pytest.approx(piece * 1.02)
    assert MEASURED.at("kernel", "high").vendor_gemm(CHUNK).duration_s == pytest.approx(piece * PIECES.high)


@quick
@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 9000))
def test_low_ends_stay_above_the_bound(m, n, k):
    op = GemmOp(m, n, k, "fp16")
    low = BARE.at("gemm", "low")
    assert low.vendor_gemm(op).duration_s >= lower_bound_s(op, A100) * (1 - 1e-12)
    assert low.vendor_gemm(op).duration_s <= BARE.vendor_gemm(op).duration_s


def test_low_end_of_an_almost_perfect_kernel_is_the_bound():
    perfect = replace(A100, kernels=replace(A100.kernels, gemm_efficiency=1.0))
    book = PriceBook(nvlink_cluster(perfect), 8).at("gemm", "low")
    op = GemmOp(18432, 18432, 16384, "fp16")
    assert book.vendor_gemm(op).duration_s == pytest.approx(lower_bound_s(op, perfect))


def test_what_if_kernels_were_the_vendors():
    for book in (BARE, MEASURED):
        kernel = book.with_vendor_kernels().kernel_gemm(OP, "wave_group", (256, 128))
        assert kernel.duration_s == pytest.approx(book.vendor_gemm(OP).duration_s)
        assert kernel.waves == 19 and kernel.tile_time_s == pytest.approx(kernel.duration_s / 19)


def test_what_if_there_were_no_latency():
    free = MEASURED.without_latency()
    assert free.signal_wait_s == 0.0
    assert free.collective_seconds("all_reduce", [0, MIB], free.ranks) == pytest.approx(
        [0, MIB * Curve(TABLE).best_s_per_byte()]
    )
    assert free.vendor_gemm(OP) == MEASURED.vendor_gemm(OP)


def test_collective_sms_can_be_given():
    book = PriceBook(POD, 8, collective_sms=2)
    assert book.comm_sms("all_reduce") == 2
    assert book.collective(CollectiveOp("all_reduce", MIB, 8)).sm == 2


def test_findings_name_what_was_not_measured():
    assert codes(BARE.findings) == ["profile_not_calibrated", "gemm_time_assumed"]
    assert codes(replace(BARE, kind="all_reduce").findings)[-1] == "not_calibrated"
    assert codes(MEASURED.findings) == ["profile_not_calibrated"]
    assert codes(replace(MEASURED, cluster=replace(POD, calibrated=True), models={}).findings) == []
    (finding,) = BARE.kernel_findings("wave_group")
    assert finding.code == "kernel_time_assumed"
    assert "1.15 x" in finding.message and "--kernel-time wave_group=S" in finding.message
    assert MEASURED.kernel_findings("wave_group") == ()
    assert codes(MEASURED.kernel_findings("other")) == ["kernel_time_assumed"]


def test_findings_about_the_curve():
    falling = CurveTable((MIB, 8 * MIB, 16 * MIB, 256 * MIB), (60e-6, 190e-6, 180e-6, 2100e-6), TABLE.source)
    assert "curve_falls" in codes(replace(MEASURED, curve=falling).findings)
    # Below a hundredth of the message it is nobody's concern.
    small = CurveTable((1024.0, 2048.0, 256 * MIB), (2e-5, 1e-5, 2100e-6), TABLE.source)
    assert "curve_falls" not in codes(replace(MEASURED, curve=small).findings)
    short = CurveTable((1024.0, 2048.0), (1e-5, 2e-5), TABLE.source)
    (finding,) = [f for f in replace(MEASURED, curve=short).findings if f.code == "curve_extrapolated"]
    assert "128 MiB" in finding.message


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"ranks": 0}, UsageError, "at least 1"),
        ({"gemm_time_s": 1e-3}, UsageError, "without its GEMM"),
        ({"tile": (128, 128)}, UsageError, "without its GEMM"),
        ({"kernel_time_s": {"wave_group": 1e-3}}, UsageError, "without its GEMM"),
        ({"curve": TABLE}, UsageError, "without the collective"),
        ({"gemm": OP, "gemm_time_s": 1e-3}, UsageError, "below 1.76 ms"),
        ({"gemm": OP, "kernel_time_s": {"wave_group": -1.0}}, UsageError, "> 0"),
        (
            {"gemm": GemmOp(100, 8192, 64), "tile": (256, 128)},
            StrategyError,
            "256x128 is larger than the output 100x8192",
        ),
        ({"collective_sms": 109}, UsageError, "has 108"),
        ({"collective_sms": -1}, UsageError, "expected 0"),
    ],
)
def test_impossible_books_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        PriceBook(POD, **{"ranks": 8, **arguments})


def test_a_malformed_curve_is_refused_when_used():
    book = PriceBook(POD, 8, kind="all_reduce", curve=CurveTable((2.0, 1.0), (1e-5, 1e-5), TABLE.source))
    with pytest.raises(ProfileError, match="do not rise"):
        book.collective_seconds("all_reduce", 1.0, 8)


@pytest.mark.parametrize(
    ("times", "words"),
    [((60e-6, 180e-6, 170e-6), "the links of switch8-pod need"), ((60.0, 180.0, 2100.0), "times what the links need")],
)
def test_a_curve_in_the_wrong_unit_is_refused(times, words):
    with pytest.raises(ProfileError, match=words):
        check_curve(POD, "all_reduce", 8, replace(TABLE, time_s=times))


def test_a_time_in_the_wrong_unit_is_refused():
    with pytest.raises(UsageError, match=r"--gemm-time.*times the"):
        replace(MEASURED, gemm_time_s=2.04)
    with pytest.raises(UsageError, match=r"wave_group \(--kernel-time\).*is below"):
        replace(MEASURED, kernel_time_s={"wave_group": 2.4e-6})


def test_a_time_far_from_the_model_and_a_contradiction_are_findings(monkeypatch):
    slow = replace(MEASURED, gemm_time_s=5 * BARE.vendor_gemm(OP).duration_s)
    (finding,) = [f for f in slow.findings if f.code == "gemm_time_far_from_model"]
    assert "takes 5.0 times what the model says" in finding.message
    monkeypatch.setattr("overlapsim.cost.beliefs.contradictions", lambda cluster: ["one and one are three"])
    found = replace(MEASURED, models={}).findings
    assert ("profile_contradicts_itself", "one and one are three") in [(f.code, f.message) for f in found]

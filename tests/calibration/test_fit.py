"""Calibration: each regime is judged, outliers and wrong units are said, the profile gives what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from overlapsim.calibration.fit import Calibration, calibrate
from overlapsim.calibration.fit_curve import held_out_errors, merge_repeats
from overlapsim.calibration.gemm_shapes import profile_seconds
from overlapsim.calibration.predict import predict
from overlapsim.calibration.profile_writer import check_folder, write_profile
from overlapsim.calibration.readers.csv_tables import read_csv_table
from overlapsim.calibration.readers.nccl_tests_text import read_nccl_tests_text
from overlapsim.calibration.readers.reading import Hints
from overlapsim.calibration.records import Header, Record, read_records
from overlapsim.calibration.regimes import judge
from overlapsim.cost.collective import CollectiveModel
from overlapsim.cost.memory_bound import memory_seconds
from overlapsim.errors import CalibrationError, UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import CurveKey

DATA = Path(__file__).parent / "data"
BASE = "h100-sxm8"
SIZES = [1 << shift for shift in range(10, 30)]


@pytest.fixture(scope="module")
def base():  # type: ignore[no-untyped-def]
    return load_cluster(BASE)


def curve(kind: str = "all_reduce", ranks: int = 8, factor: float = 1.1, **changes: object) -> list[Record]:
    """The base's own table, `factor` slower."""
    table = load_cluster(BASE).curves[CurveKey(kind, ranks)]
    return [
        Record("collective", kind, time * factor, size_bytes=int(size), dtype="fp16", ranks=ranks, nodes=1, **changes)  # type: ignore[arg-type]
        for size, time in zip(table.size_bytes, table.time_s, strict=True)
    ]


def gemms(count: int = 150, factor: float = 1.1, dtype: str = "bf16", seed: int = 5) -> list[Record]:
    """Shapes at the base's own price, `factor` slower, with 2 % noise."""
    random = np.random.default_rng(seed)
    shapes = np.stack([2 ** random.integers(low, 15, count) for low in (5, 8, 8)], axis=1)
    times = profile_seconds(load_cluster(BASE).device, dtype, shapes) * factor * random.lognormal(0, 0.02, count)
    return [
        Record("gemm", "gemm", float(time), m=int(m), n=int(n), k=int(k), dtype=dtype)
        for (m, n, k), time in zip(shapes, times, strict=True)
    ]


def codes(result: Calibration) -> set[str]:
    return {finding.code for finding in result.findings}


def test_case_e06_end_to_end(base, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    reading = read_csv_table(DATA / "e06_all_reduce_8xh100.csv", Hints(8, "all_reduce", 8))
    result = calibrate(reading.records, base, BASE)
    (fit,) = result.curves
    assert fit.accepted
    (stray,) = fit.left_out
    assert (stray.size_bytes, stray.expected_s) == (2 << 20, pytest.approx(41e-6, rel=0.05))
    assert 18e-6 < (fit.latency_s or 0) < 25e-6
    assert 110e9 < (fit.bytes_per_s or 0) < 150e9
    assert any("2.00 MiB took 291 us" in finding.message for finding in result.findings)
    machine = load_cluster(str(write_profile(result, tmp_path / "mine").parent))
    assert machine.calibrated
    model = CollectiveModel(machine, "all_reduce", 8)
    assert model.seconds([1 << 20, 4 << 20]) == pytest.approx([32.4e-6, 59.4e-6])
    assert float(model.seconds(2 << 20)) == pytest.approx(41.4e-6, rel=0.01)


def test_a_log_with_two_tests_gives_both(base) -> None:  # type: ignore[no-untyped-def]
    reading = read_nccl_tests_text(DATA / "two_tests.log", Hints(ranks_per_node=4))
    result = calibrate(reading.records, base, BASE)
    assert {fit.key for fit in result.curves} == {CurveKey("all_reduce", 4), CurveKey("all_to_all", 4)}
    assert result.num_accepted == 2


def test_the_written_profile_gives_what_was_measured(base, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    records = curve() + curve("all_gather", 4) + gemms()
    result = calibrate(records, base, BASE)
    assert result.num_accepted == 3
    path = write_profile(result, tmp_path / "mine")
    machine = load_cluster(str(path))
    assert machine.name == "h100-sxm8-calibrated"
    measured = np.array([record.median_s for record in records])
    error = predict(records, machine) / measured - 1
    # Curves go through their points; the GEMM form has its own roughness.
    kinds = np.array([record.kind for record in records])
    assert np.abs(error[kinds == "collective"]).max() < 1e-6
    assert np.median(np.abs(error[kinds == "gemm"])) < 0.05
    # What calibrate holds and what the files give are the same machine.
    assert predict(records, result.cluster) == pytest.approx(predict(records, machine), rel=1e-4)
    # What was not measured stays the base's.
    key = CurveKey("reduce_scatter", 2)
    assert machine.curves[key].time_s == base.curves[key].time_s
    assert not base.calibrated


def test_side_files(base, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "mine"
    records = curve() + gemms()
    write_profile(calibrate(records, base, BASE), folder)
    assert read_records(folder / "records.csv").records == tuple(records)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["num_accepted"] == 2
    assert report["curves"][0]["regimes"][0]["num_points"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine"], "nothing is left beside the folder"


def test_same_records_give_the_same_bytes(base, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    records = curve() + curve("all_gather", 4) + gemms()
    shuffled = [records[place] for place in np.random.default_rng(1).permutation(len(records))]
    for name, listed in (("a", records), ("b", shuffled)):
        write_profile(calibrate(listed, base, BASE), tmp_path / name)
    for file in ("h100-sxm8-calibrated.yaml", "fits/gemm_h100-sxm5-80gb.yaml", "tables/all_reduce_8_1.csv"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_folder_is_replaced_only_if_it_is_an_earlier_result(base, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "mine"
    write_profile(calibrate(curve() + curve("all_gather", 4), base, BASE), folder)
    write_profile(calibrate(curve(), base, BASE), folder)
    assert not (folder / "tables/all_gather_4_1.csv").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious.txt").write_text("x", encoding="utf-8")
    with pytest.raises(UsageError, match="holds other files"):
        check_folder(other)
    with pytest.raises(UsageError, match="is a file"):
        check_folder(other / "precious.txt")
    with pytest.raises(UsageError, match="does not exist"):
        check_folder(tmp_path / "no" / "where")


def test_a_calibrated_profile_can_be_calibrated_again(base, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    first, second = tmp_path / "first", tmp_path / "second"
    write_profile(calibrate(curve(factor=1.2) + gemms(), base, BASE), first)
    again = calibrate(curve("all_gather", 4), load_cluster(str(first)), str(first))
    path = write_profile(again, second)
    before, after = load_cluster(str(first)), load_cluster(str(path))
    for name in ("tables", "fits"):
        for file in (first / name).iterdir():
            file.unlink()
    after = load_cluster(str(path))
    assert after.curves[CurveKey("all_reduce", 8)].time_s == before.curves[CurveKey("all_reduce", 8)].time_s
    assert after.curves[CurveKey("all_gather", 4)].time_s != before.curves[CurveKey("all_gather", 4)].time_s
    assert after.device.fits["gemm.bf16"].parameters == before.device.fits["gemm.bf16"].parameters


@pytest.mark.parametrize(
    ("factor", "likely"),
    [
        (1e3, "us in a column of ms"),
        (1e6, "us in a column of s"),
        (1e-3, "ms in a column of us"),
        (1e-6, "s in a column of us"),
    ],
)
def test_wrong_time_units_are_named(base, factor: float, likely: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CalibrationError, match=likely):
        calibrate(curve(factor=factor), base, BASE)
    with pytest.raises(CalibrationError, match=likely):
        calibrate(gemms(factor=factor), base, BASE)


@pytest.mark.parametrize("least", [1 << 10, 1 << 16, 1 << 20])
def test_sizes_in_kib_are_named(base, least: int) -> None:  # type: ignore[no-untyped-def]
    sized = [(record, record.size_bytes or 0) for record in curve()]
    records = [replace(record, size_bytes=size // 1024) for record, size in sized if size >= least]
    with pytest.raises(CalibrationError, match="as if the sizes were KiB"):
        calibrate(records, base, BASE)


def test_times_that_beat_the_wire_are_refused(base) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CalibrationError, match="shorter than h100-sxm8 allows"):
        calibrate(curve(factor=0.3), base, BASE)


def test_one_time_that_beats_the_wire_is_left_out(base) -> None:  # type: ignore[no-untyped-def]
    records = curve()
    records[-3] = replace(records[-3], median_s=records[-3].median_s / 4)
    (fit,) = calibrate(records, base, BASE).curves
    assert fit.left_out[0].reason == "faster than the links allow"


def test_a_degraded_fabric_is_said(base) -> None:  # type: ignore[no-untyped-def]
    assert "slower_than_base" in codes(calibrate(curve(factor=4.0), base, BASE))


def test_errors_that_cancel_are_not_accepted() -> None:
    errors = np.array([0.3] * 20 + [-0.3] * 20)
    sizes = np.array([1e4] * 20 + [1e8] * 20)
    assert abs(np.median(errors)) < 1e-12
    assert not any(regime.accepted for regime in judge(errors, sizes))


def test_a_rough_table_is_not_accepted(base) -> None:  # type: ignore[no-untyped-def]
    random = np.random.default_rng(2)
    rough = [replace(record, median_s=record.median_s * float(random.lognormal(0.9, 0.5))) for record in curve()]
    with pytest.raises(CalibrationError, match="not accepted"):
        calibrate(rough, base, BASE)
    both = calibrate(rough + curve("all_gather", 4), base, BASE)
    assert [fit.accepted for fit in both.curves] == [True, False]
    assert both.cluster.curves[CurveKey("all_reduce", 8)] == base.curves[CurveKey("all_reduce", 8)]


def test_rough_small_messages_do_not_spoil_the_large_ones(base) -> None:  # type: ignore[no-untyped-def]
    random = np.random.default_rng(4)
    rough = [
        replace(r, median_s=r.median_s * (float(random.lognormal(0.9, 0.5)) if (r.size_bytes or 0) < 65536 else 1))
        for r in curve()
    ]
    result = calibrate(rough, base, BASE)
    (fit,) = result.curves
    assert fit.accepted
    assert fit.points[0].size_bytes == 65536
    assert "begins_late" in codes(result)
    random = np.random.default_rng(1)
    rough_end = [
        replace(r, median_s=r.median_s * (float(random.lognormal(0.9, 0.7)) if (r.size_bytes or 0) > 2**20 else 1))
        for r in curve()
    ]
    with pytest.raises(CalibrationError, match="not accepted"):
        calibrate(rough_end, base, BASE)


def test_repeats_that_disagree_are_not_accepted(base) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CalibrationError, match="repeats of one size differ"):
        calibrate(curve(factor=1.0) + curve(factor=4.0), base, BASE)


def test_repeats_give_noise_and_percentiles(base) -> None:  # type: ignore[no-untyped-def]
    records = [record for factor in (0.97, 1.0, 1.03, 1.06, 1.2) for record in curve(factor=factor)]
    (fit,) = calibrate(records, base, BASE).curves
    assert fit.noise == pytest.approx(0.5 * (1.144 - 0.982) / 1.03, rel=0.02)
    point = merge_repeats(records)[0]
    assert (point.p10_s or 0) < point.time_s < (point.p90_s or 0)
    assert point.repeats == 5


def test_jitter_of_single_calls_refuses_nothing_and_repeating_does_not_widen_it(base) -> None:  # type: ignore[no-untyped-def]
    jittery = [replace(r, p10_s=r.median_s * 0.8, p90_s=r.median_s * 2.2, repeats=40) for r in curve()]
    (once,) = calibrate(jittery, base, BASE).curves
    (often,) = calibrate(jittery * 5, base, BASE).curves
    assert once.accepted and often.accepted
    assert once.noise == often.noise == pytest.approx(0.7)
    assert once.disagreement is None
    assert often.disagreement == pytest.approx(0)


def test_held_out_points_are_predicted_without_themselves() -> None:
    points = list(merge_repeats(curve()))
    errors, sizes = held_out_errors(points)
    assert sizes.tolist() == [point.size_bytes for point in points[1:-1]]
    changed = [replace(point, time_s=point.time_s * (2 if place == 7 else 1)) for place, point in enumerate(points)]
    moved, _ = held_out_errors(changed)
    assert moved[6] + 1 == pytest.approx((errors[6] + 1) / 2)


def test_solo_first_then_contention(base) -> None:  # type: ignore[no-untyped-def]
    records = curve() + gemms()
    beside = [replace(record, median_s=record.median_s * 1.3, concurrent="all_reduce") for record in gemms()]
    slowed = [replace(record, median_s=record.median_s * 1.5, concurrent="gemm") for record in curve()]
    alone, together = calibrate(records, base, BASE), calibrate(records + beside + slowed, base, BASE)
    assert [fit.points for fit in together.curves] == [fit.points for fit in alone.curves]
    assert together.kernels[0].fit == alone.kernels[0].fit
    assert {item.key for item in together.contention} == {"gemm_beside_all_reduce", "all_reduce_beside_gemm"}
    by_key = {item.key: item for item in together.contention}
    assert by_key["gemm_beside_all_reduce"].median == pytest.approx(1.3, rel=0.05)
    assert by_key["all_reduce_beside_gemm"].median == pytest.approx(1.5, rel=0.01)


def test_contention_is_written(base, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    slowed = [replace(record, median_s=record.median_s * 1.5, concurrent="gemm") for record in curve()]
    machine = load_cluster(str(write_profile(calibrate(curve() + slowed, base, BASE), tmp_path / "m")))
    fit = machine.device.fits["contention.all_reduce_beside_gemm"]
    assert fit.parameters["slowdown"] == pytest.approx(1.5, rel=0.01)


def test_constants_of_a_node_need_two_collectives_and_rank_counts(base) -> None:  # type: ignore[no-untyped-def]
    few = calibrate(curve() + curve(ranks=4), base, BASE)
    assert few.structural is None
    assert "curves_only" in codes(few)
    many = calibrate(
        [r for kind in ("all_reduce", "all_gather") for n in (2, 4, 8) for r in curve(kind, n)], base, BASE
    )
    assert many.structural is not None
    assert many.structural.accepted
    assert many.structural.fit.num_points > 60


def test_few_shapes_leave_the_base_alone(base) -> None:  # type: ignore[no-untyped-def]
    result = calibrate(curve() + gemms(12), base, BASE)
    assert "too_few_shapes" in codes(result)
    assert result.kernels[0].fit is None
    assert result.cluster.device.fits == base.device.fits


def test_a_sister_is_told_from_few_shapes() -> None:
    """Published GEMMs of a B300 from the profile of a B200: 60 shapes take its bias away."""
    from overlapsim.calibration.fit_gemm import anchors
    from overlapsim.calibration.gemm_shapes import rows_of
    from overlapsim.cost.gemm_fitted import bundled_rows

    rows = bundled_rows("gemm/b300-sxm-288gb.csv", "bf16")
    assert rows is not None
    shapes = np.stack((rows.m, rows.n, rows.k), axis=1).astype(int)
    chosen = anchors(rows_of(shapes, rows.time_s), 60)
    records = [
        Record("gemm", "gemm", float(t), m=int(m), n=int(n), k=int(k), dtype="bf16")
        for (m, n, k), t in zip(shapes, rows.time_s, strict=True)
    ]
    b200 = load_cluster("b200-sxm8")
    result = calibrate([r for r, mine in zip(records, chosen, strict=True) if mine], b200, "b200-sxm8")
    unseen = [r for r, mine in zip(records, chosen, strict=True) if not mine]
    measured = np.array([record.median_s for record in unseen])
    before, after = (predict(unseen, machine) / measured - 1 for machine in (b200, result.cluster))
    assert np.median(before) > 0.05
    assert abs(np.median(after)) < 0.03
    assert np.median(np.abs(after)) < 0.05


def test_stray_shapes_are_said_and_left_out(base) -> None:  # type: ignore[no-untyped-def]
    records = gemms(200)
    records[17] = replace(records[17], median_s=records[17].median_s * 6)
    result = calibrate(records, base, BASE)
    assert not result.kernels[0].used.all()
    assert sum(finding.code == "outlier" for finding in result.findings) >= 1


def test_types_without_a_price_are_said(base) -> None:  # type: ignore[no-untyped-def]
    odd = [replace(record, dtype="fp4") for record in gemms(30)]
    assert "type_not_priced" in codes(calibrate(curve() + odd, base, BASE))


def test_what_the_base_cannot_price_is_said(base) -> None:  # type: ignore[no-untyped-def]
    wide = [replace(record, dtype="fp64") for record in gemms(60)]
    odd = [Record("memory", "tea_making", 1e-5, m=1024, n=size, dtype="bf16") for size in range(1, 40)]
    result = calibrate(curve() + wide + odd, base, BASE)
    assert sum(finding.code == "type_not_priced" for finding in result.findings) == 2


def test_a_memory_bound_operator(base, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows = np.repeat(2 ** np.arange(4, 15), 4)
    columns = np.tile([1024, 4096, 8192, 16384], 11)
    times = memory_seconds("rmsnorm", rows, columns, base.device) * 1.2
    records = [
        Record("memory", "rmsnorm", float(t), m=int(m), n=int(n), dtype="bf16")
        for t, m, n in zip(times, rows, columns, strict=True)
    ]
    machine = load_cluster(str(write_profile(calibrate(records, base, BASE), tmp_path / "m")))
    assert np.median(np.abs(predict(records, machine) / times - 1)) < 0.05


def test_ranks_spread_thinly_are_not_taken_for_a_wrong_unit(base) -> None:  # type: ignore[no-untyped-def]
    records = [
        Record("collective", "all_reduce", 30e-6 + size / 0.6e9, size_bytes=size, ranks=2, nodes=2) for size in SIZES
    ]
    result = calibrate(records, base, BASE)
    assert {"spread_over_nodes", "slower_than_base"} <= codes(result)
    assert np.isnan(predict(records, base)).all()
    assert predict(records, result.cluster) == pytest.approx([record.median_s for record in records])


def test_forced_algorithms_and_other_types_are_kept_aside(base) -> None:  # type: ignore[no-untyped-def]
    result = calibrate(
        curve() + curve(factor=1.4, algo="Ring") + [replace(r, dtype="int8") for r in curve(factor=1.3)], base, BASE
    )
    (fit,) = result.curves
    assert (fit.algo, fit.dtype) == ("", "fp16")
    assert "conditions_aside" in codes(result)
    forced = calibrate(curve(algo="Ring"), base, BASE)
    assert "forced_algorithm" in codes(forced)


def test_in_place_times_stand_in_only_where_nothing_else_was_timed(base) -> None:  # type: ignore[no-untyped-def]
    both = calibrate(curve() + curve(factor=0.98, in_place=True), base, BASE)
    assert both.curves[0].points == calibrate(curve(), base, BASE).curves[0].points
    assert "in_place_used" in codes(calibrate(curve(in_place=True), base, BASE))


@pytest.mark.parametrize(("device", "differs"), [("NVIDIA H100 80GB HBM3", False), ("NVIDIA A100", True), ("", False)])
def test_another_device_is_said(base, device: str, differs: bool) -> None:  # type: ignore[no-untyped-def]
    assert ("device_differs" in codes(calibrate(curve(), base, BASE, header=Header(device=device)))) == differs


def test_ranks_that_do_not_fit_the_base(base) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CalibrationError, match="do not fit h100-sxm8"):
        calibrate([replace(record, ranks=16) for record in curve()], base, BASE)


def test_records_that_are_not_valid_are_not_used(base) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CalibrationError, match="none of the 21 records is valid"):
        calibrate(curve(valid=False), base, BASE)
    assert "not_valid" in codes(calibrate(curve() + curve(factor=3.0, valid=False), base, BASE))


def test_across_nodes(base, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    times = CollectiveModel(base.with_nodes(2), "all_reduce", 16).seconds(SIZES) * 1.2
    records = [
        Record("collective", "all_reduce", float(t), size_bytes=s, ranks=16, nodes=2)
        for s, t in zip(SIZES, times, strict=True)
    ]
    machine = load_cluster(str(write_profile(calibrate(records, base, BASE), tmp_path / "m"))).with_nodes(2)
    assert CollectiveModel(machine, "all_reduce", 16).seconds(SIZES) == pytest.approx(times)

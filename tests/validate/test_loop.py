"""The loop's own arithmetic on a made-up machine, where every answer is known; nothing is timed here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from overlapsim.validate.loop import sizes
from overlapsim.validate.loop.compare import (
    CASES,
    PREDICTIONS,
    are_predicted,
    kept_results,
    read_predictions,
    rows_of,
    with_predictions,
    write_predictions,
    write_results,
    write_rows,
)
from overlapsim.validate.loop.measure import KERNELS, RECORDS
from overlapsim.validate.loop.predict import predict_cases, predicted
from overlapsim.validate.loop.profile import Machine, calibrate_machine, speed_beside
from overlapsim.validate.shapes import chunked_spec, serial_spec, wave_group_spec

from overlapsim.accuracy.loop import evaluate
from overlapsim.calibration.fit_contention import Slowdown
from overlapsim.calibration.records import Header, Record, RecordSet, dump_records, parse_records
from overlapsim.errors import CalibrationError

CALL_S = 5e-6
FLOP_PER_S = 110e9
LATENCY_S = 300e-6
BYTES_PER_S = 1.5e9
GEMM_SLOWER, FLOW_SLOWER = 1.5, 2.0
TILES_SLOWER = 1.1


def gemm_s(m: int, n: int, k: int) -> float:
    return CALL_S + 2.0 * m * n * k / FLOP_PER_S


def flow_s(size_bytes: float) -> float:
    return LATENCY_S + size_bytes / BYTES_PER_S


def gemm(m: int, n: int, k: int, factor: float = 1.0, concurrent: str = "") -> Record:
    seconds = gemm_s(m, n, k) * factor
    return Record(
        *("gemm", "gemm", seconds, m, n, k), dtype="fp32", p10_s=0.98 * seconds, p90_s=1.02 * seconds, repeats=12,
        concurrent=concurrent,
    )  # fmt: skip


def flow(kind: str, size: int, factor: float = 1.0, concurrent: str = "") -> Record:
    seconds = flow_s(size) * factor
    return Record(
        "collective", kind, seconds, size_bytes=size, dtype="fp32", ranks=2, nodes=1, p10_s=0.98 * seconds,
        p90_s=1.02 * seconds, repeats=12, concurrent=concurrent, in_place=kind == "all_reduce",
    )  # fmt: skip


def tiles_s(m: int, n: int, k: int) -> float:
    count = (m // 128) * (n // 128)
    return TILES_SLOWER * count * gemm_s(128, 128, k)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loop")
    records = [gemm(*shape) for shape in sizes.GEMM_SHAPES]
    records += [flow(kind, size) for kind in sizes.KINDS for size in sizes.SIZES]
    for m, n, k in sizes.BESIDE_SHAPES:
        for kind in sizes.KINDS:
            records.append(gemm(m, n, k, GEMM_SLOWER, kind))
            records.append(flow(kind, 4 * m * n, FLOW_SLOWER, "gemm"))
    (path / RECORDS).write_text(dump_records(RecordSet(tuple(records), Header("CPU of nowhere"))))
    rows = [{"m": m, "n": n, "k": k, "time_s": tiles_s(m, n, k), "valid": True} for m, n, k in sizes.KERNEL_SHAPES]
    (path / KERNELS).write_text(json.dumps({"tile": list(sizes.TILE), "dtype": "fp32", "rows": rows}))
    return path


@pytest.fixture(scope="module")
def machine(folder: Path) -> Machine:
    return calibrate_machine(folder, lambda message: None)


def test_held_out_sizes_are_held_out() -> None:
    for _, spec in sizes.headline_specs(2):
        assert sizes.is_held_out(spec)
        assert spec.size_bytes >= 1e6
    m, n, k = sizes.GEMM_SHAPES[0]
    assert not sizes.is_held_out(serial_spec("all_reduce", 2, m, n, k, "fp32"))


def slowdowns(gemm_x: float, flow_y: float) -> list[Slowdown]:
    return [
        Slowdown("gemm", "gemm", "all_reduce", 2, gemm_x, gemm_x, gemm_x),
        Slowdown("collective", "all_reduce", "gemm", 2, flow_y, flow_y, flow_y),
    ]


@pytest.mark.parametrize(
    "gemm_x, flow_y, speed",
    [
        (1.0, 1.0, 1.0),  # neither slows the other
        (2.0, 2.0, 0.02),  # one core shared: hiding costs as much as it saves
        (2.0, 1.0, 0.5),  # the collective takes half the core and loses nothing
        (1.5, 2.0, 1 / 3),
        (0.97, 0.99, 1.0),  # noise is no speed-up
    ],
)
def test_both_slow_downs_in_one_speed(gemm_x: float, flow_y: float, speed: float) -> None:
    assert speed_beside("all_reduce", slowdowns(gemm_x, flow_y)) == pytest.approx(speed)


def test_contention_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(CalibrationError, match="quiet machine"):
        speed_beside("all_reduce", slowdowns(1.5, 2.0)[:1])


def test_calibration_finds_the_machine(machine: Machine) -> None:
    assert machine.cluster.calibrated
    assert {kernel.table.name for kernel in machine.calibration.kernels if kernel.accepted} == {"gemm.fp32"}
    assert len([curve for curve in machine.calibration.curves if curve.accepted]) == 3
    # Slow-downs are over the fitted price of the GEMM, which is off by a percent or two.
    assert machine.beside == pytest.approx(dict.fromkeys(sizes.KINDS, 1 / 3), abs=0.03)
    assert machine.tiles_ratio == pytest.approx(TILES_SLOWER, rel=0.05)
    overlap = machine.overlap("all_reduce")
    assert (overlap.comm_sms, overlap.gemm_speed) == (1, pytest.approx(2 / 3, abs=0.06))


@pytest.mark.parametrize("kind", sizes.KINDS)
@pytest.mark.parametrize("shape", sizes.HEADLINE)
def test_predictions_of_the_made_up_machine(machine: Machine, kind: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    base = serial_spec(kind, 2, m, n, k, "fp32")
    value, low, high = predicted(machine, base)
    assert low <= value <= high
    assert value == pytest.approx(gemm_s(m, n, k) + flow_s(4 * m * n), rel=0.04)

    chunked = chunked_spec(base, 2)
    first, second = chunked.settings["chunk_rows"]
    beside_s = flow_s(4 * first * n)
    # The second piece runs at a third of its speed while the first collective moves, then alone.
    left = gemm_s(second, n, k) - beside_s / 3
    end = max(gemm_s(first, n, k) + beside_s + max(0.0, left), gemm_s(first, n, k) + beside_s)
    assert predicted(machine, chunked)[0] == pytest.approx(end + flow_s(4 * second * n), rel=0.06)

    waves = wave_group_spec(base, sizes.TILE, 1)
    assert predicted(machine, waves)[0] == pytest.approx(tiles_s(m, n, k) + flow_s(4 * m * n), rel=0.06)


def test_predicted_then_measured_is_what_the_suite_scores(folder: Path, machine: Machine) -> None:
    cases = predict_cases(machine, 2)
    assert len(cases) == 3 * 3 * 5
    write_predictions(cases, folder)
    assert are_predicted(folder)
    assert len(read_predictions(folder / PREDICTIONS)) == len(cases)
    again = with_predictions(sizes.headline_specs(2), folder / PREDICTIONS)
    assert [case.predicted_s for case in again] == [case.predicted_s for case in cases]
    # As if every run had taken a tenth longer than predicted.
    entries = []
    for case in again:
        assert case.predicted_s is not None
        measured = 1.1 * case.predicted_s
        entries.append(
            {
                "case": case.name, "strategy": case.spec.strategy, "parameters": dict(case.spec.parameters),
                "collective": case.spec.collective, "ranks": 2, "m": case.spec.m, "n": case.spec.n, "k": case.spec.k,
                "dtype": "fp32", "size_bytes": case.spec.size_bytes, "predicted_s": case.predicted_s,
                "low_s": case.low_s, "high_s": case.high_s, "measured_s": measured, "p10_s": 0.99 * measured,
                "p90_s": 1.01 * measured, "repeats": 36, "round_medians_s": [measured] * 3, "noise": 0.001,
                "valid": case.spec.strategy != "chunked" or case.spec.m != 640, "error_over_tolerance": 0.2,
            }
        )  # fmt: skip
    write_results(entries, {"device": "CPU of nowhere"}, 1, folder)
    # Shapes with a case that is not valid are run again, the others are not.
    assert {entry["case"] for entry in kept_results(folder)} == {case.name for case in cases if case.spec.m != 640}
    rows, header = rows_of(folder / CASES)
    write_rows(rows, header, folder)
    suite = evaluate(folder)
    assert {group.name for group in suite.groups} == {"serial", "chunked", "wave_group"}
    assert all(group.fitted is False for group in suite.groups)
    assert suite.overall.median_signed == pytest.approx(1 / 1.1 - 1)
    assert suite.overall.num_points == 45 - 6
    assert suite.overall.sign_right == suite.overall.sign_total > 0
    assert {finding.code for finding in suite.findings} == {"not_valid", "says_nothing_about_gpus"}
    assert suite.notes["bar"].endswith("met")
    # Other measurements: predictions and what was run for them no longer hold.
    write_predictions(cases[:1], folder)
    assert kept_results(folder) == []
    (folder / KERNELS).write_text((folder / KERNELS).read_text() + " ")
    assert not are_predicted(folder)


def test_too_few_valid_measurements_stop_before_predictions(tmp_path: Path, folder: Path) -> None:
    content = parse_records((folder / RECORDS).read_text())
    rough = tuple(replace(record, valid=record.kind != "gemm" or bool(record.concurrent)) for record in content.records)
    (tmp_path / RECORDS).write_text(dump_records(RecordSet(rough, content.header)))
    (tmp_path / KERNELS).write_text((folder / KERNELS).read_text())
    with pytest.raises(CalibrationError, match="too few for: fp32 GEMMs; run the same command again"):
        calibrate_machine(tmp_path, lambda message: None)
    # A curve of valid measurements may be refused too: the reason is said.
    wild = tuple(
        replace(record, median_s=record.median_s * (1, 5)[number % 2]) if record.op == "all_reduce" else record
        for number, record in enumerate(content.records)
    )
    (tmp_path / RECORDS).write_text(dump_records(RecordSet(wild, content.header)))
    with pytest.raises(CalibrationError, match=r"too few for: curve of all_reduce; .*\n  all_reduce .*: not accepted"):
        calibrate_machine(tmp_path, lambda message: None)
    assert not (tmp_path / "profile").exists()

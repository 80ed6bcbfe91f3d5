"""Compare: errors by kind and regime, contention apart, what is not priced is said; the plot holds every record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from overlapsim.calibration.compare import compare
from overlapsim.calibration.records import Record
from overlapsim.errors import CalibrationError, UsageError
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import CurveKey
from overlapsim.report.compare_plot import compare_figure, compare_plot

BASE = "h100-sxm8"


@pytest.fixture(scope="module")
def base():  # type: ignore[no-untyped-def]
    return load_cluster(BASE)


def curve(factor: float = 1.0, kind: str = "all_reduce", **changes: object) -> list[Record]:
    table = load_cluster(BASE).curves[CurveKey(kind, 8)]
    return [
        Record("collective", kind, time * factor, size_bytes=int(size), dtype="fp16", ranks=8, nodes=1, **changes)  # type: ignore[arg-type]
        for size, time in zip(table.size_bytes, table.time_s, strict=True)
    ]


def test_errors_by_regime_keep_their_sign(base) -> None:  # type: ignore[no-untyped-def]
    records = [replace(r, median_s=r.median_s * (1.25 if (r.size_bytes or 0) < 65536 else 0.8)) for r in curve()]
    result = compare(records, base)
    assert [line.regime for line in result.lines] == ["below 64 KiB", "64 KiB to 64 MiB", "from 64 MiB"]
    assert [line.median_signed for line in result.lines] == pytest.approx([-0.2, 0.25, 0.25])
    assert [line.median_abs for line in result.lines] == pytest.approx([0.2, 0.25, 0.25])
    assert [line.worst for line in result.lines] == pytest.approx([-0.2, 0.25, 0.25])
    assert sum(line.num_points for line in result.lines) == len(result.rows) == len(records)
    assert all(line.calibrated == 1 for line in result.lines)


def test_a_profile_against_itself(base) -> None:  # type: ignore[no-untyped-def]
    result = compare(curve() + curve(kind="all_gather"), base)
    assert max(abs(row.error) for row in result.rows) < 1e-9
    assert {finding.code for finding in result.findings} == {"not_calibrated"}


def test_what_ran_beside_others_stands_apart(base) -> None:  # type: ignore[no-untyped-def]
    result = compare(curve() + curve(1.5, concurrent="gemm"), base)
    assert all(line.median_abs < 1e-9 for line in result.lines)
    assert [line.median_signed for line in result.slowdowns] == pytest.approx([1 / 1.5 - 1] * 3)


def test_gemms_by_time(base) -> None:  # type: ignore[no-untyped-def]
    from overlapsim.calibration.gemm_shapes import profile_seconds

    shapes = np.array([[64, 1024, 1024], [4096, 4096, 4096], [16384, 8192, 8192]])
    times = profile_seconds(base.device, "bf16", shapes)
    records = [
        Record("gemm", "gemm", float(t), m=int(m), n=int(n), k=int(k), dtype="bf16")
        for (m, n, k), t in zip(shapes, times, strict=True)
    ]
    result = compare(records, base)
    assert {line.group for line in result.lines} == {"gemm bf16"}
    assert max(abs(row.error) for row in result.rows) < 1e-9


def test_fewer_sms_make_a_gemm_slower(base) -> None:  # type: ignore[no-untyped-def]
    record = Record("gemm", "gemm", 1e-3, m=8192, n=8192, k=4096, dtype="bf16")
    whole, part = (compare([r], base).rows[0].predicted_s for r in (record, replace(record, sms_left=66)))
    assert 1.6 * whole < part < 2.4 * whole


def test_what_is_not_priced_is_said(base) -> None:  # type: ignore[no-untyped-def]
    odd = Record("gemm", "gemm", 1e-4, m=64, n=64, k=64, dtype="fp4")
    result = compare([*curve(), odd], base)
    assert [f.message for f in result.findings if f.code == "not_priced"] == ["1 records are not priced: gemm fp4"]
    with pytest.raises(CalibrationError, match="prices none of the 1 records"):
        compare([odd], base)


def test_a_suspected_unit_is_said(base) -> None:  # type: ignore[no-untyped-def]
    assert "unit_suspected" in {finding.code for finding in compare(curve(1e6), base).findings}


def test_not_valid(base) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CalibrationError, match="none of the"):
        compare(curve(valid=False), base)


def test_plot_holds_every_record(base, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    result = compare(curve(1.1) + curve(0.9, "all_gather") + curve(1.4, concurrent="gemm"), base)
    figure = compare_figure(result)
    drawn = np.concatenate(
        [np.asarray(line.get_ydata()) for line in figure.axes[0].lines if line.get_marker() != "None"]
    )
    assert sorted(drawn) == pytest.approx(sorted(row.error + 1 for row in result.rows))
    for suffix in ("png", "svg"):
        compare_plot(result, tmp_path / f"p.{suffix}")
        compare_plot(result, tmp_path / f"q.{suffix}")
        assert (tmp_path / f"p.{suffix}").read_bytes() == (tmp_path / f"q.{suffix}").read_bytes()
    with pytest.raises(UsageError, match=r"expected \.png or \.svg"):
        compare_plot(result, tmp_path / "p.pdf")

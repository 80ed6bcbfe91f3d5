"""A user's own profile as the base: what is written stands alone, whatever the base named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from overlapsim.calibration.fit import calibrate
from overlapsim.calibration.own_base import base_overlay
from overlapsim.calibration.profile_writer import write_profile
from overlapsim.calibration.records import Record
from overlapsim.errors import ProfileError
from overlapsim.hardware.loading import load_cluster
from overlapsim.hardware.profile import CurveKey

KEY = CurveKey("all_reduce", 8)


def curve() -> list[Record]:
    table = load_cluster("h100-sxm8").curves[KEY]
    return [
        Record("collective", "all_reduce", time * 1.1, size_bytes=int(size), ranks=8, nodes=1)
        for size, time in zip(table.size_bytes, table.time_s, strict=True)
    ]


def own(folder: Path, cluster: str) -> Path:
    folder.mkdir()
    (folder / "mine.yaml").write_text(f"kind: cluster\nextends: h100-sxm8\n{cluster}", encoding="utf-8")
    (folder / "my-node.yaml").write_text(
        "kind: node\nextends: h100-sxm8\ndevice: my-gpu\nnvlink_latency: 2 us\n", encoding="utf-8"
    )
    (folder / "my-gpu.yaml").write_text(
        "kind: device\nextends: h100-sxm5-80gb\nboost_clock: 1700 MHz\n", encoding="utf-8"
    )
    (folder / "gather.csv").write_text("size_bytes,time_s\n1048576,4e-5\n16777216,1.8e-4\n", encoding="utf-8")
    return folder / "mine.yaml"


def test_a_bundled_base_is_only_named() -> None:
    assert base_overlay("h100-sxm8") == ({"extends": "h100-sxm8"}, {})


def test_an_own_base_is_carried_along(tmp_path: Path) -> None:
    base = own(tmp_path / "own", "node: my-node\nnum_nodes: 4\ncurves:\n  all_gather/4: {file: gather.csv}\n")
    result = calibrate(curve(), load_cluster(str(base)), str(base))
    path = write_profile(result, tmp_path / "out")
    shutil.rmtree(tmp_path / "own")
    machine = load_cluster(str(path))
    assert path.name == "mine-calibrated.yaml"
    assert machine.num_nodes == 4
    assert machine.node.nvlink_latency_s == pytest.approx(2e-6)
    assert machine.device.boost_clock_hz == pytest.approx(1.7e9)
    assert machine.curves[CurveKey("all_gather", 4)].size_bytes == (1048576.0, 16777216.0)
    assert machine.curves[KEY].time_s == pytest.approx([record.median_s for record in curve()])
    assert machine.calibrated


def test_an_own_node_keeps_its_device_under_fits(tmp_path: Path) -> None:
    base = own(tmp_path / "own", "node: my-node\n")
    slowed = [
        Record(
            "collective", "all_reduce", r.median_s * 1.5, size_bytes=r.size_bytes, ranks=8, nodes=1, concurrent="gemm"
        )
        for r in curve()
    ]
    result = calibrate(curve() + slowed, load_cluster(str(base)), str(base))
    machine = load_cluster(str(write_profile(result, tmp_path / "out")))
    assert machine.device.boost_clock_hz == pytest.approx(1.7e9)
    assert machine.node.nvlink_latency_s == pytest.approx(2e-6)
    assert "contention.all_reduce_beside_gemm" in machine.device.fits


def test_curves_taken_away_stay_away(tmp_path: Path) -> None:
    base = own(tmp_path / "own", "curves: null\n")
    assert not load_cluster(str(base)).curves
    result = calibrate(curve(), load_cluster(str(base)), str(base))
    assert set(load_cluster(str(write_profile(result, tmp_path / "out"))).curves) == {KEY}


def test_one_curve_taken_away_stays_away(tmp_path: Path) -> None:
    base = own(tmp_path / "own", "curves:\n  all_gather/8: null\n")
    result = calibrate(curve(), load_cluster(str(base)), str(base))
    curves = load_cluster(str(write_profile(result, tmp_path / "out"))).curves
    assert CurveKey("all_gather", 8) not in curves
    assert CurveKey("all_gather", 4) in curves


def test_fits_taken_away_cannot_be_kept(tmp_path: Path) -> None:
    base = own(tmp_path / "own", "fits: null\n")
    with pytest.raises(ProfileError, match="takes its base's fits away"):
        base_overlay(str(base))

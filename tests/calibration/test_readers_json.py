"""nccl-tests JSON: the same facts as the text, percentiles of iterations, nothing of the environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlapsim.calibration.readers.json_stream import Beside, items
from overlapsim.calibration.readers.nccl_tests_json import read_nccl_tests_json
from overlapsim.calibration.readers.reading import Hints
from overlapsim.errors import CalibrationError
from tests.calibration.logs import SECRETS, TIMES_US

NODE = Hints(ranks_per_node=8)


def content(*, iterations: bool = False, ranks: int = 8, **changes: Any) -> dict[str, Any]:
    factor = 2 * (ranks - 1) / ranks
    random = np.random.default_rng(3)
    results = []
    for size, time_us in TIMES_US:
        side = {"time": time_us, "alg_bw": size / time_us / 1e3, "bus_bw": size / time_us / 1e3 * factor, "nwrong": 0.0}
        result: dict[str, Any] = {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1"}
        result |= {"out_of_place": side, "in_place": {**side, "nwrong": None}}
        if iterations:
            times = np.round(time_us * random.lognormal(0, 0.05, 21), 3).tolist()
            result["out_of_place_per_iter"] = {"times_us": times, "p50_us": float(np.median(times))}
        results.append(result)
    devices = [
        {"rank": r, "group": 0, "pid": 4242, "hostname": SECRETS[0], "device": r, "device_info": "Example GPU"}
        for r in range(ranks)
    ]
    whole = {
        "version": 3,
        "start_time": "2026-03-01 10:00:00",
        "args": ["/home/mallory/build/all_reduce_perf", "-b", "1K"],
        "env": [f"HOSTNAME={SECRETS[0]}", "USER=mallory", "NCCL_ALGO=Ring"],
        "nccl_version": 22703,
        "config": {"nthreads": 1, "ngpus": 1, "iterations": 20, "warmup_iters": 5, "aggregated_iterations": 1},
        "devices": devices,
        "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"},
    }
    return {**whole, **changes}


def write(folder: Path, whole: dict[str, Any], cut: int = 0) -> Path:
    path = folder / "run.json"
    text = json.dumps(whole)
    path.write_text(text[: len(text) - cut], encoding="utf-8")
    return path


def test_facts(tmp_path: Path) -> None:
    reading = read_nccl_tests_json(write(tmp_path, content()), NODE)
    out = [record for record in reading.records if not record.in_place]
    assert [record.size_bytes for record in out] == [size for size, _ in TIMES_US]
    assert [record.median_s for record in out] == pytest.approx([time * 1e-6 for _, time in TIMES_US])
    assert {(r.op, r.ranks, r.nodes, r.dtype, r.algo, r.repeats) for r in out} == {
        ("all_reduce", 8, 1, "fp32", "Ring", 20)
    }
    assert len(reading.records) == 2 * len(TIMES_US)
    assert reading.header.libraries == {"nccl": "2.27.3"}
    assert (reading.header.device, reading.header.date) == ("Example GPU", "2026-03-01")


def test_iterations_give_percentiles(tmp_path: Path) -> None:
    whole = content(iterations=True)
    reading = read_nccl_tests_json(write(tmp_path, whole), NODE)
    times = whole["results"][0]["out_of_place_per_iter"]["times_us"]
    first = reading.records[0]
    assert (first.median_s, first.repeats) == (pytest.approx(np.median(times) * 1e-6), 21)
    assert first.p10_s == pytest.approx(np.quantile(times, 0.1) * 1e-6)
    assert first.p90_s == pytest.approx(np.quantile(times, 0.9) * 1e-6)


def test_nothing_private_is_kept(tmp_path: Path) -> None:
    kept = repr(read_nccl_tests_json(write(tmp_path, content()), NODE))
    assert not any(secret in kept for secret in (*SECRETS, "mallory", "4242"))


def test_devices_may_stand_in_config_and_list_processes_only(tmp_path: Path) -> None:
    whole = content()
    whole["config"] |= {"devices": whole.pop("devices")[:1], "ngpus": 8}
    assert {r.ranks for r in read_nccl_tests_json(write(tmp_path, whole), NODE).records} == {8}


@pytest.mark.parametrize("cut", [30, 300, 2500])
def test_cut_off(tmp_path: Path, cut: int) -> None:
    reading = read_nccl_tests_json(write(tmp_path, content(), cut), NODE)
    assert "cut_off" in {finding.code for finding in reading.findings}
    times = dict(TIMES_US)
    assert all(r.median_s == pytest.approx(times[r.size_bytes or 0] * 1e-6) for r in reading.records)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"results": []}, "no results"),
        ({"args": ["scatter_perf"]}, "does not model"),
    ],
)
def test_errors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        read_nccl_tests_json(write(tmp_path, content(**changes)), NODE)


def test_times_in_another_unit(tmp_path: Path) -> None:
    whole = content()
    for result in whole["results"]:
        result["out_of_place"]["time"] /= 1000
    with pytest.raises(CalibrationError, match="alg_bw says"):
        read_nccl_tests_json(write(tmp_path, whole), NODE)


def test_stream_gives_items_whatever_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"a": [1, {"b": "x]}"}], "list": [{"n": 1.5e3, "s": 'é"\\'}, 12, [3], "t"], "end": None}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")
    for size in (1, 2, 3, 7, 1000):
        monkeypatch.setattr("overlapsim.calibration.readers.source.CHUNK_BYTES", size)
        beside = Beside()
        assert list(items(path, "list", beside)) == whole["list"]
        assert beside.values == {"a": whole["a"], "end": None}
        assert not beside.cut_off

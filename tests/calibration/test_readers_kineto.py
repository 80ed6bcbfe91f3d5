"""torch profiler traces: the last arrival separates transfer from waiting; what overlapped is marked."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlapsim.calibration.readers.kineto import read_kineto
from overlapsim.calibration.readers.kineto_trace import Spans
from overlapsim.calibration.readers.reading import Hints, Reading
from overlapsim.errors import CalibrationError

NODE = Hints(ranks_per_node=8)
RANKS = 4
TRANSFER_US = 100.0
WAITS_US = {0: 900.0, 1: 40.0, 2: 0.0, 3: 350.0}


def kernel(start: float, duration: float, **arguments: Any) -> dict[str, Any]:
    name = arguments.pop("name", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": 20,
        "ts": start,
        "dur": duration,
        "args": {"device": 0, "stream": 20, "External id": 7, **arguments},
    }


def metadata(
    seq: int, *, name: str = "allreduce", elements: int = 1 << 20, out: int | None = None, ranks: int = RANKS
) -> dict[str, Any]:
    return {
        "Collective name": name,
        "In msg nelems": elements,
        "Out msg nelems": elements if out is None else out,
        "dtype": "BFloat16",
        "Group size": ranks,
        "Process Group Name": "0",
        "Process Group Ranks": str(list(range(ranks))),
        "In split size": "[]",
        "Out split size": "[]",
        "Seq": seq,
    }


def events(rank: int, *, calls: int = 5, skew_us: float = 0.0, **changes: Any) -> list[dict[str, Any]]:
    """Equal calls: this rank waits `WAITS_US`, then all transfer."""
    made: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}]
    for call in range(calls):
        begin = 10_000.0 * (call + 1)
        wait = WAITS_US.get(rank, 0.0)
        made.append(kernel(begin + 900 - wait + skew_us, TRANSFER_US + wait, **metadata(call + 1, **changes)))
    return made


def write(folder: Path, rank: int | None, made: list[dict[str, Any]], *, packed: bool = False, cut: int = 0) -> Path:
    whole: dict[str, Any] = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": RANKS, "nccl_version": "2.27.3"},
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "hostname": "zeus-17",
        "traceEvents": made,
        "traceName": "/home/mallory/trace.json",
    }
    if rank is None:
        del whole["distributedInfo"]
    text = json.dumps(whole, indent=1)
    text = text[: len(text) - cut]
    path = folder / f"trace_{len(list(folder.iterdir()))}.json{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


def run(folder: Path, ranks: int = RANKS, **changes: Any) -> Reading:
    return read_kineto([write(folder, rank, events(rank, **changes)) for rank in range(ranks)], NODE)


def codes(reading: Reading) -> dict[str, str]:
    return {finding.code: finding.message for finding in reading.findings}


def test_transfer_is_told_from_waiting(tmp_path: Path) -> None:
    reading = run(tmp_path)
    (record,) = reading.records
    assert record.median_s == pytest.approx(TRANSFER_US * 1e-6)
    assert (record.op, record.size_bytes, record.dtype, record.ranks, record.nodes) == (
        "all_reduce",
        2 << 20,
        "bf16",
        4,
        1,
    )
    assert (record.repeats, record.valid, record.concurrent) == (5, True, "")
    mean_wait = np.mean(list(WAITS_US.values()))
    assert f"{mean_wait / (mean_wait + TRANSFER_US):.0%} of their time waiting" in codes(reading)["waiting"]
    assert reading.header.device == "NVIDIA H100 80GB HBM3"


def test_packed_files_in_any_order_give_the_same(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.mkdir()
    packed.mkdir()
    files = [write(packed, rank, events(rank), packed=True) for rank in reversed(range(RANKS))]
    assert read_kineto(files, NODE).records == run(plain).records


def test_clocks_of_nodes_may_differ(tmp_path: Path) -> None:
    files = [write(tmp_path, rank, events(rank, skew_us=5000.0 * rank)) for rank in range(RANKS)]
    reading = read_kineto(files, NODE)
    assert reading.records[0].median_s == pytest.approx(TRANSFER_US * 1e-6)
    assert "clocks_differ" in codes(reading)


def test_ranks_that_are_missing_make_it_not_valid(tmp_path: Path) -> None:
    reading = run(tmp_path, ranks=2)
    assert not any(record.valid for record in reading.records)
    assert "ranks_missing" in codes(reading)


@pytest.mark.parametrize(
    ("changes", "op", "size"),
    [
        ({"name": "_allgather_base", "elements": 1000, "out": 4000}, "all_gather", 8000),
        ({"name": "all_gather_single", "elements": 1000, "out": 4000}, "all_gather", 8000),
        ({"name": "_reduce_scatter_base", "elements": 4000, "out": 1000}, "reduce_scatter", 8000),
        ({"name": "all_to_allv", "elements": 4000}, "all_to_all", 8000),
        ({"name": "broadcast", "elements": 4000}, "broadcast", 8000),
    ],
)
def test_sizes_are_those_of_nccl_tests(tmp_path: Path, changes: dict[str, Any], op: str, size: int) -> None:
    (record,) = run(tmp_path, **changes).records
    assert (record.op, record.size_bytes) == (op, size)


def test_unequal_splits_and_messages_are_left_out(tmp_path: Path) -> None:
    files = []
    for rank in range(RANKS):
        made = events(rank)
        uneven = metadata(50, name="all_to_allv") | {"In split size": "[1, 2, 3, 4]"}
        made += [kernel(90_000.0, 5.0, **uneven), kernel(91_000.0, 5.0, **metadata(51, name="send", ranks=2))]
        files.append(write(tmp_path, rank, made))
    reading = read_kineto(files, NODE)
    assert len(reading.records) == 1
    assert sum(finding.code == "left_out" for finding in reading.findings) == 2


def test_metadata_may_stand_on_the_cpu_operator(tmp_path: Path) -> None:
    files = []
    for rank in range(RANKS):
        made = events(rank)
        for number, event in enumerate(entry for entry in made if entry.get("cat") == "kernel"):
            told = {key: event["args"].pop(key) for key in metadata(1)}
            event["args"]["External id"] = 100 + number
            made.append(
                {
                    "ph": "X",
                    "cat": "cpu_op",
                    "name": "record_param_comms",
                    "ts": 1,
                    "dur": 1,
                    "args": {"External id": 100 + number, **told},
                }
            )
        files.append(write(tmp_path, rank, made))
    (record,) = read_kineto(files, NODE).records
    assert (record.median_s, record.repeats) == (pytest.approx(TRANSFER_US * 1e-6), 5)


def test_without_sequence_numbers_calls_are_joined_by_order(tmp_path: Path) -> None:
    files = []
    for rank in range(RANKS):
        made = events(rank)
        for event in made:
            event["args"].pop("Seq", None)
        files.append(write(tmp_path, rank, made))
    (record,) = read_kineto(files, NODE).records
    assert (record.median_s, record.repeats) == (pytest.approx(TRANSFER_US * 1e-6), 5)


def gemm_events(start: float, duration: float, identity: int) -> list[dict[str, Any]]:
    operator = {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::mm",
        "ts": start - 50,
        "dur": 9,
        "args": {
            "External id": identity,
            "Input Dims": [[4096, 1024], [1024, 8192]],
            "Input type": ["c10::BFloat16", "c10::BFloat16"],
        },
    }
    return [operator, kernel(start, duration, name="nvjet_tst_256x128", **{"External id": identity})]


def test_what_overlaps_is_marked_on_both_sides(tmp_path: Path) -> None:
    files = []
    for rank in range(RANKS):
        made = events(rank)
        # Alone long before the first call; then beside the transfer of the second.
        made += gemm_events(100.0, 60.0, 200) + gemm_events(20_880.0, 120.0, 201)
        files.append(write(tmp_path, rank, made))
    reading = read_kineto(files, NODE)
    found = {(record.kind, record.concurrent): record for record in reading.records}
    assert set(found) == {("collective", ""), ("collective", "kernels"), ("gemm", ""), ("gemm", "collective")}
    assert found["gemm", ""].median_s == pytest.approx(60e-6)
    assert found["gemm", ""].repeats == RANKS
    assert (found["gemm", ""].m, found["gemm", ""].n, found["gemm", ""].k) == (4096, 8192, 1024)
    assert found["collective", "kernels"].repeats == 1


def test_groups_across_nodes_are_placed_by_their_ranks(tmp_path: Path) -> None:
    files = [write(tmp_path, rank, events(rank)) for rank in range(RANKS)]
    (record,) = read_kineto(files, Hints(ranks_per_node=2)).records
    assert record.nodes == 2
    with pytest.raises(CalibrationError, match="give --ranks-per-node"):
        read_kineto(files, Hints())


def test_cut_off_trace(tmp_path: Path) -> None:
    files = [write(tmp_path, rank, events(rank), cut=900) for rank in range(RANKS)]
    reading = read_kineto(files, NODE)
    assert "cut_off" in codes(reading)
    assert reading.records[0].repeats < 5
    assert reading.records[0].median_s == pytest.approx(TRANSFER_US * 1e-6)


def test_a_cut_off_archive(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [*events(0, ranks=2, calls=400)], packed=True)
    path.write_bytes(path.read_bytes()[:-200])
    assert "cut_off" in codes(read_kineto([path], NODE))


def test_nothing_private_is_kept(tmp_path: Path) -> None:
    kept = repr(run(tmp_path))
    assert "zeus" not in kept
    assert "mallory" not in kept


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([], "no GPU kernel"),
        ([kernel(1.0, 2.0, name="elementwise")], "no collective with metadata"),
    ],
)
def test_errors(tmp_path: Path, made: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        read_kineto([write(tmp_path, 0, made)], NODE)


def test_two_traces_of_one_rank(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="second trace of rank 0"):
        read_kineto([write(tmp_path, 0, events(0)) for _ in range(2)], NODE)


def test_ranks_may_be_taken_from_the_order_of_files(tmp_path: Path) -> None:
    reading = read_kineto([write(tmp_path, None, events(rank)) for rank in range(RANKS)], NODE)
    assert "rank_assumed" in codes(reading)
    assert reading.records[0].valid


def test_spans() -> None:
    spans = Spans()
    for start, duration in ((5.0, 2.0), (0.0, 1.0), (0.5, 1.5), (6.0, 0.5)):
        spans.add(start, duration)
    assert spans.overlap_s(0.0, 10.0) == pytest.approx(4.0)
    assert spans.overlap_s(1.5, 5.5) == pytest.approx(1.0)
    assert spans.overlap_s(3.0, 4.0) == 0.0
    assert Spans().overlap_s(0.0, 1.0) == 0.0

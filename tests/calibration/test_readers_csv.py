"""CSV tables: columns by name, units only as the name says, nothing guessed; and formats told by content."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from overlapsim.calibration.readers.csv_tables import parse_csv_table
from overlapsim.calibration.readers.detect import detect, read_measurements
from overlapsim.calibration.readers.reading import Hints
from overlapsim.calibration.records import Record, RecordSet, dump_records
from overlapsim.errors import CalibrationError
from tests.calibration.logs import log

NODE = Hints(ranks_per_node=8, collective="all_reduce", ranks=8, dtype="bf16")
ONE = Record("collective", "all_reduce", 41e-6, size_bytes=1 << 20, dtype="fp16", ranks=8, nodes=1)


def only(text: str, hints: Hints = NODE) -> Record:
    (record,) = parse_csv_table(text, "t.csv", hints).records
    return record


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("size_bytes,time_s\n1048576,41e-6\n", ("all_reduce", 1 << 20, "bf16", 8)),
        ("size_bytes,time_us\n1048576,41\n", ("all_reduce", 1 << 20, "bf16", 8)),
        ("size_bytes,latency_ms\n1048576,0.041\n", ("all_reduce", 1 << 20, "bf16", 8)),
        (
            "source_table,hardware,nodes,ranks,collective,size_bytes,time_us\nx,H100,1,8,all_reduce,1048576,41\n",
            ("all_reduce", 1 << 20, "bf16", 8),
        ),
        (
            "collective,ranks,dtype,size_bytes,repeat,oop_time_us,algbw_GBps_derived\nalltoall,4,half,1048576,1,41,25.6\n",
            ("all_to_all", 1 << 20, "fp16", 4),
        ),
        (
            "framework,device,op_name,nccl_dtype,num_gpus,message_size,latency\nx,H100,all_gather,half,4,524288,0.041\n",
            ("all_gather", 1 << 20, "fp16", 4),
        ),
        ("dtype,ranks,message_size_elements,time_us\nbfloat16,2,524288,41\n", ("all_reduce", 1 << 20, "bf16", 2)),
    ],
)
def test_collectives(text: str, expected: tuple[object, ...]) -> None:
    record = only(text)
    assert (record.op, record.size_bytes, record.dtype, record.ranks) == expected
    assert record.median_s == pytest.approx(41e-6)
    assert record.nodes == 1


@pytest.mark.parametrize(
    "text",
    [
        "source_table,dtype,m,n,k,time_us\nh100,bf16,128,256,512,41\n",
        "M,N,K,latency_ms,tflops\n128,256,512,0.041,0.8\n",
        "gemm_dtype,m,n,k,latency\nbfloat16,128,256,512,0.041\n",
        "dtype,m,n,k,median_us,p10_us,p90_us,repeats\nbf16,128,256,512,41,40,44,30\n",
    ],
)
def test_gemms(text: str) -> None:
    record = only(text)
    assert (record.kind, record.m, record.n, record.k, record.dtype) == ("gemm", 128, 256, 512, "bf16")
    assert record.median_s == pytest.approx(41e-6)


def test_percentiles_and_both_sides() -> None:
    record = only("dtype,m,n,k,median_us,p10_us,p90_us,repeats\nbf16,128,256,512,41,40,44,30\n")
    assert (record.p10_s, record.p90_s, record.repeats) == (pytest.approx(40e-6), pytest.approx(44e-6), 30)
    both = parse_csv_table(
        "size_bytes,count,dtype,oop_time_us,ip_time_us\n0,0,float,0.1,0.1\n64,16,float,12,11\n", "t", NODE
    )
    assert [(r.in_place, r.dtype, round(r.median_s * 1e6)) for r in both.records] == [
        (False, "fp32", 12),
        (True, "fp32", 11),
    ]


def test_placement_in_the_table() -> None:
    text = "ranks,devices_per_node,size_bytes,median_time_us\n2,1,1024,41\n"
    assert only(text, Hints(collective="all_reduce")).nodes == 2
    with pytest.raises(CalibrationError, match="table says 2 nodes"):
        only(text)


@pytest.mark.parametrize(
    ("text", "hints", "message"),
    [
        ("size_bytes,time\n8,41\n", NODE, "column 'time' has no unit; rename it to time_s"),
        ("size_bytes,busbw\n8,41\n", NODE, "no column of times"),
        ("bytes_sent,time_us\n8,41\n", NODE, "expected size_bytes"),
        ("size_bytes,time_us\n8,41\n", Hints(8), "give --ranks"),
        ("size_bytes,time_us\n8,41\n", Hints(8, ranks=8), "give --collective"),
        ("size_bytes,time_us\n8,41\n", Hints(None, "all_reduce", 8), "give --ranks-per-node"),
        ("size_bytes,time_us\n8,41\n", Hints(6, "all_reduce", 16), "do not fill nodes of 6"),
        ("m,n,k,time_us\n8,8,8,41\n", Hints(8), "give --dtype"),
        ("size_bytes,time_us\n8,fast\n", NODE, "line 2: time_us is 'fast'"),
        ("size_bytes,time_us\n8,-3\n", NODE, "line 2: time_us is '-3'"),
        ("size_bytes,time_us\n8.5,3\n", NODE, "line 2: size_bytes is '8.5'"),
        ("size_bytes,time_us\n8\n16,3\n", NODE, "line 2: 1 cells"),
        ("size_bytes,time_us\n", NODE, "no rows"),
        ("size_bytes,time_us\n8,\n", NODE, "no row has a time"),
        ("size_bytes,size_bytes,time_us\n8,8,1\n", NODE, "comes twice"),
        ("hardware,size_bytes,time_us\nA100,8,1\nH100,8,1\n", NODE, "2 devices"),
        ("collective,ranks,size_bytes,time_us\nbarrier,8,8,1\n", NODE, "line 2: a collective that is not known"),
    ],
)
def test_errors(text: str, hints: Hints, message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        parse_csv_table(text, "t.csv", hints)


@pytest.mark.parametrize("end", ["16", "16,", "16,0.00", "16,0.0004"])
def test_a_cut_off_last_line_is_reported(end: str) -> None:
    reading = parse_csv_table(f"size_bytes,time_s\n8,0.000411\n{end}", "t.csv", NODE)
    assert (len(reading.records), [finding.code for finding in reading.findings]) == (1, ["cut_off"])


def test_a_last_line_without_an_end_may_be_whole() -> None:
    reading = parse_csv_table("size_bytes,time_s\n8,0.000411\n16,0.000512", "t.csv", NODE)
    assert (len(reading.records), reading.findings) == (2, ())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (log().encode(), "nccl-tests text"),
        (log().encode("utf-16"), "nccl-tests text"),
        ("\n".join(log().splitlines()[20:]).encode(), "nccl-tests text"),
        (b'{"version":3,"args":["all_reduce_perf"],"nccl_version":22703,"results":[]}', "nccl-tests json"),
        (b'{"schemaVersion": 1, "deviceProperties": [], "traceEvents": []}', "kineto"),
        (gzip.compress(b'{\n  "schemaVersion": 1, "traceEvents": []}'), "kineto"),
        (b'[{"ph": "X", "name": "a", "ts": 1, "dur": 1}]', "kineto"),
        (b"\xef\xbb\xbfsize_bytes,time_s\n8,1e-5\n", "csv"),
        (b"# a comment\nsize_bytes,time_s\n8,1e-5\n", "csv"),
        (dump_records(RecordSet((ONE,))).encode(), "records"),
    ],
)
def test_formats_are_told_by_content(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "measured.dat"
    path.write_bytes(content)
    assert detect(path) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"PAR1xxxx", "Parquet"),
        (b"\x00\x01\x02", "is binary"),
        (b"8,1e-5\n16,2e-5\n", "no column names"),
        (b"size\ttime\n8\t1\n", "without commas"),
        (b"hello\n", "no format that can be read"),
        (b'{"model": "llama"}', "JSON of a kind that is not known"),
    ],
)
def test_what_is_no_format(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "measured.dat"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        detect(path)


def test_records_come_back_and_one_file_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text(dump_records(RecordSet((ONE,))), encoding="utf-8")
    (reading,) = read_measurements([path])
    assert reading.records == (ONE,)
    with pytest.raises(CalibrationError, match="given twice"):
        read_measurements([path, path])
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_measurements([tmp_path / "missing.csv"])
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_measurements([tmp_path])

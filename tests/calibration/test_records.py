"""Record files: nothing is lost on the way through text, nothing private gets in, errors name the line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapsim.calibration.privacy import is_private, scrub, shown
from overlapsim.calibration.records import (
    COLUMNS,
    Header,
    Record,
    RecordSet,
    dump_records,
    parse_records,
    read_records,
)
from overlapsim.errors import CalibrationError

GEMM = Record("gemm", "gemm", 1.2e-4, m=4096, n=8192, k=1024, dtype="bf16", p10_s=1.1e-4, p90_s=1.4e-4, repeats=20)
ALL_REDUCE = Record("collective", "all_reduce", 41e-6, size_bytes=1 << 20, dtype="fp16", ranks=8, nodes=1)
BESIDE = Record(
    *("gemm", "gemm", 1.6e-4), m=4096, n=8192, k=1024, dtype="bf16", sms_left=112, concurrent="all_reduce", valid=False
)
HEADER = Header(
    "NVIDIA H100 80GB HBM3", "570.86.15", {"nccl": "2.27.3", "torch": "2.8.0"}, "8 ranks a node", "2026-03-01"
)

TIMES = st.floats(min_value=1e-9, max_value=10.0)
COUNTS = st.integers(min_value=1, max_value=2**40)


@st.composite
def records(draw: st.DrawFn) -> Record:
    low, median, high = sorted(draw(st.tuples(TIMES, TIMES, TIMES)))
    common = {
        "dtype": draw(st.sampled_from(("bf16", "fp8", ""))),
        "repeats": draw(st.integers(1, 10_000)),
        "valid": draw(st.booleans()),
        "concurrent": draw(st.sampled_from(("", "all_reduce", "kernels"))),
        "p10_s": draw(st.sampled_from((low, None))),
        "p90_s": draw(st.sampled_from((high, None))),
    }
    if draw(st.booleans()):
        sizes = {
            "m": draw(COUNTS),
            "n": draw(COUNTS),
            "k": draw(COUNTS),
            "sms_left": draw(st.none() | st.integers(1, 148)),
        }
        return Record("gemm", "gemm", median, **sizes, **common)
    nodes = draw(st.integers(1, 8))
    forced = {"algo": draw(st.sampled_from(("", "Ring"))), "proto": draw(st.sampled_from(("", "LL128")))}
    where = {"ranks": nodes * draw(st.integers(1, 8)), "nodes": nodes, "size_bytes": draw(COUNTS)}
    return Record("collective", "all_gather", median, in_place=draw(st.booleans()), **where, **forced, **common)


@given(st.lists(records(), min_size=1, max_size=8))
def test_text_keeps_everything(listed: list[Record]) -> None:
    content = RecordSet(tuple(listed), HEADER)
    text = dump_records(content)
    assert parse_records(text) == content
    assert dump_records(parse_records(text)) == text


def test_columns_are_those_of_the_documentation() -> None:
    assert dump_records(RecordSet((GEMM,))).splitlines()[1] == (
        "kind,op,m,n,k,size_bytes,dtype,ranks,nodes,algo,proto,channels,sms_left,concurrent,median_s,p10_s,p90_s,repeats,valid"
    )


def test_columns_may_stand_in_any_order() -> None:
    lines = dump_records(RecordSet((GEMM, ALL_REDUCE, BESIDE), HEADER)).splitlines()
    turned = [",".join(reversed(line.split(","))) for line in lines[1:]]
    assert parse_records("\n".join([lines[0], *turned])).records == (GEMM, ALL_REDUCE, BESIDE)


def test_private_text_in_a_header_is_dropped_both_ways() -> None:
    header = Header("H100 on node17", "570", {"torch": "/home/mallory/torch"}, "8 ranks on 10.0.0.4", "2026-03-01")
    text = dump_records(RecordSet((GEMM,), header))
    for secret in ("node17", "mallory", "10.0.0.4"):
        assert secret not in text
    raw = (
        '# {"overlapsim_records": 1, "device": "H100", "user": "mallory", "hostname": "zeus", '
        '"topology": "on 10.0.0.4"}\n' + text.split("\n", 1)[1]
    )
    content = parse_records(raw)
    assert {finding.code for finding in content.findings} == {"header_dropped", "private_dropped"}
    assert not any(secret in repr(content) for secret in ("mallory", "zeus", "10.0.0.4"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text.split("\n", 1)[1], "no header"),
        (lambda text: text.replace('"overlapsim_records": 1', '"overlapsim_records": 2'), "version 2"),
        (lambda text: text.replace("{", "[", 1), "not a header"),
        (lambda text: text.replace("median_s", "time_s"), "no column median_s, unknown column 'time_s'"),
        (lambda text: text.replace("0.00012", "-1"), "line 3: record of gemm gemm: times are"),
        (lambda text: text.replace("0.00012", "fast"), "line 3: median_s is 'fast'"),
        (lambda text: text.replace("0.00012", "nan"), "line 3"),
        (lambda text: text.replace("4096", "4096.5"), "line 3: m is '4096.5'; expected a whole number"),
        (lambda text: text.replace("4096", ""), "no m; a gemm needs them"),
        (lambda text: text.replace("gemm,gemm", "gem,gemm"), "line 3: kind is 'gem'; expected one of"),
        (lambda text: text.replace("true", "maybe"), "valid is 'maybe'"),
        (lambda text: text.replace(",true", ""), "line 3: 18 cells; expected 19"),
        (lambda text: text.replace("0.00011", "0.0002"), "p10_s 0.0002 is above p90_s"),
        (lambda text: text.split("\n")[0], "no line of column names"),
    ],
)
def test_errors(edit, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CalibrationError, match=message):
        parse_records(edit(dump_records(RecordSet((GEMM,)))))


def test_nodes_cannot_outnumber_ranks() -> None:
    with pytest.raises(CalibrationError, match="4 nodes for 2 ranks"):
        Record("collective", "all_reduce", 1e-5, size_bytes=8, ranks=2, nodes=4)


def test_missing_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_records(tmp_path / "none.csv")


@pytest.mark.parametrize(
    "text",
    [
        "ana@lab",
        "10.1.2.3",
        "fe80:0:0:0:1:2:3:4",
        "00:1a:2b:3c:4d:5e",
        "/home/ana/x",
        "login3.hpc.lab.edu",
        "gpu-0003",
        "node17",
    ],
)
def test_private(text: str) -> None:
    assert is_private(f"ran on {text} today")
    assert text not in scrub(f"ran on {text} today")


@pytest.mark.parametrize(
    "text", ["NVIDIA H100 80GB HBM3", "2.27.3+cuda12.9", "8 ranks a node", "570.86.15", "2026-03-01", "A100-SXM4-40GB"]
)
def test_not_private(text: str) -> None:
    assert not is_private(text)


def test_shown_keeps_numbers_only() -> None:
    assert shown("[secret] 1024 256 float sum zeus 12.9 N/A") == "? 1024 256 float sum ? 12.9 N/A"


def test_columns_constant() -> None:
    assert len(COLUMNS) == len(set(COLUMNS)) == 19

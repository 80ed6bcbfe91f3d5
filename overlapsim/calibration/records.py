"""Records: timed facts with their conditions, as CSV below one line of JSON that says where they were taken."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from overlapsim.calibration.privacy import is_private, scrub
from overlapsim.errors import CalibrationError
from overlapsim.plan import Finding

Kind = Literal["collective", "gemm", "memory", "launch"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
VERSION: Final = 1
COLUMNS: Final = (
    *("kind", "op", "m", "n", "k", "size_bytes", "dtype", "ranks", "nodes", "algo", "proto", "channels"),
    *("sms_left", "concurrent", "median_s", "p10_s", "p90_s", "repeats", "valid"),
)
"""Columns of the format, in order; `in_place` may follow where in-place collectives were timed."""


@dataclass(frozen=True)
class Record:
    """One timed fact.

    Attributes
    ----------
    kind : collective, gemm, memory (a memory-bound operator) or launch
    op : collective (``all_reduce`` ...), ``gemm``, or the operator's name
    median_s : median time of one call, seconds
    m, n, k : GEMM ``C[m, n] = A[m, k] B[k, n]``; rows and columns (m, n) of a memory-bound operator
    size_bytes : of a collective, as nccl-tests defines it
    dtype : ``bf16 fp16 fp32 fp8 ...``, empty if not known
    ranks, nodes : of a collective
    algo, proto, channels : forced on the library; empty and None where it chose
    sms_left : SMs that were left to this kernel; None for all
    concurrent : what ran beside it on the same GPU; empty if it ran alone. Constrains contention, never a solo time
    p10_s, p90_s : percentiles over the repeats
    repeats : timed calls behind the median
    valid : False where the tool reported wrong results, or the time holds something else
    in_place : the collective wrote into its own input
    """

    kind: Kind
    op: str
    median_s: float
    m: int | None = None
    n: int | None = None
    k: int | None = None
    size_bytes: int | None = None
    dtype: str = ""
    ranks: int | None = None
    nodes: int | None = None
    algo: str = ""
    proto: str = ""
    channels: int | None = None
    sms_left: int | None = None
    concurrent: str = ""
    p10_s: float | None = None
    p90_s: float | None = None
    repeats: int = 1
    valid: bool = True
    in_place: bool = False

    def __post_init__(self) -> None:
        if problem := _problem(self):
            raise CalibrationError(f"record of {self.kind} {self.op or '(no op)'}: {problem}")

    @property
    def alone(self) -> bool:
        """Whether nothing ran beside it."""
        return not self.concurrent


@dataclass(frozen=True)
class Header:
    """Where and with what the records were taken; never who or on which host.

    Attributes
    ----------
    device : product name of the GPU
    driver : driver version
    libraries : versions by name (``nccl``, ``nccl-tests``, ``torch`` ...)
    topology : in words, such as ``8 ranks a node``
    date : of the measurement, ``YYYY-MM-DD``
    """

    device: str = ""
    driver: str = ""
    libraries: Mapping[str, str] = field(default_factory=dict)
    topology: str = ""
    date: str = ""


NO_HEADER: Final = Header()


@dataclass(frozen=True)
class RecordSet:
    """Records with their header, and what was odd about them."""

    records: tuple[Record, ...]
    header: Header = NO_HEADER
    findings: tuple[Finding, ...] = ()


def dump_records(content: RecordSet) -> str:
    r"""Text of a record file; the same records give the same bytes.

    Host names, user names and addresses in the header are replaced.

    Examples
    --------
    >>> record = Record("collective", "all_reduce", 41e-6, size_bytes=1048576, ranks=8, nodes=1)
    >>> text = dump_records(RecordSet((record,), Header(device="H100")))
    >>> parse_records(text).records == (record,)
    True
    """
    header = content.header
    stated = {
        "overlapsim_records": VERSION,
        "device": scrub(header.device),
        "driver": scrub(header.driver),
        "libraries": {scrub(name): scrub(version) for name, version in sorted(header.libraries.items())},
        "topology": scrub(header.topology),
        "date": scrub(header.date),
    }
    columns = (*COLUMNS, "in_place") if any(record.in_place for record in content.records) else COLUMNS
    out = io.StringIO()
    out.write(f"# {json.dumps(stated)}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(getattr(record, column)) for column in columns] for record in content.records)
    return out.getvalue()


def parse_records(text: str, name: str = "records") -> RecordSet:
    """Read the text of a record file.

    Parameters
    ----------
    text : a first line ``# {"overlapsim_records": 1, ...}``, then CSV with `COLUMNS` in any order
    name : of the file, for messages

    Raises
    ------
    CalibrationError
        If the header is missing or of another version, a column is missing or unknown, or a cell is not what its
        column holds; the message names the line.
    """
    lines = text.removeprefix("\ufeff").splitlines()
    if not lines or not lines[0].startswith("#"):
        raise CalibrationError(
            f"{name}: no header; expected a first line '# {{\"overlapsim_records\": {VERSION}, ...}}'"
        )
    header, findings = _header(lines[0].removeprefix("#"), name)
    rows = [
        (number, row)
        for number, row in enumerate(csv.reader(lines), start=1)
        if row and not row[0].lstrip().startswith("#")
    ]
    if not rows:
        raise CalibrationError(f"{name}: no line of column names; expected {','.join(COLUMNS)}")
    columns = [cell.strip() for cell in rows[0][1]]
    missing = [column for column in COLUMNS if column not in columns]
    unknown = [column for column in columns if column not in (*COLUMNS, "in_place")]
    if missing or unknown or len(set(columns)) != len(columns):
        told = [f"no column {column}" for column in missing] + [f"unknown column {column!r}" for column in unknown]
        raise CalibrationError(
            f"{name}, line {rows[0][0]}: {', '.join(told) or 'a column twice'}; expected {','.join(COLUMNS)}"
        )
    records = tuple(_record(name, number, columns, row) for number, row in rows[1:])
    return RecordSet(records, header, findings)


def read_records(path: str | Path) -> RecordSet:
    """Read a record file; errors as `parse_records`.

    Raises
    ------
    CalibrationError
        Also if the file cannot be read.
    """
    try:
        return parse_records(Path(path).read_text(encoding="utf-8-sig"), Path(path).name)
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path} cannot be read: {error}; expected a record file (docs/records.md)") from None


def _header(text: str, name: str) -> tuple[Header, tuple[Finding, ...]]:
    try:
        stated = json.loads(text)
        version = stated["overlapsim_records"]
    except (ValueError, TypeError, KeyError):
        raise CalibrationError(
            f"{name}, line 1: not a header; expected '# {{\"overlapsim_records\": {VERSION}, ...}}'"
        ) from None
    if version != VERSION:
        raise CalibrationError(f"{name}: records of version {version!r}; this version of overlapsim reads {VERSION}")
    known = {item.name for item in fields(Header)}
    dropped = sorted(scrub(str(key)) for key in stated if key not in known and key != "overlapsim_records")
    values: dict[str, Any] = {key: stated[key] for key in known if key in stated}
    libraries = values.get("libraries", {})
    if not isinstance(libraries, dict) or not all(
        isinstance(values.get(key, ""), str) for key in known - {"libraries"}
    ):
        raise CalibrationError(
            f"{name}, line 1: expected text for device, driver, topology, date, and a mapping libraries"
        )
    values["libraries"] = {str(key): str(value) for key, value in libraries.items()}
    texts = [value for key, value in values.items() if key != "libraries"] + [*values["libraries"].values()]
    private = any(is_private(text) for text in texts)
    cleaned: dict[str, Any] = {key: scrub(value) for key, value in values.items() if key != "libraries"}
    cleaned["libraries"] = {scrub(key): scrub(value) for key, value in values["libraries"].items()}
    findings = []
    if dropped:
        findings.append(Finding("header_dropped", f"header keys that records do not hold were dropped: {len(dropped)}"))
    if private:
        findings.append(Finding("private_dropped", "a host name, user name or address in the header was dropped"))
    return Header(**cleaned), tuple(findings)


def _record(name: str, number: int, columns: Sequence[str], row: Sequence[str]) -> Record:
    if len(row) != len(columns):
        raise CalibrationError(f"{name}, line {number}: {len(row)} cells; expected {len(columns)}, one a column")
    values: dict[str, Any] = {}
    for column, cell in zip(columns, row, strict=True):
        try:
            values[column] = _PARSERS[column](cell.strip())
        except ValueError as error:
            raise CalibrationError(f"{name}, line {number}: {column} is {scrub(cell)!r}; expected {error}") from None
    try:
        return Record(**values)
    except CalibrationError as error:
        raise CalibrationError(f"{name}, line {number}: {error}") from None


def _problem(record: Record) -> str:
    """What contradicts itself in one record, or nothing."""
    if record.kind not in KINDS:
        return f"kind is {record.kind!r}; expected one of {', '.join(KINDS)}"
    if not record.op:
        return "op is empty; expected a name such as all_reduce or gemm"
    times = [record.median_s, *(time for time in (record.p10_s, record.p90_s) if time is not None)]
    if not all(math.isfinite(time) and time > 0 for time in times):
        return f"times are {times}; expected finite seconds above 0"
    if record.p10_s is not None and record.p90_s is not None and record.p10_s > record.p90_s:
        return f"p10_s {record.p10_s:g} is above p90_s {record.p90_s:g}"
    needed = {"collective": ("size_bytes", "ranks", "nodes"), "gemm": ("m", "n", "k"), "memory": ("m", "n")}
    missing = [column for column in needed.get(record.kind, ()) if getattr(record, column) is None]
    if missing:
        return f"no {', '.join(missing)}; a {record.kind} needs them"
    if record.nodes is not None and record.ranks is not None and record.nodes > record.ranks:
        return f"{record.nodes} nodes for {record.ranks} ranks"
    return ""


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def _text(cell: str) -> str:
    return scrub(cell)


def _kind(cell: str) -> str:
    if cell not in KINDS:
        raise ValueError(f"one of {', '.join(KINDS)}")
    return cell


def _count(cell: str) -> int | None:
    if not cell:
        return None
    if not cell.isdecimal() or int(cell) < 1:
        raise ValueError("a whole number of at least 1, or nothing")
    return int(cell)


def _repeats(cell: str) -> int:
    return _count(cell) or 1


def _seconds(cell: str) -> float | None:
    if not cell:
        return None
    if "_" in cell:
        raise ValueError("seconds as a plain number")
    try:
        return float(cell)
    except ValueError:
        raise ValueError("seconds as a plain number") from None


def _median(cell: str) -> float:
    value = _seconds(cell)
    if value is None:
        raise ValueError("seconds as a plain number")
    return value


def _flag(cell: str) -> bool:
    if cell.lower() not in ("true", "false", "1", "0"):
        raise ValueError("true or false")
    return cell.lower() in ("true", "1")


_PARSERS: Final[Mapping[str, Callable[[str], object]]] = {
    "kind": _kind,
    **dict.fromkeys(("op", "dtype", "algo", "proto", "concurrent"), _text),
    **dict.fromkeys(("m", "n", "k", "size_bytes", "ranks", "nodes", "channels", "sms_left"), _count),
    "median_s": _median,
    **dict.fromkeys(("p10_s", "p90_s"), _seconds),
    "repeats": _repeats,
    **dict.fromkeys(("valid", "in_place"), _flag),
}

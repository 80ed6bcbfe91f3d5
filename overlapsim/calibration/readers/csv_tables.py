"""CSV tables: size -> time curves, collective sweeps, GEMM sweeps; columns by name, units only as the name says."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overlapsim.calibration.privacy import scrub
from overlapsim.calibration.readers.reading import NO_HINTS, Hints, Reading, collective_of, dtype_of, element_bytes
from overlapsim.calibration.readers.source import read_text
from overlapsim.calibration.records import Header, Record
from overlapsim.errors import CalibrationError
from overlapsim.plan import Finding

FORMAT: Final = "csv"
_UNITS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_TIME: Final = re.compile(
    r"(?P<side>oop_|out_of_place_|ip_|in_place_)?(?P<what>median_|mean_|avg_|p10_|p90_)?"
    r"(?:time|latency|duration|elapsed)(?:_(?P<after>median|mean|avg))?(?:_(?P<unit>s|ms|us|ns))?"
    r"|(?P<bare>p10|p90|median|mean)_(?P<bare_unit>s|ms|us|ns)"
)
_ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "size_bytes": ("size_bytes", "bytes", "size_b", "message_size_bytes", "msg_size_bytes"),
    "elements": ("message_size_elements", "elements", "num_elements", "count"),
    "collective": ("collective", "op_name", "primitive", "operation"),
    "ranks": ("ranks", "num_gpus", "gpus", "world_size", "nranks"),
    "nodes": ("nodes", "num_nodes"),
    "ranks_per_node": ("ranks_per_node", "devices_per_node", "gpus_per_node"),
    "dtype": ("dtype", "nccl_dtype", "gemm_dtype", "data_type"),
    "m": ("m",),
    "n": ("n",),
    "k": ("k",),
    "repeats": ("repeats", "iterations", "iters"),
    "device": ("device", "hardware", "gpu"),
    "redop": ("redop",),
}
# Tables of one published collector state neither unit: elements, and milliseconds.
_COLLECTOR: Final = ({"nccl_dtype", "num_gpus", "message_size", "latency"}, {"gemm_dtype", "m", "n", "k", "latency"})


@dataclass(frozen=True)
class _Time:
    """One column of times."""

    column: str
    scale_s: float
    in_place: bool
    what: str


def read_csv_table(path: Path, hints: Hints = NO_HINTS) -> Reading:
    """Read a CSV table; see `parse_csv_table`."""
    return parse_csv_table(read_text(path), path.name, hints)


def parse_csv_table(text: str, name: str, hints: Hints = NO_HINTS) -> Reading:
    """Read the text of a CSV table.

    Rows with m, n and k are GEMMs, rows with a size are collectives. A time column must carry its unit
    (``time_us``, ``latency_ms``). What no column says (collective, ranks, dtype) comes from `hints`, never from a
    guess. Lines that begin with ``#`` are skipped; rows with a blank time are left out.

    Raises
    ------
    CalibrationError
        If columns are missing, a time has no unit, or a cell is not a number; the message names the line.
    """
    lines = text.removeprefix("\ufeff").splitlines()
    rows = [
        (number, [cell.strip() for cell in row])
        for number, row in enumerate(csv.reader(lines), start=1)
        if row and not row[0].lstrip().startswith("#")
    ]
    if not rows:
        raise CalibrationError(f"{name} has no rows; expected a line of column names and measurements")
    header = [cell.lower() for cell in rows[0][1]]
    if len(set(header)) != len(header):
        raise CalibrationError(f"{name}, line {rows[0][0]}: a column name comes twice")
    if len(rows) == 1:
        raise CalibrationError(f"{name} has column names and no rows")
    table = _Table(name, header, hints)
    records: list[Record] = []
    blank = 0
    if not text.endswith(("\n", "\r")) and _is_cut(rows, len(header)):
        table.findings.append(Finding("cut_off", f"{name}, line {rows[-1][0]}: the last line is cut off; left out"))
        rows = rows[:-1]
    for number, cells in rows[1:]:
        if len(cells) != len(header):
            raise CalibrationError(f"{name}, line {number}: {len(cells)} cells; expected {len(header)}, one a column")
        made = table.records(number, dict(zip(header, cells, strict=True)))
        blank += not made
        records += made
    if blank:
        table.findings.append(
            Finding("rows_left_out", f"{name}: {blank} rows of size 0 or without a time were left out")
        )
    if not records:
        raise CalibrationError(f"{name}: no row has a time")
    devices = {scrub(row[header.index(table.at["device"])]) for _, row in rows[1:]} if "device" in table.at else set()
    if len(devices) > 1:
        raise CalibrationError(
            f"{name} holds {len(devices)} devices ({', '.join(sorted(devices)[:4])}); a profile is of one: split it"
        )
    return Reading(FORMAT, tuple(records), Header(device=next(iter(devices), "")), tuple(table.findings))


def _is_cut(rows: Sequence[tuple[int, list[str]]], width: int) -> bool:
    """Whether a last line without an end lacks cells, or ends in a number that is shorter than all above it."""
    last = rows[-1][1]
    above = [len(cells[-1]) for _, cells in rows[1:-1] if len(cells) == width]
    return len(last) < width or (len(last) == width and bool(above) and len(last[-1]) < min(above))


class _Table:
    """The columns of one table."""

    def __init__(self, name: str, header: Sequence[str], hints: Hints) -> None:
        self.findings: list[Finding] = []
        self.at = {
            field: alias for field, aliases in _ALIASES.items() for alias in reversed(aliases) if alias in header
        }
        self._name, self._hints = name, hints
        collector = any(columns <= set(header) for columns in _COLLECTOR)
        if collector and "message_size" in header:
            self.at["elements"] = "message_size"
        self._times = _time_columns(name, header, milliseconds=collector)
        self._gemm = {"m", "n", "k"} <= set(self.at)
        if not self._gemm and not {"size_bytes", "elements"} & set(self.at):
            raise CalibrationError(
                f"{name} has the columns {', '.join(header)}; expected size_bytes (collectives) or m, n, k (GEMMs) "
                "with a time such as time_us"
            )

    def records(self, number: int, row: Mapping[str, str]) -> list[Record]:
        """Records of one row: one a side (in place or not) that has a time."""
        where = f"{self._name}, line {number}"
        made: list[Record] = []
        if not self._gemm and row[self.at.get("size_bytes", self.at.get("elements", ""))].strip() in ("0", "0.0"):
            return made  # sizes below one element a rank
        for in_place in (False, True):
            values = {
                time.what: scaled
                for time in self._times
                if time.in_place == in_place and (scaled := _seconds(row[time.column], time, where)) is not None
            }
            if "median" in values:
                made.append(self._record(where, row, values, in_place=in_place))
        return made

    def _record(self, where: str, row: Mapping[str, str], times: Mapping[str, float], *, in_place: bool) -> Record:
        dtype = dtype_of(row[self.at["dtype"]]) if "dtype" in self.at else (self._hints.dtype or "")
        repeats = self._count(where, row, "repeats") or 1
        low, high = times.get("p10"), times.get("p90")
        median = times["median"]
        if self._gemm:
            if not dtype:
                raise CalibrationError(f"{self._name} has no column dtype; give --dtype")
            m, n, k = (self._count(where, row, key) for key in ("m", "n", "k"))
            return Record("gemm", "gemm", median, m=m, n=n, k=k, dtype=dtype, p10_s=low, p90_s=high, repeats=repeats)
        ranks = self._count(where, row, "ranks") or self._hints.ranks
        if ranks is None:
            raise CalibrationError(f"{self._name} has no column ranks; give --ranks")
        if ranks < 2:
            raise CalibrationError(f"{where}: {ranks} rank; expected at least 2")
        return Record(
            kind="collective",
            op=self._collective(where, row),
            median_s=median,
            size_bytes=self._size(where, row, dtype),
            dtype=dtype,
            ranks=ranks,
            nodes=self._nodes(where, row, ranks),
            p10_s=low,
            p90_s=high,
            repeats=repeats,
            in_place=in_place,
        )

    def _collective(self, where: str, row: Mapping[str, str]) -> str:
        if "collective" not in self.at:
            if self._hints.collective is None:
                raise CalibrationError(f"{self._name} has no column collective; give --collective")
            return self._hints.collective
        collective = collective_of(row[self.at["collective"]])
        if collective is None:
            raise CalibrationError(f"{where}: a collective that is not known; expected all_reduce, all_gather ...")
        return collective

    def _size(self, where: str, row: Mapping[str, str], dtype: str) -> int:
        if "size_bytes" in self.at:
            size = self._count(where, row, "size_bytes")
            assert size is not None
            return size
        width = element_bytes(dtype)
        if width is None:
            raise CalibrationError(
                f"{where}: sizes are elements of type {dtype!r}, whose bytes are not known; give --dtype"
            )
        elements = self._count(where, row, "elements")
        assert elements is not None
        return elements * width

    def _nodes(self, where: str, row: Mapping[str, str], ranks: int) -> int:
        stated = self._count(where, row, "nodes")
        inside = self._count(where, row, "ranks_per_node")
        if stated is None and inside is not None:
            stated = max(1, ranks // inside)
        if self._hints.ranks_per_node is None and stated is not None:
            return stated
        nodes = self._hints.nodes(ranks, where)
        if stated is not None and stated != nodes:
            raise CalibrationError(
                f"{where}: the table says {stated} nodes for {ranks} ranks, --ranks-per-node makes it {nodes}; "
                "leave the option out where the table says it"
            )
        return nodes

    def _count(self, where: str, row: Mapping[str, str], field: str) -> int | None:
        if field not in self.at:
            return None
        cell = row[self.at[field]]
        try:
            value = float(cell)
        except ValueError:
            value = math.nan
        if not value >= 1 or value != int(value):
            raise CalibrationError(
                f"{where}: {self.at[field]} is {scrub(cell)!r}; expected a whole number of at least 1"
            )
        return int(value)


def _time_columns(name: str, header: Sequence[str], *, milliseconds: bool) -> tuple[_Time, ...]:
    times: dict[tuple[bool, str], _Time] = {}
    for column in header:
        match = _TIME.fullmatch(column)
        if match is None:
            continue
        unit = match["unit"] or match["bare_unit"] or ("ms" if milliseconds and column == "latency" else None)
        if unit is None:
            raise CalibrationError(
                f"{name}: column {column!r} has no unit; rename it to {column}_s, {column}_ms or {column}_us"
            )
        what = (match["what"] or match["bare"] or "median").rstrip("_")
        what = what if what in ("p10", "p90") else "median"
        in_place = (match["side"] or "").startswith("i")
        times.setdefault((in_place, what), _Time(column, _UNITS[unit], in_place, what))
    if not any(what == "median" for _, what in times):
        raise CalibrationError(f"{name} has no column of times; expected one such as time_us, time_s or latency_ms")
    return tuple(times.values())


def _seconds(cell: str, time: _Time, where: str) -> float | None:
    if not cell:
        return None
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise CalibrationError(f"{where}: {time.column} is {scrub(cell)!r}; expected a number above 0")
    # Division keeps round numbers round: 50 us is 5e-05 s, not 4.9999999999999996e-05.
    return value / round(1 / time.scale_s)

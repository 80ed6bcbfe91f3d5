"""Published operator tables: rows as ``table|column=value|...``, and what each row is as an operator."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from overlapsim.calibration.operator_rows import READERS, Work
from overlapsim.errors import CalibrationError, WorkloadError

UNITS: Final = ("s", "ms", "us", "TFLOP/s", "GFLOP/s", "Gelem/s")
"""Units of a value: a time, FLOP by time (as `Work.flop` counts them), or elements by time."""
_TIME: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_RATE: Final = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "Gelem/s": 1e9}
_NAME: Final = re.compile(r"^[A-Za-z0-9_.\-]+$")


@dataclass(frozen=True)
class TableRow:
    """One measurement.

    Attributes
    ----------
    id : ``table|column=value|...`` in the table's order, blank columns left out
    table, columns : the same, taken apart
    value, unit : as published, `unit` one of `UNITS`
    """

    id: str
    table: str
    columns: Mapping[str, str]
    value: float
    unit: str

    @property
    def fitted(self) -> bool:
        """Whether the row belongs to the half that fits may use: the first byte of the id's SHA-256 is even."""
        return hashlib.sha256(self.id.encode()).digest()[0] % 2 == 0

    def work(self) -> Work:
        """The operator of the row.

        Raises
        ------
        CalibrationError
            If the table is of no known kind, or a column is missing or malformed.
        """
        try:
            return _reader(self.table)(self.table, self.columns)
        except KeyError as error:
            raise CalibrationError(
                f"{self.id}: column {error.args[0]} is missing (docs/accuracy.md, operators)"
            ) from None
        except (ValueError, ZeroDivisionError, WorkloadError) as error:
            raise CalibrationError(f"{self.id}: {error}; expected the columns of docs/accuracy.md, operators") from None


def to_seconds(value: float, unit: str, work: Work) -> float:
    """Time of a published value; a rate is turned with the row's FLOP or elements."""
    if unit in _TIME:
        return value * _TIME[unit]
    return _amount(unit, work) / (value * _RATE[unit])


def from_seconds(seconds: float, unit: str, work: Work) -> float:
    """Inverse of `to_seconds`."""
    if unit in _TIME:
        return seconds / _TIME[unit]
    return _amount(unit, work) / (seconds * _RATE[unit])


def parse_table(text: str, name: str) -> list[TableRow]:
    """Rows of a table named `name`: a CSV whose last columns are ``value,unit``; blank columns do not count.

    Raises
    ------
    CalibrationError
        If the header or a row is malformed.
    """
    reader = csv.DictReader(io.StringIO(text))
    names = list(reader.fieldnames or ())
    if names[-2:] != ["value", "unit"]:
        raise CalibrationError(f"{name}: header ends in {names[-2:]}; expected value,unit")
    keys = names[:-2]
    return [
        _row("|".join([name, *(f"{key}={row[key]}" for key in keys if row[key])]), row["value"], row["unit"])
        for row in reader
    ]


def parse_rows(text: str, name: str) -> list[TableRow]:
    """Rows of a ``id,value,unit`` CSV, as ``accuracy --suite operators --data`` takes it.

    Raises
    ------
    CalibrationError
        If the header differs, there is no row, or an id, value or unit is malformed; the message names the line.
    """
    reader = csv.DictReader(io.StringIO(text.lstrip("\ufeff")))
    if reader.fieldnames != ["id", "value", "unit"]:
        raise CalibrationError(f"{name}: header is {reader.fieldnames}; expected id,value,unit")
    result = []
    for number, row in enumerate(reader, start=2):
        if None in row or None in row.values():
            raise CalibrationError(f"{name} line {number}: expected three fields id,value,unit")
        try:
            result.append(_row(row["id"], row["value"], row["unit"]))
        except CalibrationError as error:
            raise CalibrationError(f"{name} line {number}: {error}") from None
    if not result:
        raise CalibrationError(f"{name} has no rows; expected at least one of id,value,unit")
    return result


def digest(rows: Iterable[TableRow]) -> str:
    """SHA-256 over ids and which half each is in: changes when a row or the rule does."""
    text = "\n".join(f"{row.id} {int(row.fitted)}" for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()


def _row(id_: str, value: str, unit: str) -> TableRow:
    table, *pairs = id_.split("|")
    columns = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    if not _NAME.match(table) or len(columns) != len(pairs) or not pairs:
        raise CalibrationError(f"id is {id_!r}; expected table|column=value|...")
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not 0 < number < float("inf"):
        raise CalibrationError(f"value of {id_} is {value!r}; expected a number above 0")
    if unit not in UNITS:
        raise CalibrationError(f"unit of {id_} is {unit!r}; expected one of {', '.join(UNITS)}")
    return TableRow(id_, table, columns, number, unit)


def _reader(table: str) -> Callable[[str, Mapping[str, str]], Work]:
    for pattern, reader in READERS:
        if re.fullmatch(pattern, table):
            return reader
    raise CalibrationError(f"table {table} is of no known kind (docs/accuracy.md, operators, lists them)")


def _amount(unit: str, work: Work) -> float:
    amount = work.elements if unit == "Gelem/s" else work.flop
    if not amount > 0:
        raise CalibrationError(f"unit {unit} does not fit this operator; expected a time")
    return amount

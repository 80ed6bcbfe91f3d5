"""Where rows go as they arrive, and what is there already: a CSV file, or a folder of Parquet parts.

The results are their own log: a point is done where its whole row is there, so that no second file can disagree.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from overlapsim.errors import UsageError
from overlapsim.report.files import check_writable, write_bytes, write_text
from overlapsim.sweep.keys import Cell, Column
from overlapsim.sweep.lock import lock

SUFFIXES: Final = (".csv", ".parquet")
_WORDS: Final = {True: "true", False: "false"}


class Store(Protocol):
    """Rows by the id of their point.

    Attributes
    ----------
    done : id -> status of all rows that are there
    """

    done: Mapping[str, str]

    def open(self) -> None:
        """Take the place for writing, for this process alone; what a killed one left half-written is dropped."""

    def append(self, rows: Sequence[Sequence[Cell]]) -> None:
        """Add rows, in the order of the columns."""

    def flush(self) -> None:
        """Write what is still held back."""

    def finish(self, ids: Sequence[str]) -> None:
        """All points are done: put rows in this order, where the format has an order."""

    def close(self) -> None:
        """Let go of the place."""


def find_store(path: Path, columns: Sequence[Column]) -> Store:
    """The store at a path, with what it holds already; nothing is written yet.

    Raises
    ------
    UsageError
        If the name has another suffix, the place cannot be written, or it holds something else.
    """
    if path.name.endswith(".csv"):
        return CsvStore(path, columns)
    if path.name.endswith(".parquet"):
        from overlapsim.sweep.parquet import ParquetStore

        return ParquetStore(path, columns)
    raise UsageError(f"results go to {str(path)!r}; expected a file .csv, or a folder .parquet")


def check_done(done: Iterable[tuple[str, str]], path: Path) -> dict[str, str]:
    """Id and status of rows as a mapping.

    Raises
    ------
    UsageError
        If a point is there twice: no sweep wrote that.
    """
    found: dict[str, str] = {}
    for id_, status in done:
        if id_ in found:
            raise UsageError(f"{path} has the point {id_} twice; expected results of one sweep: give another file")
        found[id_] = status
    return found


class CsvStore:
    """Rows of a CSV file, each written whole at once and one line long; when all are there they are put in order.

    Parameters
    ----------
    path : file; it need not exist
    columns : of a row

    Raises
    ------
    UsageError
        As `find_store`.
    """

    def __init__(self, path: Path, columns: Sequence[Column]) -> None:
        self.path = check_writable(path)
        self._header = _line([column.name for column in columns])
        self._file: io.BufferedRandom | None = None
        self._lines: dict[str, bytes] = {}
        whole = self._read() if self._exists() else b""
        self.done: Mapping[str, str] = self._check(whole)

    def _exists(self) -> bool:
        if self.path.exists() and not self.path.is_file():
            raise UsageError(f"{self.path} is no regular file; results are read back, so expected one that can be")
        return self.path.exists() and self.path.stat().st_size > 0

    def _read(self) -> bytes:
        """Whole lines of the file behind its header."""
        content = self.path.read_bytes()
        if not content.startswith(self._header):
            raise UsageError(
                f"{self.path} does not begin with the columns of this sweep; expected its own results or no file: "
                "give another name"
            )
        return content[len(self._header) : content.rfind(b"\n") + 1]

    def _check(self, whole: bytes) -> dict[str, str]:
        rows = list(csv.reader(whole.decode("utf-8").splitlines()))
        columns = self._header.count(b",") + 1
        for at, row in enumerate(rows, start=2):
            if len(row) != columns:
                raise UsageError(f"{self.path}: line {at} has {len(row)} cells; expected {columns}: give another file")
        done = check_done(((row[0], row[1]) for row in rows), self.path)
        self._lines = dict(zip(done, whole.splitlines(keepends=True), strict=True))
        return done

    def open(self) -> None:
        """Lock the file and drop a line that was cut short."""
        if not self._exists():
            write_text(self.path, self._header.decode("utf-8"))
        file = self.path.open("r+b")
        self._file = file
        lock(file.fileno(), self.path)
        # Read again: another sweep may have written since.
        whole = self._read()
        self.done = self._check(whole)
        file.truncate(len(self._header) + len(whole))
        file.seek(0, os.SEEK_END)

    def append(self, rows: Sequence[Sequence[Cell]]) -> None:
        """Write rows; they are in the file, whatever becomes of this process, when this returns."""
        assert self._file is not None
        for row in rows:
            self._lines[str(row[0])] = line = _line(row)
            self._file.write(line)
        self._file.flush()

    def flush(self) -> None:
        """Nothing is held back."""

    def finish(self, ids: Sequence[str]) -> None:
        """Put the rows in order, so that the file does not depend on who was faster, nor on interruptions."""
        if list(self._lines) != list(ids):
            write_bytes(self.path, self._header + b"".join(self._lines[id_] for id_ in ids))

    def close(self) -> None:
        """Unlock the file."""
        if self._file is not None:
            self._file.close()


def _line(cells: Sequence[Cell]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([_WORDS[c] if isinstance(c, bool) else c for c in cells])
    line = text.getvalue()
    assert line.count("\n") == 1, "a cell has several lines"
    return line.encode("utf-8")

"""Rows as a Parquet dataset: a folder of parts, each renamed into place whole; the only importer of pyarrow."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from overlapsim.errors import UsageError
from overlapsim.report.files import write_bytes
from overlapsim.sweep.keys import Cell, Column
from overlapsim.sweep.lock import lock
from overlapsim.sweep.store import check_done

PART_ROWS: Final = 5000
PART_S: Final = 5.0
"""A part is written when it has so many rows, or so long after the last one: at most that much is done again after a
kill, and an hour leaves at most 720 files."""


class ParquetStore:
    """Rows of a folder of parts ``part-00000.parquet`` ..., which pandas, pyarrow, dask and others read as one table.

    Parameters
    ----------
    path : folder; it need not exist
    columns : of a row

    Raises
    ------
    UsageError
        If pyarrow is not installed, the folder cannot be made or holds something else.
    """

    def __init__(self, path: Path, columns: Sequence[Column]) -> None:
        self.path = Path(os.path.realpath(path))
        self._schema = _schema(columns)
        self._rows: list[Sequence[Cell]] = []
        self._written_at = time.monotonic()
        self._folder = -1
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{path} is a file; expected a folder for Parquet parts, or a name that is free")
        if not self.path.parent.is_dir():
            raise UsageError(f"cannot write {path}: the folder {self.path.parent} does not exist; create it first")
        self.done: Mapping[str, str] = self._read()

    def _parts(self) -> list[Path]:
        if not self.path.exists():
            return []
        found = sorted(entry for entry in self.path.iterdir() if not entry.name.startswith("."))
        strange = [entry.name for entry in found if not _is_part(entry.name)]
        if strange:
            raise UsageError(f"{self.path} holds {strange[0]}; expected parts of a sweep alone: give another folder")
        return found

    def _read(self) -> dict[str, str]:
        import pyarrow.parquet as pq

        done: list[tuple[str, str]] = []
        for part in self._parts():
            try:
                same = pq.read_schema(part).equals(self._schema)
            except (OSError, ValueError) as error:
                raise UsageError(f"cannot read {part}: {error}; remove it to have its points done again") from None
            if not same:
                raise UsageError(f"{part} does not have the columns of this sweep; give another folder")
            table = pq.read_table(part, columns=["id", "status"])
            done += zip(table["id"].to_pylist(), table["status"].to_pylist(), strict=True)
        return check_done(done, self.path)

    def open(self) -> None:
        """Make and lock the folder; parts that were not renamed are dropped."""
        self.path.mkdir(exist_ok=True)
        if os.name == "posix":
            self._folder = os.open(self.path, os.O_RDONLY)
            lock(self._folder, self.path)
        for entry in self.path.glob(".part-*.part"):
            entry.unlink()
        self.done = self._read()
        self._written_at = time.monotonic()

    def append(self, rows: Sequence[Sequence[Cell]]) -> None:
        """Hold rows until a part is due."""
        self._rows += rows
        if len(self._rows) >= PART_ROWS or time.monotonic() - self._written_at >= PART_S:
            self.flush()

    def flush(self) -> None:
        """Write the rows held as the next part."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._rows:
            columns = [list(cells) for cells in zip(*self._rows, strict=True)]
            arrays = [pa.array(cells, field.type) for cells, field in zip(columns, self._schema, strict=True)]
            buffer = io.BytesIO()
            pq.write_table(pa.Table.from_arrays(arrays, schema=self._schema), buffer)
            last = max((int(part.name[5:-8]) for part in self._parts()), default=-1)
            write_bytes(self.path / f"part-{last + 1:05d}.parquet", buffer.getvalue())
            self._rows = []
        self._written_at = time.monotonic()

    def finish(self, ids: Sequence[str]) -> None:
        """Write what is held; a table of parts has no order."""
        self.flush()

    def close(self) -> None:
        """Unlock the folder."""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1


def _is_part(name: str) -> bool:
    return name.startswith("part-") and name.endswith(".parquet") and name[5:-8].isdecimal()


def _schema(columns: Sequence[Column]) -> Any:
    try:
        import pyarrow as pa
    except ImportError:
        raise UsageError(
            "Parquet needs pyarrow; install it with: pip install 'overlapsim[cluster]', or write .csv"
        ) from None
    types = {"text": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    return pa.schema([(column.name, types[column.type]) for column in columns])

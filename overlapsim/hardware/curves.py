"""Measured collective curves: the one CSV format and its reader."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise
from pathlib import Path
from typing import Final

from overlapsim.errors import ProfileError
from overlapsim.hardware.profile import CurveTable, Source

HEADER: Final = "size_bytes,time_s"
_EXPECTED: Final = f"expected the header '{HEADER}' (sizes in bytes, times in seconds)"
# Spellings of the same two columns by other tools: named so that the message can say what to convert.
_OTHER_SIZES: Final = frozenset({"size", "bytes", "size_b", "message_size", "msg_size", "elements", "count"})
_OTHER_TIMES: Final = frozenset({"time", "time_us", "time_ms", "us", "ms", "latency", "latency_us", "oop_time_us"})


def read_curve(path: str | Path, *, text: str | None = None) -> CurveTable:
    """Read a size -> time table.

    The format is a UTF-8 CSV with the header ``size_bytes,time_s`` and rising sizes. Lines that start with ``#``
    and blank lines are skipped; a byte-order mark and CRLF line ends are fine. "Size" is what nccl-tests calls size.

    Parameters
    ----------
    path : str or Path
        File to read; only a name for messages when `text` is given.
    text : str, optional
        Content that was read already.

    Returns
    -------
    CurveTable
        At least one point; its source is ``measured``, medium trust, with the file's name.

    Raises
    ------
    ProfileError
        If the file is missing or empty, a column is missing, a cell is not a finite number above zero, or the
        sizes do not rise; the message names the line.

    Examples
    --------
    >>> lines = ["size_bytes,time_s", "1048576,4.1e-5"]
    >>> read_curve("mine.csv", text=chr(10).join(lines)).time_s
    (4.1e-05,)
    """
    content = _read(path) if text is None else text
    lines = [
        (number, line.strip())
        for number, line in enumerate(content.removeprefix("\ufeff").splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        raise ProfileError(f"curve {path} is empty; {_EXPECTED} and one row or more")
    _check_header(path, lines[0][1])
    if len(lines) == 1:
        raise ProfileError(f"curve {path} has a header and no rows; expected one row or more")
    rows = [(number, *_row(path, number, line)) for number, line in lines[1:]]
    for (_, before, _), (number, size, _) in pairwise(rows):
        if size == before:
            raise ProfileError(f"curve {path}, line {number}: size {size:.0f} appears twice; keep one row a size")
        if size < before:
            raise ProfileError(
                f"curve {path}, line {number}: size {size:.0f} comes after {before:.0f}; sort the rows by size"
            )
    return CurveTable(
        size_bytes=tuple(size for _, size, _ in rows),
        time_s=tuple(time for _, _, time in rows),
        source=Source("measured", Path(path).name, "medium"),
        digest=hashlib.sha256(content.encode()).hexdigest(),
    )


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ProfileError(f"curve {path} does not exist; expected a CSV file with columns {HEADER}") from None
    except UnicodeDecodeError:
        raise ProfileError(f"curve {path} is not UTF-8 text; {_EXPECTED}") from None
    except OSError as error:
        raise ProfileError(f"curve {path} cannot be read: {error.strerror}") from None


def _check_header(path: str | Path, line: str) -> None:
    columns = [cell.strip() for cell in line.split(",")]
    if columns == HEADER.split(","):
        return
    if all(_number(cell) is not None for cell in columns):
        raise ProfileError(f"curve {path} starts with numbers and has no header; {_EXPECTED}")
    names = {cell.lower() for cell in columns}
    if names & (_OTHER_SIZES | _OTHER_TIMES):
        raise ProfileError(f"curve {path} has the header {line!r}; {_EXPECTED}: convert the values, then rename")
    missing = [column for column in HEADER.split(",") if column not in columns]
    if missing:
        raise ProfileError(f"curve {path} has no column {' and no column '.join(missing)}: {line!r}; {_EXPECTED}")
    raise ProfileError(f"curve {path} has the header {line!r}; {_EXPECTED} and nothing else")


def _row(path: str | Path, number: int, line: str) -> tuple[float, float]:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 2:
        raise ProfileError(f"curve {path}, line {number}: {len(cells)} cells in {line!r}; expected 2, {HEADER}")
    size, time = (_positive(path, number, name, cell) for name, cell in zip(HEADER.split(","), cells, strict=True))
    return size, time


def _positive(path: str | Path, number: int, name: str, cell: str) -> float:
    value = _number(cell)
    if value is None:
        raise ProfileError(f"curve {path}, line {number}: {name} is {cell!r}; expected a plain number")
    if not math.isfinite(value) or value <= 0:
        raise ProfileError(f"curve {path}, line {number}: {name} is {cell}; expected a finite number above 0")
    return value


def _number(cell: str) -> float | None:
    # float() also takes 1_000, which no other reader of such a file would.
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None

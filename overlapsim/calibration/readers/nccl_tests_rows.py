"""One row of an nccl-tests table: its cells by the labels above it, and whether its numbers agree with each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

TYPES: Final = (
    *("int8", "uint8", "int32", "uint32", "int64", "uint64", "half", "float", "double", "bfloat16"),
    *("fp8_e4m3", "fp8_e5m2", "f8e4m3", "f8e5m2"),
)
REDOPS: Final = ("sum", "prod", "max", "min", "avg", "mulsum", "none")
LABELS: Final = (
    *("size", "count", "type", "redop", "root"),
    *("time", "algbw", "busbw", "#wrong"),
    *("time", "algbw", "busbw", "#wrong"),
)
# Anywhere in a line: a row is printed in two pieces, and mpirun tags both.
_TAG: Final = re.compile(r"\[\d+,\d+\](?:<\w+>)?:?")
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_START: Final = re.compile(rf"(?:^|(?<=[\s:|>]))(\d+)\s+(\d+)\s+({'|'.join(TYPES)})\s+({'|'.join(REDOPS)})(?=\s|$)")
_LABELS: Final = re.compile(r"(?:^|[\s#])(size\s+count(?:\s+\(?\w+\)?)*?\s+type\b.*)$")
# Sizes and counts are exact; times and rates are printed with 2 decimals or 2 significant digits at least.
RATE_SLACK: Final = 0.02
COARSE_SLACK: Final = 0.06
RATE_STEP: Final = 0.0051


@dataclass(frozen=True)
class Half:
    """One side (out of place or in place) of a row; times in seconds, rates in bytes/s."""

    time_s: float
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    wrong: float | None


@dataclass(frozen=True)
class Row:
    """One size of a table.

    Attributes
    ----------
    line : number in the file
    size_bytes, count, dtype, redop, root : as printed; root is -1 where the table has none
    halves : out of place, then in place; None where missing
    problem : why the row cannot be used, or nothing
    """

    line: int
    size_bytes: int
    count: int
    dtype: str
    redop: str
    root: int
    halves: tuple[Half | None, Half | None]
    problem: str = ""


def clean(line: str) -> str:
    """A line without colours and launcher tags."""
    return _TAG.sub("", _ANSI.sub("", line)).rstrip()


def labels_of(line: str) -> tuple[str, ...] | None:
    """Column labels if this is the line that names them (``size count type ... time algbw busbw``)."""
    match = _LABELS.search(line)
    if match is None or "algbw" not in line:
        return None
    return tuple(cell for cell in match[1].split() if not cell.startswith("("))


def starts_row(line: str) -> bool:
    """Whether a line holds the first cells of a row."""
    return "#" not in line[: line.find(" ") + 1] and _START.search(line) is not None


def num_starts(line: str) -> int:
    """How many rows begin in this line: two where outputs were mixed."""
    return len(_START.findall(line))


def parse_row(number: int, line: str, labels: Sequence[str], *, last: bool) -> Row:
    """Read one row.

    Parameters
    ----------
    number : line number
    line : cleaned text that `starts_row`
    labels : columns, from the line that names them
    last : the file ends here, perhaps in the middle of a number
    """
    match = _START.search(line)
    assert match is not None
    size, count, dtype, redop = int(match[1]), int(match[2]), match[3], match[4]
    names, cells = list(labels[4:]), line[match.end() :].split()
    root = -1
    if names and names[0] == "root":
        names = names[1:]
        if cells and re.fullmatch(r"-?\d+", cells[0]):
            root = int(cells.pop(0))
    split = next((i for i, name in enumerate(names) if i and name in ("time", "cputime")), len(names))
    width, both = split, len([name for name in names if name != "timestamp"])
    # A time stamp is two cells; it says nothing that is kept.
    stamped = "timestamp" in names and len(cells) > both
    values = cells[:both] if stamped else cells
    complete = len(values) == both
    halves: list[Half | None] = []
    problem = ""
    for first in (0, width):
        part = values[first : first + width]
        if first >= both or len(part) < 3:
            halves.append(None)
            continue
        # The last cell of a file may be half a number; those before it are whole.
        if last and not complete and first + len(part) == len(values):
            halves.append(None)
            continue
        counted = "#wrong" in names[:width]
        half, told = _half(size, part, counted=counted)
        halves.append(half)
        problem = problem or told
    if not complete and not (last and halves[0] is not None):
        problem = problem or f"{len(values)} cells after the type, expected {both}"
    if num_starts(line) > 1:
        problem = "two rows in one line"
    return Row(number, size, count, dtype, redop, root, (halves[0], halves[1]), problem)


def _half(size: int, cells: Sequence[str], *, counted: bool) -> tuple[Half | None, str]:
    try:
        time_us, algbw, busbw = (float(cell) for cell in cells[:3])
    except ValueError:
        return None, "a cell is not a number"
    # `N/A` where nothing was checked; older versions print the largest deviation (`error`) instead of a count.
    wrong = _wrong(cells[3]) if counted and len(cells) > 3 else None
    if size == 0:
        return None, ""
    if not (0 < time_us < 1e12) or algbw != algbw:
        return None, "a time is not above 0"
    half = Half(time_us / 1e6, algbw * 1e9, busbw * 1e9, wrong)
    expected = size / time_us / 1e3
    slack = COARSE_SLACK if "e" in cells[0] else RATE_SLACK
    if abs(expected - algbw) > RATE_STEP + slack * max(expected, algbw):
        return half, f"size / time is {expected:.3g} GB/s, algbw says {algbw:.3g}"
    return half, ""


def _wrong(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None

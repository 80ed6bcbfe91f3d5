"""Which reader a file needs, told by its content and never by its name."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from overlapsim.calibration.readers import csv_tables, nccl_tests_json, nccl_tests_text
from overlapsim.calibration.readers.kineto import FORMAT as KINETO
from overlapsim.calibration.readers.kineto import read_kineto
from overlapsim.calibration.readers.reading import NO_HINTS, Hints, Reading
from overlapsim.calibration.readers.source import head, open_bytes
from overlapsim.calibration.records import parse_records
from overlapsim.errors import CalibrationError

RECORDS: Final = "records"
EXPECTED: Final = (
    "expected nccl-tests text or JSON (-J), a torch profiler trace (.json, .json.gz), a CSV table with named columns, "
    "or records (docs/records.md)"
)
_KINETO: Final = re.compile(r'"traceEvents"|"deviceProperties"|"schemaVersion"|"ph"\s*:')
_NCCL_JSON: Final = re.compile(r'"nccl_version"|"out_of_place"|"in_place"')
_NCCL_TEXT: Final = re.compile(
    r"algbw\s+busbw|nccl-tests version|\bnThreads?:? \d+ nGpus|# Out of bounds values|_perf\b"
)


def detect(path: Path) -> str:
    """Format of a file: ``records``, ``kineto``, ``nccl-tests json``, ``nccl-tests text`` or ``csv``.

    Raises
    ------
    CalibrationError
        If it is none of them, empty or unreadable.
    """
    open_bytes(path).close()
    start = head(path)
    if start.startswith(b"PAR1"):
        raise CalibrationError(f"{path} is Parquet; export it as CSV first")
    utf16 = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if b"\0" in start and not utf16:
        raise CalibrationError(f"{path} is binary; {EXPECTED}")
    text = start.decode("utf-16" if utf16 else "utf-8", errors="replace").removeprefix("\ufeff")
    if text.startswith("#") and "overlapsim_records" in text[:200]:
        return RECORDS
    body = text.lstrip()
    if body.startswith(("{", "[{", "[\n", "[ ", "[\r")):
        # An environment dump may push the results of -J behind the first bytes, its version never.
        if _KINETO.search(text) and not re.search(r'"nccl_version"\s*:\s*\d', text):
            return KINETO
        if _NCCL_JSON.search(text) or '"args"' in text[:4096]:
            return nccl_tests_json.FORMAT
        raise CalibrationError(f"{path} is JSON of a kind that is not known; {EXPECTED}")
    if _NCCL_TEXT.search(text) or nccl_tests_text.looks_like(text):
        return nccl_tests_text.FORMAT
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    if "," in first and not all(_is_number(cell) for cell in first.split(",")):
        return csv_tables.FORMAT
    if "," in first:
        raise CalibrationError(f"{path} has numbers and no column names; {EXPECTED}")
    if "\t" in first or ";" in first:
        raise CalibrationError(f"{path} looks like a table without commas; {EXPECTED}")
    raise CalibrationError(f"{path} is of no format that can be read; {EXPECTED}")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return not cell.strip()
    return True


def read_measurements(
    paths: Sequence[Path], hints: Hints = NO_HINTS, *, progress: Callable[[str], None] | None = None
) -> list[Reading]:
    """Read files of any mix of formats; the traces among them are read as the ranks of one run.

    Parameters
    ----------
    paths : files
    hints : what the files do not say
    progress : called with a line for people now and then

    Raises
    ------
    CalibrationError
        If a file is of no known format or cannot be used; errors of the readers.
    """
    tell = progress or (lambda message: None)
    readings: list[Reading] = []
    traces: list[Path] = []
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise CalibrationError(f"{path} is given twice; its rows would count double")
        seen.add(path.resolve())
        form = detect(path)
        tell(f"{path.name}: {form}")
        match form:
            case nccl_tests_text.FORMAT:
                readings.append(nccl_tests_text.read_nccl_tests_text(path, hints))
            case nccl_tests_json.FORMAT:
                readings.append(nccl_tests_json.read_nccl_tests_json(path, hints))
            case csv_tables.FORMAT:
                readings.append(csv_tables.read_csv_table(path, hints))
            case _ if form == KINETO:
                traces.append(path)
            case _:
                content = parse_records(path.read_text(encoding="utf-8-sig"), path.name)
                readings.append(Reading(RECORDS, content.records, content.header, content.findings))
    if traces:
        readings.append(read_kineto(traces, hints, progress=tell))
    return readings

"""nccl-tests text output: any version's columns, several tests in a log, warnings and launcher labels in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from overlapsim.calibration.readers.nccl_tests_log import Log, Test, read_log, segments
from overlapsim.calibration.readers.nccl_tests_rows import Row, starts_row
from overlapsim.calibration.readers.nccl_tests_rules import identify, interleaved, table_records
from overlapsim.calibration.readers.reading import NO_HINTS, Hints, Reading
from overlapsim.calibration.readers.source import read_text
from overlapsim.calibration.records import Header, Record
from overlapsim.errors import CalibrationError
from overlapsim.plan import Finding

FORMAT: Final = "nccl-tests text"
# More broken rows than this and the file is not what it looks like.
MAX_BROKEN: Final = 0.2


def read_nccl_tests_text(path: Path, hints: Hints = NO_HINTS) -> Reading:
    """Read a log of one or more nccl-tests (or rccl-tests) runs; see `parse_nccl_tests_text`."""
    return parse_nccl_tests_text(read_text(path), path.name, hints)


def parse_nccl_tests_text(text: str, name: str, hints: Hints = NO_HINTS) -> Reading:
    """Read the text of a log.

    Columns are found by the line that labels them. Out-of-place and in-place times become records of their own.
    Rows must agree with themselves (size over time is the printed bandwidth), or they are left out and reported.

    Parameters
    ----------
    text : whole log
    name : of the file, for messages
    hints : ranks per node; collective and ranks for logs whose first lines are missing

    Raises
    ------
    CalibrationError
        If there are no rows, outputs of several processes are mixed, the collective or the number of ranks cannot
        be told, ranks per node are missing or contradict the log, or most rows are broken.
    """
    log = read_log(text)
    tests = [test for test in log.tests if test.rows]
    if not tests:
        raise CalibrationError(
            f"{name}: no row of an nccl-tests table among {log.num_lines} lines; is the log complete?"
        )
    findings: list[Finding] = []
    records: list[Record] = []
    for test in tests:
        records += _test(test, name, hints, findings)
    if not records:
        raise CalibrationError(f"{name}: no usable row; " + "; ".join(finding.message for finding in findings))
    return Reading(FORMAT, tuple(records), _header(log, tests, hints), tuple(findings))


def _test(test: Test, name: str, hints: Hints, findings: list[Finding]) -> Iterator[Record]:
    where = f"{name}, line {test.first_line}"
    broken = [row for row in test.rows if row.problem]
    if len(broken) > max(1, MAX_BROKEN * len(test.rows)) or len(broken) == len(test.rows):
        first = broken[0]
        raise CalibrationError(
            f"{where}: {len(broken)} of {len(test.rows)} rows contradict themselves (line {first.line}: "
            f"{first.problem}); outputs are mixed, or a column was changed: give the log as the tool printed it"
        )
    if broken:
        lines = ", ".join(str(row.line) for row in broken)
        findings.append(
            Finding("broken_rows", f"{name}: left out {len(broken)} rows (line {lines}): {broken[0].problem}")
        )
    parts = [(kind, [row for row in rows if not row.problem]) for kind, rows in segments(test)]
    if told := interleaved(test.banners, [[row.size_bytes for row in rows if row.size_bytes] for _, rows in parts]):
        raise CalibrationError(
            f"{where}: {told}: the output of two runs is mixed, and rows cannot be told apart; give each run's own log"
        )
    findings += _states(test, name)
    yield from _tables(test, parts, where, name, hints, findings)


def _tables(
    test: Test,
    parts: Sequence[tuple[tuple[str, str], list[Row]]],
    where: str,
    name: str,
    hints: Hints,
    findings: list[Finding],
) -> Iterator[Record]:
    reductions = {redop for (_, redop), _ in parts}
    # One reduction stands for all: the sum, which overlapped collectives use.
    kept = next((redop for redop in ("sum", "none") if redop in reductions), min(reductions))
    if others := sorted(reductions - {kept}):
        findings.append(Finding("reductions_left_out", f"{where}: kept reduction {kept}, left out {', '.join(others)}"))
    for (_, redop), rows in parts:
        if redop == kept and rows:
            identity = identify(test, rows, where, hints, findings)
            yield from table_records(test, rows, identity, name, findings)


def _states(test: Test, name: str) -> Iterator[Finding]:
    """What the run says about itself that a reader of its numbers should know."""
    if test.failed:
        yield Finding("wrong_results", f"{name}: the test reports wrong results; those rows are kept as not valid")
    if test.half_rows:
        yield Finding("rows_rejoined", f"{name}: {test.half_rows} rows were broken by other output and put together")
    last = max(row.size_bytes for row in test.rows)
    if not test.concluded:
        rest = f" (it was to go to {test.max_bytes} bytes)" if test.max_bytes > 2 * last else ""
        yield Finding(
            "cut_off", f"{name}: the test from line {test.first_line} has no end; last size {last} bytes{rest}"
        )
    if test.settings.get("warmup iters") == 0:
        yield Finding("no_warmup", f"{name}: run without warm-up (-w 0); the first sizes hold start-up costs")
    if test.settings.get("agg iters", 1) > 1:
        yield Finding("aggregated", f"{name}: calls were aggregated (-m); a time is a share of a batch")
    if test.blocking:
        yield Finding("blocking", f"{name}: run with -z; each time holds a host synchronisation")


def _header(log: Log, tests: Sequence[Test], hints: Hints) -> Header:
    first = tests[0]
    libraries = {"nccl": first.nccl, "nccl-tests": first.tests_version}
    return Header(
        device=first.device,
        driver=log.driver,
        libraries={name: version for name, version in libraries.items() if version},
        topology=f"{hints.ranks_per_node} ranks a node" if hints.ranks_per_node else "",
    )


def looks_like(text: str) -> bool:
    """Whether a text without any banner holds rows of a table: a log whose beginning is missing."""
    return any(starts_row(line) for line in text.splitlines())

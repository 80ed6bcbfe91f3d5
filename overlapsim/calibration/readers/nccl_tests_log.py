"""An nccl-tests log cut into its tests: banners, versions, label lines, rows, and what lies between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from overlapsim.calibration.readers.nccl_tests_rows import LABELS, Row, clean, labels_of, parse_row, starts_row

_LAUNCHER: Final = re.compile(r"^\s*(?:\[(\d+,\d+)\](?:<\w+>)?:?|(\d+):(?=\s))\s?")
_STARTING: Final = re.compile(r"Collective test starting:\s*(\w+?)(?:_mpi)?\s*$")
_VERSION: Final = re.compile(r"nccl-tests version (\S+)")
_LIBRARY: Final = re.compile(r"nccl-library=(\d+)")
_NCCL: Final = re.compile(r"\b(?:NCCL|RCCL) version\s*:?\s*(\d+\.\d+(?:\.\d+)?)")
_DRIVER: Final = re.compile(r"\b(?:cudaDriverVersion|Driver Version:?)\s+([\d.]+)")
_CONFIG: Final = re.compile(r"\bnThreads?:?\s+(\d+)\s+nGpus:?\s+(\d+)\s+minBytes:?\s+(\d+)\s+maxBytes:?\s+(\d+)")
_SETTING: Final = re.compile(r"(warmup iters|agg iters|iters|validation|graph):\s*(\d+)")
_RANK: Final = re.compile(
    r"\bRank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[0-9a-fx:.]+\]\s*(.*?)\s*$"
)
_COMMAND: Final = re.compile(
    r"\b(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|sendrecv|reduce|gather|scatter|hypercube)_perf(?:_mpi)?\b"
)
_SETUP: Final = re.compile(r"\bNCCL_(ALGO|PROTO|MAX_NCHANNELS|MIN_NCHANNELS)\s*[= ]\s*([A-Za-z0-9_,^]+)")
_HALF_ROW: Final = re.compile(r"^\s*[\d.]+(?:\s+(?:[\d.e+-]+|N/A))+\s*$")


@dataclass
class Test:
    """One test of a log while it is being read.

    Attributes
    ----------
    first_line : where it begins
    stream : launcher's label of the lines, empty without one
    program : ``all_reduce`` ... as its first lines, or the command before it, say
    num_ranks, hosts : from the rank banner; hosts only as a set of opaque numbers
    settings : ``warmup iters``, ``graph`` ... of the configuration line
    banners : configuration lines seen
    """

    first_line: int
    stream: str = ""
    program: str = ""
    named: bool = False
    num_ranks: int = 0
    groups: set[int] = field(default_factory=set)
    hosts: set[int] = field(default_factory=set)
    device: str = ""
    nccl: str = ""
    tests_version: str = ""
    max_bytes: int = 0
    settings: dict[str, int] = field(default_factory=dict)
    forced: dict[str, str] = field(default_factory=dict)
    blocking: bool = False
    banners: int = 0
    labels: tuple[str, ...] = ()
    rows: list[Row] = field(default_factory=list)
    concluded: bool = False
    failed: bool = False
    half_rows: int = 0


@dataclass(frozen=True)
class Log:
    """All tests of a file, in order, with what holds for the whole file."""

    tests: tuple[Test, ...]
    driver: str
    num_lines: int


def version_of_code(code: int) -> str:
    """NCCL's version from its number: 23007 is 2.30.7, and before 2.9 2708 was 2.7.8.

    Examples
    --------
    >>> version_of_code(23007), version_of_code(2708)
    ('2.30.7', '2.7.8')
    """
    base = 10000 if code >= 10000 else 1000
    return f"{code // base}.{code % base // 100}.{code % 100}"


def read_log(text: str) -> Log:
    """Cut the text of a log into tests; lines of several launcher streams are told apart first."""
    lines = text.removeprefix("\ufeff").splitlines()
    # A cut in the middle of a line leaves no line end behind the last row.
    cut = bool(lines) and not text.endswith(("\n", "\r"))
    tests: list[Test] = []
    driver = ""
    for stream, numbered in _streams(lines).items():
        parser = _Parser(stream)
        for number, line in numbered:
            parser.line(number, line, last=cut and number == len(lines))
        tests += parser.tests
        driver = driver or parser.driver
    return Log(tuple(sorted(tests, key=lambda test: test.first_line)), driver, len(lines))


def _streams(lines: Iterable[str]) -> dict[str, list[tuple[int, str]]]:
    """Lines by launcher label; a log without labels is one stream."""
    streams: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines, start=1):
        match = _LAUNCHER.match(line)
        label = (match[1] or match[2]) if match else ""
        body = line[match.end() :] if match and match[2] else line
        streams.setdefault(label, []).append((number, clean(body)))
    # Lines without a label in a labelled log are warnings and commands: they belong to whatever runs then.
    if len(streams) > 1 and "" in streams and not any(starts_row(line) for _, line in streams[""]):
        loose = streams.pop("")
        for numbered in streams.values():
            numbered[:] = sorted([*numbered, *loose])
    return streams


class _Parser:
    """Goes through the lines of one stream."""

    def __init__(self, stream: str) -> None:
        self.tests: list[Test] = []
        self.driver = ""
        self._stream = stream
        self._command = ""
        self._nccl = ""
        self._forced: dict[str, str] = {}
        self._device = ""
        self._open: tuple[int, str] | None = None

    def line(self, number: int, line: str, *, last: bool) -> None:
        """Take one line."""
        if self._rejoin(number, line, last=last):
            return
        if starts_row(line):
            self._row(number, line, last=last)
            return
        if labels := labels_of(line):
            test = self._current(number)
            if test.rows:
                test = self._begin(number)
            test.labels = labels
            return
        for handle in (self._starting, self._config, self._rank, self._end, self._loose):
            if handle(number, line):
                return

    def _begin(self, number: int) -> Test:
        test = Test(number, self._stream, program=self._command, nccl=self._nccl, forced=dict(self._forced))
        self.tests.append(test)
        return test

    def _current(self, number: int) -> Test:
        """The test that a header line at `number` belongs to: the open one until it has rows or an end."""
        if not self.tests or self.tests[-1].rows or self.tests[-1].concluded:
            return self._begin(number)
        return self.tests[-1]

    def _row(self, number: int, line: str, *, last: bool) -> None:
        if not self.tests or self.tests[-1].concluded:
            self._begin(number)
        test = self.tests[-1]
        row = parse_row(number, line, test.labels or LABELS, last=last)
        if row.halves == (None, None) and row.size_bytes and not last:
            # The rest may stand on the next line, behind a warning of another process.
            self._open = (number, line)
        test.rows.append(row)

    def _rejoin(self, number: int, line: str, *, last: bool) -> bool:
        if self._open is None:
            return False
        first, start = self._open
        if number > first + 3 or starts_row(line):
            self._open = None
            return False
        if not _HALF_ROW.match(line):
            return False
        test = self.tests[-1]
        kept = " ".join(start.split()[:5] if "root" in (test.labels or LABELS) else start.split()[:4])
        row = parse_row(first, f"{kept} {line}", test.labels or LABELS, last=last)
        if row.problem or row.halves == (None, None):
            return False
        test.rows[-1] = row
        test.half_rows += 1
        self._open = None
        return True

    def _starting(self, number: int, line: str) -> bool:
        if match := _VERSION.search(line):
            test = self._current(number)
            test.tests_version = match[1]
            if library := _LIBRARY.search(line):
                test.nccl = version_of_code(int(library[1]))
            return True
        if match := _STARTING.search(line):
            test = self._current(number)
            if test.named:
                test = self._begin(number)
            test.program, test.named = match[1].removesuffix("_perf"), True
            return True
        return False

    def _config(self, number: int, line: str) -> bool:
        match = _CONFIG.search(line)
        if match is None:
            if "Blocking Enabled" in line and self.tests:
                self.tests[-1].blocking = True
                return True
            return False
        test = self._current(number)
        test.banners += 1
        test.max_bytes = max(test.max_bytes, int(match[4]))
        test.settings |= {name: int(value) for name, value in _SETTING.findall(line)}
        return True

    def _rank(self, number: int, line: str) -> bool:
        match = _RANK.search(line)
        if match is None:
            return False
        test = self._current(number)
        test.num_ranks = max(test.num_ranks, int(match[1]) + 1)
        test.groups.add(int(match[2] or 0))
        # Only whether two ranks share a host is kept.
        test.hosts.add(hash(match[3]))
        test.device = match[4]
        return True

    def _end(self, number: int, line: str) -> bool:
        if "Out of bounds values" in line:
            if self.tests:
                self.tests[-1].failed |= "FAILED" in line
            return True
        if "Avg bus bandwidth" in line or "test concluded" in line:
            if self.tests:
                self.tests[-1].concluded = True
            return True
        return False

    def _loose(self, number: int, line: str) -> bool:
        if match := _NCCL.search(line):
            self._nccl = match[1]
            if self.tests and not self.tests[-1].nccl:
                self.tests[-1].nccl = match[1]
        if match := _DRIVER.search(line):
            self.driver = match[1]
        for name, value in _SETUP.findall(line):
            self._forced[name] = value
        if commands := _COMMAND.findall(line):
            self._command = commands[-1]
        return False


def segments(test: Test) -> Iterator[tuple[tuple[str, str], list[Row]]]:
    """Rows of a test by element type and reduction, as `-d all -o all` prints them one after another."""
    part: list[Row] = []
    for row in test.rows:
        if part and (row.dtype, row.redop, row.root) != (part[-1].dtype, part[-1].redop, part[-1].root):
            yield (part[-1].dtype, part[-1].redop), part
            part = []
        part.append(row)
    if part:
        yield (part[-1].dtype, part[-1].redop), part

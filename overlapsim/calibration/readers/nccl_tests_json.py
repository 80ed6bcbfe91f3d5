"""nccl-tests JSON (``-J FILE``): the same tables with per-iteration times; its environment and hosts are dropped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from overlapsim.calibration.readers.json_stream import Beside, items
from overlapsim.calibration.readers.nccl_tests_log import Test, version_of_code
from overlapsim.calibration.readers.nccl_tests_rows import RATE_SLACK, RATE_STEP, Half, Row
from overlapsim.calibration.readers.nccl_tests_rules import identify, interleaved, table_records
from overlapsim.calibration.readers.reading import NO_HINTS, Hints, Reading, collective_of
from overlapsim.calibration.records import Header, Record
from overlapsim.errors import CalibrationError
from overlapsim.plan import Finding

FORMAT: Final = "nccl-tests json"


def read_nccl_tests_json(path: Path, hints: Hints = NO_HINTS) -> Reading:
    """Read the file that ``-J`` writes.

    One file is one run. ``env``, host names and process ids in it are not kept. Where ``-I`` wrote times per
    iteration, records carry their median and percentiles instead of the mean.

    Raises
    ------
    CalibrationError
        If there are no results, the collective or the ranks cannot be told, or ranks per node are missing or
        contradict the file.
    """
    beside = Beside()
    results = [item for item in items(path, "results", beside) if isinstance(item, dict)]
    name = path.name
    if not results:
        raise CalibrationError(f"{name}: no results in the JSON; expected the file that nccl-tests -J writes")
    findings: list[Finding] = []
    if beside.cut_off:
        findings.append(Finding("cut_off", f"{name}: the JSON ends in the middle; {len(results)} results were read"))
    test = _test(beside.values, findings, name)
    rows = [row for number, item in enumerate(results, start=1) if (row := _row(number, item))]
    broken = [row for row in rows if row.problem]
    if broken:
        raise CalibrationError(f"{name}: result {broken[0].line}: {broken[0].problem}; was a value changed?")
    if told := interleaved(1, _tables(rows)):
        raise CalibrationError(f"{name}: {told}; expected one run")
    test.rows = rows
    records = _records(test, rows, results, name, hints, findings)
    if not records:
        raise CalibrationError(f"{name}: no usable result; " + "; ".join(finding.message for finding in findings))
    libraries = {"nccl": test.nccl} if test.nccl else {}
    topology = f"{hints.ranks_per_node} ranks a node" if hints.ranks_per_node else ""
    date = str(beside.values.get("start_time", ""))[:10]
    header = Header(device=test.device, libraries=libraries, topology=topology, date=date)
    return Reading(FORMAT, tuple(records), header, tuple(findings))


def _test(values: Mapping[str, Any], findings: list[Finding], name: str) -> Test:
    test = Test(1, concluded=True)
    arguments = values.get("args")
    if isinstance(arguments, list) and arguments:
        program = str(arguments[0]).rsplit("/", 1)[-1].removesuffix("_mpi")
        # A wrapper's name says nothing; then the columns must.
        test.program = program.removesuffix("_perf") if collective_of(program) or program.endswith("_perf") else ""
    config = values.get("config") if isinstance(values.get("config"), dict) else {}
    assert isinstance(config, dict)
    per_process = _whole(config.get("nthreads"), 1) * _whole(config.get("ngpus"), 1)
    devices = values.get("devices", config.get("devices"))
    listed = [item for item in devices if isinstance(item, dict)] if isinstance(devices, list) else []
    # One entry a process: of its ranks the tool lists the first.
    test.num_ranks = len(listed) * per_process if listed else per_process
    test.groups = {_whole(item.get("group"), 0) for item in listed}
    test.hosts = {hash(item.get("hostname")) for item in listed if item.get("hostname")}
    test.device = str(listed[0].get("device_info", "")) if listed else ""
    code = values.get("nccl_version")
    test.nccl = version_of_code(code) if isinstance(code, int) else ""
    test.settings = {
        "iters": _whole(config.get("iterations"), 1),
        "agg iters": _whole(config.get("aggregated_iterations"), 1),
    }
    if _whole(config.get("warmup_iters"), 1) == 0:
        findings.append(Finding("no_warmup", f"{name}: run without warm-up; the first sizes hold start-up costs"))
    if str(config.get("blocking_collectives", "false")) not in ("false", "0", "False"):
        findings.append(Finding("blocking", f"{name}: run with -z; each time holds a host synchronisation"))
    # Only NCCL's own switches are read out of the environment.
    environment = values.get("env")
    for entry in environment if isinstance(environment, list) else []:
        variable, _, value = str(entry).partition("=")
        if variable in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"):
            test.forced[variable.removeprefix("NCCL_")] = value
    return test


def _row(number: int, item: Mapping[str, Any]) -> Row | None:
    size = _whole(item.get("size"), 0)
    if not size:
        return None
    halves: list[Half | None] = []
    problem = ""
    for key in ("out_of_place", "in_place"):
        side = item.get(key)
        if not isinstance(side, dict) or "time" not in side:
            halves.append(None)
            continue
        time_us, algbw, busbw = (_float(side.get(name)) for name in ("time", "alg_bw", "bus_bw"))
        if not time_us > 0 or not math.isfinite(time_us):
            halves.append(None)
            continue
        wrong = side.get("nwrong")
        halves.append(Half(time_us / 1e6, algbw * 1e9, busbw * 1e9, None if wrong is None else _float(wrong)))
        expected = size / time_us / 1e3
        if abs(expected - algbw) > RATE_STEP + RATE_SLACK * max(expected, algbw):
            problem = f"{key}: size / time is {expected:.3g} GB/s, alg_bw says {algbw:.3g}"
    root = str(item.get("root", "-1")).strip()
    return Row(
        number,
        size,
        _whole(item.get("count"), 0),
        str(item.get("type", "")),
        str(item.get("redop", "none")),
        int(root) if root.lstrip("-").isdecimal() else -1,
        (halves[0], halves[1]),
        problem,
    )


def _tables(rows: Sequence[Row]) -> list[list[int]]:
    tables: dict[tuple[str, str, int], list[int]] = {}
    for row in rows:
        tables.setdefault((row.dtype, row.redop, row.root), []).append(row.size_bytes)
    return list(tables.values())


def _records(
    test: Test,
    rows: Sequence[Row],
    results: Sequence[Mapping[str, Any]],
    name: str,
    hints: Hints,
    findings: list[Finding],
) -> list[Record]:
    times = {
        (number, in_place): _iterations(item.get(f"{'in' if in_place else 'out_of'}_place_per_iter"))
        for number, item in enumerate(results, start=1)
        for in_place in (False, True)
    }
    records = []
    redop = next((op for op in ("sum", "none") if any(row.redop == op for row in rows)), rows[0].redop)
    kept = [row for row in rows if row.redop == redop]
    identity = identify(test, kept, name, hints, findings)
    for row in kept:
        for record in table_records(test, [row], identity, name, findings):
            records.append(_with_percentiles(record, times[row.line, record.in_place]))
    return records


def _iterations(report: object) -> Sequence[float]:
    listed = report.get("times_us") if isinstance(report, dict) else None
    return (
        [float(time) for time in listed if isinstance(time, int | float) and time > 0]
        if isinstance(listed, list)
        else []
    )


def _with_percentiles(record: Record, times_us: Sequence[float]) -> Record:
    if len(times_us) < 3:
        return record
    low, median, high = (float(value) for value in np.quantile(times_us, (0.1, 0.5, 0.9)) / 1e6)
    return replace(record, median_s=median, p10_s=low, p90_s=high, repeats=len(times_us))


def _whole(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float | str) and str(value) != "nan" else math.nan

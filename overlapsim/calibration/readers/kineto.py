"""torch profiler (Kineto) traces of several ranks: transfers apart from waiting for peers, GEMMs, what overlapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from overlapsim.calibration.readers.kineto_trace import Call, Gemm, Trace, read_trace
from overlapsim.calibration.readers.reading import NO_HINTS, Hints, Reading
from overlapsim.calibration.records import Header, Record
from overlapsim.errors import CalibrationError
from overlapsim.plan import Finding

FORMAT: Final = "kineto"
# Beside something else: kernels that touch for less than this share of their time count as alone.
ALONE_SHARE: Final = 0.05
# Clocks of nodes differ; of one node's GPUs by a few microseconds.
CLOCK_SLACK_S: Final = 5e-6
_REPORT_EVERY_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class _Timed:
    """One call of a group, all its ranks together."""

    call: Call
    transfer_s: float
    waiting_s: float
    complete: bool
    concurrent: str
    clocks_agree: bool


def read_kineto(
    paths: Sequence[Path], hints: Hints = NO_HINTS, *, progress: Callable[[str], None] | None = None
) -> Reading:
    """Read the traces of the ranks of one run together.

    A collective kernel spins until its last rank arrives, so its duration on one rank is waiting plus transfer. The
    rank that arrives last waits for nobody: its duration, the shortest of the call, is the transfer. That needs a
    trace of every rank of the group; calls with ranks missing are kept as not valid. Calls are joined by process
    group and sequence number.

    Parameters
    ----------
    paths : one trace a rank, ``.json`` or ``.json.gz``; read event by event, so size does not matter
    hints : ranks per node
    progress : called with a line for people now and then

    Raises
    ------
    CalibrationError
        If a file is no trace, two files are of one rank, or nothing in them can be used.
    """
    tell = progress or (lambda message: None)
    findings: list[Finding] = []
    traces: dict[int, Trace] = {}
    for index, path in enumerate(paths):
        trace = read_trace(path, _reporter(path, tell))
        if trace.cut_off:
            findings.append(
                Finding("cut_off", f"{path.name}: the trace ends in the middle; {trace.num_events} events were read")
            )
        rank = trace.rank
        if rank is None:
            rank = index
            findings.append(Finding("rank_assumed", f"{path.name}: the trace does not name its rank; taken as {index}"))
        if rank in traces:
            raise CalibrationError(
                f"{path.name}: a second trace of rank {rank}; give one trace a rank, of one run (calibrate runs apart, "
                "then merge their records)"
            )
        traces[rank] = trace
    calls = _timed_calls(traces)
    records = [*_collective_records(calls, hints, findings), *_gemm_records(traces.values())]
    findings += _findings(traces, calls)
    if not records:
        raise CalibrationError(
            f"{paths[0].name}: no collective with metadata and no GEMM with shapes in {len(paths)} traces; profile "
            "with record_shapes=True on torch 2.4 or later" + "".join(f"; {finding.message}" for finding in findings)
        )
    first = next(iter(traces.values()))
    return Reading(
        FORMAT,
        tuple(records),
        Header(
            device=first.device,
            libraries={"nccl": first.nccl} if first.nccl else {},
            topology=f"{hints.ranks_per_node} ranks a node" if hints.ranks_per_node else "",
        ),
        tuple(findings),
    )


def _reporter(path: Path, tell: Callable[[str], None]) -> Callable[[int], None]:
    told = 0

    def report(bytes_read: int) -> None:
        nonlocal told
        if bytes_read - told >= _REPORT_EVERY_BYTES:
            told = bytes_read
            tell(f"{path.name}: {bytes_read >> 20} MiB read")

    return report


def _timed_calls(traces: dict[int, Trace]) -> list[_Timed]:
    together: dict[tuple[str, ...], dict[int, Call]] = {}
    for rank, trace in traces.items():
        for call in trace.calls:
            together.setdefault(call.key, {})[rank] = call
    timed = []
    for members in together.values():
        # Ties go to the lowest rank, so that files in another order give the same records.
        last = min(sorted(members), key=lambda rank: members[rank].duration_s)
        call = members[last]
        latest = max(member.start_s for member in members.values())
        compute = traces[last].compute.overlap_s(call.start_s, call.start_s + call.duration_s)
        timed.append(
            _Timed(
                call=call,
                transfer_s=call.duration_s,
                waiting_s=float(np.mean([member.duration_s for member in members.values()])) - call.duration_s,
                # Without sequence numbers calls are joined by order: unlike sizes show traces of unlike steps.
                complete=len(members) == call.ranks and len({m.size_bytes for m in members.values()}) == 1,
                concurrent="kernels" if compute > ALONE_SHARE * call.duration_s else "",
                clocks_agree=latest - call.start_s <= max(CLOCK_SLACK_S, 0.2 * call.duration_s),
            )
        )
    return timed


def _collective_records(calls: Iterable[_Timed], hints: Hints, findings: list[Finding]) -> list[Record]:
    groups: dict[tuple[Any, ...], list[_Timed]] = {}
    for timed in calls:
        call = timed.call
        nodes = _nodes(call, hints)
        key = (call.collective, call.ranks, nodes, call.dtype, call.size_bytes, timed.concurrent, timed.complete)
        groups.setdefault(key, []).append(timed)
    records = []
    for (collective, ranks, nodes, dtype, size, concurrent, complete), members in sorted(groups.items()):
        low, median, high = _quantiles([timed.transfer_s for timed in members])
        records.append(
            Record(
                "collective",
                collective,
                median,
                size_bytes=size,
                dtype=dtype,
                ranks=ranks,
                nodes=nodes,
                concurrent=concurrent,
                p10_s=low,
                p90_s=high,
                repeats=len(members),
                valid=complete,
            )
        )
    return records


def _nodes(call: Call, hints: Hints) -> int:
    if call.members and hints.ranks_per_node:
        return len({member // hints.ranks_per_node for member in call.members})
    return hints.nodes(call.ranks, "the trace")


def _gemm_records(traces: Iterable[Trace]) -> list[Record]:
    groups: dict[tuple[Any, ...], list[float]] = {}
    for trace in traces:
        for gemm in trace.gemms:
            groups.setdefault((*_shape(gemm), _beside(gemm, trace)), []).append(gemm.duration_s)
    records = []
    for (m, n, k, dtype, concurrent), times in sorted(groups.items()):
        low, median, high = _quantiles(times)
        records.append(
            Record(
                *("gemm", "gemm", median),
                m=m,
                n=n,
                k=k,
                dtype=dtype,
                concurrent=concurrent,
                p10_s=low,
                p90_s=high,
                repeats=len(times),
            )
        )
    return records


def _shape(gemm: Gemm) -> tuple[int, int, int, str]:
    return gemm.m, gemm.n, gemm.k, gemm.dtype


def _beside(gemm: Gemm, trace: Trace) -> str:
    shared = trace.communication.overlap_s(gemm.start_s, gemm.start_s + gemm.duration_s)
    return "collective" if shared > ALONE_SHARE * gemm.duration_s else ""


def _quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    low, median, high = (float(value) for value in np.quantile(times, (0.1, 0.5, 0.9)))
    return low, median, high


def _findings(traces: dict[int, Trace], calls: Sequence[_Timed]) -> list[Finding]:
    found = []
    if missing := [timed for timed in calls if not timed.complete]:
        needed = max(timed.call.ranks for timed in missing)
        found.append(
            Finding(
                "ranks_missing",
                f"{len(missing)} of {len(calls)} collectives lack the same call of some rank (groups of up to "
                f"{needed}, {len(traces)} traces): waiting cannot be told from transfer; kept as not valid",
            )
        )
    whole = [timed for timed in calls if timed.complete]
    if whole:
        waited = sum(timed.waiting_s for timed in whole)
        moved = sum(timed.transfer_s for timed in whole)
        found.append(
            Finding(
                "waiting",
                f"collective kernels spent {waited / (waited + moved):.0%} of their time waiting for the last rank; "
                "that part is not in the records",
            )
        )
    if differing := sum(not timed.clocks_agree for timed in whole):
        found.append(
            Finding(
                "clocks_differ",
                f"in {differing} of {len(whole)} collectives the shortest kernel did not start last: clocks of the "
                "ranks differ, or ranks left early; the shortest was taken",
            )
        )
    left_out: dict[str, int] = {}
    for trace in traces.values():
        for reason, count in trace.left_out.items():
            left_out[reason] = left_out.get(reason, 0) + count
    found += [Finding("left_out", f"{count} {reason} were left out") for reason, count in sorted(left_out.items())]
    return found

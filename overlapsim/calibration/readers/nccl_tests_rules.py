"""What an nccl-tests table is: its collective, its ranks and nodes, whether two outputs are mixed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from overlapsim.calibration.readers.nccl_tests_log import Test
from overlapsim.calibration.readers.nccl_tests_rows import Half, Row
from overlapsim.calibration.readers.reading import Hints, bus_factor, collective_of, dtype_of, element_bytes
from overlapsim.calibration.records import Record
from overlapsim.errors import CalibrationError
from overlapsim.plan import Finding

# Ranks of which twice the printing step of the bandwidths still tells neighbours apart.
MAX_RANKS = 4096


@dataclass(frozen=True)
class Identity:
    """What was run, on how many ranks of how many nodes."""

    collective: str
    ranks: int
    nodes: int


def interleaved(banners: int, tables: Sequence[Sequence[int]]) -> str:
    """Why the sizes of a test's tables look like two outputs in one, or nothing.

    A table's sizes rise; they may begin again (``-N`` cycles), and a table may repeat one size only.

    Examples
    --------
    >>> interleaved(1, [[8, 16, 32, 8, 16, 32]])
    ''
    >>> interleaved(2, [[8, 8, 16, 16]])
    '2 tests begin before the first row, and 2 of 4 sizes come twice in a row'
    """
    sizes = [size for table in tables for size in table]
    if len(tables) > 4 and sum(len(table) == 1 for table in tables) > len(tables) / 2:
        return "rows of two element types or reductions alternate"
    twice = back = 0
    for table in tables:
        if len(set(table)) == 1:
            continue
        twice += sum(a == b for a, b in pairwise(table))
        top = 0
        for before, size in pairwise(table):
            top = max(top, before)
            restarts = size == table[0] and before == top
            back += size < before and not restarts
    begun = f"{banners} tests begin before the first row, and " if banners > 1 else ""
    if back:
        return f"{begun}sizes fall {back} times in one table"
    # Sizes rounded to a multiple may repeat here and there.
    if twice > 0.2 * len(sizes) and (banners > 1 or twice > 2):
        return f"{begun}{twice} of {len(sizes)} sizes come twice in a row"
    return ""


def identify(test: Test, rows: Sequence[Row], where: str, hints: Hints, findings: list[Finding]) -> Identity:
    """Tell collective, ranks and nodes from the banner, the command or the numbers; contradictions are errors.

    Raises
    ------
    CalibrationError
        If something cannot be told, or two sources disagree.
    """
    ranks = _ranks(test, rows, where, hints, findings)
    collective = _collective(test, rows, ranks, where, hints, findings)
    _check_factor(rows, collective, ranks, where)
    nodes = hints.nodes(ranks, where)
    _check_hosts(test, ranks, nodes, where, findings)
    return Identity(collective, ranks, nodes)


def _ranks(test: Test, rows: Sequence[Row], where: str, hints: Hints, findings: list[Finding]) -> int:
    ranks = test.num_ranks
    if len(test.groups) > 1:
        groups = len(test.groups)
        findings.append(Finding("split_groups", f"{where}: {groups} groups ran side by side and shared the links"))
        ranks //= groups
    derived = _ranks_of_numbers(rows)
    if hints.ranks and ranks > 1 and hints.ranks != ranks:
        raise CalibrationError(f"{where}: --ranks is {hints.ranks}, the log lists {ranks}; leave it out")
    if hints.ranks:
        return hints.ranks
    if derived > ranks:
        findings.append(
            Finding("ranks_derived", f"{where}: the log lists {ranks} ranks; its bandwidth columns fit {derived} only")
        )
        return derived
    if not ranks:
        raise CalibrationError(f"{where}: the lines that list the ranks are missing; give --ranks")
    if ranks < 2:
        raise CalibrationError(
            f"{where}: 1 rank. Built without MPI=1, nccl-tests runs every process alone: build it with MPI=1 or use -g"
        )
    return ranks


def _ranks_of_numbers(rows: Sequence[Row]) -> int:
    """The one number of ranks that element counts, or both bandwidths within their printing steps, allow; else 0."""
    shares = {
        row.size_bytes // (row.count * width)
        for row in rows
        if row.count and row.size_bytes and (width := element_bytes(dtype_of(row.dtype)))
    }
    if len(shares) == 1 and (share := shares.pop()) > 1:
        return share
    # Factors above 1 are an all-reduce's, below those of gather, scatter and all-to-all; 1 says nothing.
    fits = [
        ranks
        for scale in (1, 2)
        for ranks in range(2, MAX_RANKS)
        if scale * (ranks - 1) != ranks and _fits(rows, scale * (ranks - 1) / ranks)
    ]
    return fits[0] if len(fits) == 1 else 0


def _fits(rows: Sequence[Row], factor: float) -> bool:
    """Whether bus over algorithm bandwidth is `factor` in every row, as precisely as both are printed."""
    halves = [half for row in rows for half in row.halves if half is not None and half.algbw_bytes_per_s > 1e9]
    steps = [(half, 0.006e9 if half.busbw_bytes_per_s < 1e12 else 0.06e9) for half in halves]
    return bool(halves) and all(
        abs(half.busbw_bytes_per_s - factor * half.algbw_bytes_per_s) <= step * (1 + factor) for half, step in steps
    )


def _collective(test: Test, rows: Sequence[Row], ranks: int, where: str, hints: Hints, findings: list[Finding]) -> str:
    if test.program:
        collective = collective_of(test.program)
        if collective is None:
            raise CalibrationError(f"{where}: {test.program}_perf measures a collective that overlapsim does not model")
        if hints.collective and hints.collective != collective:
            raise CalibrationError(
                f"{where}: --collective is {hints.collective}, the log says {collective}; leave it out"
            )
        return collective
    if hints.collective:
        return hints.collective
    reduces = rows[0].redop != "none"
    fitting = [name for name in ("all_reduce", "reduce_scatter") if _fits(rows, bus_factor(name, ranks))]
    if reduces and rows[0].root < 0 and len(fitting) == 1:
        findings.append(
            Finding("collective_derived", f"{where}: not named; reduction and bandwidths fit {fitting[0]} only")
        )
        return fitting[0]
    if not reduces and rows[0].root < 0 and (unreduced := _unreduced(rows, ranks)):
        findings.append(
            Finding("collective_derived", f"{where}: not named; bandwidths and checked halves are those of {unreduced}")
        )
        return unreduced
    raise CalibrationError(
        f"{where}: the log does not name its collective, and its columns fit several; give --collective"
    )


def _unreduced(rows: Sequence[Row], ranks: int) -> str:
    """All-gather or all-to-all, which print alike but for one thing: the tool never checks an all-to-all in place."""
    checked = [[half.wrong is not None for row in rows if (half := row.halves[side]) is not None] for side in (0, 1)]
    if not _fits(rows, bus_factor("all_gather", ranks)) or not all(checked[0]) or not checked[0] or not checked[1]:
        return ""
    return "all_gather" if all(checked[1]) else "" if any(checked[1]) else "all_to_all"


def _check_factor(rows: Sequence[Row], collective: str, ranks: int, where: str) -> None:
    if any(half and half.algbw_bytes_per_s > 1e9 for row in rows for half in row.halves) and not _fits(
        rows, bus_factor(collective, ranks)
    ):
        raise CalibrationError(
            f"{where}: bus and algorithm bandwidth do not differ as those of {collective} over {ranks} ranks do "
            f"({bus_factor(collective, ranks):.4g}); outputs of two tests are mixed, or the log is of another test"
        )


def _check_hosts(test: Test, ranks: int, nodes: int, where: str, findings: list[Finding]) -> None:
    hosts = len(test.hosts)
    if not hosts or len(test.groups) > 1 or test.num_ranks != ranks or hosts == nodes:
        return
    if hosts == ranks:
        # Containers with one GPU each have host names of their own.
        findings.append(
            Finding("host_per_rank", f"{where}: each rank names a host of its own; taken as {nodes} nodes, as you said")
        )
        return
    raise CalibrationError(
        f"{where}: the log lists {ranks} ranks on {hosts} hosts, --ranks-per-node makes it {nodes} nodes; "
        f"expected --ranks-per-node {ranks // hosts}"
    )


def table_records(
    test: Test, rows: Sequence[Row], identity: Identity, name: str, findings: list[Finding]
) -> Iterator[Record]:
    """Records of one table; CPU times and rows of size 0 are left out."""
    if "cputime" in test.labels:
        findings.append(Finding("cpu_time", f"{name}: run with -C, times are of the CPU; left out"))
        return
    for row in rows:
        for half, in_place in zip(row.halves, (False, True), strict=True):
            if half is not None and row.size_bytes:
                yield _record(test, row, half, identity, in_place=in_place)


def _record(test: Test, row: Row, half: Half, identity: Identity, *, in_place: bool) -> Record:
    low, high = test.forced.get("MIN_NCHANNELS", ""), test.forced.get("MAX_NCHANNELS", "")
    return Record(
        kind="collective",
        op=identity.collective,
        median_s=half.time_s,
        size_bytes=row.size_bytes,
        dtype=dtype_of(row.dtype),
        ranks=identity.ranks,
        nodes=identity.nodes,
        algo=test.forced.get("ALGO", ""),
        proto=test.forced.get("PROTO", ""),
        channels=int(low) if low == high and low.isdecimal() else None,
        repeats=max(1, test.settings.get("iters", 1)),
        valid=not half.wrong,
        in_place=in_place,
    )

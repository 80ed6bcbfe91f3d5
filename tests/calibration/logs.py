"""Writes what nccl-tests prints, in the column variants of its versions, from given times."""

from __future__ import annotations

from collections.abc import Sequence

from overlapsim.calibration.readers.reading import bus_factor

PROGRAMS = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
    "broadcast": "broadcast_perf",
    "send_recv": "sendrecv_perf",
}
# The shape of a published all-reduce over 8 GPUs of one node: latency, a switch of protocol, then bandwidth.
TIMES_US = tuple((1 << 10 << i, 20.0 + 0.9 * i + (1 << 10 << i) / 240e3 + (6.0 if i > 8 else 0.0)) for i in range(18))
SECRETS = ("zeus-rack3-n17", "zeus-rack3-n18", "10.12.0.77", "/home/mallory")


def row(
    size: int, time_us: float, collective: str, ranks: int, *, root: bool, wrong: str, per_iter: bool, stamp: bool
) -> str:
    """One row as the tool prints it, out of place then in place."""
    count = size // 4
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        count //= ranks
    redop = "sum" if "reduce" in collective else "none"
    cells = f"{size:12d}  {count:12d}  {'float':>8}  {redop:>6}"
    if root:
        cells += f"  {0 if collective == 'broadcast' else -1:6d}"
    for factor, mark in ((1.0, wrong), (0.98, "N/A" if collective == "all_to_all" else wrong)):
        shown = f"{time_us * factor:.2f}" if time_us < 1000 else f"{time_us * factor:.1f}"
        algbw = size / float(shown) / 1e3
        cells += f"  {shown:>7}  {algbw:6.2f}  {algbw * bus_factor(collective, ranks):6.2f}  {mark:>6}"
        if per_iter:
            cells += f"  {time_us * 0.97:7.2f}  {time_us * 1.1:7.2f}  {time_us * 1.08:7.2f}  {1.9:7.2f}"
    return cells + ("  2026-01-02 03:04:05" if stamp else "")


def banner(collective: str, ranks: int, per_host: int, *, new: bool) -> list[str]:
    """Lines before the table."""
    lines = []
    if new:
        lines += [
            "# nccl-tests version 2.19.6 nccl-headers=23007 nccl-library=23007",
            f"# Collective test starting: {PROGRAMS[collective]}",
        ]
    lines += [
        "# nThread 1 nGpus 1 minBytes 1024 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 "
        "validation: 1 graph: 0",
        "#",
        "# Using devices",
    ]
    group = " Group  0" if new else ""
    for rank in range(ranks):
        host = SECRETS[rank // per_host % 2]
        lines.append(
            f"#  Rank {rank:2d}{group} Pid {4242 + rank:6d} on {host} device {rank % per_host:2d} [0x0f] Example GPU"
        )
    return [*lines, "#"]


def table(
    collective: str,
    ranks: int,
    times: Sequence[tuple[int, float]] = TIMES_US,
    *,
    root: bool = True,
    error: bool = False,
    per_iter: bool = False,
    stamp: bool = False,
    wrong: str = "0",
) -> list[str]:
    """Label lines and rows."""
    mark = "error" if error else "#wrong"
    side = f"time   algbw   busbw  {mark}" + ("    i_min    i_max    i_p99    i_cv%" if per_iter else "")
    roots = "    root" if root else ""
    lines = [
        f"#       size         count      type   redop{roots}     {side}     {side}"
        + ("   timestamp" if stamp else ""),
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
    ]
    return lines + [
        row(size, time, collective, ranks, root=root, wrong=wrong, per_iter=per_iter, stamp=stamp)
        for size, time in times
    ]


def footer(collective: str, *, new: bool = True) -> list[str]:
    """Lines behind the table."""
    lines = ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 101.5 ", "#"]
    return [*lines, f"# Collective test concluded: {PROGRAMS[collective]}"] if new else lines


def log(
    collective: str = "all_reduce",
    ranks: int = 8,
    times: Sequence[tuple[int, float]] = TIMES_US,
    *,
    per_host: int = 8,
    new: bool = True,
    **variant: object,
) -> str:
    """A whole run."""
    lines = banner(collective, ranks, per_host, new=new) + table(collective, ranks, times, **variant)  # type: ignore[arg-type]
    return "\n".join(lines + footer(collective, new=new)) + "\n"

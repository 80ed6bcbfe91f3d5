"""How measurements are shown to people."""

from __future__ import annotations

from collections.abc import Iterable

from overlapsim.calibration.records import Record
from overlapsim.units import format_bytes, format_time


def records_table(records: Iterable[Record]) -> None:
    """Print records as a table."""
    from rich.table import Table

    from overlapsim.cli.output import console

    table = Table(title="times of the slowest rank: median, 10th and 90th percentile")
    for column in ("what", "size", "type", "ranks", "beside", "median", "p10", "p90", "repeats", "valid"):
        table.add_column(column)
    for record in records:
        size = f"{record.m}x{record.n}x{record.k}" if record.kind == "gemm" else format_bytes(record.size_bytes or 0)
        ends = ("-" if end is None else format_time(end) for end in (record.p10_s, record.p90_s))
        table.add_row(
            record.op,
            size,
            record.dtype,
            str(record.ranks or "-"),
            record.concurrent or "-",
            format_time(record.median_s),
            *ends,
            str(record.repeats),
            "yes" if record.valid else "no",
        )
    console(130).print(table)

"""`validate contention`: what GEMMs and collectives cost one another, as records."""

from __future__ import annotations

from pathlib import Path

import click
from overlapsim.validate.cli.options import collectives, on_ranks, records_path, run_options
from overlapsim.validate.cli.options import shapes as parse_shapes


@click.command("contention")
@click.option("--shape", default="2048,8192x4096x4096", show_default=True, help="MxNxK, each a list or FROM:TO.")
@click.option("--collective", "kinds", default="all", show_default=True, help="Names with commas, or all.")
@click.option("--dtype", default="bf16", show_default=True, help="fp32, fp16 or bf16.")
@run_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder or .csv of records; kept ones stay.")
def command(
    shape: str,
    kinds: str,
    dtype: str,
    ranks: int | None,
    backend: str | None,
    time_budget: float,
    timeout: float,
    repeats: int,
    output: Path | None,
) -> None:
    """Time each GEMM while collectives of its output's size move all the time, and those collectives beside it."""
    shapes = parse_shapes(shape)
    names = collectives(kinds)
    path = records_path(output)
    with on_ranks(ranks, backend, timeout) as joined:
        if joined is None:
            return
        from overlapsim.validate.budget import Budget
        from overlapsim.validate.measure import Sampler, Sampling
        from overlapsim.validate.output import RecordFile, header_of
        from overlapsim.validate.sweeps import sweep_contention

        budget = Budget(time_budget)
        budget.announce(f"{len(shapes)} GEMMs beside {len(names)} collectives, {joined.size} ranks", joined.is_first)
        file = RecordFile(path, header_of(joined), writes=joined.is_first)
        sweep_contention(Sampler(joined, Sampling(repeats=repeats)), shapes, names, dtype, file, budget)
        if joined.is_first:
            from overlapsim.validate.cli.view import records_table

            records_table(file.records)

"""`validate gemm`: times of GEMMs alone, as records."""

from __future__ import annotations

from pathlib import Path

import click
from overlapsim.validate.cli.options import on_ranks, records_path, run_options
from overlapsim.validate.cli.options import shapes as parse_shapes


@click.command("gemm")
@click.option(
    "--shape", default="256:8192x1024,4096x1024,4096", show_default=True, help="MxNxK, each a list or FROM:TO."
)
@click.option("--dtype", default="bf16", show_default=True, help="fp32, tf32, fp16 or bf16.")
@run_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder or .csv of records; kept ones stay.")
def command(
    shape: str,
    dtype: str,
    ranks: int | None,
    backend: str | None,
    time_budget: float,
    timeout: float,
    repeats: int,
    output: Path | None,
) -> None:
    """Time the vendor library's GEMM on every combination of M, N and K, far-apart shapes first."""
    shapes = parse_shapes(shape)
    path = records_path(output)
    with on_ranks(ranks, backend, timeout) as joined:
        if joined is None:
            return
        from overlapsim.validate.budget import Budget
        from overlapsim.validate.measure import Sampler, Sampling
        from overlapsim.validate.output import RecordFile, header_of
        from overlapsim.validate.sweeps import far_apart, sweep_gemms

        budget = Budget(time_budget)
        budget.announce(f"{len(shapes)} GEMMs of {dtype} on {joined.size} ranks", joined.is_first)
        file = RecordFile(path, header_of(joined), writes=joined.is_first)
        sweep_gemms(Sampler(joined, Sampling(repeats=repeats)), far_apart(shapes), dtype, file, budget)
        if joined.is_first:
            from overlapsim.validate.cli.view import records_table

            records_table(file.records)

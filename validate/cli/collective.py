"""`validate collective`: times of collectives alone, as records."""

from __future__ import annotations

from pathlib import Path

import click
from overlapsim.validate.cli.options import collectives, on_ranks, records_path, run_options
from overlapsim.validate.cli.options import sizes as parse_sizes


@click.command("collective")
@click.option("--collective", "kinds", default="all", show_default=True, help="Names with commas, or all.")
@click.option("--size", default="64KiB:64MiB", show_default=True, help="FROM:TO (doubling) or a list.")
@click.option("--dtype", default="bf16", show_default=True, help="fp32, fp16 or bf16.")
@run_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder or .csv of records; kept ones stay.")
def command(
    kinds: str,
    size: str,
    dtype: str,
    ranks: int | None,
    backend: str | None,
    time_budget: float,
    timeout: float,
    repeats: int,
    output: Path | None,
) -> None:
    """Time collectives of the sizes that nccl-tests defines, each checked for its numbers first."""
    names, sizes = collectives(kinds), parse_sizes(size)
    path = records_path(output)
    with on_ranks(ranks, backend, timeout) as joined:
        if joined is None:
            return
        from overlapsim.validate.budget import Budget
        from overlapsim.validate.measure import Sampler, Sampling
        from overlapsim.validate.output import RecordFile, header_of
        from overlapsim.validate.sweeps import sweep_collectives

        budget = Budget(time_budget)
        budget.announce(f"{len(names)} collectives, {len(sizes)} sizes, {joined.size} ranks", joined.is_first)
        file = RecordFile(path, header_of(joined), writes=joined.is_first)
        sweep_collectives(Sampler(joined, Sampling(repeats=repeats)), names, sizes, dtype, file, budget)
        if joined.is_first:
            from overlapsim.validate.cli.view import records_table

            records_table(file.records)

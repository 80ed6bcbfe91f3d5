"""`validate overlap`: one shape, serially and by other strategies, planned here and run at once."""

from __future__ import annotations

from pathlib import Path

import click
from overlapsim.validate.cli.options import KINDS, on_ranks, run_options
from overlapsim.validate.cli.options import shapes as parse_shapes

from overlapsim.cli.options import tile as parse_tile
from overlapsim.cli.output import print_json
from overlapsim.errors import UsageError


@click.command("overlap")
@click.option("--shape", required=True, help="MxNxK on one rank, such as 4096x8192x1024.")
@click.option("--dtype", default="bf16", show_default=True, help="fp32, tf32, fp16 or bf16.")
@click.option("--collective", type=click.Choice(KINDS), default="all_reduce", show_default=True)
@click.option("--chunks", type=int, multiple=True, help="Pieces of chunked execution (repeatable; default 2 and 4).")
@click.option("--tile", default="128x128x64", show_default=True, help="BMxBNxBK of the wave-group kernel.")
@click.option(
    "--groups", type=int, multiple=True, help="Equal groups of wave-group runs (repeatable; default 2 and 4)."
)
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the cases that were run (.json).")
def command(
    shape: str,
    dtype: str,
    collective: str,
    chunks: tuple[int, ...],
    tile: str,
    groups: tuple[int, ...],
    ranks: int | None,
    backend: str | None,
    time_budget: float,
    timeout: float,
    repeats: int,
    as_json: bool,
    output: Path | None,
) -> None:
    """Run one GEMM and its collective serially, in chunks and in wave groups, and compare.

    Nothing is predicted here: for that plan with `overlapsim operator` and run the plan, or use `loop`.
    """
    sizes = parse_shapes(shape)
    if len(sizes) > 1:
        raise UsageError(f"--shape is {shape!r}, {len(sizes)} shapes; give one")
    m, n, k = sizes[0]
    kernel_tile = parse_tile(tile)
    with on_ranks(ranks, backend, timeout) as joined:
        if joined is None:
            return
        from overlapsim.validate.cases import Case, cases_table, run_cases, write_cases
        from overlapsim.validate.measure import Sampling
        from overlapsim.validate.shapes import chunked_spec, serial_spec, wave_group_spec

        base = serial_spec(collective, joined.size, m, n, k, dtype)
        name = f"{collective} {m}x{n}x{k} {dtype}"
        specs = [base, *(chunked_spec(base, count) for count in chunks or (2, 4) if count <= m)]
        if collective != "all_gather":
            specs += [wave_group_spec(base, kernel_tile, count) for count in groups or (2, 4)]
        results = run_cases(
            joined, [Case(name, spec) for spec in specs], time_budget=time_budget, sampling=Sampling(repeats=repeats)
        )
        if not joined.is_first:
            return
        if output is not None:
            write_cases(results, output, joined)
        if as_json:
            print_json([result.to_dict() for result in results])
            return
        cases_table(results)

"""Every kernel compiled for five architectures without a GPU: resources in a table, signals checked in the assembly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from overlapsim.cli.output import console, print_json
from overlapsim.errors import StrategyError
from overlapsim.units import format_bytes

if TYPE_CHECKING:
    from overlapsim.validate.kernels.architectures import Architecture
    from overlapsim.validate.kernels.compiling import Compiled, Variant

MOST_SPILLED: Final = 256
"""Bytes of a thread that may live on its stack: more slows a main loop down."""


@dataclass(frozen=True)
class Row:
    """One kernel on one architecture.

    Attributes
    ----------
    compiled : resources and assembly
    problems : what is wrong; empty if it can be used
    """

    compiled: Compiled
    problems: tuple[str, ...]


def compile_matrix(variants: Iterable[Variant], architectures: Iterable[Architecture]) -> Iterator[Row]:
    """Compile every variant for every architecture and check the result.

    Raises
    ------
    StrategyError
        If a variant does not compile.
    """
    from overlapsim.validate.kernels.compiling import compile_for

    targets = tuple(architectures)
    for variant in variants:
        for target in targets:
            compiled = compile_for(variant, target)
            yield Row(compiled, problems(compiled))


def problems(compiled: Compiled) -> tuple[str, ...]:
    """What is wrong with a compiled kernel: resources, and the signals that its kind must show."""
    from overlapsim.validate.kernels.architectures import fills_registers
    from overlapsim.validate.kernels.ptx_checks import acquire_problems, signal_problems

    found = []
    try:
        compiled.require_fit()
    except StrategyError as error:
        found.append(str(error))
    if compiled.spilled_bytes > MOST_SPILLED:
        found.append(f"{compiled.spilled_bytes} bytes of a thread are spilled; expected at most {MOST_SPILLED}")
    kind = compiled.variant.split()[0].rstrip(",")
    if kind == "gemm":
        found += signal_problems(compiled.ptx)
    elif kind in ("arrival", "wait", "hold"):
        found += acquire_problems(compiled.ptx, guards_loads=kind == "arrival")
    if kind == "hold" and (compiled.spilled_bytes or not fills_registers(compiled.registers, compiled.warps)):
        found.append(f"{compiled.registers} registers a thread do not fill an SM: other blocks fit beside it")
    return tuple(found)


@click.command("compile-matrix")
@click.option("--arch", "archs", multiple=True, help="Architecture such as sm_90; all five by default.")
@click.option("--tile", help="Only the signalled GEMM with this tile, such as 256x128x64.")
@click.option("--stages", type=click.IntRange(1, 8), default=3, show_default=True, help="Stages of that GEMM.")
@click.option("--dtype", type=click.Choice(("bf16", "fp16", "fp32", "tf32")), default="bf16", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(archs: tuple[str, ...], tile: str | None, stages: int, dtype: str, as_json: bool) -> None:
    """Compile the kernels for GPUs that need not be here; print shared memory, registers and spills.

    A kernel that an architecture cannot launch is named, and the exit code is 2. Needs triton, no GPU.
    """
    from overlapsim.validate.kernels.architectures import ARCHITECTURES, architecture

    targets = tuple(architecture(name) for name in archs) or ARCHITECTURES
    rows = []
    for row in compile_matrix(_variants(tile, stages, dtype), targets):
        rows.append(row)
        if not as_json:
            click.echo(f"{row.compiled.architecture} {row.compiled.variant}", err=True)
    if as_json:
        print_json([{**_cells(row.compiled), "problems": row.problems} for row in rows])
    else:
        _print(rows)
    refused = [
        f"{row.compiled.architecture}, {row.compiled.variant}: {problem}" for row in rows for problem in row.problems
    ]
    if refused:
        raise StrategyError("\n".join(refused))


def _variants(tile: str | None, stages: int, dtype: str) -> tuple[Variant, ...]:
    from overlapsim.validate.kernels.config import GemmConfig
    from overlapsim.validate.kernels.variants import default_variants, gemm_variant

    if tile is None:
        return default_variants()
    sides = tile.lower().split("x")
    if len(sides) != 3 or not all(side.isdecimal() for side in sides):
        raise StrategyError(f"tile {tile!r}; expected BMxBNxBK such as 256x128x64")
    bm, bn, bk = (int(side) for side in sides)
    return (gemm_variant(GemmConfig(bm, bn, bk, stages=stages), dtype),)


def _cells(compiled: Compiled) -> dict[str, Any]:
    return {
        "kernel": compiled.variant,
        "architecture": compiled.architecture,
        "warps": compiled.warps,
        "shared_bytes": compiled.shared_bytes,
        "shared_limit_bytes": compiled.shared_limit_bytes,
        "registers": compiled.registers,
        "spilled_bytes": compiled.spilled_bytes,
        "blocks_per_sm": compiled.blocks_per_sm,
    }


def _print(rows: list[Row]) -> None:
    from rich.table import Table

    table = Table("kernel", "architecture", "shared", "of", "registers", "spilled", "blocks/SM", "", box=None)
    for row in rows:
        compiled = row.compiled
        table.add_row(
            *(compiled.variant, compiled.architecture),
            *(format_bytes(compiled.shared_bytes), format_bytes(compiled.shared_limit_bytes)),
            *(str(compiled.registers), format_bytes(compiled.spilled_bytes), str(compiled.blocks_per_sm)),
            "refused" if row.problems else "ok",
        )
    console().print(table)

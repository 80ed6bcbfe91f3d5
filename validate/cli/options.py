"""Options that commands share: ranks, backend, budget, files; and how a command gets onto its ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from overlapsim.cli.options import dimensions
from overlapsim.errors import UsageError
from overlapsim.units import parse_bytes
from overlapsim.workload.operators import COLLECTIVES

if TYPE_CHECKING:
    from overlapsim.validate.ranks import Ranks

_RUN: Final = (
    click.option("--ranks", type=int, help="Start so many ranks on this machine (without torchrun)."),
    click.option(
        "--backend", type=click.Choice(["nccl", "gloo"]), help="Library of the collectives (default: by GPU)."
    ),
    click.option("--time-budget", type=float, default=120.0, show_default=True, help="Seconds after which to stop."),
    click.option(
        "--timeout",
        type=float,
        default=60.0,
        show_default=True,
        help="Seconds a rank is waited for before it is named.",
    ),
    click.option("--repeats", type=int, default=20, show_default=True, help="Timed calls behind a median."),
)
KINDS: Final = ("all_reduce", "reduce_scatter", "all_to_all", "all_gather")
"""Collectives that runners start."""


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what every command on several ranks takes."""
    for option in reversed(_RUN):
        command = option(command)
    return command


def sizes(text: str) -> tuple[int, ...]:
    """Parse ``64KiB:64MiB`` (doubling, ends included) or ``1MiB,3MiB``.

    Raises
    ------
    UsageError
        If the text is neither, or a size is below 1 byte.

    Examples
    --------
    >>> sizes("1KiB:4KiB"), sizes("1000,3KiB")
    ((1024, 2048, 4096), (1000, 3072))
    """
    low, found, high = text.partition(":")
    given = [int(parse_bytes(part.strip())) for part in ([low, high] if found else text.split(","))]
    if min(given) < 1 or (found and given[0] > given[1]):
        raise UsageError(f"sizes are {text!r}; expected FROM:TO such as 64KiB:64MiB, or a list such as 1MiB,3MiB")
    if not found:
        return tuple(given)
    result, size = [], given[0]
    while size < given[1]:
        result.append(size)
        size *= 2
    return (*result, given[1])


def shapes(text: str) -> tuple[tuple[int, int, int], ...]:
    """Parse ``MxNxK``, each a size, a list or FROM:TO: all combinations.

    Options named ``--m`` would be taken for abbreviations of torchrun's own.

    Raises
    ------
    UsageError
        If the text is not that.

    Examples
    --------
    >>> shapes("256,512x1024x64")
    ((256, 1024, 64), (512, 1024, 64))
    """
    parts = text.lower().split("x")
    if len(parts) != 3:
        raise UsageError(f"shape is {text!r}; expected MxNxK such as 4096x8192x1024 or 256:8192x1024,4096x1024")
    m, n, k = (dimensions(part) for part in parts)
    return tuple((a, b, c) for a in m for b in n for c in k)


def collectives(text: str) -> tuple[str, ...]:
    """Parse ``all_reduce,reduce_scatter`` or ``all``.

    Raises
    ------
    UsageError
        If a name is unknown, or no runner starts it.
    """
    names = KINDS if text == "all" else tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in KINDS:
            known = "is not run here" if name in COLLECTIVES else "is unknown"
            raise UsageError(f"collective {name!r} {known}; expected {', '.join(KINDS)} or all")
    return names


@contextmanager
def on_ranks(ranks: int | None, backend: str | None, timeout: float) -> Iterator[Ranks | None]:
    """Join the ranks that torchrun started, or start some; then the block gets None and has nothing left to do.

    Parameters
    ----------
    ranks : from ``--ranks``
    backend, timeout : for `overlapsim.validate.ranks.start`

    Raises
    ------
    UsageError
        If neither torchrun nor ``--ranks`` says how many.
    RankError
        If a rank fails.
    """
    from overlapsim.validate.launch import run_ranks, under_torchrun

    if not under_torchrun() and ranks is not None:
        run_ranks(_without_ranks(sys.argv[1:]), ranks)
        yield None
        return
    from overlapsim.validate.ranks import start

    with start(backend, timeout) as joined:
        if ranks is not None and ranks != joined.size:
            raise UsageError(f"--ranks is {ranks} where torchrun started {joined.size}; leave it away")
        yield joined


def _without_ranks(arguments: list[str]) -> list[str]:
    """The command line without ``--ranks N``: torchrun's children must not start ranks of their own."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == "--ranks":
            skip = True
        elif not argument.startswith("--ranks="):
            kept.append(argument)
    return kept


def records_path(output: Path | None) -> Path | None:
    """Record file in a folder that is made where it does not exist, or the file itself.

    Raises
    ------
    UsageError
        If the folder cannot be made.
    """
    if output is None or output.suffix == ".csv":
        return output
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make folder {output}: {error.strerror}; choose another") from None
    return output / "records.csv"

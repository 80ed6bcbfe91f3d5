"""Option types shared by commands: quantities with units, tiles, measured kernel times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import click

from overlapsim.errors import UsageError
from overlapsim.units import parse_time_s


class Seconds(click.ParamType):
    """A time such as ``2.36e-3``, ``2.36ms`` or ``62us``; positive."""

    name = "time"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        try:
            return positive_time_s(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)


class Tile(click.ParamType):
    """An output tile such as ``256x128`` or ``256x128x32`` (BM x BN x BK)."""

    name = "tile"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int, int]:
        """Return (BM, BN, BK); BK is 32 when not given."""
        parts = str(value).lower().split("x")
        if len(parts) not in (2, 3) or not all(part.isdecimal() and 1 <= int(part) <= 4096 for part in parts):
            self.fail(f"{value!r} is not a tile; expected BMxBN or BMxBNxBK with sizes of 1 to 4096", param, ctx)
        sizes = [int(part) for part in parts]
        return sizes[0], sizes[1], sizes[2] if len(sizes) == 3 else 32


def positive_time_s(text: str) -> float:
    """Seconds of `text`, refusing zero, negative and non-finite times.

    Raises
    ------
    UsageError
        If the text is not a positive time.
    """
    seconds = parse_time_s(text)
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"{text!r} is {seconds:g} s; expected a time above 0")
    return seconds


def kernel_times(entries: Sequence[str], known: Sequence[str]) -> Mapping[str, float]:
    """Parse ``STRATEGY=TIME`` entries.

    Raises
    ------
    UsageError
        If an entry has another form, names an unknown strategy, or comes twice.
    """
    times: dict[str, float] = {}
    for entry in entries:
        name, found, time = entry.partition("=")
        if not found:
            raise UsageError(f"--kernel-time is {entry!r}; expected STRATEGY=TIME such as wave_group=2.36ms")
        if name not in known:
            raise UsageError(f"--kernel-time names strategy {name!r}; known strategies: {', '.join(known)}")
        if name in times:
            raise UsageError(f"--kernel-time {name} is given twice; give one time")
        times[name] = positive_time_s(time)
    return times

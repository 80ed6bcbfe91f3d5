"""How commands print: one form of JSON, one width of tables, one note while the engine is compiled."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

if TYPE_CHECKING:
    from rich.console import Console

COMPILE_NOTE: Final = "compiling the engine: once after installation, about half a minute"
NOTE_AFTER_S: Final = 3.0


def print_json(content: Any) -> None:
    """Print `content` (builtins or dataclasses) as indented JSON on stdout."""
    click.echo(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())


def table_width(default: int = 120) -> int | None:
    """Columns of a table: the terminal's (None), else ``COLUMNS``, else `default`: a pipe has no width of its own."""
    if sys.stdout.isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) > 0 else default


def console(default: int = 120) -> Console:
    """Return a console for tables that leaves a closed pipe to `main`: rich alone would exit with a failure."""
    from rich.console import Console

    class PipeConsole(Console):
        """A console without an exit code of its own."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipeConsole(soft_wrap=True, width=table_width(default))


@contextmanager
def compile_note(after_s: float = NOTE_AFTER_S) -> Iterator[None]:
    """Say on stderr that the engine is being compiled, once the block waits for it longer than `after_s` seconds.

    Nothing is printed where the cache holds the engine or the block ends sooner; no thread outlives the block.
    """
    from overlapsim.jit import on_first_compilation

    timer = threading.Timer(after_s, click.echo, (COMPILE_NOTE,), {"err": True})
    timer.daemon = True
    try:
        with on_first_compilation(timer.start):
            yield
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()

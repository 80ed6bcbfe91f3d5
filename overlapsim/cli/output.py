"""How commands print: one form of JSON, one width of tables, one note while the engine is compiled."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from overlapsim.plan import Finding

if TYPE_CHECKING:
    from rich.console import Console

    from overlapsim.workload.layout import Layout
    from overlapsim.workload.model import ModelSpec

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
    from rich.table import Table

    class PipeConsole(Console):
        """A console without an exit code of its own; its tables fold words that are too long and cut none."""

        def print(self, *objects: Any, **options: Any) -> None:
            for table in objects:
                if isinstance(table, Table):
                    for column in table.columns:
                        column.overflow = "fold"
            super().print(*objects, **options)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return PipeConsole(soft_wrap=True, width=table_width(default))


def layout_words(layout: Layout, model: ModelSpec) -> str:
    """A layout for a headline: as it is typed, and what degrees of experts were left to a default.

    Examples
    --------
    >>> from overlapsim.workload.layout import Layout
    >>> from overlapsim.workload.presets import load_preset
    >>> layout_words(Layout(tp=2, ep=4, dp=4), load_preset("mixtral-8x7b"))
    'tp=2,ep=4,dp=4 (etp=2, as tp)'
    """
    from overlapsim.workload.model import MoE

    experts = any(isinstance(layer.mlp, MoE) for layer in model.kinds)
    return f"{layout} (etp={layout.etp}, as tp)" if experts and layout.etp == layout.tp > 1 else str(layout)


def together(findings: Iterable[Finding]) -> list[Finding]:
    """One finding of each code, in the order of their first ones, with the sentences of all that have it.

    Examples
    --------
    >>> from overlapsim.plan import Finding
    >>> [f.message for f in together([Finding("a", "one"), Finding("b", "two"), Finding("a", "three")])]
    ['one; three', 'two']
    """
    messages: dict[str, dict[str, None]] = {}
    for finding in findings:
        messages.setdefault(finding.code, {})[finding.message] = None
    return [Finding(code, "; ".join(said)) for code, said in messages.items()]


@contextmanager
def compile_note(after_s: float = NOTE_AFTER_S) -> Iterator[None]:
    """Say on stderr that the engine is being compiled, once it has been for longer than `after_s` seconds in all.

    Nothing is printed where the cache holds the engine, or while anything else takes its time; no thread outlives the
    block.
    """
    from overlapsim.jit import on_compilation

    clock = _CompileClock(after_s)
    try:
        with on_compilation(clock.start, clock.stop):
            yield
    finally:
        clock.stop()


class _CompileClock:
    """Runs while a function is compiled, stands still between two, and speaks once when its time is over."""

    def __init__(self, after_s: float) -> None:
        self._left_s, self._began_s = after_s, 0.0
        self._timer: threading.Timer | None = None
        self._told = False

    def start(self) -> None:
        if not self._told and self._timer is None:
            self._began_s = time.monotonic()
            self._timer = threading.Timer(max(0.0, self._left_s), self._tell)
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            timer.join()
            self._left_s -= time.monotonic() - self._began_s

    def _tell(self) -> None:
        self._told = True
        click.echo(COMPILE_NOTE, err=True)

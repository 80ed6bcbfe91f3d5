"""How far a suite is: loops count their rows, and whoever listens is told every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeVar

T = TypeVar("T")
Say = Callable[[str], None]
EVERY_S: Final = 2.0
"""Between two lines, and before the first: what is done sooner says nothing."""


class _Listener:
    def __init__(self, say: Say, every_s: float) -> None:
        self.say, self.every_s, self.told_s = say, every_s, time.monotonic()

    def tell(self, text: str) -> None:
        now = time.monotonic()
        if now - self.told_s >= self.every_s:
            self.told_s = now
            self.say(text)


_LISTENER: ContextVar[_Listener | None] = ContextVar("progress", default=None)


@contextmanager
def progress_to(say: Say, every_s: float = EVERY_S) -> Iterator[None]:
    """Within this context `say` is told what `counted` loops are at, at most once in `every_s` seconds."""
    token = _LISTENER.set(_Listener(say, every_s))
    try:
        yield
    finally:
        _LISTENER.reset(token)


def counted(what: str, entries: Iterable[T]) -> Iterator[T]:
    """Go through entries and tell who listens which one is next.

    Parameters
    ----------
    what : the entries are, such as ``rows of vtrain-multi``
    entries : their number is told where it is known

    Examples
    --------
    >>> with progress_to(print, every_s=0.0):
    ...     total = sum(counted("numbers", [1, 2]))
    numbers: 1 of 2
    numbers: 2 of 2
    """
    of = f" of {len(entries)}" if isinstance(entries, Sequence) else ""
    for number, entry in enumerate(entries, start=1):
        if (listener := _LISTENER.get()) is not None:
            listener.tell(f"{what}: {number}{of}")
        yield entry

"""How long a command may take, said before it begins, and how much of that is left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import click

from overlapsim.units import format_time


@dataclass
class Budget:
    """A limit on wall time.

    Attributes
    ----------
    seconds : of the whole command
    """

    seconds: float
    _begun: float = field(default_factory=time.monotonic, repr=False)

    @property
    def spent_s(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._begun

    @property
    def left_s(self) -> float:
        """What remains; 0 when it is used up."""
        return max(0.0, self.seconds - self.spent_s)

    def announce(self, what: str, loud: bool = True) -> None:
        """Say on stderr what is about to be done, and within which time."""
        if loud:
            click.echo(f"time budget {format_time(self.seconds)}: {what}", err=True)

    def tell(self, message: str, loud: bool = True) -> None:
        """Progress on stderr, with the time since the start."""
        if loud:
            click.echo(f"[{self.spent_s:5.0f} s] {message}", err=True)

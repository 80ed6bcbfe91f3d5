"""Numbers from one seed, fast: random programs need hundreds of small draws each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


class Draw:
    """Numbers from one seeded numpy Generator, drawn in batches because single draws are slow.

    Parameters
    ----------
    seed : int, >= 0

    Examples
    --------
    >>> Draw(1).between(3, 5) in (3, 4, 5)
    True
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._batch: list[float] = []

    def real(self) -> float:
        """Uniform in [0, 1)."""
        if not self._batch:
            self._batch = self._rng.random(512).tolist()
        return self._batch.pop()

    def chance(self, probability: float) -> bool:
        """True with `probability`."""
        return self.real() < probability

    def between(self, low: int, high: int) -> int:
        """Integer in low .. high, both included."""
        return low + int(self.real() * (high - low + 1))

    def pick(self, values: Sequence[T]) -> T:
        """One of `values`, each as likely as it occurs."""
        return values[int(self.real() * len(values))]

    def sample(self, values: Sequence[T], count: int) -> list[T]:
        """`count` distinct entries, in random order."""
        rest = list(values)
        return [rest.pop(self.between(0, len(rest) - 1)) for _ in range(count)]

"""Routing: how many tokens each expert gets, as a distribution; and the rows of every rank's experts that follow."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from overlapsim.errors import UsageError
from overlapsim.units import whole_number

FloatArray = npt.NDArray[np.float64]
Unit = Literal["expert", "device"]
"""What a capacity (or an auxiliary loss) is counted over: one expert, or the experts of one GPU together."""
MOST_EXPONENT: Final = 64.0
"""Zipf's exponent; the second expert then gets 2^-64 of the first one's tokens, which is none."""


@dataclass(frozen=True)
class Routing:
    """Shares of the routed copies by expert.

    ``zipf``: the i-th most wanted expert gets ``1 / i ** exponent`` of the first one's copies; the most wanted ones
    stand together on the first rank, which is the worst place for them. ``counts``: tokens of each expert as recorded,
    where it lies. A token picks different experts, so no expert gets more than one copy of each;
    what is over goes to the others.

    Attributes
    ----------
    kind : ``uniform``, ``zipf`` or ``counts``
    exponent : of zipf, from 0 (uniform)
    counts : tokens of each expert, in the order of their numbers

    Raises
    ------
    UsageError
        If a number is out of range.

    Examples
    --------
    >>> str(Routing.parse("zipf:1.2")), Routing.parse("counts:3:1").counts
    ('zipf:1.2', (3.0, 1.0))
    """

    kind: Literal["uniform", "zipf", "counts"] = "uniform"
    exponent: float = 0.0
    counts: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= MOST_EXPONENT:
            raise UsageError(f"zipf exponent is {self.exponent}; expected a number from 0 to {MOST_EXPONENT:g}")
        if self.kind == "counts" and not (self.counts and min(self.counts) >= 0 and 0 < sum(self.counts) < math.inf):
            raise UsageError(
                f"{len(self.counts)} recorded counts from {min(self.counts, default=0):g} to "
                f"{max(self.counts, default=0):g}; expected finite tokens of each expert, from 0, not all 0"
            )

    @classmethod
    def parse(cls, text: str) -> Routing:
        """Read ``uniform``, ``zipf:EXPONENT`` or ``counts:N:N:..``.

        Raises
        ------
        UsageError
            If the text is none of these.
        """
        kind, _, rest = text.strip().partition(":")
        if kind == "uniform" and not rest:
            return UNIFORM
        try:
            if kind == "zipf":
                return cls("zipf", float(rest))
            if kind == "counts":
                return cls("counts", counts=tuple(float(part) for part in rest.split(":")))
        except ValueError:
            pass
        raise UsageError(
            f"routing is {text!r}; expected uniform, zipf:EXPONENT such as zipf:0.8, "
            "counts:N:N:.., or on the command line a .csv or .json file of counts"
        )

    def __str__(self) -> str:
        """Text that `parse` reads."""
        if self.kind == "zipf":
            return f"zipf:{self.exponent:.12g}"
        return ":".join(["counts", *(f"{count:.12g}" for count in self.counts)]) if self.kind == "counts" else "uniform"

    @property
    def even(self) -> bool:
        """Whether every expert gets the same."""
        return self.kind == "uniform" or (self.kind == "zipf" and self.exponent == 0)

    def shares(self, num_experts: int, top_k: int) -> FloatArray:
        """Share of the copies that each expert gets, by expert number; they sum to 1 and none is above 1 / `top_k`.

        Raises
        ------
        UsageError
            If counts are of another number of experts.

        Examples
        --------
        >>> Routing("zipf", 1.0).shares(4, 1).round(2).tolist()
        [0.48, 0.24, 0.16, 0.12]
        """
        if self.kind == "counts":
            if len(self.counts) != num_experts:
                raise UsageError(f"{len(self.counts)} recorded counts and {num_experts} experts; expected one for each")
            wanted = np.array(self.counts)
        else:
            wanted = np.arange(1, num_experts + 1, dtype=np.float64) ** -self.exponent
        return _filled(wanted / wanted.sum(), 1 / top_k)

    def rank_rows(
        self,
        num_experts: int,
        top_k: int,
        tokens: int,
        ranks: int,
        *,
        capacity_factor: float | None = None,
        capacity_per: Unit = "expert",
        balanced: bool = False,
    ) -> tuple[tuple[int, ...], ...]:
        """Rows of each expert, rank by rank.

        Parameters
        ----------
        tokens : of all ranks together, each going to `top_k` experts
        capacity_factor : rows kept at most, over the even share; None drops nothing
        capacity_per : ``expert``: each expert's own rows; ``device``: those of a rank's experts together
        balanced : ranks get even shares, as an auxiliary loss over each GPU's experts brings about; experts of a rank
            keep their proportions
        """
        copies = float(tokens * top_k)
        wanted = (copies * self.shares(num_experts, top_k)).reshape(ranks, -1)
        if balanced:
            each = copies / ranks
            sums = wanted.sum(axis=1, keepdims=True)
            even = np.full_like(wanted, each / wanted.shape[1])
            wanted = np.where(sums > 0, wanted * each / np.where(sums > 0, sums, 1.0), even)
            wanted = np.stack([_filled(row / each, min(1.0, tokens / each)) * each for row in wanted])
        if capacity_factor is not None and capacity_per == "expert":
            wanted = np.minimum(wanted, capacity_factor * copies / num_experts)
        elif capacity_factor is not None:
            most = capacity_factor * copies / ranks
            wanted *= np.minimum(1.0, most / np.maximum(wanted.sum(axis=1, keepdims=True), 1e-9))
        return tuple(tuple(int(rows) for rows in np.rint(row)) for row in wanted)


UNIFORM: Final = Routing()
"""Every expert gets the same."""


def read_counts(text: str) -> Routing:
    r"""Recorded counts from the text of a file: a JSON list, or CSV whose last column is the tokens of each expert.

    Where the first of several columns is headed ``expert``, it numbers the experts, which may stand in any order.

    Raises
    ------
    UsageError
        If there are no such numbers, or an expert is missing or there twice.

    Examples
    --------
    >>> str(read_counts("expert,tokens\n1,4\n0,12\n")), str(read_counts("[12, 4]"))
    ('counts:12:4', 'counts:12:4')
    """
    text = text.removeprefix("\ufeff").strip()
    try:
        if text.startswith(("[", "{")):
            return Routing("counts", counts=tuple(msgspec.json.decode(text, type=list[float])))
        rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]
        head = rows.pop(0) if rows and not _is_number(rows[0][-1]) else []
        counts = [float(row[-1]) for row in rows]
        if len(head) > 1 and head[0].lower() == "expert":
            numbers = [whole_number(row[0]) for row in rows]
            if sorted(-1 if number is None else number for number in numbers) != list(range(len(rows))):
                raise ValueError(f"its experts are not numbered 0 to {len(rows) - 1}, each once")
            counts = [count for _, count in sorted(zip(numbers, counts, strict=True))]
        if not counts:
            raise ValueError("it has no numbers")
        return Routing("counts", counts=tuple(counts))
    except (TypeError, ValueError, RecursionError, csv.Error, msgspec.MsgspecError) as problem:
        raise UsageError(
            f"recorded counts cannot be read ({problem}); expected a JSON list, or CSV with tokens of each expert in "
            "its last column"
        ) from problem


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _filled(shares: FloatArray, most: float) -> FloatArray:
    """Shares with none above `most`: what is over goes to the others in their proportions, evenly where all are 0."""
    result = shares.copy()
    for _ in range(len(result)):
        over = result > most * (1 + 1e-12)
        if not over.any():
            break
        spare = float((result[over] - most).sum())
        result[over] = most
        below = result < most * (1 - 1e-12)
        if not below.any():
            break
        weights = np.where(below, result, 0.0)
        if weights.sum() <= 0:
            weights = below.astype(np.float64)
        result = result + spare * weights / weights.sum()
    return result

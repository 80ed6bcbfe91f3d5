"""Fresh random operands, and float64 references of what a run must give: numbers first, then time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from overlapsim.validate.plans import TORCH_TYPES, RunSpec

from overlapsim.errors import OverlapSimError
from overlapsim.strategy.shards import shard_rows

if TYPE_CHECKING:
    import torch

# Unit roundoff: half a unit in the last place of each type's significand.
ROUNDOFF: Final = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
SLACK: Final = 8.0
"""Largest of many errors over their typical size: values of C reach five standard deviations, errors as many."""
CHECKED_ROWS: Final = 48
"""Rows of an output that are held against float64; whole outputs are looked through for poison."""
ALL: Final = -1
"""Source of rows that are summed over all ranks."""


class NumericsError(OverlapSimError):
    """A run gave wrong numbers: nothing of it may be timed."""

    exit_code = 3


@dataclass(frozen=True)
class Placed:
    """Which rows of C an output on this rank holds.

    Attributes
    ----------
    source : int, shape (rows,): rank whose C a row is of, or `ALL` for the sum over ranks
    row : int, shape (rows,): row there
    """

    source: NDArray[np.int64]
    row: NDArray[np.int64]

    @classmethod
    def summed(cls, rows: NDArray[np.int64]) -> Placed:
        """Rows of the sum over ranks."""
        return cls(np.full(rows.size, ALL, dtype=np.int64), rows)


class Problem:
    """Operands of one GEMM and collective on this rank, and what must come out.

    Parameters
    ----------
    spec : what is run
    rank, device : where
    seed : of the data; the same on all ranks, so that each can make the others' operands for its reference

    Attributes
    ----------
    a, b : operands on this rank; with all_gather `a` is the rank's own shard of rows
    """

    def __init__(self, spec: RunSpec, rank: int, device: torch.device, seed: int = 0) -> None:
        import torch

        self.spec, self.rank, self.device, self.seed = spec, rank, device, seed
        self.dtype: torch.dtype = getattr(torch, TORCH_TYPES[spec.dtype])
        self.a, self.b = self.a_of(rank), self.b_of(rank)

    def refresh(self, seed: int) -> None:
        """Other data in the same tensors, so that captured graphs see them."""
        self.seed = seed
        self.a.copy_(self.a_of(self.rank))
        self.b.copy_(self.b_of(self.rank))

    def a_of(self, rank: int) -> torch.Tensor:
        """Rows of A that a rank holds."""
        rows = self.shard_rows(rank) if self.spec.gathers else self.spec.rows_of(rank)
        return self._random(2 * rank, rows, self.spec.k)

    def b_of(self, rank: int) -> torch.Tensor:
        """B of a rank."""
        return self._random(2 * rank + 1, self.spec.k, self.spec.n)

    def shard_rows(self, rank: int) -> int:
        """Rows of A that a rank brings to an all_gather; the first have one more where they do not divide."""
        return shard_rows(self.spec.m, self.spec.ranks)[rank]

    def empty(self, *shape: int) -> torch.Tensor:
        """A poisoned tensor of the operands' type: what is not written stays not-a-number."""
        import torch

        return torch.full(shape, math.nan, dtype=self.dtype, device=self.device)

    def check(self, output: torch.Tensor, placed: Placed, what: str) -> float:
        """Hold an output against the float64 reference.

        Parameters
        ----------
        output : shape (rows, n)
        placed : which row of C each of them is
        what : for the message

        Returns
        -------
        float
            Largest error over the tolerance, below 1.

        Raises
        ------
        NumericsError
            If a row is missing, an element was never written, or the error is larger than rounding can make it.
        """
        import torch

        if output.shape != (placed.row.size, self.spec.n):
            raise NumericsError(
                f"{what} on rank {self.rank} gave {tuple(output.shape)}; expected {placed.row.size}x{self.spec.n}"
            )
        bad = int((~torch.isfinite(output)).any(dim=1).sum()) if output.numel() else 0
        if bad:
            raise NumericsError(
                f"{what} on rank {self.rank}: {bad} of {output.shape[0]} rows hold elements that were never written"
            )
        if not output.numel():
            return 0.0
        picked = self._picked(placed.row.size)
        reference = self._reference(placed, picked)
        got = output[torch.as_tensor(picked, device=self.device)].double()
        error = float((got - reference).abs().max())
        limit = self.tolerance(summed=bool(placed.source[0] == ALL))
        if not error <= limit:
            raise NumericsError(
                f"{what} on rank {self.rank} is off by {error:.3g} from the float64 reference; rounding allows "
                f"{limit:.3g}: rows, tiles or ranks are mixed up"
            )
        return error / limit

    def tolerance(self, *, summed: bool) -> float:
        """Largest error that rounding explains: of the products' sum, of the stored type, of the sum over ranks."""
        spec = self.spec
        ranks = spec.ranks if summed and not spec.gathers else 1
        # Operands are uniform in (-1, 1): products have a variance of 1/9.
        scale = math.sqrt(spec.k * ranks) / 3
        accumulated = 2.0**-11 if spec.accumulate == "fp16" else 2.0**-24
        multiplied = ROUNDOFF["tf32"] if spec.dtype == "tf32" else 0.0
        stored = ROUNDOFF["fp32"] if spec.dtype == "tf32" else ROUNDOFF[spec.dtype]
        return SLACK * scale * (stored * ranks + accumulated * math.sqrt(spec.k) + multiplied)

    def _picked(self, rows: int) -> NDArray[np.int64]:
        """Rows to check: the first, the last, and others at random."""
        if rows <= CHECKED_ROWS:
            return np.arange(rows)
        random = np.random.default_rng(self.seed + 1).choice(rows, CHECKED_ROWS - 2, replace=False)
        return np.unique(np.concatenate(([0, rows - 1], random)))

    def _reference(self, placed: Placed, picked: NDArray[np.int64]) -> torch.Tensor:
        import torch

        spec = self.spec
        result = torch.zeros(picked.size, spec.n, dtype=torch.float64, device=self.device)
        source, row = placed.source[picked], placed.row[picked]
        if spec.gathers:
            gathered = torch.cat([self.a_of(rank) for rank in range(spec.ranks)])
            return gathered[torch.as_tensor(row, device=self.device)].double() @ self.b.double()
        for rank in range(spec.ranks):
            mine = np.flatnonzero((source == rank) | (source == ALL))
            if mine.size:
                at = torch.as_tensor(mine, device=self.device)
                rows = self.a_of(rank)[torch.as_tensor(row[mine], device=self.device)]
                result[at] += rows.double() @ self.b_of(rank).double()
        return result

    def _random(self, stream: int, *shape: int) -> torch.Tensor:
        import torch

        generator = torch.Generator(device=self.device).manual_seed(self.seed * 1_000_003 + stream)
        values = torch.rand(*shape, generator=generator, device=self.device, dtype=torch.float32)
        return (2 * values - 1).to(self.dtype)

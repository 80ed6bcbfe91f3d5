"""A block of rows of one GEMM with its collective: what serial execution has one of and chunked execution several."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from overlapsim.validate.numerics import Placed, Problem
from overlapsim.validate.runners.base import all_gather, all_reduce, all_to_all, matmul, reduce_scatter

from overlapsim.errors import PlanError
from overlapsim.schedule.reorder import even_counts
from overlapsim.strategy.shards import shard_rows

if TYPE_CHECKING:
    import torch

Counts = NDArray[np.int64]


class Block(ABC):
    """Rows ``first .. first + rows`` of C on this rank.

    Attributes
    ----------
    communicates_first : the GEMM waits for the collective, instead of the other way round
    """

    communicates_first = False

    @abstractmethod
    def poison(self) -> None:
        """Fill what a run writes with not-a-number."""

    @abstractmethod
    def compute(self) -> None:
        """Run the GEMM."""

    @abstractmethod
    def communicate(self) -> Sequence[Any]:
        """Start the collective."""

    @abstractmethod
    def output(self) -> tuple[torch.Tensor, Placed]:
        """Rows that this rank ends with, and which they are."""


class ReducedBlock(Block):
    """all_reduce, in place."""

    def __init__(self, problem: Problem, first: int, rows: int) -> None:
        self._a, self._b = problem.a[first : first + rows], problem.b
        self._c = problem.empty(rows, problem.spec.n)
        self._placed = Placed.summed(np.arange(first, first + rows))

    def poison(self) -> None:
        """Poison C."""
        self._c.fill_(float("nan"))

    def compute(self) -> None:
        """C = A B."""
        matmul(self._a, self._b, self._c)

    def communicate(self) -> Sequence[Any]:
        """Sum C over the ranks."""
        return all_reduce(self._c)

    def output(self) -> tuple[torch.Tensor, Placed]:
        """All rows of the block."""
        return self._c, self._placed


class ScatteredBlock(Block):
    """reduce_scatter: each rank gets an equal share of the block's rows, padded where they do not divide."""

    def __init__(self, problem: Problem, first: int, rows: int) -> None:
        ranks, n = problem.spec.ranks, problem.spec.n
        each = -(-rows // ranks)
        self._a, self._b, self._rows = problem.a[first : first + rows], problem.b, rows
        self._sent, self._received = problem.empty(each * ranks, n), problem.empty(each, n)
        start = min(rows, problem.rank * each)
        mine = np.arange(start, min(rows, start + each))
        self._placed = Placed.summed(first + mine)

    def poison(self) -> None:
        """Poison both buffers; padding stays so, and is never read."""
        self._sent.fill_(float("nan"))
        self._received.fill_(float("nan"))

    def compute(self) -> None:
        """C = A B."""
        matmul(self._a, self._b, self._sent[: self._rows])

    def communicate(self) -> Sequence[Any]:
        """Sum C and keep this rank's share."""
        return reduce_scatter(self._received, self._sent)

    def output(self) -> tuple[torch.Tensor, Placed]:
        """The rank's share without padding."""
        return self._received[: self._placed.row.size], self._placed


class ExchangedBlock(Block):
    """all_to_all: the block's rows spread evenly over the ranks, by rising row."""

    def __init__(self, problem: Problem, first: int, rows: int, starts: Counts, sizes: Counts) -> None:
        # Row counts of the block on every rank: with unbalanced routing they differ.
        rank, n = problem.rank, problem.spec.n
        counts = np.array([even_counts(int(size), problem.spec.ranks)[0] for size in sizes])
        self._a, self._b = problem.a[first : first + rows], problem.b
        self._sent_rows, self._received_rows = counts[rank].tolist(), counts[:, rank].tolist()
        self._c, self._received = problem.empty(rows, n), problem.empty(sum(self._received_rows), n)
        before = (np.cumsum(counts, axis=1) - counts)[:, rank]
        source = np.repeat(np.arange(problem.spec.ranks), counts[:, rank])
        row = [np.arange(s + b, s + b + c) for s, b, c in zip(starts, before, counts[:, rank], strict=True)]
        self._placed = Placed(source, np.concatenate(row))

    def poison(self) -> None:
        """Poison both buffers."""
        self._c.fill_(float("nan"))
        self._received.fill_(float("nan"))

    def compute(self) -> None:
        """C = A B."""
        matmul(self._a, self._b, self._c)

    def communicate(self) -> Sequence[Any]:
        """Hand each rank its rows."""
        return all_to_all(self._received, self._c, self._received_rows, self._sent_rows)

    def output(self) -> tuple[torch.Tensor, Placed]:
        """Rows of all ranks for this one, by source."""
        return self._received, self._placed


class GatheredBlock(Block):
    """all_gather first: an equal share of every rank's rows of A, then the GEMM on all of them."""

    communicates_first = True

    def __init__(self, problem: Problem, first: int, rows: int) -> None:
        # `first` and `rows` count inside the largest shard.
        spec = problem.spec
        self._problem, self._first = problem, first
        self._shard, self._b = problem.empty(rows, spec.k), problem.b
        self._a, self._c = problem.empty(rows * spec.ranks, spec.k), problem.empty(rows * spec.ranks, spec.n)
        own = np.array(shard_rows(spec.m, spec.ranks))
        inside = first + np.arange(rows)
        row = (np.cumsum(own) - own)[:, None] + inside
        self._keep = np.flatnonzero((inside < own[:, None]).ravel())
        self._placed = Placed.summed(row.ravel()[self._keep])

    def poison(self) -> None:
        """Poison what is gathered and computed, and take the shard anew; rows that do not exist are zero."""
        for buffer in (self._a, self._c):
            buffer.fill_(float("nan"))
        self._shard.zero_()
        own = self._problem.a[self._first : self._first + self._shard.shape[0]]
        self._shard[: own.shape[0]].copy_(own)

    def compute(self) -> None:
        """C = A B of the gathered rows."""
        matmul(self._a, self._b, self._c)

    def communicate(self) -> Sequence[Any]:
        """Gather the rows."""
        return all_gather(self._a, self._shard)

    def output(self) -> tuple[torch.Tensor, Placed]:
        """Rows that exist."""
        import torch

        return self._c[torch.as_tensor(self._keep, device=self._c.device)], self._placed


def blocks_of(problem: Problem, chunk_rows: Sequence[int]) -> list[Block]:
    """Blocks of a GEMM and its collective, one after another.

    Parameters
    ----------
    problem : operands on this rank
    chunk_rows : rows of each block, adding up to m; ranks with fewer rows get blocks in proportion

    Raises
    ------
    PlanError
        If no block knows the collective.
    """
    spec = problem.spec
    ends = np.cumsum(np.array([0, *chunk_rows], dtype=np.int64))
    if spec.gathers:
        each = -(-spec.m // spec.ranks)
        inside = ends * each // spec.m
        return [GatheredBlock(problem, int(a), int(b - a)) for a, b in itertools.pairwise(inside)]
    if spec.collective == "all_to_all":
        rows = np.array([spec.rows_of(rank) for rank in range(spec.ranks)], dtype=np.int64)
        scaled = ends[:, None] * rows // spec.m
        return [
            ExchangedBlock(problem, int(a[problem.rank]), int((b - a)[problem.rank]), a, b - a)
            for a, b in itertools.pairwise(scaled)
        ]
    kinds: dict[str, type[ReducedBlock | ScatteredBlock]] = {
        "all_reduce": ReducedBlock,
        "reduce_scatter": ScatteredBlock,
    }
    if spec.collective not in kinds:
        raise PlanError(f"no runner for a GEMM with {spec.collective}; expected {', '.join(kinds)}, all_to_all ...")
    make = kinds[spec.collective]
    return [make(problem, int(a), int(b - a)) for a, b in itertools.pairwise(ends)]

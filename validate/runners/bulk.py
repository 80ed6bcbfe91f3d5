"""Bulk pairs: a whole collective beside a whole GEMM that needs nothing of it, and the same one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from overlapsim.validate.numerics import Placed, Problem
from overlapsim.validate.parts import CollectivePart
from overlapsim.validate.runners.base import Runner, matmul

if TYPE_CHECKING:
    import torch


class PairRunner(Runner):
    """The collective first; the GEMM beside it or behind it.

    Parameters
    ----------
    problem : the spec's `independent_bytes` is the collective's size
    overlapped : False runs one after the other on one stream
    """

    def __init__(self, problem: Problem, *, overlapped: bool) -> None:
        super().__init__(problem)
        spec = problem.spec
        assert spec.independent_bytes is not None
        self._part = CollectivePart(
            spec.collective, int(spec.independent_bytes), spec.dtype, problem.rank, spec.ranks, problem.device
        )
        self._c = problem.empty(problem.a.shape[0], spec.n)
        self._overlapped = overlapped

    def poison(self) -> None:
        """Poison C, and see that the collective moves the right numbers."""
        self._c.fill_(float("nan"))
        self._part.check()

    def run(self) -> None:
        """Collective and GEMM."""
        if not self._overlapped:
            self.lanes.inline(self._part.start)
            matmul(self.problem.a, self.problem.b, self._c)
            return
        self.lanes.fork()
        self.lanes.start(self._part.start)
        matmul(self.problem.a, self.problem.b, self._c)
        self.lanes.join()

    def output(self) -> tuple[torch.Tensor, Placed]:
        """The GEMM's own rows."""
        rows = np.arange(self._c.shape[0])
        return self._c, Placed(np.full(rows.size, self.problem.rank), rows)


def make(problem: Problem) -> Runner:
    """Runner of a bulk plan."""
    return PairRunner(problem, overlapped=True)

"""Asynchronous tensor parallelism: shards come straight from their owners, or whole products go to them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from overlapsim.validate.numerics import Placed, Problem
from overlapsim.validate.runners.base import Runner, exchange, matmul
from overlapsim.validate.runners.ring_steps import pull_steps

from overlapsim.strategy.shards import shard_rows

if TYPE_CHECKING:
    import torch


class PushRunner(Runner):
    """reduce_scatter: each peer's product goes to it while the next is computed; own rows and the sum come last."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        spec, rank = problem.spec, problem.rank
        rows = shard_rows(spec.m, spec.ranks)
        ends = np.cumsum((0, *rows))
        self._span = [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]
        self._c = problem.empty(spec.m, spec.n)
        self._parts = [problem.empty(rows[rank], spec.n) for _ in range(spec.ranks - 1)]
        self._streams = int(spec.settings.get("compute_streams", 1))

    def poison(self) -> None:
        """Poison products and parts."""
        for buffer in (self._c, *self._parts):
            buffer.fill_(float("nan"))

    def run(self) -> None:
        """Multiply for each peer in turn and hand over; then own rows, then the sum."""
        lanes, ranks, rank = self.lanes, self.spec.ranks, self.problem.rank
        lanes.spread(self._streams)
        for step in range(1, ranks):
            with lanes.computing(step % self._streams):
                self._multiply((rank + step) % ranks)
                lanes.fork()
            lanes.start(lambda step=step: self._move(step))  # type: ignore[misc]
        lanes.collect(self._streams)
        self._multiply(rank)
        lanes.join()
        own = self._c[self._span[rank]]
        for part in self._parts:
            own.add_(part)

    def output(self) -> tuple[torch.Tensor, Placed]:
        """The rank's own rows."""
        span = self._span[self.problem.rank]
        return self._c[span], Placed.summed(np.arange(span.start, span.stop))

    def _multiply(self, owner: int) -> None:
        span = self._span[owner]
        matmul(self.problem.a[span], self.problem.b, self._c[span])

    def _move(self, step: int) -> Sequence[Any]:
        ranks, rank = self.spec.ranks, self.problem.rank
        to, source = (rank + step) % ranks, (rank - step) % ranks
        return exchange([(to, self._c[self._span[to]], None), (source, None, self._parts[step - 1])])


def make(problem: Problem) -> Runner:
    """Runner of an asynchronous tensor-parallel plan, by its way."""
    spec = problem.spec
    if spec.collective == "reduce_scatter":
        return PushRunner(problem)
    if spec.settings["way"] == "nvls_gather":
        from overlapsim.validate.runners.chunked import make_serial

        return make_serial(problem)
    if spec.settings["way"] == "flag_gemm":
        from overlapsim.validate.runners.fused_tiles import ArrivalRunner

        return ArrivalRunner(problem)
    from overlapsim.validate.runners.ring_exchange import gather_by

    return gather_by(problem, pull_steps(problem.rank, spec.ranks))

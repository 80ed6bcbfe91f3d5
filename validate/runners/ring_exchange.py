"""Ring exchange: a vendor GEMM for each shard of rows while the next shard, or partial sum, is on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from overlapsim.validate.numerics import Placed, Problem
from overlapsim.validate.runners.base import Runner, exchange, matmul
from overlapsim.validate.runners.ring_steps import RingStep, gather_steps, scatter_steps

from overlapsim.strategy.shards import shard_rows

if TYPE_CHECKING:
    import torch


class RingRunner(Runner):
    """What both rings share: rows of shards, buffers in the order of the steps."""

    def __init__(self, problem: Problem, steps: Sequence[RingStep]) -> None:
        super().__init__(problem)
        spec = problem.spec
        self._steps = steps
        self._rows = np.array(shard_rows(spec.m, spec.ranks))
        self._starts = np.cumsum(self._rows) - self._rows
        self._streams = int(spec.settings.get("compute_streams", 1))
        # Rows of one step lie together, so that its shards are one GEMM.
        self._at: dict[int, slice] = {}
        self._spans: list[slice] = []
        place = 0
        for step in steps:
            begin = place
            for shard in step.shards:
                self._at[shard] = slice(place, place + int(self._rows[shard]))
                place = self._at[shard].stop
            self._spans.append(slice(begin, place))

    def _global_rows(self) -> np.ndarray:
        """Row of C of each row of the buffers."""
        parts = [
            np.arange(self._starts[shard], self._starts[shard] + self._rows[shard])
            for step in self._steps
            for shard in step.shards
        ]
        return np.concatenate(parts)


class GatherRing(RingRunner):
    """all_gather before the GEMM."""

    def __init__(self, problem: Problem, steps: Sequence[RingStep]) -> None:
        spec = problem.spec
        super().__init__(problem, steps)
        self._a, self._c = problem.empty(spec.m, spec.k), problem.empty(spec.m, spec.n)
        self.poison()

    def poison(self) -> None:
        """Poison what arrives and what is computed; the own shard is there from the beginning."""
        self._a.fill_(float("nan"))
        self._c.fill_(float("nan"))
        self._a[self._at[self.problem.rank]].copy_(self.problem.a)

    def run(self) -> None:
        """Start all transfers in order; each GEMM waits for its own."""
        self.lanes.fork()
        self.lanes.spread(self._streams)
        tickets = [self.lanes.start(lambda step=step: self._move(step)) for step in self._steps]  # type: ignore[misc]
        for number, (span, ticket) in enumerate(zip(self._spans, tickets, strict=True)):
            with self.lanes.computing(number % self._streams):
                self.lanes.wait(ticket)
                matmul(self._a[span], self.problem.b, self._c[span])
        self.lanes.collect(self._streams)
        self.lanes.join()

    def _move(self, step: RingStep) -> Sequence[Any]:
        sent = [(peer, self._a[self._at[shard]], None) for peer, shard in step.sent]
        received = [(peer, None, self._a[self._at[shard]]) for peer, shard in step.received]
        return exchange([*sent, *received])

    def output(self) -> tuple[torch.Tensor, Placed]:
        """All rows, in the order of the steps."""
        return self._c, Placed.summed(self._global_rows())


class HostGatherRing(GatherRing):
    """The same on CPU tensors: a transfer of the next step is under way while a step is multiplied."""

    def run(self) -> None:
        """Receive one step ahead."""
        ahead = self._move(self._steps[0])
        for number, span in enumerate(self._spans):
            self.lanes.wait(ahead)
            # Only now is there something to send on.
            ahead = self._move(self._steps[number + 1]) if number + 1 < len(self._steps) else ()
            matmul(self._a[span], self.problem.b, self._c[span])


class ScatterRing(RingRunner):
    """reduce_scatter after the GEMM."""

    def __init__(self, problem: Problem, steps: Sequence[RingStep]) -> None:
        spec = problem.spec
        super().__init__(problem, steps)
        self._a, self._c = problem.empty(spec.m, spec.k), problem.empty(spec.m, spec.n)
        # The last step may get two sums for the same rows, one from each side.
        self._received = {
            move: problem.empty(int(self._rows[move[1]]), spec.n) for step in self._steps for move in step.received
        }
        self.poison()

    def poison(self) -> None:
        """Poison partial sums, and lay the rows of A in the order of the steps."""
        import torch

        self._a.copy_(self.problem.a[torch.as_tensor(self._global_rows(), device=self._a.device)])
        self._c.fill_(float("nan"))
        for buffer in self._received.values():
            buffer.fill_(float("nan"))

    def run(self) -> None:
        """Pass the sum of each step on while the next step is multiplied, then add what arrived."""
        lanes = self.lanes
        lanes.spread(self._streams)
        lanes.fork()
        for number, (step, span) in enumerate(zip(self._steps, self._spans, strict=True)):
            ticket = lanes.start(lambda step=step: self._move(step)) if step.received or step.sent else None  # type: ignore[misc]
            with lanes.computing(number % self._streams):
                matmul(self._a[span], self.problem.b, self._c[span])
                if ticket is not None:
                    lanes.wait(ticket)
                for move in step.received:
                    self._c[self._at[move[1]]].add_(self._received[move])
                # The next transfer sends what this step summed.
                lanes.fork()
        lanes.collect(self._streams)
        lanes.join()

    def _move(self, step: RingStep) -> Sequence[Any]:
        sent = [(peer, self._c[self._at[shard]], None) for peer, shard in step.sent]
        received = [(move[0], None, self._received[move]) for move in step.received]
        return exchange([*sent, *received])

    def output(self) -> tuple[torch.Tensor, Placed]:
        """The rank's own rows."""
        rank = self.problem.rank
        rows = np.arange(self._starts[rank], self._starts[rank] + self._rows[rank])
        return self._c[self._at[rank]], Placed.summed(rows)


def gather_by(problem: Problem, steps: Sequence[RingStep]) -> Runner:
    """Runner of an all_gather in given steps."""
    return HostGatherRing(problem, steps) if problem.device.type == "cpu" else GatherRing(problem, steps)


def make(problem: Problem) -> Runner:
    """Runner of a ring plan."""
    spec = problem.spec
    if spec.collective == "reduce_scatter":
        return ScatterRing(problem, scatter_steps(problem.rank, spec.ranks, spec.settings["form"]))
    return gather_by(problem, gather_steps(problem.rank, spec.ranks, spec.settings["form"]))

"""All-gather first in one GEMM kernel: tiles wait for the rows that they need, own rows first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from overlapsim.validate.numerics import Placed, Problem
from overlapsim.validate.runners.base import Runner, exchange

if TYPE_CHECKING:
    import torch

WAIT_S: Final = 10.0
"""After which a tile gives up waiting, and the shard that did not arrive is named."""
COMM_SMS: Final = 16
"""SMs that the kernel leaves to the library's transfers: all NVSwitch channels of current NCCL defaults fit in."""
DEFAULTS: Final[Mapping[str, int]] = {"bm": 128, "bn": 128, "bk": 64, "stages": 3}
"""Kernel of plans that name none: the tile that most devices' profiles list."""


class ArrivalRunner(Runner):
    """The rows of each other rank arrive piece by piece, a flag behind each; needs the Triton kernels.

    Parameters
    ----------
    problem : all_gather; m divides over the ranks and their comm tiles
    """

    def __init__(self, problem: Problem) -> None:
        from overlapsim.validate.kernels import launch

        super().__init__(problem)
        spec, rank, device = problem.spec, problem.rank, problem.device
        shard = spec.m // spec.ranks
        self._rows = comm_rows(shard, int(spec.settings.get("comm_rows", shard)))
        self._per_rank = shard // self._rows
        pieces = spec.ranks * self._per_rank
        # Own rows are there; the others arrive round the ring, nearest first.
        sources = [(rank + step) % spec.ranks for step in range(spec.ranks)]
        self._arrival = [source * self._per_rank + piece for source in sources for piece in range(self._per_rank)]
        config = launch.GemmConfig.from_settings({**DEFAULTS, **spec.settings})
        self._order = launch.ArrivalOrder.by_arrival(spec.m, spec.n, config, self._arrival, device=device)
        self._flags = launch.new_counters(pieces, device)
        self._status = launch.new_status(pieces, device)
        self._a, self._c = problem.empty(spec.m, spec.k), problem.empty(spec.m, spec.n)
        self._num_sms = _sms(device) - COMM_SMS if device.type == "cuda" else None
        self.poison()

    def poison(self) -> None:
        """Poison what arrives and what is computed."""
        self._a.fill_(float("nan"))
        self._c.fill_(float("nan"))
        self._own().copy_(self.problem.a)

    def run(self) -> None:
        """Send and receive on one stream, multiply on the other."""
        from overlapsim.validate.kernels import launch

        self._flags.zero_()
        self.lanes.fork()
        for piece in self._arrival[: self._per_rank]:
            launch.raise_flag(self._flags, piece)
        for step in range(1, self.spec.ranks):
            for inner in range(self._per_rank):
                self.lanes.start(lambda step=step, inner=inner: self._move(step, inner))  # type: ignore[misc]
                with self.lanes.communication():
                    source = (self.problem.rank + step) % self.spec.ranks
                    if self.problem.device.type == "cpu":
                        # In the interpreter nothing runs beside anything: all is there before the kernel begins.
                        self.lanes.join()
                    launch.raise_flag(self._flags, source * self._per_rank + inner)
        launch.arrival_gemm(
            self._a,
            self.problem.b,
            self._c,
            self._order,
            self._flags,
            self._status,
            num_sms=self._num_sms,
            timeout_s=WAIT_S,
            tf32=self.spec.dtype == "tf32",
        )
        self.lanes.join()

    def settle(self) -> None:
        """Ask whether every shard arrived."""
        from overlapsim.validate.kernels import launch

        launch.check_status(self._status, what="shard")

    def output(self) -> tuple[torch.Tensor, Placed]:
        """All rows of C."""
        return self._c, Placed.summed(np.arange(self.spec.m))

    def _own(self) -> torch.Tensor:
        shard = self.spec.m // self.spec.ranks
        return self._a[self.problem.rank * shard : (self.problem.rank + 1) * shard]

    def _move(self, step: int, inner: int) -> Sequence[Any]:
        ranks, rank = self.spec.ranks, self.problem.rank
        to, source = (rank - step) % ranks, (rank + step) % ranks
        first = source * self._per_rank + inner
        received = self._a[first * self._rows : (first + 1) * self._rows]
        sent = self._own()[inner * self._rows : (inner + 1) * self._rows]
        return exchange([(to, sent, None), (source, None, received)])


def comm_rows(shard: int, asked: int) -> int:
    """Rows of a comm tile: the largest divisor of a rank's shard up to what the plan asks for.

    Examples
    --------
    >>> comm_rows(1024, 256), comm_rows(1000, 300)
    (256, 250)
    """
    return max(rows for rows in range(1, min(asked, shard) + 1) if shard % rows == 0)


def make(problem: Problem) -> Runner:
    """Runner of a fused all_gather plan."""
    return ArrivalRunner(problem)


def _sms(device: torch.device) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)

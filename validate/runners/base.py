"""What every runner offers: buffers made once, one run, and an output that says which rows of C it holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from overlapsim.validate.numerics import Placed, Problem
from overlapsim.validate.runners.lanes import lanes_of

if TYPE_CHECKING:
    import torch


class Runner(ABC):
    """One plan on this rank.

    Parameters
    ----------
    problem : operands and reference; its spec says what is run
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.spec = problem, problem.spec
        self.lanes = lanes_of(problem.device)

    @abstractmethod
    def poison(self) -> None:
        """Overwrite every buffer that a run must write with not-a-number."""

    @abstractmethod
    def run(self) -> None:
        """Run once; on a GPU only enqueue, tied to the current stream."""

    @abstractmethod
    def output(self) -> tuple[torch.Tensor, Placed]:
        """Result of the last run in plain rows, and which rows of C they are."""

    def settle(self) -> None:  # noqa: B027
        """Look at what a run left behind on the device, such as groups that were never signalled.

        Raises
        ------
        DeadlockError
            If a part of the run never became ready.
        """

    def verify(self, what: str) -> float:
        """Poison, run once and hold the output against the reference; returns the error over the tolerance.

        Raises
        ------
        NumericsError
            If the numbers are wrong.
        """
        self.poison()
        self.run()
        self.settle()
        output, placed = self.output()
        return self.problem.check(output, placed, what)


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The vendor library's GEMM into a given buffer."""
    import torch

    if a.shape[0]:
        torch.mm(a, b, out=out)


def all_reduce(buffer: torch.Tensor) -> Sequence[Any]:
    """Start the sum of a buffer in place."""
    import torch.distributed as dist

    return (dist.all_reduce(buffer, async_op=True),)


def reduce_scatter(received: torch.Tensor, sent: torch.Tensor) -> Sequence[Any]:
    """Start a reduce_scatter of equal parts."""
    import torch.distributed as dist

    # torch 2.13 renames it and warns at the old name; 2.4 has the old one only.
    start = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return (start(received, sent, async_op=True),)


def all_gather(received: torch.Tensor, sent: torch.Tensor) -> Sequence[Any]:
    """Start an all_gather of equal parts."""
    import torch.distributed as dist

    start = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return (start(received, sent, async_op=True),)


def all_to_all(
    received: torch.Tensor, sent: torch.Tensor, received_rows: Sequence[int], sent_rows: Sequence[int]
) -> Sequence[Any]:
    """Start an all_to_all of uneven parts, cut along the first dimension."""
    import torch.distributed as dist

    return (dist.all_to_all_single(received, sent, list(received_rows), list(sent_rows), async_op=True),)


def exchange(pairs: Sequence[tuple[int, torch.Tensor | None, torch.Tensor | None]]) -> Sequence[Any]:
    """Start sends and receives with peers together.

    Parameters
    ----------
    pairs : (peer, what is sent, what is received); None or nothing in it is no transfer
    """
    import torch.distributed as dist

    ops = []
    for peer, sent, received in pairs:
        if sent is not None and sent.numel():
            ops.append(dist.P2POp(dist.isend, sent, peer))
        if received is not None and received.numel():
            ops.append(dist.P2POp(dist.irecv, received, peer))
    works: Sequence[Any] = dist.batch_isend_irecv(ops) if ops else ()
    return works

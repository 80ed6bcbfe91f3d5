"""Serial and chunked execution: vendor GEMMs on blocks of rows, one library collective a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from overlapsim.validate.numerics import Placed, Problem
from overlapsim.validate.runners.base import Runner
from overlapsim.validate.runners.blocks import blocks_of

if TYPE_CHECKING:
    import torch


class BlockRunner(Runner):
    """Blocks one after another; the collective of one beside the GEMM of its neighbour, or after it.

    Parameters
    ----------
    problem : operands
    chunk_rows : rows of each block
    overlapped : False runs GEMM and collective of each block one after the other on one stream
    """

    def __init__(self, problem: Problem, chunk_rows: Sequence[int], *, overlapped: bool) -> None:
        super().__init__(problem)
        self._blocks = blocks_of(problem, chunk_rows)
        self._overlapped = overlapped
        for block in self._blocks:
            block.poison()

    def poison(self) -> None:
        """Poison every block."""
        for block in self._blocks:
            block.poison()

    def run(self) -> None:
        """Run all blocks."""
        if self._blocks[0].communicates_first:
            self._gather_first()
            return
        for block in self._blocks:
            block.compute()
            if self._overlapped:
                self.lanes.fork()
                self.lanes.start(block.communicate)
            else:
                self.lanes.inline(block.communicate)
        if self._overlapped:
            self.lanes.join()

    def _gather_first(self) -> None:
        """Gather block after block, each GEMM behind the gather of its own."""
        if not self._overlapped:
            for block in self._blocks:
                self.lanes.inline(block.communicate)
                block.compute()
            return
        self.lanes.fork()
        tickets = [self.lanes.start(block.communicate) for block in self._blocks]
        for block, ticket in zip(self._blocks, tickets, strict=True):
            # Each GEMM waits for the gather of its own block, not for those behind it.
            self.lanes.wait(ticket)
            block.compute()
        self.lanes.join()

    def output(self) -> tuple[torch.Tensor, Placed]:
        """Rows of all blocks."""
        import torch

        parts = [block.output() for block in self._blocks]
        placed = Placed(
            np.concatenate([where.source for _, where in parts]), np.concatenate([where.row for _, where in parts])
        )
        return torch.cat([part for part, _ in parts]), placed


def make_serial(problem: Problem) -> Runner:
    """GEMM, then collective (all_gather: collective, then GEMM)."""
    if problem.spec.independent_bytes is not None:
        from overlapsim.validate.runners.bulk import PairRunner

        return PairRunner(problem, overlapped=False)
    return BlockRunner(problem, (problem.spec.m,), overlapped=False)


def make_chunked(problem: Problem) -> Runner:
    """Blocks of ``chunk_rows`` from the plan."""
    return BlockRunner(problem, problem.spec.settings["chunk_rows"], overlapped=True)


def make_pipelined(problem: Problem) -> Runner:
    """Splits of ``split_rows`` from the plan: as chunked execution, but for the SMs that each side is given."""
    return BlockRunner(problem, problem.spec.settings["split_rows"], overlapped=True)

"""Wave groups: one signalled, reordered GEMM; the unmodified collective of each group as soon as its tiles are done."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from overlapsim.validate.numerics import Placed, Problem
from overlapsim.validate.runners.base import Runner
from overlapsim.validate.runners.host_tiles import HostTiles
from overlapsim.validate.runners.transfers import GroupTransfers

if TYPE_CHECKING:
    import torch

WAIT_S: Final = 10.0
"""After which a waiting kernel gives up and says which group hung."""


class HostWaveGroups(Runner):
    """On CPU tensors, with the vendor's GEMM on every tile.

    Parameters
    ----------
    problem : operands and plan
    expected : tiles that each group waits for, instead of the map's
    """

    def __init__(self, problem: Problem, expected: Sequence[int] | None = None) -> None:
        super().__init__(problem)
        reorder = problem.spec.reorder
        assert reorder is not None
        self._transfers = GroupTransfers(reorder, problem.rank, problem.empty)
        self._tiles = HostTiles(problem.a, problem.b, self._transfers.packed, reorder, problem.rank, expected)

    def poison(self) -> None:
        """Poison what is sent and received."""
        self._transfers.packed.fill_(float("nan"))
        self._transfers.received.fill_(float("nan"))

    def run(self) -> None:
        """Compute tiles in order and start the collective of each finished group."""
        self._tiles.run(lambda group: self.lanes.start(lambda: self._transfers.start(group)))
        self.lanes.join()

    def kernel_alone(self) -> None:
        """The GEMM without collectives: what `--kernel-time wave_group=` means."""
        self._tiles.run(lambda group: None)

    def output(self) -> tuple[torch.Tensor, Placed]:
        """Rows put back in order."""
        return self._transfers.restored()


class KernelWaveGroups(Runner):
    """With the Triton kernels: on a GPU two streams, in Triton's interpreter one kernel after the other.

    Parameters
    ----------
    problem : operands and plan
    expected : tiles that each group waits for, instead of the map's
    """

    def __init__(self, problem: Problem, expected: Sequence[int] | None = None) -> None:
        from overlapsim.validate.kernels import launch

        super().__init__(problem)
        spec = problem.spec
        assert spec.reorder is not None
        self._transfers = GroupTransfers(spec.reorder, problem.rank, problem.empty)
        config = launch.GemmConfig.from_settings(spec.settings)
        device = problem.device
        self._has_tiles = bool(self._transfers.packed.numel())
        if self._has_tiles:
            self._order = launch.TileOrder.from_map(spec.reorder, config, rank=problem.rank, device=device)
        self._restore = launch.RestoreOrder.from_map(spec.reorder, rank=problem.rank, device=device)
        groups = self._transfers.num_groups
        self._counters = launch.new_counters(groups, device)
        self._status = launch.new_status(groups, device)
        self._expected = tuple(self._transfers.group_tiles if expected is None else expected)
        self._restored = problem.empty(self._restore.rows, spec.n)
        reserve = int(spec.settings.get("sm_reserve", 0))
        self._persistent = bool(spec.settings.get("persistent", False))
        self._num_sms = _sms(device) - reserve if self._persistent and device.type == "cuda" else None

    def poison(self) -> None:
        """Poison what is sent, received and restored."""
        for buffer in (self._transfers.packed, self._transfers.received, self._restored):
            buffer.fill_(float("nan"))

    def run(self) -> None:
        """Launch the GEMM, and on the other stream a wait and a collective a group."""
        from overlapsim.validate.kernels import launch

        single = self._transfers.num_groups == 1
        self.lanes.fork()
        self._gemm(counted=not single)
        if single:
            # One group waits for the whole kernel: stream order does that, without a signal.
            self.lanes.inline(lambda: self._transfers.start(0))
            return
        for group, tiles in enumerate(self._expected):
            with self.lanes.communication():
                launch.wait_group(self._counters, group, tiles, self._status, timeout_s=WAIT_S)
            self.lanes.start(lambda group=group: self._transfers.start(group))  # type: ignore[misc]
        self.lanes.join()

    def kernel_alone(self) -> None:
        """The GEMM without collectives and signals."""
        self._gemm(counted=False)

    def settle(self) -> None:
        """Ask whether every group was signalled."""
        from overlapsim.validate.kernels import launch

        launch.check_status(self._status, self._expected)

    def consume(self) -> None:
        """The consumer that undoes the order."""
        from overlapsim.validate.kernels import launch

        launch.restored_add(self._transfers.received, self._restore, None, self._restored)

    def output(self) -> tuple[torch.Tensor, Placed]:
        """Rows put back in order by the kernel of the consumer."""
        _, placed = self._transfers.restored()
        self.consume()
        return self._restored, placed

    def _gemm(self, *, counted: bool) -> None:
        from overlapsim.validate.kernels import launch

        if not self._has_tiles:
            return
        launch.signalled_gemm(
            self.problem.a,
            self.problem.b,
            self._transfers.packed,
            self._order,
            self._counters if counted else None,
            persistent=self._persistent,
            num_sms=self._num_sms,
            tf32=self.spec.dtype == "tf32",
        )


def make(problem: Problem, expected: Sequence[int] | None = None) -> HostWaveGroups | KernelWaveGroups:
    """Runner of a wave-group plan: kernels on a GPU or in Triton's interpreter, else tiles by the vendor's GEMM."""
    if problem.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return KernelWaveGroups(problem, expected)
    return HostWaveGroups(problem, expected)


def _sms(device: torch.device) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)

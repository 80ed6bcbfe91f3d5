"""Times one case on one GPU; in Triton's interpreter the same calls run on CPU tensors, as a rehearsal."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
from overlapsim.validate.kernels import launch
from overlapsim.validate.kernels.config import GemmConfig
from overlapsim.validate.kernels.restore_order import RestoreOrder
from overlapsim.validate.kernels.tile_order import TileOrder
from overlapsim.validate.measure import Sampler, Timing
from overlapsim.validate.one_gpu.cases import PACKED, PLAIN, RANKS, SIGNALLED, VENDOR, Case
from overlapsim.validate.one_gpu.inside import Inside, Rehearsal, recorded
from overlapsim.validate.plans import TORCH_TYPES
from overlapsim.validate.runners.lanes import lanes_of
from torch import Tensor

from overlapsim.calibration.records import Record
from overlapsim.cost.tiles import TileGrid
from overlapsim.schedule.reorder import subtile_map, tile_map

SWIZZLE: Final = 4
BACKGROUND: Final = 3.0
"""The background lasts so many times what is measured, both taken alone."""
CHAIN: Final = 10
"""Launches in one sample of a latency."""
WAIT_S: Final = 2.0


class Bench:
    """Operands, streams and counters of one GPU.

    Parameters
    ----------
    sampler : takes the times of what runs alone
    num_sms : of the GPU
    """

    def __init__(self, sampler: Sampler | Rehearsal, num_sms: int) -> None:
        self.sampler, self.num_sms = sampler, num_sms
        self.device = sampler.ranks.device
        self.on_gpu = self.device.type == "cuda"
        self.lanes = lanes_of(self.device)
        self._inside = Inside(self.device, self.lanes)
        self._shape: tuple[Any, ...] = ()
        self._operands: tuple[Tensor, Tensor, Tensor] | None = None

    def time(self, case: Case) -> Timing:
        """Time of one call of a case.

        Raises
        ------
        DeadlockError
            If a signal did not come.
        """
        return {
            "launch": self._launch,
            "gemm": self._gemm,
            "consumer": self._consumer,
            "sms": self._on_fewer_sms,
            "waves": self._gemm,
            "contention": self._beside,
            "wave_group": self._wave_group,
        }[case.section](case)

    def _launch(self, case: Case) -> Timing:
        flags, status = launch.new_counters(2, self.device), launch.new_status(2, self.device)

        def kernel() -> None:
            launch.raise_flag(flags, 0)

        def event() -> None:
            self.lanes.fork()
            with self.lanes.communication():
                kernel()
            self.lanes.join()
            launch.raise_flag(flags, 1)

        def wait_group() -> None:
            launch.raise_flag(flags, 0, 5)
            launch.wait_group(flags, 0, 5, status, timeout_s=WAIT_S)

        def signal() -> None:
            if not self.on_gpu:
                return wait_group()
            self.lanes.fork()
            with self.lanes.communication():
                launch.wait_group(flags, 0, 5, status, timeout_s=WAIT_S)
            launch.raise_flag(flags, 0, 5)
            self.lanes.join()

        # Kernels behind one another in each: of one chain, across streams, flag and wait, flag and waiting wait.
        call, links = {
            "kernel": (kernel, 1),
            "event": (event, 2),
            "wait_group": (wait_group, 1),
            "signal": (signal, 1),
        }[case.like.op]

        def chain() -> None:
            for _ in range(CHAIN):
                call()

        timing = self.sampler.time(chain, case.name)
        launch.check_status(status, (5, 0))
        return scaled(timing, 1 / (CHAIN * links))

    def _gemm(self, case: Case) -> Timing:
        return self.sampler.time(self._gemm_call(case), case.name)

    def _gemm_call(self, case: Case) -> Callable[[], None]:
        a, b, c = self._gemm_operands(case.like)
        if case.like.op == VENDOR:
            return silent(lambda: torch.mm(a, b, out=c))
        order = self._order(case, 1)
        counters = launch.new_counters(1, self.device) if case.like.op == SIGNALLED else None
        store: Any = "row_major" if case.like.op == PLAIN else "packed"
        assert case.like.op in (PLAIN, PACKED, SIGNALLED)
        persistent = case.variant == "persistent"
        sms = case.like.sms_left if persistent and self.on_gpu else None
        return lambda: launch.signalled_gemm(
            a, b, c, order, counters, persistent=persistent, num_sms=sms, store=store, tf32=case.like.dtype == "tf32"
        )

    def _on_fewer_sms(self, case: Case) -> Timing:
        call = self._gemm_call(case)
        if case.variant == "persistent":
            return self.sampler.time(call, case.name)
        assert case.like.sms_left is not None
        # In the interpreter no SM is taken; the calls are the same.
        held = self.num_sms - case.like.sms_left if self.on_gpu else 1
        started, stop = launch.new_counters(1, self.device), launch.new_counters(1, self.device)
        status = launch.new_status(1, self.device)

        def before() -> None:
            stop.zero_()
            self.lanes.fork()
            with self.lanes.communication():
                launch.hold_sms(held, started, stop, timeout_s=WAIT_S)
            launch.wait_group(started, 0, held, status, timeout_s=WAIT_S)

        def after() -> None:
            launch.raise_flag(stop, 0)
            self.lanes.join()

        timing = self._inside.time(call, before, after)
        launch.check_status(status, (held,))
        return timing

    def _consumer(self, case: Case) -> Timing:
        record = case.like
        assert record.m and record.n
        if not case.own_kernel:
            x = self._random(record.m, record.n, dtype=record.dtype)
            weight = self._random(record.n, dtype=record.dtype)
            return self.sampler.time(
                silent(lambda: torch.nn.functional.rms_norm(x, (x.shape[1],), weight, 1e-6)), case.name
            )
        restore = restore_order(record.m, record.n, case.variant, self.device)
        packed = self._random(restore.packed_elements, dtype=record.dtype)
        out = torch.empty(restore.rows, record.n, dtype=packed.dtype, device=self.device)
        weight = self._random(record.n, dtype=record.dtype)
        if record.op == "restored_add":
            residual = self._random(restore.rows, record.n, dtype=record.dtype)
            return self.sampler.time(lambda: launch.restored_add(packed, restore, residual, out), case.name)
        return self.sampler.time(lambda: launch.restored_rmsnorm(packed, restore, weight, out), case.name)

    def _beside(self, case: Case) -> Timing:
        record = case.like
        on_copy = record.op == "copy"
        gemm = self._gemm_call(replace(case, like=replace(record, kind="gemm", op=VENDOR, k=record.k or record.n)))
        source = self._copied(record)
        target = torch.empty_like(source)

        def copy() -> None:
            target.copy_(source)

        if record.alone:
            return self.sampler.time(copy, case.name)
        alone = [self.sampler.time(run, case.name, repeats=3).median_s for run in (gemm, copy)]
        measured, other = (copy, gemm) if on_copy else (gemm, copy)
        mine_s, other_s = reversed(alone) if on_copy else alone
        count = int(BACKGROUND * mine_s / other_s) + 2
        backgrounds: list[Any] = []

        def before() -> None:
            self.lanes.fork()
            with nullcontext() if on_copy else self.lanes.communication():
                for _ in range(count):
                    other()
                backgrounds.append(recorded() if self.on_gpu else None)

        return self._inside.time(measured, before, self.lanes.join, aside=on_copy, backgrounds=backgrounds)

    def _wave_group(self, case: Case) -> Timing:
        a, b, packed = self._gemm_operands(case.like)
        received = torch.empty_like(packed)
        order = self._order(case, case.groups or 1)
        counters = launch.new_counters(order.num_groups, self.device)
        status = launch.new_status(order.num_groups, self.device)
        flat, there = packed.view(-1), received.view(-1)

        def serial() -> None:
            torch.mm(a, b, out=packed)
            received.copy_(packed)

        def overlapped() -> None:
            self.lanes.fork()
            launch.signalled_gemm(a, b, packed, order, counters)
            for group, tiles in enumerate(order.group_tiles):
                first, end = order.group_start[group : group + 2]
                with self.lanes.communication():
                    launch.wait_group(counters, group, tiles, status, timeout_s=WAIT_S)
                    there[first:end].copy_(flat[first:end])
            self.lanes.join()

        call = {"serial": serial, "overlapped": overlapped, "copy": silent(lambda: received.copy_(packed))}[
            case.variant
        ]
        timing = self.sampler.time(call, case.name)
        launch.check_status(status, order.group_tiles)
        return timing

    def _order(self, case: Case, groups: int) -> TileOrder:
        record = case.like
        assert record.m and record.n
        config = config_of(case)
        grid = TileGrid(record.m, record.n, config.bm, config.bn)
        sizes = even_groups(grid.num_tiles, groups)
        return TileOrder.from_map(tile_map(grid, grid.execution_order(SWIZZLE), sizes), config, device=self.device)

    def _gemm_operands(self, record: Record) -> tuple[Tensor, Tensor, Tensor]:
        """A, B and C of the last shape are kept: cases of one shape follow each other."""
        assert record.m and record.n and record.k
        shape = (record.m, record.n, record.k, record.dtype)
        if self._operands is None or shape != self._shape:
            self._operands = None
            a = self._random(record.m, record.k, dtype=record.dtype)
            b = self._random(record.k, record.n, dtype=record.dtype)
            self._shape, self._operands = shape, (a, b, torch.empty(record.m, record.n, dtype=a.dtype, device=a.device))
        return self._operands

    def _random(self, *shape: int, dtype: str) -> Tensor:
        values = torch.rand(*shape, device=self.device, dtype=torch.float32)
        return (2 * values - 1).to(getattr(torch, TORCH_TYPES[dtype]))

    def _copied(self, record: Record) -> Tensor:
        assert record.m and record.n
        return torch.zeros(record.m, record.n, dtype=getattr(torch, TORCH_TYPES[record.dtype]), device=self.device)


def silent(call: Callable[[], object]) -> Callable[[], None]:
    """A call whose result is not wanted."""

    def run() -> None:
        call()

    return run


def config_of(case: Case) -> GemmConfig:
    """Kernel of a case that has a tile."""
    bm, bn, bk = case.tile
    return GemmConfig(bm, bn, bk)


def restore_order(m: int, n: int, variant: str, device: Any) -> RestoreOrder:
    """Consumer's tables: tiles in swizzled order, a rank's rows of them, or rows where they always were."""
    if variant == "row_major":
        # One tile as large as the matrix: every row stands where it always does. Its width must be a power of two.
        return RestoreOrder.from_map(tile_map(TileGrid(m, n, m, n), [0], (1,)), device=device)
    grid = TileGrid(m, n, 128, 128)
    walk = grid.execution_order(SWIZZLE)
    if variant == "tile":
        return RestoreOrder.from_map(tile_map(grid, walk, (grid.num_tiles,)), device=device)
    return RestoreOrder.from_map(subtile_map(grid, walk, (grid.num_tiles,), RANKS), rank=1, device=device)


def even_groups(num_tiles: int, groups: int) -> tuple[int, ...]:
    """Groups as equal as they can be, at most one a tile.

    Examples
    --------
    >>> even_groups(10, 4), even_groups(2, 8)
    ((2, 3, 2, 3), (1, 1))
    """
    count = min(groups, num_tiles)
    ends = [num_tiles * part // count for part in range(count + 1)]
    return tuple(end - begin for begin, end in itertools.pairwise(ends))


def scaled(timing: Timing, factor: float) -> Timing:
    """Times of one of several equal calls."""
    return replace(timing, median_s=timing.median_s * factor, p10_s=timing.p10_s * factor, p90_s=timing.p90_s * factor)

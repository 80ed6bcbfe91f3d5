"""Signalling and tile reordering: unmodified collectives start as soon as a group of a GEMM's waves is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from overlapsim.cost.gemm import GemmCost
from overlapsim.errors import StrategyError
from overlapsim.plan import Finding
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.strategy.base import (
    YES,
    Applicability,
    Context,
    Parameters,
    ParameterSpace,
    Partition,
    Strategy,
    StrategyInfo,
)
from overlapsim.strategy.tasks import COMM_PRIORITY, Gpu
from overlapsim.units import dtype_bytes, ps_from_s
from overlapsim.workload.operators import CollectiveOp, GemmOp

MAPS = {"all_reduce": "tile"}
"""Unit that the reorder map moves, by collective; others follow."""
SWIZZLES = (8, 4, 2, 1)


class WaveGroup(Strategy):
    """One signalled GEMM; each group of consecutive waves is one contiguous buffer and one collective."""

    name = "wave_group"
    info = StrategyInfo(
        summary="signalled, reordered GEMM; one library collective per group of waves",
        granularity="wave group",
        hides="the collective of finished waves under the rest of the GEMM",
        cost="SMs of the collective, a templated kernel, a waiting kernel per group, a reorder map",
        frameworks=("FlashOverlap", "overlapsim.validate"),
        references=("Hong et al., EuroSys'26, doi 10.1145/3767295.3769370",),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse collectives without a map, a single rank, and GEMMs that are one wave on every tile."""
        gemm, collective = context.gemm_and_collective()
        if collective.kind not in MAPS:
            return Applicability(False, (f"no reorder map for {collective.kind} (maps: {', '.join(MAPS)})",))
        if collective.ranks < 2:
            return Applicability(False, ("one rank has nothing to communicate",), "little_to_hide")
        num_sms = context.prices.cluster.device.num_sms
        if context.prices.comm_sms(collective.kind) >= num_sms:
            return Applicability(False, (f"the collective takes all {num_sms} SMs",), "contention")
        kernels = self._kernels(context, gemm)
        # Reserving SMs can push one wave into two, but then the second is the price of the reserve, not early work.
        if all(kernel.grid.waves(num_sms) < 2 for kernel in kernels):
            grid = kernels[0].grid
            reason = (
                f"{grid.num_tiles} tiles of {grid.bm}x{grid.bn} on {num_sms} SMs are one wave: nothing is ready early"
            )
            return Applicability(False, (reason,), "under_one_wave")
        return YES

    def parameters(self, context: Context) -> ParameterSpace:
        """Leave open the tile, the swizzle and the split of the waves into groups."""
        gemm, _ = context.gemm_and_collective()
        tiles = tuple(kernel.tile for kernel in self._kernels(context, gemm))
        return ParameterSpace({"tile": tiles, "swizzle": SWIZZLES}, lambda point: self._partition(context, point))

    def rewrite(self, context: Context, parameters: Parameters, builder: ProgramBuilder) -> None:
        """Gate one collective a group behind the tiles of that group; reserve the collective's SMs."""
        gemm, collective = context.gemm_and_collective()
        prices = context.prices
        kernel = prices.kernel_gemm(gemm, self.name, tuple(parameters["tile"]))
        groups = self._group_tiles(parameters, kernel)
        comm_sms = prices.comm_sms(collective.kind)
        gpu = Gpu(builder, prices)
        # One group waits for the whole kernel anyway, so nothing is gained by reserving SMs for it.
        source = gpu.add_gemm(gemm, kernel, sms=gpu.num_sms - comm_sms if len(groups) > 1 else gpu.num_sms)
        wait_ps = ps_from_s(prices.signal_wait_s)
        sizes = self._group_bytes(gemm, kernel, parameters["swizzle"], groups)
        before = None
        for number, (done, size) in enumerate(zip(np.cumsum(groups), sizes, strict=True), start=1):
            part = CollectiveOp(collective.kind, float(size), collective.ranks, collective.dtype, collective.name)
            task = gpu.add_collective(
                part, prices.collective(part), sms=comm_sms, tag=f"fwd {collective.kind} group {number}/{len(groups)}"
            )
            builder.add_edge(source, task, src_units=int(done), lag_ps=wait_ps)
            if before is not None:
                # The next group's waiting kernel is launched behind this collective and pays the same poll.
                builder.add_edge(before, task, lag_ps=wait_ps)
            before = task

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return the kernel template, the groups and the map kind."""
        gemm, collective = context.gemm_and_collective()
        kernel = context.prices.kernel_gemm(gemm, self.name, tuple(parameters["tile"]))
        groups = self._group_tiles(parameters, kernel)
        bm, bn, bk = kernel.tile
        return {
            "collective": collective.kind,
            "ranks": collective.ranks,
            "dtype": gemm.dtype,
            "accumulate": gemm.accumulate,
            "kernel": "signalled_gemm",
            "bm": bm,
            "bn": bn,
            "bk": bk,
            "stages": 3,
            "persistent": False,
            "swizzle": parameters["swizzle"],
            "map_kind": MAPS[collective.kind],
            "group_tiles": list(groups),
            "sm_reserve": context.prices.comm_sms(collective.kind) if len(groups) > 1 else 0,
            "comm_stream_priority": COMM_PRIORITY,
        }

    def findings(self, context: Context, parameters: Parameters) -> tuple[Finding, ...]:
        """Say that the consumer must read the reordered output."""
        return (
            *context.prices.kernel_findings(self.name),
            Finding(
                "consumer_reorders",
                "the collective's output is in execution order of tiles; the next element-wise kernel must read "
                "through the map (a fused RMSNorm took 7-10 % longer in the published measurements, not charged here)",
            ),
        )

    def _kernels(self, context: Context, gemm: GemmOp) -> list[GemmCost]:
        """Candidate kernels, fastest first."""
        prices = context.prices
        kernels = [prices.kernel_gemm(gemm, self.name, tile) for tile in prices.kernel_tiles(gemm, self.name)]
        return sorted(kernels, key=lambda kernel: kernel.duration_s)[:4]

    def _partition(self, context: Context, point: Parameters) -> Partition | None:
        gemm, collective = context.gemm_and_collective()
        prices = context.prices
        kernel = prices.kernel_gemm(gemm, self.name, point["tile"])
        sms = prices.cluster.device.num_sms - prices.comm_sms(collective.kind)
        waves = kernel.grid.waves(sms)
        if waves < 2:
            return None
        done_tiles = np.minimum(np.arange(waves + 1) * sms, kernel.grid.num_tiles)
        written = np.concatenate([[0.0], np.cumsum(self._tile_bytes(gemm, kernel, point["swizzle"]))])[done_tiles]
        first, last = np.triu_indices(waves)
        tau = np.full((waves, waves), np.inf)
        tau[first, last] = (
            prices.collective_seconds(collective.kind, written[last + 1] - written[first]) + prices.signal_wait_s
        )

        def to_parameters(cuts: tuple[int, ...]) -> Parameters:
            ends = done_tiles[list(cuts)]
            return {**point, "group_tiles": tuple(int(x) for x in np.diff(ends, prepend=0))}

        return Partition(kernel.tile_time_s * np.arange(1, waves + 1), kernel.duration_s, tau, to_parameters)

    def _group_tiles(self, parameters: Parameters, kernel: GemmCost) -> tuple[int, ...]:
        groups = tuple(int(x) for x in parameters["group_tiles"])
        if not groups or min(groups) < 1 or sum(groups) != kernel.grid.num_tiles:
            raise StrategyError(
                f"group_tiles sum to {sum(groups)} with a least of {min(groups, default=0)}; "
                f"expected positive groups that sum to the {kernel.grid.num_tiles} tiles of the output"
            )
        return groups

    def _group_bytes(
        self, gemm: GemmOp, kernel: GemmCost, swizzle: int, groups: tuple[int, ...]
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        starts = np.cumsum((0, *groups[:-1]))
        return np.add.reduceat(self._tile_bytes(gemm, kernel, swizzle), starts)

    def _tile_bytes(self, gemm: GemmOp, kernel: GemmCost, swizzle: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Bytes of each tile in execution order: ragged edges make some smaller."""
        elements = kernel.grid.tile_elements()[kernel.grid.execution_order(swizzle)]
        return elements.astype(np.float64) * dtype_bytes(gemm.dtype)


STRATEGY = WaveGroup()

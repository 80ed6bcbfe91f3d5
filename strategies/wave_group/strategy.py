"""Signalling and tile reordering: unmodified collectives start as soon as a group of a GEMM's waves is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

import numpy as np
from msgspec import Meta
from overlapsim.strategies.wave_group.groups import checked_groups, group_bytes, partitions

from overlapsim.cost.gemm import GemmCost
from overlapsim.plan import Finding
from overlapsim.schedule.reorder import MAP_KINDS, collective_map, even_counts, map_settings, scale_groups
from overlapsim.strategy.base import (
    YES,
    Applicability,
    Context,
    Parameters,
    ParameterSpace,
    Partition,
    Strategy,
    StrategyInfo,
    refuse_relation,
)
from overlapsim.strategy.tasks import COMM_PRIORITY, Gpu, Placement, Site
from overlapsim.units import ps_from_s
from overlapsim.workload.operators import CollectiveOp, GemmOp

MODES: Final = ("steal",)
"""Where the collective's SMs come from: taken as CTAs retire, as measured systems do.  ``reserve`` (a persistent kernel
that leaves them free for the whole run) is accepted as a parameter and not proposed: nobody has measured it."""
SWIZZLES: Final = (8, 4, 2, 1)
Size = Annotated[int, Meta(ge=1, le=65536)]
# More tiles are priced than planned for: the slower ones rarely win by their waves.
KERNELS: Final = 2


@dataclass(frozen=True)
class WaveGroupParameters:
    """Tile (BM, BN, BK), panel width of the swizzle, where the collective's SMs come from, tiles of each group."""

    tile: tuple[Size, Size, Size]
    swizzle: Literal[1, 2, 3, 4, 6, 8]
    sms: Literal["steal", "reserve"]
    group_tiles: tuple[int, ...]


class WaveGroup(Strategy):
    """One signalled GEMM; each group of consecutive waves is one contiguous buffer and one collective."""

    name = "wave_group"
    traits = frozenset({"whole_gemm"})
    parameter_type = WaveGroupParameters
    own_kernel = True
    info = StrategyInfo(
        summary="signalled, reordered GEMM; one library collective per group of waves",
        granularity="wave group",
        hides="the collective of finished waves under the rest of the GEMM",
        cost="SMs of the collective and of a waiting kernel, a templated kernel, a signal per group, a reorder map",
        frameworks=("FlashOverlap", "overlapsim.validate"),
        references=("Hong et al., EuroSys'26, doi 10.1145/3767295.3769370",),
    )

    def applies_to(self, context: Context) -> Applicability:
        """Refuse collectives without a map, a single rank, and GEMMs that are one wave on every tile."""
        pair = context.pair()
        if refusal := refuse_relation(pair, self.relations):
            return refusal
        gemm, collective = pair.gemm, pair.collective
        if collective.kind not in MAP_KINDS:
            return Applicability(False, (f"no reorder map for {collective.kind} (maps: {', '.join(MAP_KINDS)})",))
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
        """Leave open the tile, where the collective's SMs come from, and the split of the waves into groups."""
        pair = context.pair()
        gemm, collective = pair.gemm, pair.collective
        kernels = {kernel.tile: kernel for kernel in self._kernels(context, gemm)}
        num_sms = context.prices.cluster.device.num_sms
        swizzles = {tile: best_swizzle(kernel, num_sms) for tile, kernel in kernels.items()}

        def solve_for(point: Parameters) -> tuple[Partition, ...]:
            point = {"tile": point["tile"], "swizzle": swizzles[point["tile"]], "sms": point["sms"]}
            return partitions(context.prices, gemm, collective, kernels[point["tile"]], point)

        return ParameterSpace({"tile": tuple(kernels), "sms": MODES}, solve_for)

    def degenerate(self, context: Context) -> Parameters:
        """One group."""
        gemm = context.pair().gemm
        kernel = self._kernels(context, gemm)[0]
        whole = (kernel.grid.num_tiles,)
        return {"tile": kernel.tile, "swizzle": SWIZZLES[0], "sms": MODES[0], "group_tiles": whole}

    def extra_memory_bytes(self, context: Context, parameters: Parameters) -> float:
        """The reordered output is another buffer of C, with a counter for each group."""
        return context.pair().gemm.output_bytes + 4.0 * len(parameters["group_tiles"])

    def rewrite(self, context: Context, parameters: Parameters, site: Site) -> Placement:
        """Gate one collective a group behind the tiles of that group, on every rank that is modelled."""
        pair = context.pair()
        gemm, collective = pair.gemm, pair.collective
        prices = context.prices
        groups = checked_groups(parameters, prices.kernel_gemm(gemm, self.name, tuple(parameters["tile"])))
        # Equal ranks are folded onto one; with unbalanced routing each rank is there, and a group waits for the last.
        members = [site.new_group() for _ in groups] if collective.rank_rows else [-1] * len(groups)
        kernels: list[int] = []
        waiters: list[int] = []
        collectives: list[list[int]] = []
        for device, rows in enumerate(collective.rank_rows or (gemm.m,)):
            local = replace(gemm, m=rows)
            kernel = prices.kernel_gemm(local, self.name, tuple(parameters["tile"]))
            own = groups if rows == gemm.m else scale_groups(groups, kernel.grid.num_tiles)
            source, waiter, flows = self._add_rank(
                site.gpu(device), local, collective, kernel, own, members, parameters
            )
            kernels.append(source)
            waiters += waiter
            collectives.append(flows)
        whole = tuple(kernels)
        # What the GEMM waits for is waited for by what would else spin on an SM until the GEMM is there.
        return pair.placement(
            ((*whole, *waiters), whole),
            (tuple(flows[0] for flows in collectives), tuple(flows[-1] for flows in collectives)),
        )

    def hides(self, context: Context, parameters: Parameters) -> bool:
        """More than one group."""
        hides: bool = len(parameters["group_tiles"]) > 1
        return hides

    def settings(self, context: Context, parameters: Parameters) -> Mapping[str, Any]:
        """Return the kernel template, the groups and the map kind."""
        pair = context.pair()
        gemm, collective = pair.gemm, pair.collective
        kernel = context.prices.kernel_gemm(gemm, self.name, tuple(parameters["tile"]))
        groups = checked_groups(parameters, kernel)
        reserve = parameters["sms"] == "reserve" and len(groups) > 1
        bm, bn, bk = kernel.tile
        # Destinations are known at run time only; the plan's map spreads every rank's rows evenly.
        rows = [even_counts(count, collective.ranks)[0] for count in collective.rank_rows]
        reorder = collective_map(
            collective.kind,
            kernel.grid,
            groups,
            ranks=collective.ranks,
            swizzle=parameters["swizzle"],
            counts=rows or None,
        )
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
            # Only a persistent kernel can leave SMs free for the whole run.
            "persistent": reserve,
            "swizzle": parameters["swizzle"],
            "group_tiles": list(groups),
            "sm_reserve": context.prices.comm_sms(collective.kind) if reserve else 0,
            "comm_stream_priority": COMM_PRIORITY,
            **map_settings(reorder),
        }

    def findings(self, context: Context, parameters: Parameters) -> tuple[Finding, ...]:
        """Say what the kernel's price stands on, and that the consumer must read the reordered output."""
        return (
            *context.prices.kernel_findings(self.name),
            Finding(
                "consumer_reorders",
                "wave_group leaves the collective's output in execution order of tiles; the next element-wise kernel "
                "must read through the map (a fused RMSNorm took 7-10 % longer in the published measurements, not "
                "charged here)",
            ),
        )

    def _kernels(self, context: Context, gemm: GemmOp) -> list[GemmCost]:
        """Candidate kernels, fastest first."""
        prices = context.prices
        kernels = [prices.kernel_gemm(gemm, self.name, tile) for tile in prices.kernel_tiles(gemm, self.name)]
        return sorted(kernels, key=lambda kernel: kernel.duration_s)[:KERNELS]

    def _add_rank(
        self,
        gpu: Gpu,
        gemm: GemmOp,
        collective: CollectiveOp,
        kernel: GemmCost,
        groups: tuple[int, ...],
        members: Sequence[int],
        parameters: Parameters,
    ) -> tuple[int, list[int], list[int]]:
        """Add one rank's tasks: the GEMM, the kernel that waits for its first group if there is one, collectives."""
        prices, builder = gpu.prices, gpu.builder
        comm_sms = prices.comm_sms(collective.kind)
        # One group waits for the whole kernel anyway, so nothing is gained by reserving SMs for it.
        reserve = parameters["sms"] == "reserve" and len(groups) > 1
        source = gpu.add_gemm(gemm, kernel, sms=gpu.num_sms - comm_sms if reserve else gpu.num_sms)
        wait_ps = ps_from_s(prices.signal_wait_s)
        sizes = group_bytes(gemm, kernel, parameters["swizzle"], groups)
        waiters: list[int] = []
        flows: list[int] = []
        for number, (done, size) in enumerate(zip(np.cumsum(groups), sizes, strict=True), start=1):
            part = replace(collective, size_bytes=max(1.0, float(size)), rank_rows=())
            label = f"{gemm.pass_} {collective.kind} group {number}/{len(groups)}"
            if not reserve and done and len(groups) > 1:
                waiter = gpu.add_waiter(source, int(done), op=gemm.name, tag=f"wait for group {number}/{len(groups)}")
                waiters = waiters or [waiter]
            task = gpu.add_collective(part, sms=comm_sms, group=members[number - 1], tag=label)
            if (reserve or len(groups) == 1) and done:
                builder.add_edge(source, task, src_units=int(done), lag_ps=wait_ps)
                if flows:
                    # The next group's waiting kernel is launched behind this collective and pays the same poll.
                    builder.add_edge(flows[-1], task, lag_ps=wait_ps)
            flows.append(task)
        return source, waiters, flows


def best_swizzle(kernel: GemmCost, num_sms: int) -> int:
    """Panel width whose tiles in flight share the most rows of A and columns of B, hence read least from HBM."""

    def traffic(swizzle: int) -> int:
        width = kernel.grid.panel_width(swizzle)
        return -(-num_sms // width) * kernel.grid.bm + width * kernel.grid.bn

    return min(SWIZZLES, key=traffic)


STRATEGY = WaveGroup()

"""From a priced operator to tasks: the few ways strategies put work on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from overlapsim.cost.base import Demand
from overlapsim.cost.gemm import GemmCost
from overlapsim.cost.prices import PriceBook
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.units import ps_from_s
from overlapsim.workload.operators import CollectiveOp, GemmOp

COMM_PRIORITY: Final = 5
"""Stream priority of communication: above compute, as overlap implementations create their streams."""


class Gpu:
    """One modelled GPU in a program under construction; symmetric ranks are folded onto device 0.

    Attributes
    ----------
    pool, compute_stream, comm_stream : numbers in the program
    """

    def __init__(self, builder: ProgramBuilder, prices: PriceBook, device: int = 0) -> None:
        self.builder = builder
        self.prices = prices
        self.device = device
        self.num_sms = prices.cluster.device.num_sms
        self.pool = builder.add_pool(self.num_sms, derate=prices.overlap.gemm_speed, name=f"gpu{device}", device=device)
        self.compute_stream = builder.add_stream(name="compute")
        self.comm_stream = builder.add_stream(priority=COMM_PRIORITY, name="comm")

    def add_gemm(self, op: GemmOp, cost: GemmCost, *, sms: int | None = None, tag: str = "") -> int:
        """Add the GEMM kernel, one unit a CTA, on at most `sms` SMs (all by default)."""
        # CTAs that share a tile run side by side: together they take what the kernel takes.
        ctas = cost.grid.num_tiles * cost.split_k
        cta_s = cost.tile_time_s if cost.split_k == 1 else cost.duration_s / -(-ctas // self.num_sms)
        # Costs name the HBM of device 0; the kernel reads its own.
        demands = (Demand(d.resource.replace("[0]", f"[{self.device}]"), d.amount, d.capacity) for d in cost.demands)
        return self.builder.add_blocks(
            stream=self.compute_stream,
            pool=self.pool,
            units=ctas,
            unit_ps=ps_from_s(cta_s),
            sm=self.num_sms if sms is None else sms,
            demands=self._per_unit(demands, ctas),
            op=op.name,
            tag=tag or f"{op.pass_} gemm",
        )

    def add_collective(
        self, op: CollectiveOp, *, sms: int, stream: int | None = None, group: int = -1, tag: str = ""
    ) -> int:
        """Add a collective that holds `sms` SMs; members of a `group` start and end together."""
        duration_s, demands = self.prices.flow(op, self.device)
        return self.builder.add_flow(
            stream=self.comm_stream if stream is None else stream,
            pool=self.pool,
            units=1,
            unit_ps=ps_from_s(duration_s),
            sm=sms,
            group=group,
            demands=self._per_unit(demands, 1),
            op=op.name,
            tag=tag or f"{op.pass_} {op.kind}",
        )

    def add_waiter(self, source: int, units: int, *, op: str, tag: str) -> int:
        """Add the kernel that spins on an SM until `units` of `source` are done; releasing costs the signal's time."""
        waiter = self.builder.add_blocks(
            stream=self.comm_stream,
            pool=self.pool,
            units=1,
            unit_ps=ps_from_s(self.prices.signal_wait_s),
            sm=1,
            op=op,
            tag=tag,
        )
        self.builder.add_edge(source, waiter, src_units=units, dst_unit=0)
        return waiter

    def _per_unit(self, demands: Iterable[Demand], units: int) -> dict[int, float]:
        return {self.builder.add_resource(d.capacity, d.resource): d.amount / units for d in demands}

"""From a priced operator to tasks: the few ways strategies put work on a GPU."""

from __future__ import annotations

from collections.abc import Iterable

from overlapsim.cost.base import Cost, Demand
from overlapsim.cost.gemm import GemmCost
from overlapsim.cost.prices import PriceBook
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.units import ps_from_s
from overlapsim.workload.operators import CollectiveOp, GemmOp

COMM_PRIORITY = 5
"""Stream priority of communication: above compute, as overlap implementations create their streams."""


class Gpu:
    """One modelled GPU in a program under construction: symmetric ranks are folded onto it.

    Attributes
    ----------
    pool, compute_stream, comm_stream : numbers in the program
    """

    def __init__(self, builder: ProgramBuilder, prices: PriceBook) -> None:
        self.builder = builder
        self.prices = prices
        self.num_sms = prices.cluster.device.num_sms
        self.pool = builder.add_pool(self.num_sms, name="gpu0", device=0)
        self.compute_stream = builder.add_stream(name="compute")
        self.comm_stream = builder.add_stream(priority=COMM_PRIORITY, name="comm")

    def add_gemm(self, op: GemmOp, cost: GemmCost, *, sms: int | None = None) -> int:
        """Add the GEMM kernel, one unit a CTA, on at most `sms` SMs (all by default)."""
        ctas = cost.grid.num_tiles * cost.split_k
        return self.builder.add_blocks(
            stream=self.compute_stream,
            pool=self.pool,
            units=ctas,
            unit_ps=ps_from_s(cost.tile_time_s),
            sm=self.num_sms if sms is None else sms,
            demands=self._per_unit(cost.demands, ctas),
            op=op.name,
            tag=f"{op.pass_} gemm",
        )

    def add_collective(
        self, op: CollectiveOp, cost: Cost, *, sms: int, stream: int | None = None, extra_s: float = 0.0, tag: str = ""
    ) -> int:
        """Add a collective that holds `sms` SMs; `extra_s` is a fixed cost inside it (launch, poll)."""
        return self.builder.add_flow(
            stream=self.comm_stream if stream is None else stream,
            pool=self.pool,
            units=1,
            unit_ps=ps_from_s(cost.duration_s + extra_s),
            sm=sms,
            demands=self._per_unit(cost.demands, 1),
            op=op.name,
            tag=tag or f"{op.pass_} {op.kind}",
        )

    def _per_unit(self, demands: Iterable[Demand], units: int) -> dict[int, float]:
        return {self.builder.add_resource(d.capacity, d.resource): d.amount / units for d in demands if d.amount > 0}

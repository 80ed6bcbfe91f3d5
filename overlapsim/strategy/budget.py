"""One budget of SMs: what collectives on different streams may hold at once, and what is left for GEMMs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from overlapsim.cost.prices import PriceBook
from overlapsim.plan import Finding
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import FLOW
from overlapsim.strategy.base import YES, Applicability
from overlapsim.workload.operators import GemmOp, OperatorGraph


@dataclass(frozen=True)
class SmBudget:
    """SMs of one GPU that communication may hold.

    Attributes
    ----------
    held : most SMs that a collective of each stream holds, by stream name
    beside_compute : those that may be held while a GEMM runs: of all streams but those that GEMMs run on
    num_sms : of the device
    """

    held: Mapping[str, int]
    beside_compute: int
    num_sms: int

    @property
    def total(self) -> int:
        """SMs that all streams may hold together."""
        return sum(self.held.values())

    def verdict(self) -> Applicability:
        """Refusal, with the cause ``contention``, where streams together may ask for more SMs than there are."""
        if self.total <= self.num_sms:
            return YES
        shares = ", ".join(f"{name} {sms}" for name, sms in sorted(self.held.items()))
        reason = (
            f"collectives of different streams may hold {self.total} SMs at once ({shares}); the GPU has "
            f"{self.num_sms}: give them fewer, or put some on one stream"
        )
        return Applicability(False, (reason,), "contention")

    def findings(self, graph: OperatorGraph, prices: PriceBook) -> tuple[Finding, ...]:
        """Name the GEMMs whose tiles are one wave on all SMs and two on what communication leaves."""
        left = self.num_sms - self.beside_compute
        tiles = {f"{op.name} {op.pass_}": prices.vendor_gemm(op).grid.num_tiles for op in graph.of_type(GemmOp)}
        losing = [name for name, count in tiles.items() if left < count <= self.num_sms]
        if not losing:
            return ()
        message = (
            f"{', '.join(losing)} would be one wave on {self.num_sms} SMs and have {left} while every stream "
            "communicates: a second wave doubles their time there"
        )
        return (Finding("below_one_wave", message),)


def sm_budget(builder: ProgramBuilder, pool: int, num_sms: int) -> SmBudget:
    """Read from the tasks so far what each stream's collectives hold in one GPU's pool.

    Streams are charged together whatever their order: two of them that wait
    for each other all the time are charged too much, never too little.
    """
    kinds, pools, sms, streams = (builder.column(name) for name in ("kind", "pool", "sm", "stream"))
    names = builder.stream_names()
    held: dict[int, int] = {}
    computing: set[int] = set()
    for task, kind in enumerate(kinds):
        if pools[task] != pool:
            continue
        if kind == FLOW:
            held[streams[task]] = max(held.get(streams[task], 0), sms[task])
        elif sms[task] > 1:
            computing.add(streams[task])
    beside = sum(count for stream, count in held.items() if stream not in computing)
    return SmBudget({names[stream]: count for stream, count in held.items() if count}, beside, num_sms)

"""The one place where strategies ask what something costs: model, measured times and 5 % / 95 % ends together."""

from __future__ import annotations

from overlapsim.cost.base import Cost
from overlapsim.cost.beliefs import curve_findings, kernel_finding, machine_findings, slow_findings
from overlapsim.cost.collective_prices import CollectivePrices
from overlapsim.cost.gemm_prices import GemmPrices
from overlapsim.cost.kernels import work_cost
from overlapsim.cost.launch_prices import LaunchPrices
from overlapsim.plan import Finding
from overlapsim.workload.operators import CollectiveOp, GemmOp, KernelOp, Operator, OperatorGraph


class PriceBook(GemmPrices, CollectivePrices, LaunchPrices):
    """Prices on one machine for one operator pair, with what the user measured of it: see `price_state.PriceState`.

    Examples
    --------
    ``book.at("gemm", "high").vendor_gemm(op)`` is the same kernel at the 95 % end of its spread.
    """

    def kernel(self, op: KernelOp) -> Cost:
        """Cost of attention, a memory-bound operator, experts or timed work on all SMs.

        Raises
        ------
        WorkloadError
            If the work is of no type that has a model.
        """
        key = ("kernel", op.work)
        if key not in self.models:
            self.models[key] = work_cost(op.work, self._device)
        cost: Cost = self.models[key]
        factor = self.factors.get(cost.family, 1.0) * self._end(cost.family, cost.spread)
        return cost if factor == 1.0 else cost.scaled(factor)

    def serial_s(self, graph: OperatorGraph) -> float:
        """Time of a graph's operators one after another, with the vendor's kernels."""
        return sum(self.operator_s(op) for op in graph.operators)

    def operator_s(self, op: Operator) -> float:
        """Time of one operator as the library runs it, alone on the GPU."""
        if isinstance(op, GemmOp):
            return self.vendor_gemm(op).duration_s
        return self.collective(op).duration_s if isinstance(op, CollectiveOp) else self.kernel(op).duration_s

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was assumed rather than measured, whatever the strategy."""
        measured = self.gemm_time_s is not None
        if ("findings", measured) not in self.models:
            self.models["findings", measured] = machine_findings(self.cluster, measured)
        found = list(self.models["findings", measured])
        if self.gemm is not None and self.gemm_time_s is not None:
            found += slow_findings(self.gemm_time_s / self._vendor_model(self.gemm).duration_s)
        if self.collective_sms is not None and self.collective_sms < self.overlap.comm_sms:
            message = (
                f"a collective holds {self.collective_sms} SMs as asked, at the speed of {self.overlap.comm_sms}: as "
                "another algorithm or registered buffers may reach"
            )
            found.append(Finding("comm_sms_as_asked", message))
        if self.kind is not None and self.ranks > 1:
            found += curve_findings(self._library(self.kind, self.ranks), self.gemm)
        return tuple(found)

    def kernel_findings(self, strategy: str) -> tuple[Finding, ...]:
        """What was assumed of the strategy's own kernel; nothing if it was measured."""
        if strategy in self.kernel_time_s or self.vendor_kernels:
            return ()
        return (kernel_finding(self._device, strategy),)

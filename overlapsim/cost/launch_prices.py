"""What starting and waiting cost: launches, flags, barriers, signals; and a plain pass over memory."""

from __future__ import annotations

from typing import Final

from overlapsim.cost.base import Demand, Spread, hbm_name, hbm_rate
from overlapsim.cost.decomposed import STEP_S
from overlapsim.cost.price_state import PriceState
from overlapsim.cost.stores import FLAG_S

# A poll and a launch: hosts and drivers differ by about this much.
LAUNCH: Final = Spread(0.5, 2.0, "prior")


class LaunchPrices(PriceState):
    """Prices of launches and signals; `prices.PriceBook` has them."""

    @property
    def launch_s(self) -> float:
        """Host time of one launch; 0 where the host runs ahead."""
        if self.stack is None or self.no_latency:
            return 0.0
        return self.stack.host_s * self._factor("launch", self.stack.spread)

    @property
    def flag_s(self) -> float:
        """From a flag in HBM to an SM that waits for it."""
        return 0.0 if self.no_latency else FLAG_S * self._factor("launch", LAUNCH)

    @property
    def barrier_s(self) -> float:
        """Time until all ranks know of each other: the base of a collective."""
        return 0.0 if self.no_latency else self.cluster.collectives.base_s * self._factor("launch", LAUNCH)

    @property
    def signal_wait_s(self) -> float:
        """From the last tile of a group to the start of its collective."""
        if self.no_latency:
            return 0.0
        return self._device.kernels.signal_wait_s * self._factor("launch", LAUNCH)

    @property
    def step_gap_s(self) -> float:
        """What each further step of a GEMM decomposed by ranks loses between two pieces (`decomposed`)."""
        end = self.ends.get("launch")
        step_s = STEP_S.typical if end is None else STEP_S.low if end == "low" else STEP_S.high
        return step_s * self.factors.get("launch", 1.0)

    def hbm_pass(self, size_bytes: float) -> tuple[float, tuple[Demand, ...]]:
        """Duration and demand of a plain pass over memory: bytes read and written, at the rate that kernels reach."""
        launch_s = 0.0 if self.no_latency else self._device.kernels.gemm_launch_s * self._factor("launch", LAUNCH)
        rate = hbm_rate(self._device)
        return launch_s + size_bytes / rate, (Demand(hbm_name(0), size_bytes, rate),)

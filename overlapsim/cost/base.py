"""What every cost function returns: a duration, what it takes from shared resources, and how far to trust it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from overlapsim.hardware.profile import DeviceSpec, Source

Family = Literal["gemm", "kernel", "attention", "memory", "collective", "launch"]
"""What moves together when ranges are made; `kernel` is a kernel's time over the vendor's, which `gemm` moves."""


@dataclass(frozen=True)
class Spread:
    """Central 90 % interval of measured over predicted, for one cost family and regime.

    Attributes
    ----------
    low, high : multipliers, ``low <= 1 <= high``
    origin : "residual" (from points not fitted), "measured" (the point itself was measured) or "prior"
    """

    low: float
    high: float
    origin: Literal["residual", "measured", "prior"]


# Repeats of one case in the FlashOverlap artifact differ by 1 % on average and 4 % at most
# (hwprofiles/SOURCES.md, FLASH): a measured time carries that much.
MEASURED: Final = Spread(0.98, 1.02, "measured")


@dataclass(frozen=True)
class Demand:
    """What a task takes from one shared resource over its whole life.

    Attributes
    ----------
    resource : name of a link or of HBM, as ``hardware/topology.py`` names it
    amount : bytes (the whole task, not per unit)
    capacity : units/s of that resource
    """

    resource: str
    amount: float
    capacity: float


@dataclass(frozen=True)
class Cost:
    """Time of one piece of work alone on its machine.

    Attributes
    ----------
    duration_s : uncontended time
    sm : SMs held while it runs (0 for none)
    demands : totals on shared resources
    family : which spread applies when ranges are made
    spread : central 90 % interval of the duration, as multipliers
    source : which layer the number came from
    in_range : True when the shape lies inside what was measured
    """

    duration_s: float
    sm: int
    family: Family
    spread: Spread
    source: Source
    demands: tuple[Demand, ...] = ()
    in_range: bool = True

    def scaled(self, factor: float) -> Cost:
        """The same work taking `factor` times as long (used for 5 % / 95 % runs)."""
        return replace(self, duration_s=self.duration_s * factor)


def hbm_name(device: int) -> str:
    """Resource name of the memory of one device; 0 is the modelled one where symmetric ranks are folded."""
    return f"hbm[{device}]"


def hbm_rate(device: DeviceSpec) -> float:
    """Bytes/s that kernels reach: the capacity of a device's HBM as a shared resource."""
    return device.hbm_bandwidth_bytes_per_s * device.kernels.hbm_efficiency

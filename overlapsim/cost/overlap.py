"""What a kernel and a collective cost each other when they share a GPU: three constants and their source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from overlapsim.cost.base import hbm_name, hbm_rate
from overlapsim.cost.collective import collective_cost
from overlapsim.errors import ProfileError
from overlapsim.hardware.profile import Cluster, Source
from overlapsim.workload.operators import CollectiveOp

FIT: Final = "overlap.signal"
"""Key of the fit that replaces the priors (hwprofiles/fits/overlap/)."""

# Fitted on the A800 rows of the FlashOverlap artifact (hwprofiles/fits/overlap/a800-sxm8.yaml), taken over for
# machines that have no overlapped measurements of their own: the store of a wave as it is, the loss of speed in
# proportion to the share of HBM that the collective draws (0.08 at the A800's 0.26).
PRIOR_EPILOGUE_FACTOR: Final = 1.0
PRIOR_LOSS_PER_HBM_SHARE: Final = 0.31
# Interference studies report mean slow-downs of 19 % and 40 % at most (hwprofiles/SOURCES.md, INTERFERE).
LEAST_GEMM_SPEED: Final = 0.7
# A size at which every collective of today has reached its rate.
LARGE_BYTES: Final = 2.0**28


@dataclass(frozen=True)
class OverlapSpec:
    """Constants of a GEMM and a collective running together.

    Attributes
    ----------
    comm_sms : SMs (CTAs) that a reducing collective holds while it runs
    gemm_speed : speed of a GEMM beside a moving collective over its speed alone, in (0, 1]: L2 and HBM shared
    epilogue_factor : a signalled kernel stores a wave's tiles in this many times the time that HBM needs for them;
        its CTAs have an SM each, so nothing computes meanwhile
    source : a fit, or the prior taken from another machine's
    loss_per_hbm_share : what a kernel and a transfer that holds no SM (copy engines, stores into peers' memory) lose of
        their speed beside each other, for each share of HBM's rate that the transfer draws
    """

    comm_sms: int
    gemm_speed: float
    epilogue_factor: float
    source: Source
    loss_per_hbm_share: float = PRIOR_LOSS_PER_HBM_SHARE

    def speed_beside(self, hbm_share: float) -> float:
        """Speed of a kernel on all SMs beside a transfer that draws `hbm_share` of HBM's rate.

        Examples
        --------
        Copies at 369 GB/s read and write an H100's memory at a quarter of what kernels reach:

        >>> spec = OverlapSpec(24, 0.92, 1.0, Source("prior", "FIT-FLASH", "low"))
        >>> round(spec.speed_beside(0.25), 3), spec.speed_beside(1.0)
        (0.922, 0.7)
        """
        return max(LEAST_GEMM_SPEED, 1 - self.loss_per_hbm_share * hbm_share)

    def __post_init__(self) -> None:
        if not (0 < self.gemm_speed <= 1 and self.epilogue_factor >= 0 and self.comm_sms >= 0):
            raise ProfileError(
                f"overlap constants are gemm_speed {self.gemm_speed}, epilogue_factor {self.epilogue_factor}, comm_sms "
                f"{self.comm_sms}; expected a speed in (0, 1], a factor >= 0 and SMs >= 0"
            )


def overlap_spec(cluster: Cluster) -> OverlapSpec:
    """Constants of a cluster: its own fit, else priors scaled to its links and HBM.

    Raises
    ------
    ProfileError
        If a fit's values are outside their physical range.
    """
    fit = cluster.fits.get(FIT)
    if fit is not None:
        values: Mapping[str, float] = fit.parameters
        return OverlapSpec(round(values["comm_sms"]), values["gemm_speed"], values["epilogue_factor"], fit.source)
    speed = max(LEAST_GEMM_SPEED, 1 - PRIOR_LOSS_PER_HBM_SHARE * hbm_share(cluster))
    return OverlapSpec(cluster.collectives.sms, speed, PRIOR_EPILOGUE_FACTOR, Source("prior", "FIT-FLASH", "low"))


def hbm_share(cluster: Cluster) -> float:
    """Share of a GPU's HBM rate that a large all-reduce inside one node draws."""
    ranks = cluster.node.num_devices
    if ranks < 2:
        return 0.0
    # Links of one node: what others a job has does not count, and is not built.
    cost = collective_cost(CollectiveOp("all_reduce", LARGE_BYTES, ranks), cluster.with_nodes(1))
    drawn = sum(demand.amount for demand in cost.demands if demand.resource == hbm_name(0))
    return drawn / cost.duration_s / hbm_rate(cluster.device)

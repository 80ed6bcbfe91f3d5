"""What a price book is made of: machine, measured times, ends of spreads and what-ifs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

from overlapsim.cost.base import Family, Spread
from overlapsim.cost.gemm import check_measured, checked_tile, refuse_oversized
from overlapsim.cost.group_collective import GroupPlace
from overlapsim.cost.launch import LaunchStack
from overlapsim.cost.overlap import OverlapSpec, overlap_spec
from overlapsim.errors import UsageError
from overlapsim.hardware.profile import Cluster, CurveTable, DeviceSpec
from overlapsim.workload.operators import CollectiveKind, GemmOp

End = Literal["low", "high"]


@dataclass(frozen=True, eq=False)
class PriceState:
    """The fields of a `prices.PriceBook`, their checks, and the books that differ from it in one of them.

    A measured time replaces the model for the GEMM it belongs to, and scales
    the model for other shapes (chunks) and other tiles: model ratios are
    better known than model times.

    Attributes
    ----------
    cluster, ranks : machine, and ranks of the collective that `curve` belongs to
    gemm : the GEMM that `gemm_time_s`, `kernel_time_s` and `tile` belong to; needed with any of them
    kind : the collective that `curve` belongs to; needed with it
    gemm_time_s : vendor kernel alone on all SMs
    kernel_time_s : a strategy's own kernel alone on all SMs, by strategy name
    curve : measured sizes and times, in place of the cluster's
    tile : (BM, BN) or (BM, BN, BK) of the measured kernels, and of every strategy's kernel
    collective_sms : SMs (CTAs) that a collective holds; the cluster's when None
    overlap_constants : what a GEMM and a collective cost each other; the cluster's when None
    groups : where a layout's groups lie, by the name that collectives give (`CollectiveOp.group`); a collective whose
        group is not among them runs over the first ranks
    factors : multiplier of all times of a family
    ends : families taken at the low or high end of their spread
    stack : how the host launches; None: it runs ahead, or the sequence is a CUDA graph
    vendor_kernels : price every strategy's kernel as fast as the vendor's (what if)
    no_latency : collectives cost their bytes alone, signals and launches nothing (what if)

    Raises
    ------
    UsageError
        If a measured time lacks its operator, or is below what the device can do.
    StrategyError
        If `tile` is larger than the GEMM's output.
    """

    cluster: Cluster
    ranks: int
    _: KW_ONLY
    gemm: GemmOp | None = None
    kind: CollectiveKind | None = None
    gemm_time_s: float | None = None
    kernel_time_s: Mapping[str, float] = field(default_factory=dict)
    curve: CurveTable | None = None
    tile: Sequence[int] | None = None
    collective_sms: int | None = None
    overlap_constants: OverlapSpec | None = None
    groups: Mapping[str, GroupPlace] = field(default_factory=dict)
    factors: Mapping[Family, float] = field(default_factory=dict)
    ends: Mapping[Family, End] = field(default_factory=dict)
    stack: LaunchStack | None = None
    vendor_kernels: bool = False
    no_latency: bool = False
    models: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Model results of this cluster: books made from one another (ends, what-ifs) share them, and a sweep may hand one
    dictionary to all its books."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise UsageError(f"prices for {self.ranks} ranks; expected at least 1")
        if self.collective_sms is not None and not 0 <= self.collective_sms <= self._device.num_sms:
            raise UsageError(
                f"a collective is to hold {self.collective_sms} SMs; {self._device.name} has {self._device.num_sms}: "
                "expected 0 to that many"
            )
        if self.curve is not None and self.kind is None:
            raise UsageError("a curve is given without the collective it measured; expected kind with curve")
        if self.gemm is None:
            if self.gemm_time_s is not None or self.kernel_time_s or self.tile is not None:
                raise UsageError("a GEMM time or tile is given without its GEMM; expected gemm with it")
            return
        if self.gemm_time_s is not None:
            check_measured(self.gemm, self._device, self.gemm_time_s, "vendor GEMM time (--gemm-time)")
        for strategy, measured_s in self.kernel_time_s.items():
            check_measured(self.gemm, self._device, measured_s, f"kernel time of {strategy} (--kernel-time)")
        if self.tile is not None:
            checked_tile(self.gemm, self.tile, self._device)
            refuse_oversized(self.gemm, self.tile)

    def scaled(self, family: Family, factor: float) -> Self:
        """The same prices with every time of `family` taking `factor` times as long."""
        return replace(self, factors={**self.factors, family: self.factors.get(family, 1.0) * factor})

    def at(self, family: Family, end: End) -> Self:
        """The same prices with `family` at the low or high end of its spread, but never below what hardware allows."""
        return replace(self, ends={**self.ends, family: end})

    def with_comm_sms(self, sms: int) -> Self:
        """Let a collective hold `sms` SMs at unchanged speed, to see whether the SMs it takes decide."""
        return replace(self, collective_sms=sms)

    def with_vendor_kernels(self) -> Self:
        """Price every strategy's kernel as fast as the vendor's, to see whether slower kernels decide."""
        return replace(self, vendor_kernels=True)

    def without_latency(self) -> Self:
        """Price collectives at the best rate seen and signals at nothing, to see whether latency decides."""
        return replace(self, no_latency=True)

    @cached_property
    def nominal(self) -> Self:
        """The same prices of healthy ranks and at no end of a spread: whether a strategy applies is asked of these.

        A strategy was chosen once, for all ranks; it does not go away where one is slow, or at the end of a range.
        """
        groups = {name: replace(place, slower=1.0) for name, place in self.groups.items()}
        if not self.factors and not self.ends and groups == self.groups:
            return self
        return replace(self, groups=groups, factors={}, ends={})

    @cached_property
    def overlap(self) -> OverlapSpec:
        """What a GEMM and a collective cost each other on this machine."""
        if self.overlap_constants is not None:
            return self.overlap_constants
        if "overlap" not in self.models:
            self.models["overlap"] = overlap_spec(self.cluster)
        spec: OverlapSpec = self.models["overlap"]
        return spec

    @property
    def _device(self) -> DeviceSpec:
        return self.cluster.device

    def _end(self, family: Family, spread: Spread) -> float:
        end = self.ends.get(family)
        return 1.0 if end is None else (spread.low if end == "low" else spread.high)

    def _factor(self, family: Family, spread: Spread) -> float:
        return self.factors.get(family, 1.0) * self._end(family, spread)

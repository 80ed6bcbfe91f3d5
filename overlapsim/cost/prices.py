"""The one place where strategies ask what something costs: model, measured times and 5 % / 95 % ends together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal

from numpy.typing import ArrayLike

from overlapsim.cost.base import MEASURED, Cost, Demand, Family, Spread, hbm_name, hbm_rate
from overlapsim.cost.beliefs import curve_findings, kernel_finding, machine_findings, slow_findings
from overlapsim.cost.collective import CollectiveModel, busbw_factor
from overlapsim.cost.curve import Curve, FloatArray
from overlapsim.cost.decomposed import STEP_S
from overlapsim.cost.gemm import (
    GemmCost,
    Tile,
    check_measured,
    checked_tile,
    gemm_cost,
    lower_bound_s,
    refuse_oversized,
    template_gemm_cost,
)
from overlapsim.cost.group_collective import GroupModel, GroupPlace
from overlapsim.cost.kernels import work_cost
from overlapsim.cost.launch import LaunchStack
from overlapsim.cost.overlap import OverlapSpec, overlap_spec
from overlapsim.cost.sm_feed import fewer_sms_s, sm_bytes_per_s
from overlapsim.cost.stores import FLAG_S, Stores, peer_stores
from overlapsim.cost.transport import TransportModel, engine_sms, transport_refusal
from overlapsim.errors import UsageError
from overlapsim.hardware.profile import Cluster, CurveTable, DeviceSpec
from overlapsim.plan import Finding
from overlapsim.units import dtype_bytes
from overlapsim.workload.operators import (
    REDUCING,
    CollectiveKind,
    CollectiveOp,
    Engine,
    GemmOp,
    KernelOp,
    Operator,
    OperatorGraph,
)

End = Literal["low", "high"]
AnyModel = CollectiveModel | TransportModel | GroupModel
# Time of a piece of a GEMM, or of another tile, over the whole's: what models of neighbouring shapes differ by
# (hwprofiles/SOURCES.md, AIC-GEMM), and the fitted chunked rows of the FlashOverlap artifact.
PIECES: Final = Spread(0.96, 1.06, "residual")
# A signalled kernel over the vendor's: fitted wave_group rows of the same artifact, one shape left out.
TEMPLATE: Final = Spread(0.95, 1.08, "residual")
# Systems run by others than their authors: on the mean of nine reduce-scatters of an A800 a fused kernel took 1.27 to
# 1.31 times as long as the model says, a GEMM decomposed by ranks 1.19 to 1.21 times (hwprofiles/SOURCES.md,
# FLASH-FIG9), while authors' and maintainers' own figures agree with the model. Nothing that is known of stores,
# copies, barriers and launches explains the difference, so until a time is measured it stays in the range.
FUSED: Final = Spread(0.95, 1.30, "prior")
DECOMPOSED: Final = Spread(0.95, 1.20, "prior")
# Stores at 76 to 78 % of the link over what sheet and protocol allow, and below where ranks meet at one port.
STORES: Final = Spread(0.9, 1.25, "prior")
EXACT: Final = Spread(1.0, 1.0, "measured")
# A poll and a launch: hosts and drivers differ by about this much.
LAUNCH: Final = Spread(0.5, 2.0, "prior")


@dataclass(frozen=True, eq=False)
class PriceBook:
    """Prices on one machine for one operator pair, with what the user measured of it.

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

    Examples
    --------
    ``book.at("gemm", "high").vendor_gemm(op)`` is the same kernel at the 95 % end of its spread.
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

    # GEMMs

    def vendor_gemm(self, op: GemmOp) -> GemmCost:
        """Cost of the vendor library's kernel on all SMs."""
        key = ("vendor", op)
        if key not in self._gemms:
            own = self.gemm is None or self._is_measured(op)
            self._gemms[key] = self._vendor_gemm(op, EXACT if own else PIECES)
        return self._gemms[key]

    def shard_gemm(self, op: GemmOp) -> GemmCost:
        """Cost of `vendor_gemm` on one rank's rows, with the range of GEMMs that were decomposed by ranks."""
        key = ("shard", op)
        if key not in self._gemms:
            self._gemms[key] = self._vendor_gemm(op, DECOMPOSED)
        return self._gemms[key]

    def _vendor_gemm(self, op: GemmOp, kernel: Spread) -> GemmCost:
        own = self.gemm is None or self._is_measured(op)
        if self.gemm_time_s is not None and own:
            cost = gemm_cost(op, self._device, tile=self.tile, measured_s=self.gemm_time_s)
        else:
            cost = self._not_below_bound(op, self._vendor_model(op).scaled(self._vendor_ratio))
        return self._ends(op, cost, self._vendor_spread(cost), kernel)

    def kernel_gemm(
        self, op: GemmOp, strategy: str, tile: Sequence[int] | None = None, *, slowdown: float | None = None
    ) -> GemmCost:
        """Cost of the strategy's own kernel on all SMs; its ``tile_time_s`` holds on fewer SMs too.

        Measured where the user measured it.  Else the vendor's time on this
        shape, ``template_slowdown`` times, for the fastest tile and longer by
        the model's ratio for others, plus the store of each wave, which
        nothing hides in a signalled kernel.

        Parameters
        ----------
        op : shape
        strategy : name in the registry, the key of ``kernel_time_s``
        tile : the kernel's; the book's, or else the fastest of the device's, when None
        slowdown : of a template of another family than the signalled one: its time over the vendor's, stores included

        Raises
        ------
        StrategyError
            If the tile cannot be used with this output.
        """
        tile = self._kernel_tile(op) if tile is None else checked_tile(op, tile, self._device)
        key = (strategy, op, tile, slowdown)
        if key not in self._gemms:
            self._gemms[key] = self._kernel_gemm(op, strategy, tile, slowdown)
        return self._gemms[key]

    def _kernel_gemm(self, op: GemmOp, strategy: str, tile: Tile, slowdown: float | None) -> GemmCost:
        if self.vendor_kernels:
            vendor = self.vendor_gemm(op)
            cost = self._template_model(op, tile)
            return cost.scaled(vendor.duration_s / cost.duration_s)
        measured_s = self.kernel_time_s.get(strategy)
        if measured_s is not None and self._is_measured(op) and tile[:2] == self._kernel_tile(op)[:2]:
            cost = template_gemm_cost(op, self._device, tile=tile, measured_s=measured_s)
            return self._ends(op, cost, EXACT, cost.spread)
        model = self._template_model(op, tile)
        if measured_s is not None:
            assert self.gemm is not None
            reference = self._template_model(self.gemm, self._kernel_tile(self.gemm))
            cost = model.scaled(measured_s / reference.duration_s)
            return self._ends(op, self._not_below_bound(op, cost), EXACT, PIECES)
        signalled_s = self._unmeasured_kernel_s(op, model)
        if slowdown is None:
            cost = model.scaled(signalled_s / model.duration_s)
            cost = cost.scaled(1 + self._epilogue_s(op, cost) / cost.tile_time_s)
        else:
            cost = model.scaled(signalled_s * slowdown / self._device.kernels.template_slowdown / model.duration_s)
            # A ratio of whole kernels must not make one CTA faster than its SM.
            least_s = 2.0 * tile[0] * tile[1] * op.k / self._device.peak(op.dtype, op.accumulate) * self._device.num_sms
            cost = cost.scaled(max(1.0, least_s / cost.tile_time_s))
        spread = self._template_spread if slowdown is None else FUSED
        return self._ends(op, self._not_below_bound(op, cost), self._vendor_spread(cost), spread)

    def kernel_tiles(self, op: GemmOp, strategy: str) -> tuple[Tile, ...]:
        """Tiles that the strategy's kernel may have: one if given or measured, else the device's that fit in C.

        Where none fits, the smallest: its CTAs overhang C.  Tiles that differ in BK alone cost the same here;
        the deepest stands for them.
        """
        if self.tile is not None or strategy in self.kernel_time_s:
            return (self._kernel_tile(op),)
        deepest = {tile[:2]: tile for tile in sorted(self._device.kernels.gemm_tiles, key=lambda tile: tile[2])}
        tiles = tuple(dict.fromkeys(deepest[tile[:2]] for tile in self._device.kernels.gemm_tiles))
        fitting = tuple(tile for tile in tiles if tile[0] <= op.m and tile[1] <= op.n)
        return fitting or (min(tiles, key=lambda tile: tile[0] * tile[1]),)

    def best_gemm_s(self, op: GemmOp) -> float:
        """Time of the fastest kernel known for `op`: the vendor's, or one that the user measured."""
        measured = (self.kernel_gemm(op, strategy) for strategy in self.kernel_time_s)
        return min(kernel.duration_s for kernel in (self.vendor_gemm(op), *measured))

    # Other kernels

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

    # Collectives

    def collective(self, op: CollectiveOp, device: int = 0) -> Cost:
        """Cost of one collective: a kernel's from the book's curve, the cluster's, or latency and wire bytes.

        Copy engines and NVLS have prices of their own (`transport`).

        Demands are those that one device carries: its own HBM and links, and
        device 0 also what all share (root ports, host memory, NICs, switches).

        Raises
        ------
        UsageError
            If the machine cannot run it by the engine asked for; `refusal` says so before.
        """
        model = self._model(op.kind, op.ranks, op.engine, op.group)
        cost = model.cost(op.size_bytes, device)
        seconds = float(self._model_seconds(model, op.size_bytes))
        return replace(cost, duration_s=seconds, sm=self.comm_sms(op.kind, op.engine) if op.ranks > 1 else 0)

    def best_collective_s(self, op: CollectiveOp) -> float:
        """Time of `op` by whatever moves its bytes fastest here: the library's kernel, NVLS, copies, or stores."""
        engines: tuple[Engine, ...] = ("nvls",) if op.kind in REDUCING else ("nvls", "copy_engine")
        others = [replace(op, engine=engine) for engine in engines]
        times = [self.flow(op)[0], *(self.flow(other)[0] for other in others if self.refusal(other) is None)]
        node = self.cluster.node
        if op.kind in (*REDUCING, "all_to_all") and node.p2p and 1 < op.ranks <= node.num_devices:
            gathered_s = self.copies(replace(op, kind="all_gather"), op.ranks - 1)[0] * (op.ranks - 1)
            times.append(self.stores(op).seconds + (gathered_s if op.kind == "all_reduce" else 0.0))
        return min(times)

    def refusal(self, op: CollectiveOp) -> str | None:
        """Why this machine cannot run a collective by the engine it names; None where it can."""
        return transport_refusal(self.cluster, op.kind, op.ranks, op.engine)

    def flow(self, op: CollectiveOp, device: int = 0) -> tuple[float, tuple[Demand, ...]]:
        """Duration and demands of `collective`, without the rest: what tasks are made of, thousands of times."""
        key = (op.kind, op.ranks, op.size_bytes, device, op.engine, op.group)
        if key not in self._flows:
            model = self._model(op.kind, op.ranks, op.engine, op.group)
            seconds = float(self._model_seconds(model, op.size_bytes))
            self._flows[key] = (seconds, model.demands(op.size_bytes, device))
        return self._flows[key]

    def copies(self, op: CollectiveOp, pieces: int, device: int = 0) -> tuple[float, tuple[Demand, ...]]:
        """Duration and demands of one of `pieces` equal copies that together are `op`, by copy engines.

        The collective's base is left out: a kernel that waits for each piece brings its own `barrier_s` and `flag_s`.

        Raises
        ------
        UsageError
            If the machine's copy engines cannot run it.
        """
        model = self._model(op.kind, op.ranks, "copy_engine")
        assert isinstance(model, TransportModel), "copies go by copy engines"
        if self.no_latency:
            seconds = float(model.bandwidth_seconds(op.size_bytes)) / pieces
        else:
            seconds = model.piece_seconds(op.size_bytes, pieces, self.ends.get("collective"))
        seconds *= self.factors.get("collective", 1.0)
        return seconds, model.demands(op.size_bytes / pieces, device, seconds)

    def stores(self, op: CollectiveOp, device: int = 0) -> Stores:
        """Price of the bytes of a reduce_scatter or all_to_all stored in peers' memory by the kernel that makes them.

        Raises
        ------
        UsageError
            If GPUs cannot reach each other's memory.
        """
        priced = peer_stores(self.cluster, op.ranks, op.size_bytes, device)
        factor = self._factor("collective", STORES)
        return replace(priced, seconds=priced.seconds * factor, sm_seconds=priced.sm_seconds * factor)

    def hbm_pass(self, size_bytes: float) -> tuple[float, tuple[Demand, ...]]:
        """Duration and demand of a plain pass over memory: bytes read and written, at the rate that kernels reach."""
        launch_s = 0.0 if self.no_latency else self._device.kernels.gemm_launch_s * self._factor("launch", LAUNCH)
        rate = hbm_rate(self._device)
        return launch_s + size_bytes / rate, (Demand(hbm_name(0), size_bytes, rate),)

    @property
    def flag_s(self) -> float:
        """From a flag in HBM to an SM that waits for it."""
        return 0.0 if self.no_latency else FLAG_S * self._factor("launch", LAUNCH)

    @property
    def barrier_s(self) -> float:
        """Time until all ranks know of each other: the base of a collective."""
        return 0.0 if self.no_latency else self.cluster.collectives.base_s * self._factor("launch", LAUNCH)

    @cached_property
    def _gemms(self) -> dict[tuple[Any, ...], GemmCost]:
        return {}

    @cached_property
    def _flows(self) -> dict[tuple[CollectiveKind, int, float, int, Engine, str], tuple[float, tuple[Demand, ...]]]:
        return {}

    def collective_seconds(
        self, kind: CollectiveKind, size_bytes: ArrayLike, ranks: int, engine: Engine = "kernel"
    ) -> FloatArray:
        """Times of many sizes at once, any shape: what `collective` gives for each.

        Raises
        ------
        UsageError
            If a size is negative or not finite, or the engine cannot run it.
        """
        return self._model_seconds(self._model(kind, ranks, engine), size_bytes)

    def comm_sms(self, kind: CollectiveKind, engine: Engine = "kernel") -> int:
        """SMs that a collective holds while it runs: none by copy engines, NVLS's own channels by NVLS.

        Point-to-point channels are a power of two, so an all_to_all holds the
        largest one within what a reducing collective holds.
        """
        if engine == "copy_engine":
            return 0
        if self.collective_sms is not None:
            return self.collective_sms
        if engine == "nvls":
            return engine_sms(self.cluster, engine)
        sms = min(self.overlap.comm_sms, self._device.num_sms)
        return 1 << (sms.bit_length() - 1) if kind in ("all_to_all", "send_recv") and sms else sms

    def sm_slowdown(self, op: CollectiveOp, sms: int) -> float:
        """Time of a collective on `sms` SMs over its price, which is on `comm_sms`: 1 from there up, and for 0 SMs."""
        full = self.comm_sms(op.kind, op.engine)
        if op.ranks < 2 or not 0 < sms < full:
            return 1.0
        if (op, sms) not in self._slowdowns:
            seconds = self.flow(op)[0]
            bandwidth_s = min(seconds, self.without_latency().flow(op)[0])
            bus_bytes = op.size_bytes * busbw_factor(op.kind, op.ranks)
            longer_s = fewer_sms_s(bandwidth_s, bus_bytes, sms, full, sm_bytes_per_s(self._device).typical)
            self._slowdowns[op, sms] = 1 + longer_s / seconds
        return self._slowdowns[op, sms]

    @cached_property
    def _slowdowns(self) -> dict[tuple[CollectiveOp, int], float]:
        return {}

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
    def signal_wait_s(self) -> float:
        """From the last tile of a group to the start of its collective."""
        if self.no_latency:
            return 0.0
        return self._device.kernels.signal_wait_s * self._factor("launch", LAUNCH)

    @property
    def launch_s(self) -> float:
        """Host time of one launch; 0 where the host runs ahead."""
        if self.stack is None or self.no_latency:
            return 0.0
        return self.stack.host_s * self._factor("launch", self.stack.spread)

    @property
    def step_gap_s(self) -> float:
        """What each further step of a GEMM decomposed by ranks loses between two pieces (`decomposed`)."""
        end = self.ends.get("launch")
        step_s = STEP_S.typical if end is None else STEP_S.low if end == "low" else STEP_S.high
        return step_s * self.factors.get("launch", 1.0)

    # Whole graphs and variants

    def serial_s(self, graph: OperatorGraph) -> float:
        """Time of a graph's operators one after another, with the vendor's kernels."""
        return sum(self.operator_s(op) for op in graph.operators)

    def operator_s(self, op: Operator) -> float:
        """Time of one operator as the library runs it, alone on the GPU."""
        if isinstance(op, GemmOp):
            return self.vendor_gemm(op).duration_s
        return self.collective(op).duration_s if isinstance(op, CollectiveOp) else self.kernel(op).duration_s

    def scaled(self, family: Family, factor: float) -> PriceBook:
        """The same prices with every time of `family` taking `factor` times as long."""
        return replace(self, factors={**self.factors, family: self.factors.get(family, 1.0) * factor})

    def at(self, family: Family, end: End) -> PriceBook:
        """The same prices with `family` at the low or high end of its spread, but never below what hardware allows."""
        return replace(self, ends={**self.ends, family: end})

    def with_comm_sms(self, sms: int) -> PriceBook:
        """Let a collective hold `sms` SMs at unchanged speed, to see whether the SMs it takes decide."""
        return replace(self, collective_sms=sms)

    def with_vendor_kernels(self) -> PriceBook:
        """Price every strategy's kernel as fast as the vendor's, to see whether slower kernels decide."""
        return replace(self, vendor_kernels=True)

    def without_latency(self) -> PriceBook:
        """Price collectives at the best rate seen and signals at nothing, to see whether latency decides."""
        return replace(self, no_latency=True)

    # What was believed

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

    # Internals

    @property
    def _device(self) -> DeviceSpec:
        return self.cluster.device

    def _vendor_model(self, op: GemmOp) -> GemmCost:
        key = ("vendor", op)
        if key not in self.models:
            self.models[key] = gemm_cost(op, self._device)
        cost: GemmCost = self.models[key]
        return cost

    def _template_model(self, op: GemmOp, tile: Tile | None) -> GemmCost:
        key = ("template", op, tile)
        if key not in self.models:
            self.models[key] = template_gemm_cost(op, self._device, tile=tile)
        cost: GemmCost = self.models[key]
        return cost

    @cached_property
    def _vendor_ratio(self) -> float:
        """Measured over modelled vendor time; 1 without a measurement."""
        if self.gemm is None or self.gemm_time_s is None:
            return 1.0
        return self.gemm_time_s / self._vendor_model(self.gemm).duration_s

    def _model(self, kind: CollectiveKind, ranks: int, engine: Engine = "kernel", group: str = "") -> AnyModel:
        place = self.groups.get(group)
        if engine == "kernel" and place is not None and place.ranks == ranks:
            placed = ("group", kind, place)
            if placed not in self.models:
                self.models[placed] = GroupModel(self.cluster, kind, place)
            model: GroupModel = self.models[placed]
            return model
        if engine == "kernel":
            return self._library(kind, ranks)
        key = ("transport", kind, ranks, engine)
        if key not in self.models:
            self.models[key] = TransportModel(self.cluster, kind, ranks, engine)
        transport: TransportModel = self.models[key]
        return transport

    def _library(self, kind: CollectiveKind, ranks: int) -> CollectiveModel:
        mine = self.curve is not None and (kind, ranks) == (self.kind, self.ranks)
        key = ("collective", kind, ranks, self.curve if mine else None)
        if key not in self.models:
            curve = Curve(self.curve) if mine and self.curve is not None else None
            self.models[key] = CollectiveModel(self.cluster, kind, ranks, curve)
        model: CollectiveModel = self.models[key]
        return model

    def _unmeasured_kernel_s(self, op: GemmOp, model: GemmCost) -> float:
        vendor = self._vendor_model(op)
        if vendor.split_k > 1:
            # The vendor fills the SMs by splitting k; a signalled kernel cannot, so only the model of its tile holds.
            return model.duration_s * self._vendor_ratio
        # The vendor's time belongs to the best tile there is, whatever tile is asked for.
        best = self._template_model(op, None)
        vendor_s = self.gemm_time_s if self._is_measured(op) else None
        vendor_s = vendor.duration_s * self._vendor_ratio if vendor_s is None else vendor_s
        return vendor_s * self._device.kernels.template_slowdown * model.duration_s / best.duration_s

    def _epilogue_s(self, op: GemmOp, cost: GemmCost) -> float:
        """Time of a wave in which a signalled kernel only stores its tiles."""
        wave_bytes = self._device.num_sms * cost.grid.bm * cost.grid.bn * dtype_bytes(op.dtype)
        return self.overlap.epilogue_factor * wave_bytes / hbm_rate(self._device)

    def _is_measured(self, op: GemmOp) -> bool:
        return self.gemm is not None and _shape(op) == _shape(self.gemm)

    def _kernel_tile(self, op: GemmOp) -> Tile:
        if self.tile is None:
            return self._template_model(op, None).tile
        return checked_tile(op, self.tile, self._device)

    def _model_seconds(self, model: AnyModel, size_bytes: ArrayLike) -> FloatArray:
        end = self.ends.get("collective")
        if self.no_latency:
            seconds = model.bandwidth_seconds(size_bytes)
        elif end is not None:
            seconds = model.seconds_at(size_bytes, end)
        else:
            seconds = model.seconds(size_bytes)
        return seconds * self.factors.get("collective", 1.0)

    def _not_below_bound(self, op: GemmOp, cost: GemmCost) -> GemmCost:
        """Scaling by a measured ratio must not promise more than the device has."""
        return cost.scaled(max(1.0, lower_bound_s(op, self._device) / cost.duration_s))

    @property
    def _template_spread(self) -> Spread:
        """A slowdown taken over from templates of another architecture may not be there at all."""
        return replace(TEMPLATE, low=TEMPLATE.low / max(1.0, self._device.kernels.template_slowdown))

    def _vendor_spread(self, cost: GemmCost) -> Spread:
        """Spread of the vendor's time: a measurement carries over to what is scaled by it."""
        return cost.spread if self.gemm_time_s is None else MEASURED

    def _ends(self, op: GemmOp, cost: GemmCost, vendor: Spread, kernel: Spread) -> GemmCost:
        """Take `gemm` and `kernel` to their ends; the low end stays above what hardware allows."""
        moved = self._end("gemm", vendor) * self._end("kernel", kernel)
        factor = self.factors.get("gemm", 1.0)
        if moved < 1:
            moved = min(1.0, max(moved, lower_bound_s(op, self._device) / (cost.duration_s * factor)))
        return cost.scaled(moved * factor)

    def _end(self, family: Family, spread: Spread) -> float:
        end = self.ends.get(family)
        return 1.0 if end is None else (spread.low if end == "low" else spread.high)

    def _factor(self, family: Family, spread: Spread) -> float:
        return self.factors.get(family, 1.0) * self._end(family, spread)


def _shape(op: GemmOp) -> tuple[int, int, int, str, str]:
    return op.m, op.n, op.k, op.dtype, op.accumulate

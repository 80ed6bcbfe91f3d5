"""What moving bytes between GPUs costs: collectives by kernels, copy engines and NVLS, and stores into peers."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, Final

from numpy.typing import ArrayLike

from overlapsim.cost.base import Cost, Demand, Spread
from overlapsim.cost.collective import CollectiveModel, busbw_factor, num_nodes
from overlapsim.cost.curve import Curve, FloatArray
from overlapsim.cost.dispatch import DispatchModel
from overlapsim.cost.group_collective import GroupModel, GroupPlace
from overlapsim.cost.price_state import PriceState
from overlapsim.cost.sm_feed import fewer_sms_s, sm_bytes_per_s
from overlapsim.cost.stores import Stores, peer_stores
from overlapsim.cost.transport import TransportModel, engine_sms, transport_refusal
from overlapsim.plan import Finding
from overlapsim.workload.operators import REDUCING, CollectiveKind, CollectiveOp, Engine

AnyModel = CollectiveModel | TransportModel | GroupModel | DispatchModel
# Stores at 76 to 78 % of the link over what sheet and protocol allow, and below where ranks meet at one port.
STORES: Final = Spread(0.9, 1.25, "prior")


class CollectivePrices(PriceState):
    """Prices of collectives; `prices.PriceBook` has them."""

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
        model = self._model_of(op)
        cost = model.cost(op.size_bytes, device)
        seconds = float(self._model_seconds(model, op.size_bytes))
        return replace(cost, duration_s=seconds, sm=self.held_sms(op))

    def best_collective_s(self, op: CollectiveOp) -> float:
        """Time of `op` by whatever moves its bytes fastest here: the library's kernel, NVLS, copies, or stores."""
        engines: tuple[Engine, ...] = ("nvls",) if op.kind in REDUCING else ("nvls", "copy_engine")
        plain = replace(op, route=None)
        others = [plain, *(replace(plain, engine=engine) for engine in engines)]
        times = [self.flow(op)[0], *(self.flow(other)[0] for other in others if self.refusal(other) is None)]
        node = self.cluster.node
        if op.kind in (*REDUCING, "all_to_all") and node.p2p and 1 < op.ranks <= node.num_devices:
            gathered_s = self.copies(replace(plain, kind="all_gather"), op.ranks - 1)[0] * (op.ranks - 1)
            times.append(self.stores(op).seconds + (gathered_s if op.kind == "all_reduce" else 0.0))
        return min(times)

    def refusal(self, op: CollectiveOp) -> str | None:
        """Why this machine cannot run a collective by the engine it names; None where it can."""
        return transport_refusal(self.cluster, op.kind, op.ranks, op.engine)

    def flow(self, op: CollectiveOp, device: int = 0) -> tuple[float, tuple[Demand, ...]]:
        """Duration and demands of `collective`, without the rest: what tasks are made of, thousands of times."""
        key = (op.kind, op.ranks, op.size_bytes, device, op.engine, op.group, op.route)
        if key not in self._flows:
            model = self._model_of(op)
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

    def held_sms(self, op: CollectiveOp) -> int:
        """SMs that `op` holds at its price: `comm_sms`, or those of the kernels that route its tokens."""
        if op.ranks < 2:
            return 0
        if op.route is None or op.route.method == "hierarchical":
            return self.comm_sms(op.kind, op.engine)
        return min(op.route.sms, self._device.num_sms - 1)

    def route_findings(self, op: CollectiveOp) -> tuple[Finding, ...]:
        """What is believed of the kernels that route tokens; nothing of other collectives."""
        model = self._model_of(op)
        return model.findings if isinstance(model, DispatchModel) else ()

    def sm_slowdown(self, op: CollectiveOp, sms: int) -> float:
        """Time of a collective on `sms` SMs over its price, which is on `held_sms`: 1 from there up, and for 0 SMs."""
        full = self.held_sms(op)
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
    def _flows(self) -> dict[tuple[Any, ...], tuple[float, tuple[Demand, ...]]]:
        return {}

    @cached_property
    def _slowdowns(self) -> dict[tuple[CollectiveOp, int], float]:
        return {}

    def _model_of(self, op: CollectiveOp) -> AnyModel:
        if op.route is None or op.ranks < 2:
            return self._model(op.kind, op.ranks, op.engine, op.group)
        place = self.groups.get(op.group)
        if place is None or place.ranks != op.ranks:
            place = GroupPlace(op.ranks, num_nodes(self.cluster, op.ranks))
        key = ("dispatch", op.route, place)
        if key not in self.models:
            self.models[key] = DispatchModel(self.cluster, op.route, place)
        model: DispatchModel = self.models[key]
        return model

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

    def _model_seconds(self, model: AnyModel, size_bytes: ArrayLike) -> FloatArray:
        end = self.ends.get("collective")
        if self.no_latency:
            seconds = model.bandwidth_seconds(size_bytes)
        elif end is not None:
            seconds = model.seconds_at(size_bytes, end)
        else:
            seconds = model.seconds(size_bytes)
        return seconds * self.factors.get("collective", 1.0)

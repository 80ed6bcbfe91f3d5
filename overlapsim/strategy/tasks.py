"""From priced operators to tasks: the GPU under construction, and the few ways strategies put work on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from overlapsim.cost.base import Cost, Demand, hbm_name
from overlapsim.cost.gemm import GemmCost
from overlapsim.cost.kernels import is_synced, num_kernels
from overlapsim.cost.prices import PriceBook
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.strategy.queues import add_queue_waits
from overlapsim.units import ps_from_s
from overlapsim.workload.attention import AttentionOp, FusedAttention, UnfusedAttention
from overlapsim.workload.operators import COMPUTE, CollectiveOp, GemmOp, GroupedGemmOp, KernelOp, Work

COMM: Final = "comm"
"""Name of the stream on which communication runs where nothing else is said."""
COMM_PRIORITY: Final = 5
"""Stream priority of communication: above compute, as overlap implementations create their streams."""
# CTAs of attention, norm and expert kernels live about this long; SMs that a collective takes cost such kernels their
# share of the time, not a wave of the whole kernel.
CTA_S: Final = 5e-6
MOST_WAVES: Final = 64
# The memory system of a GPU as a rate shared by kernels and by transfers without SMs: a kernel on all SMs takes all of
# it. Sums of the kernels' shares may end above 1 in the last bit.
MEMORY_CAPACITY: Final = 1 + 1e-9
# Host calls of a framework's collective, each as long as a kernel's: the kernel, and the events by which its stream and
# the one of computation wait for each other (hwprofiles/SOURCES.md, VTRAIN: layers with and without collectives).
COLLECTIVE_CALLS: Final = 2
# A further call from within an operator of one's own (a copy, a flag, a barrier) is an eager one (LAUNCH-EAGER): what a
# slow framework adds to each operator it does not pay again.
CALL_S: Final = 12e-6


@dataclass(frozen=True)
class Placement:
    """Where the operators of a graph went: tasks by operator position.

    Attributes
    ----------
    entries : tasks that must wait for whatever the operator waits for
    exits : tasks whose end is the end of the operator
    """

    entries: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    exits: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


class Site:
    """A program under construction on one machine: its GPUs, and how the host reaches them.

    Symmetric ranks are folded onto device 0; strategies that need unequal ranks ask for further devices.

    Parameters
    ----------
    builder, prices : where tasks go, and what they cost
    num_queues : hardware queues of a GPU (``CUDA_DEVICE_MAX_CONNECTIONS``): streams share them in the order they are
        first used.  None gives every stream its own
    launch_s : host time to launch one kernel; 0 where the host runs ahead or the sequence is a CUDA graph
    """

    def __init__(
        self, builder: ProgramBuilder, prices: PriceBook, *, num_queues: int | None = None, launch_s: float = 0.0
    ) -> None:
        assert num_queues is None or num_queues >= 1, "a GPU has at least one queue"
        self.builder = builder
        self.prices = prices
        self.num_queues = num_queues
        self.launch_ps = ps_from_s(launch_s) if launch_s > 0 else 0
        self.call_ps = min(self.launch_ps, ps_from_s(CALL_S))
        self._gpus: dict[int, Gpu] = {}
        self._num_groups = 0
        self._open = self._placed = 0

    def gpu(self, device: int = 0) -> Gpu:
        """The modelled GPU of this number; made when first asked for."""
        if device not in self._gpus:
            self._gpus[device] = Gpu(self, device)
        return self._gpus[device]

    @contextmanager
    def placing(self) -> Iterator[None]:
        """While tasks of a graph are added; when the outermost is done, what shared queues cost becomes waits."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
        if not self._open and self.num_queues is not None:
            add_queue_waits(self.builder, self._placed)
            self._placed = self.builder.num_tasks

    def new_group(self) -> int:
        """A number for FLOW tasks of several devices that start, move and end together."""
        self._num_groups += 1
        return self._num_groups - 1


class Gpu:
    """One modelled GPU in a program under construction."""

    def __init__(self, site: Site, device: int) -> None:
        self.builder = site.builder
        self.prices = site.prices
        self.device = device
        self.num_sms = site.prices.cluster.device.num_sms
        self.pool = self.builder.add_pool(
            self.num_sms, derate=self.prices.overlap.gemm_speed, name=f"gpu{device}", device=device
        )
        self._site = site
        self._streams: dict[str, int] = {}
        self._copy_engines: dict[int, int] = {}
        self._kernels: list[tuple[int, float]] = []
        self._memory: int | None = None

    @cached_property
    def compute_stream(self) -> int:
        """Number of the stream of computation."""
        return self.stream(COMPUTE)

    @cached_property
    def comm_stream(self) -> int:
        """Number of the stream of communication."""
        return self.stream(COMM)

    def stream(self, name: str, priority: int | None = None) -> int:
        """Number of a stream by name, made when first asked for; all but ``compute...`` have the higher priority."""
        if name not in self._streams:
            queues = self._site.num_queues
            queue = None if queues is None else self.device * queues + len(self._streams) % queues
            if priority is None:
                priority = 0 if name.startswith(COMPUTE) else COMM_PRIORITY
            self._streams[name] = self.builder.add_stream(priority=priority, queue=queue, name=name)
        return self._streams[name]

    def copy_engine(self, number: int = 0) -> int:
        """Pool of one of the GPU's copy engines."""
        if number not in self._copy_engines:
            name = f"gpu{self.device} copy engine {number}"
            self._copy_engines[number] = self.builder.add_pool(1, name=name, device=self.device)
        return self._copy_engines[number]

    def add_gemm(
        self,
        op: GemmOp | KernelOp,
        cost: GemmCost,
        *,
        sms: int | None = None,
        stream: int | None = None,
        launches: int = 1,
        tag: str = "",
    ) -> int:
        """Add the GEMM kernel, one unit a CTA, on at most `sms` SMs (all by default).

        Of its `launches` the first is the framework's, others are calls from within the operator.
        """
        # CTAs that share a tile run side by side: together they take what the kernel takes.
        ctas = cost.grid.num_tiles * cost.split_k
        cta_s = cost.tile_time_s if cost.split_k == 1 else cost.duration_s / -(-ctas // self.num_sms)
        launch_ps = min(launches, 1) * self._site.launch_ps + max(0, launches - 1) * self._site.call_ps
        return self._blocks(op.name, tag or f"{op.pass_} gemm", ctas, cta_s, cost.demands, sms, stream, launch_ps)

    def add_kernel(self, op: KernelOp, cost: Cost, *, sms: int | None = None, stream: int | None = None) -> int:
        """Add attention, a memory-bound operator or other work as waves of short CTAs on all its SMs."""
        width = min(cost.sm or self.num_sms, self.num_sms if sms is None else sms)
        waves = min(MOST_WAVES, max(1, round(cost.duration_s / CTA_S)))
        seconds = cost.duration_s / waves
        tag = f"{op.pass_} {_class_of(op.work)}"
        launch_ps = num_kernels(op.work) * self._site.launch_ps
        task = self._blocks(op.name, tag, width * waves, seconds, cost.demands, width, stream, launch_ps)
        if self._site.launch_ps and is_synced(op.work):
            self.builder.add_edge(task, self.builder.add_host(unit_ps=0, host=self.device, op=op.name, tag="sync"))
        return task

    def add_collective(
        self,
        op: CollectiveOp,
        *,
        sms: int | None = None,
        stream: int | None = None,
        group: int = -1,
        pool: int | None = None,
        units: int = 1,
        tag: str = "",
    ) -> int:
        """Add a collective on `sms` SMs, by default its price's, slower on fewer; a `group` starts and ends as one.

        One by copy engines takes the engine of number 0 instead, or the one whose `pool` is given.
        With several `units` it moves in equal chunks, whose ends other tasks may wait for.
        """
        duration_s, demands = self.prices.flow(op, self.device)
        if op.engine == "copy_engine" and op.ranks > 1:
            sms, pool = 1, self.copy_engine() if pool is None else pool
        elif op.ranks < 2:
            sms = 0
        elif sms is None and not op.sms:
            sms = self.prices.held_sms(op)
        else:
            sms = op.sms if sms is None else sms
            duration_s *= self.prices.sm_slowdown(op, sms)
        return self.add_transfer(
            duration_s,
            demands,
            sms=sms,
            stream=stream,
            group=group,
            pool=pool,
            units=units,
            launch_ps=COLLECTIVE_CALLS * self._site.launch_ps,
            op=op.name,
            tag=(tag or f"{op.pass_} {op.kind}") + (f" [{op.group}]" if op.group else ""),
        )

    def add_transfer(
        self,
        duration_s: float,
        demands: Iterable[Demand] = (),
        *,
        sms: int = 0,
        stream: int | None = None,
        group: int = -1,
        pool: int | None = None,
        units: int = 1,
        launches: int = 1,
        launch_ps: int | None = None,
        op: str = "",
        tag: str = "",
    ) -> int:
        """Add a FLOW of a given price: what a strategy's own kernel or copies move, or a wait for all ranks.

        Parameters
        ----------
        duration_s, demands : of all units together
        sms : held while it runs; 1 with the pool of a copy engine
        launches : host calls that it takes (a copy and the flag behind it are two), from within an operator
        launch_ps : host time, where it is no multiple of such calls
        """
        demands = tuple(demands)
        task = self.builder.add_flow(
            stream=self.comm_stream if stream is None else stream,
            pool=self.pool if pool is None else pool,
            units=units,
            unit_ps=ps_from_s(duration_s / units),
            sm=sms,
            group=group,
            host=self.device,
            launch_ps=launches * self._site.call_ps if launch_ps is None else launch_ps,
            demands=self._per_unit(demands, units),
            op=op,
            tag=tag,
        )
        # One on SMs slows kernels by the pool's derate.
        if not sms or pool not in (None, self.pool):
            self._share_memory(task, duration_s, units, demands)
        return task

    def _share_memory(self, task: int, duration_s: float, units: int, demands: Iterable[Demand]) -> None:
        """Let a transfer without SMs and the kernels beside it slow each other, equally, by what it draws of HBM.

        Kernels on all SMs then run at `OverlapSpec.speed_beside`, those on few SMs at their own speed.
        """
        hbm = hbm_name(self.device)
        drawn = sum(d.amount / d.capacity for d in demands if d.resource == hbm)
        speed = self.prices.overlap.speed_beside(drawn / duration_s) if drawn else 1.0
        if speed == 1.0:
            return
        if self._memory is None:
            self._memory = self.builder.add_resource(MEMORY_CAPACITY, f"memory[{self.device}]")
            for kernel, amount in self._kernels:
                self.builder.add_demand(kernel, self._memory, amount)
        self.builder.add_demand(task, self._memory, (1 / speed - 1) * duration_s / units)

    def add_waiter(self, source: int, units: int, *, op: str, tag: str) -> int:
        """Add the kernel that spins on an SM until `units` of `source` are done; releasing costs the signal's time."""
        waiter = self.builder.add_blocks(
            stream=self.comm_stream,
            pool=self.pool,
            units=1,
            unit_ps=ps_from_s(self.prices.signal_wait_s),
            sm=1,
            host=self.device,
            launch_ps=self._site.launch_ps,
            op=op,
            tag=tag,
        )
        self.builder.add_edge(source, waiter, src_units=units, dst_unit=0)
        return waiter

    def _blocks(
        self,
        op: str,
        tag: str,
        units: int,
        unit_s: float,
        demands: Iterable[Demand],
        sms: int | None,
        stream: int | None,
        launch_ps: int,
    ) -> int:
        # Costs name the HBM of device 0; the kernel reads its own.
        own = (Demand(d.resource.replace("[0]", f"[{self.device}]"), d.amount, d.capacity) for d in demands)
        task = self.builder.add_blocks(
            stream=self.compute_stream if stream is None else stream,
            pool=self.pool,
            units=units,
            unit_ps=ps_from_s(unit_s),
            sm=self.num_sms if sms is None else sms,
            host=self.device,
            launch_ps=launch_ps,
            demands=self._per_unit(own, units),
            op=op,
            tag=tag,
        )
        self._kernels.append((task, unit_s / self.num_sms))
        if self._memory is not None:
            self.builder.add_demand(task, self._memory, unit_s / self.num_sms)
        return task

    def _per_unit(self, demands: Iterable[Demand], units: int) -> dict[int, float]:
        return {self.builder.add_resource(d.capacity, d.resource): d.amount / units for d in demands}


def _class_of(work: Work) -> str:
    """What reports call a kernel: experts are GEMMs too."""
    if isinstance(work, GroupedGemmOp):
        return "gemm"
    return "attention" if isinstance(work, AttentionOp | FusedAttention | UnfusedAttention) else "kernel"

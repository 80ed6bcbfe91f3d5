"""From a pipeline schedule and prices to tasks: a compute stream a device, transfers beside or between its blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from overlapsim.errors import DeadlockError, ProgramError
from overlapsim.schedule.builder import ProgramBuilder, TaskKind, blocks_kind, flow_kind
from overlapsim.schedule.kernel_order import topological_order
from overlapsim.schedule.pipeline import FORWARD, KIND_LETTERS, PipelineSchedule
from overlapsim.schedule.pipeline_check import check_schedule
from overlapsim.schedule.pipeline_links import Links, P2pMode, link
from overlapsim.schedule.pipeline_steps import Steps, price_steps
from overlapsim.schedule.pipeline_work import PipelineWork
from overlapsim.schedule.program import Int


@dataclass(frozen=True, eq=False)
class PipelineTasks:
    """Where the actions of a schedule are in a program, for what is attached to them later.

    Attributes
    ----------
    schedule : PipelineSchedule
    compute_streams : stream of each device
    task : int64 array of shape (actions,): task of each action; the two of an F&B pair with its own block share one
    units : int64 array of shape (actions,): units of that task
    """

    schedule: PipelineSchedule
    compute_streams: tuple[int, ...]
    task: Int
    units: Int

    def last_backward(self, stage: int, copy: int = 0) -> int:
        """Action after which all gradients of the weights of a stage are there."""
        s = self.schedule
        return int(s.gradient_index[stage, s.copy_of == copy].max())

    def first_forward(self, stage: int, copy: int = 0) -> int:
        """Action that needs the weights of a stage first."""
        s = self.schedule
        return int(s.index[FORWARD, stage, s.copy_of == copy].min())

    def add_gradient_edge(
        self, builder: ProgramBuilder, collective: int, stage: int, *, copy: int = 0, done: float = 1.0, lag_ps: int = 0
    ) -> None:
        """Let a collective, added after the pipeline, wait for the gradients of a bucket.

        Parameters
        ----------
        collective : task
        stage, copy : whose last backward (or weight gradient) makes the bucket
        done : share of that last backward after which the bucket is complete, in (0, 1]; rounded up to whole units

        Raises
        ------
        ProgramError
            If `done` is outside (0, 1].
        """
        if not 0 < done <= 1:
            raise ProgramError(f"a bucket is complete after {done} of the last backward; expected a share in (0, 1]")
        action = self.last_backward(stage, copy)
        # 1e-9: a share meant as whole units is not one more for its rounding.
        units = max(1, math.ceil(done * int(self.units[action]) - 1e-9))
        builder.add_edge(int(self.task[action]), collective, src_units=units, lag_ps=lag_ps)

    def add_weight_edge(
        self, builder: ProgramBuilder, collective: int, stage: int, *, copy: int = 0, unit: int = 0, lag_ps: int = 0
    ) -> None:
        """Let the first forward of a stage wait, at its `unit`, for a collective that gathers weights."""
        task = int(self.task[self.first_forward(stage, copy)])
        builder.add_edge(collective, task, dst_unit=unit, lag_ps=lag_ps)


def lower_pipeline(
    builder: ProgramBuilder,
    schedule: PipelineSchedule,
    work: PipelineWork,
    *,
    pools: Sequence[int],
    p2p: P2pMode = "overlapped",
) -> PipelineTasks:
    """Add the tasks of one step of a pipeline to a program.

    Each device gets a compute stream with its blocks, each on one SM of the
    device's pool (how many its kernels use was settled when the block was
    simulated; demands, and collectives that hold SMs of the pool, stretch
    it).  Each ordered pair of devices that talk gets a stream at the sender,
    and one at the receiver where transfers hold SMs; transfers from one
    device to another keep the order in which they are produced.  Host lane d
    launches for device d, at no cost.

    Parameters
    ----------
    builder : ProgramBuilder
    schedule : PipelineSchedule, checked here
    work : PipelineWork, prices
    pools : pool of each device, with SMs for one block and all transfers and collectives at a time
    p2p : {"overlapped", "steady", "blocking"}
        ``overlapped``: transfers run beside computation and receives are
        posted in time (Megatron's interleaved schedule with
        ``--overlap-p2p-communication-warmup-flush``, torch.distributed.pipelining).
        ``steady``: before the first backward is due and after the last
        forward a sender waits for its transfer (Megatron's interleaved
        schedule by default).  ``blocking``: send and receive are one call
        between two actions, and both devices wait until both have come
        (Megatron without virtual stages); see `pipeline_links.link`.

    Returns
    -------
    PipelineTasks

    Raises
    ------
    PlanError, DeadlockError
        As :func:`check_schedule`; the latter also if blocking transfers wait for each other.
    ProgramError
        If a block that the schedule needs has no price, the mode is unknown, or pools are not one a device.

    Examples
    --------
    >>> from overlapsim.schedule.pipeline_one_way import one_f_one_b
    >>> from overlapsim.schedule.pipeline_work import Block, StageTable, StageWork
    >>> b = ProgramBuilder()
    >>> work = StageTable((StageWork(Block(1, 10), Block(1, 20)),) * 2)
    >>> tasks = lower_pipeline(b, one_f_one_b(2, 4), work, pools=[b.add_pool(2), b.add_pool(2)])
    >>> b.freeze().num_tasks
    16
    """
    if len(pools) != schedule.num_devices:
        raise ProgramError(f"{len(pools)} pools for {schedule.num_devices} devices; expected one a device")
    check_schedule(schedule)
    steps = price_steps(schedule, work)
    links = link(schedule, steps, work, p2p)
    before, after = np.concatenate((links.line, links.wait, links.post)).T.copy()
    order = topological_order(links.num_nodes, before, after)
    if len(order) < links.num_nodes:
        raise DeadlockError(
            f"schedule {schedule.name!r} comes to a stop with {p2p} transfers: a device would wait for one whose other "
            "end waits for the device; take overlapped transfers, or another schedule"
        )
    streams = tuple(builder.add_stream(name=f"compute {device}") for device in range(schedule.num_devices))
    tasks, joins = _add_tasks(builder, schedule, steps, links, order, streams, pools)
    builder.add_edges(tasks[links.wait[:, 0]], tasks[links.wait[:, 1]])
    builder.add_edges(tasks[links.post[:, 0]], joins[links.post[:, 1]])
    return PipelineTasks(schedule, streams, tasks[steps.of_action], steps.units[steps.of_action])


def _add_tasks(
    builder: ProgramBuilder,
    schedule: PipelineSchedule,
    steps: Steps,
    links: Links,
    order: Int,
    streams: Sequence[int],
    pools: Sequence[int],
) -> tuple[Int, Int]:
    """Task of each node, and where its receiver joins: of a transfer that holds SMs the member at the receiver."""
    kinds = [
        blocks_kind(
            stream=streams[device], pool=pools[device], host=device, units=block.units, unit_ps=block.unit_ps, sm=1,
            demands=block.demands, op=block.op, mem_start=block.mem_start, mem_end=block.mem_end,
        )
        for block, device in zip(steps.blocks, steps.device_of_block.tolist(), strict=True)
    ]  # fmt: skip
    # Two kinds for each transfer: at the sender, and at the receiver, which is there only if it holds SMs.
    kind_of = np.concatenate((steps.block_of, len(kinds) + 2 * links.price_of))[order]
    holds = np.array([False] * len(kinds) + [price.sm > 0 for price, _, _ in links.prices for _ in range(2)], np.bool_)
    kinds += _transfer_kinds(builder, links, pools)
    twice = holds[kind_of]
    first = np.cumsum(1 + twice) - (1 + twice)
    which = np.repeat(kind_of, 1 + twice)
    which[first[twice] + 1] += 1
    # A group bears its first member's number.
    groups = np.where(holds[which], np.repeat(builder.num_tasks + first, 1 + twice), -1)
    tags = _tags(schedule, steps, links)
    tasks, joins = np.empty(links.num_nodes, np.int64), np.empty(links.num_nodes, np.int64)
    tasks[order] = builder.num_tasks + first
    joins[order] = tasks[order] + twice
    builder.add_copies(kinds, which, [tags[node] for node in np.repeat(order, 1 + twice).tolist()], groups)
    return tasks, joins


def _transfer_kinds(builder: ProgramBuilder, links: Links, pools: Sequence[int]) -> list[TaskKind]:
    """For each distinct transfer its task at the sender and that at the receiver."""
    streams: dict[tuple[int, int, str], int] = {}

    def stream(source: int, target: int, end: str) -> int:
        key = (source, target, end)
        if key not in streams:
            streams[key] = builder.add_stream(name=f"{end} {source} to {target}")
        return streams[key]

    kinds: list[TaskKind] = []
    for price, source, target in links.prices:
        flow = partial(flow_kind, units=price.units, unit_ps=price.unit_ps, sm=price.sm, weight=price.weight, op="p2p")
        send = flow(stream=stream(source, target, "send"), pool=pools[source], host=source, demands=price.demands)
        # The demands of the whole route are the sender's; the receiver's member lends its SMs.
        receive = flow(stream=stream(source, target, "receive"), pool=pools[target], host=target) if price.sm else send
        kinds += [send, receive]
    return kinds


def _tags(schedule: PipelineSchedule, steps: Steps, links: Links) -> list[str]:
    """What reports call each node: actions as in CSV, transfers by what they carry and where to."""
    s = schedule
    names = [
        f"{stage}{KIND_LETTERS[kind]}{micro_batch}"
        for kind, stage, micro_batch in zip(s.kind.tolist(), s.stage.tolist(), s.micro_batch.tolist(), strict=True)
    ]
    tags = [
        names[first] if first == last else f"({names[first]};{names[last]})"
        for first, last in zip(steps.first.tolist(), steps.last.tolist(), strict=True)
    ]
    target = [target for _, _, target in links.prices]
    tags += [
        f"{names[producer]} to {target[price]}"
        for producer, price in zip(links.producer.tolist(), links.price_of.tolist(), strict=True)
    ]
    return tags

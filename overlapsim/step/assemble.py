"""From stage pieces to the program of a step: pipelines of blocks, data parallelism between them, the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from overlapsim.cost.prices import PriceBook
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.pipeline import WEIGHT_GRAD, PipelineSchedule
from overlapsim.schedule.pipeline_program import PipelineTasks, lower_pipeline
from overlapsim.schedule.program import BLOCKS, Int, Program
from overlapsim.step.blocks import Piece
from overlapsim.step.buckets import Kind, UnitCost, place_of
from overlapsim.step.inputs import StepInputs
from overlapsim.step.line import Line
from overlapsim.step.perturb import jitter_factors
from overlapsim.step.pieces import StagePieces
from overlapsim.step.replicas import HEALTHY, Replica, coupled_ranks
from overlapsim.step.synchronisation import INNER
from overlapsim.step.traffic import copies_reductions, embedding_reduction, held_parameters, traffic_of
from overlapsim.workload.build import Which
from overlapsim.workload.layout import Layout
from overlapsim.workload.operators import CollectiveOp
from overlapsim.workload.stage_weights import LocalParameters


@dataclass(frozen=True, eq=False)
class StepProgram:
    """The program of the pipelines that differ, one after another; a device stands for all ranks of its stage.

    Attributes
    ----------
    program : Program
    device : int64 array of shape (tasks,): device of each task (of a transfer, the sender); pipeline k has devices from
        k times the devices of a pipeline
    receiver : int64 array of shape (tasks,): device that a transfer reaches; -1 for other tasks
    pieces : what a block stands for, by its operator name
    """

    program: Program
    device: Int
    receiver: Int
    pieces: Mapping[str, Piece]


def assemble(
    inputs: StepInputs, prices: PriceBook, schedule: PipelineSchedule, pipelines: Sequence[Replica] = ()
) -> StepProgram:
    """Build the program of a step.

    Parameters
    ----------
    pipelines : those to simulate (`replicas.replicas`); empty: one for all, with nothing degraded

    Raises
    ------
    LayoutError
        If the schedule does not fit the layout.
    """
    pipelines = pipelines or (Replica((HEALTHY,) * schedule.num_devices),)
    step = _Step(inputs, prices, schedule, pipelines)
    gathers = step.add_first_gathers()
    tasks = [lower_pipeline(step.builder, schedule, line, pools=line.pools, p2p=inputs.p2p_mode) for line in step.lines]
    step.gate_forwards(tasks, gathers)
    reductions = step.add_reductions(tasks)
    optimizers = step.add_optimizers(tasks, reductions)
    if not gathers:
        step.add_last_gathers(optimizers)
    for pieces in step.pieces:
        pieces.check_used()
    program = step.builder.freeze()
    device = np.asarray(program.pool_device, dtype=np.int64)[program.pool]
    named = zip(program.op, program.tag, device // schedule.num_devices * schedule.num_devices, strict=True)
    receiver = [first + int(tag.rpartition(" to ")[2]) if op == "p2p" else -1 for op, tag, first in named]
    if inputs.perturbation.jitter:
        program = _jittered(program, device // schedule.num_devices, inputs, pipelines)
    return StepProgram(program, device, np.array(receiver, dtype=np.int64), step.blocks)


def _jittered(program: Program, line: Int, inputs: StepInputs, pipelines: Sequence[Replica]) -> Program:
    """The program with the time of every block drawn anew: each waits for the slowest of the ranks it talks to."""
    unit_ps, ranks = program.unit_ps.copy(), len(coupled_ranks(inputs))
    for number, replica in enumerate(pipelines):
        own = np.flatnonzero((program.kind == BLOCKS) & (line == number))
        seed = (inputs.perturbation.seed, replica.number)
        factors = jitter_factors(seed, len(own), inputs.perturbation.jitter, ranks)
        unit_ps[own] = np.maximum(1, np.rint(unit_ps[own] * factors)).astype(np.int64)
    return replace(program, unit_ps=unit_ps)


class _Step:
    """The program under construction."""

    def __init__(
        self, inputs: StepInputs, prices: PriceBook, schedule: PipelineSchedule, pipelines: Sequence[Replica]
    ) -> None:
        self.inputs, self.schedule = inputs, schedule
        self.builder = ProgramBuilder()
        self.blocks: dict[str, Piece] = {}
        stations = dict.fromkeys(station for replica in pipelines for station in replica.stations)
        pieces = {station: StagePieces(inputs, station.prices(prices), schedule) for station in stations}
        self.pieces = tuple(pieces.values())
        devices, copies = range(schedule.num_devices), range(schedule.num_copies)
        self.local = [[held_parameters(inputs, schedule, d, copy) for copy in copies] for d in devices]
        self.traffic = [[traffic_of(inputs, local) for local in held] for held in self.local]
        self.lines = [
            Line(inputs, schedule, replica, number, self.builder, pieces, self.blocks, self._largest())
            for number, replica in enumerate(pipelines)
        ]

    def add_first_gathers(self) -> list[list[int]]:
        """Parameters that the step before has updated, gathered under this step's first forwards; as `_held`."""
        if self.inputs.dp_overlap != "both" or not self.inputs.layout.zero:
            return []
        return [
            self._joined(op, device) for device, copy in self._held() for op, _ in self.traffic[device][copy].gather
        ]

    def gate_forwards(self, tasks: Sequence[PipelineTasks], gathers: Sequence[Sequence[int]]) -> None:
        """Let each stage's first forward wait, unit by unit, for its parameters."""
        left = iter(gathers)
        for device, copy in self._held() if gathers else ():
            units = self._units(device, copy, "forward")
            for op, before in self.traffic[device][copy].gather:
                place = place_of(units, _kind(op), before, end=False)
                for own, member in zip(tasks, next(left), strict=True):
                    count = int(own.units[own.first_forward(place.stage, copy)])
                    unit = min(count - 1, round(place.share * count))
                    own.add_weight_edge(self.builder, member, place.stage, copy=copy, unit=unit)

    def add_reductions(self, tasks: Sequence[PipelineTasks]) -> list[int]:
        """Gradients of every device, each piece as soon as it is complete in all pipelines."""
        if self.schedule.num_copies == 1:
            holders = [[(device, 0)] for device in range(self.schedule.num_devices)]
        else:
            copies, stages = range(self.schedule.num_copies), range(self.schedule.num_stages)
            holders = [[(int(self.schedule.placement[c, s]), c) for c in copies] for s in stages]
        found = [task for held in holders for task in self._reduce(tasks, held)]
        shared = embedding_reduction(self.inputs)
        ends = (0, self.schedule.num_stages - 1)
        devices = [int(self.schedule.placement[0, stage]) for stage in ends]
        if shared is not None and devices[0] != devices[1]:
            for line, own in zip(self.lines, tasks, strict=True):
                for device in devices:
                    found.append(line.collective(shared, device))
                    for stage in ends:
                        own.add_gradient_edge(self.builder, found[-1], stage)
        return found

    def add_optimizers(self, tasks: Sequence[PipelineTasks], reductions: Sequence[int]) -> list[list[int]]:
        """The step of every device, behind all gradients of the job: their norm is of all of them; by pipeline."""
        stages = range(self.schedule.num_stages)
        waits = dict.fromkeys(reductions)
        copies = range(self.schedule.num_copies)
        waits |= dict.fromkeys(
            int(own.task[own.last_backward(stage, copy)]) for own in tasks for stage in stages for copy in copies
        )
        found = [
            [self._optimizer(line, own, device) for device in range(self.schedule.num_devices)]
            for line, own in zip(self.lines, tasks, strict=True)
        ]
        for optimizer in (task for own in found for task in own):
            for task in waits:
                self.builder.add_edge(task, optimizer)
        return found

    def add_last_gathers(self, optimizers: Sequence[Sequence[int]]) -> None:
        """Parameters gathered after the optimizer, at the end of the step."""
        for device, copy in self._held():
            for op, _ in self.traffic[device][copy].gather:
                for own, member in zip(optimizers, self._joined(op, device), strict=True):
                    self.builder.add_edge(own[device], member)

    # Inside

    def _held(self) -> list[tuple[int, int]]:
        """Devices, and the copies of the model on each."""
        return [(d, copy) for d in range(self.schedule.num_devices) for copy in range(self.schedule.num_copies)]

    def _largest(self) -> list[CollectiveOp | None]:
        """The largest reduction of each device."""
        return [
            max(
                (op for traffic in held for op, _ in traffic.reduce if op.group != INNER),
                key=lambda op: op.size_bytes,
                default=None,
            )
            for held in self.traffic
        ]

    def _units(self, device: int, copy: int, which: Which) -> list[UnitCost]:
        """Units of a device's stages in the order in which a pass meets them."""
        stages = [s for s in range(self.schedule.num_stages) if self.schedule.placement[copy, s] == device]
        pieces = self.lines[0].pieces[device]
        ordered = stages if which == "forward" else reversed(stages)
        return [unit for stage in ordered for unit in pieces.units(stage, which)]

    def _reduce(self, tasks: Sequence[PipelineTasks], held: Sequence[tuple[int, int]]) -> list[int]:
        """Gradients of the same parameters, which devices hold in copies of the model, summed over all of them."""
        found: list[int] = []
        device, copy = held[0]
        reduce = self.traffic[device][copy].reduce
        if len(held) > 1:
            reduce += copies_reductions(self.inputs, self.local[device][copy])
        units = {where: self._units(*where, self._last) for where in held}
        for op, done in reduce:
            # A group bears its first member's number.
            group = self.builder.num_tasks if len(self.lines) * len(held) > 1 else -1
            for device, copy in held:
                place = place_of(units[device, copy], _kind(op), done, end=True)
                for line, own in zip(self.lines, tasks, strict=True):
                    found.append(line.collective(op, device, group))
                    count = int(own.units[own.last_backward(place.stage, copy)])
                    share = max(1, round(place.share * count)) / count
                    own.add_gradient_edge(self.builder, found[-1], place.stage, copy=copy, done=share)
        return found

    @property
    def _last(self) -> Which:
        """The pass that completes gradients."""
        return "weight_grad" if (self.schedule.kind >= WEIGHT_GRAD).any() else "backward"

    def _joined(self, op: CollectiveOp, device: int) -> list[int]:
        """A collective on one device of every pipeline; a group bears its first member's number."""
        group = self.builder.num_tasks if len(self.lines) > 1 else -1
        return [line.collective(op, device, group) for line in self.lines]

    def _optimizer(self, line: Line, tasks: PipelineTasks, device: int) -> int:
        layout, pieces = self.inputs.layout, line.pieces[device]
        own = sum(_own_parameters(local, layout) for local in self.local[device])
        piece = pieces.graph(f"optimizer {own}", pieces.builder.optimizer(own), follows=False)
        block = line.block(device, piece, 1, f"optim.step {device}")
        return self.builder.add_blocks(
            stream=tasks.compute_streams[device],
            pool=line.pools[device],
            host=device,
            units=block.units,
            unit_ps=block.unit_ps,
            sm=1,
            demands=block.demands,
            op=block.op,
            tag="optimizer",
        )


def _kind(op: CollectiveOp) -> Kind:
    return "expert" if op.name.endswith("expert") else "dense"


def _own_parameters(local: LocalParameters, layout: Layout) -> float:
    """Parameters whose state a rank steps: its shards of them where the optimizer is sharded."""
    return local.dense / layout.dense_shards + local.expert / layout.expert_shards

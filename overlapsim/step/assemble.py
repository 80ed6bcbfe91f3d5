"""From stage pieces to the program of a step: a pipeline of blocks, its transfers, data parallelism, the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from overlapsim.cost.base import Demand
from overlapsim.cost.prices import PriceBook
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.pipeline import PipelineSchedule
from overlapsim.schedule.pipeline_program import PipelineTasks, lower_pipeline
from overlapsim.schedule.pipeline_work import Block, StageWork, Transfer
from overlapsim.schedule.program import Int, Program
from overlapsim.step.blocks import Piece
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import StagePieces
from overlapsim.step.traffic import boundary_bytes, embedding_reduction, stage_traffic
from overlapsim.units import ps_from_s
from overlapsim.workload.layout import Layout
from overlapsim.workload.operators import CollectiveOp
from overlapsim.workload.rank_map import RankMap
from overlapsim.workload.stage_weights import LocalParameters, stage_parameters

LONGEST_UNIT_S: Final = 60.0
"""Longest step of a block, a little below the engine's longest unit."""


@dataclass(frozen=True, eq=False)
class StepProgram:
    """The program of one pipeline; every device of it stands for all ranks of its stage.

    Attributes
    ----------
    program : Program
    device : int64 array of shape (tasks,): pipeline device of each task (of a transfer, the sender)
    receiver : int64 array of shape (tasks,): device that a transfer reaches; -1 for other tasks
    pieces : what a block stands for, by its operator name
    """

    program: Program
    device: Int
    receiver: Int
    pieces: Mapping[str, Piece]


def assemble(inputs: StepInputs, prices: PriceBook, schedule: PipelineSchedule) -> StepProgram:
    """Build the program of a step.

    Raises
    ------
    LayoutError
        If the schedule does not fit the layout.
    """
    step = _Step(inputs, prices, schedule)
    gathers = step.add_first_gathers()
    tasks = lower_pipeline(step.builder, schedule, step, pools=step.pools, p2p=inputs.p2p_mode)
    step.gate_forwards(tasks, gathers)
    reductions = step.add_reductions(tasks)
    optimizers = step.add_optimizers(tasks, reductions)
    if not gathers:
        step.add_last_gathers(optimizers)
    program = step.builder.freeze()
    device = np.asarray(program.pool_device, dtype=np.int64)[program.pool]
    named = zip(program.op, program.tag, strict=True)
    receiver = [int(tag.rpartition(" to ")[2]) if op == "p2p" else -1 for op, tag in named]
    return StepProgram(program, device, np.array(receiver, dtype=np.int64), step.blocks)


class _Step:
    """The program under construction; also the prices that the pipeline asks for (`PipelineWork`)."""

    def __init__(self, inputs: StepInputs, prices: PriceBook, schedule: PipelineSchedule) -> None:
        self.inputs, self.prices, self.schedule = inputs, prices, schedule
        self.pieces = StagePieces(inputs, prices, schedule)
        self.builder = ProgramBuilder()
        self.blocks: dict[str, Piece] = {}
        num_sms = inputs.cluster.device.num_sms
        self.pools = [
            self.builder.add_pool(num_sms, derate=self._beside_communication(), name=f"gpu{d}", device=d)
            for d in range(schedule.num_devices)
        ]
        self.traffic = [stage_traffic(inputs, d) for d in range(schedule.num_devices)]
        self._line = RankMap(inputs.layout, inputs.rank_order).group("pp")
        self._dp_streams = [self.builder.add_stream(priority=5, name=f"dp {d}") for d in range(schedule.num_devices)]

    # What the pipeline asks for

    def stage(self, device: int, stage: int) -> StageWork:
        """Blocks of a stage."""
        split = bool((self.schedule.kind >= 2).any())
        layers = max(1, len(self.pieces.layers[stage]))
        get = self.pieces.stage
        forward = self._block(device, get(stage, "forward"), layers, f"forward {stage}")
        backward = self._block(device, get(stage, "backward"), layers, f"backward {stage}")
        if not split:
            return StageWork(forward, backward)
        return StageWork(
            forward,
            backward,
            self._block(device, get(stage, "input_grad"), layers, f"input_grad {stage}"),
            self._block(device, get(stage, "weight_grad"), layers, f"weight_grad {stage}"),
        )

    def pair(self, device: int, forward_stage: int, backward_stage: int) -> Block | None:
        """Block of an F&B pair."""
        piece = self.pieces.pair(forward_stage, backward_stage)
        layers = max(1, len(self.pieces.layers[backward_stage]))
        return self._block(device, piece, layers, f"pair {forward_stage} {backward_stage}")

    def transfer(self, source: int, target: int, from_stage: int, to_stage: int) -> Transfer | None:
        """Activations or gradients between two devices, with the gather of slices on arrival."""
        sent, gathered = boundary_bytes(self.inputs)
        layout, model = self.inputs.layout, self.inputs.model
        per_node = self.prices.cluster.node.num_devices
        inside = self._line[source] // per_node == self._line[target] // per_node
        ranks, group = (2, "") if inside else (layout.pp, "pp")
        op = CollectiveOp("send_recv", max(1.0, sent), ranks, model.dtype, "embed", group=group)
        seconds, demands = self.prices.flow(op)
        if gathered:
            slices = CollectiveOp("all_gather", gathered, layout.tp, model.dtype, "embed", group="tp")
            seconds += self.prices.flow(slices)[0]
        units = _parts(seconds)
        found = {name: amount / units for name, amount in self._resources(demands, source, target).items()}
        return Transfer(ps_from_s(seconds / units), units, demands=found)

    # Data parallelism and the optimizer

    def add_first_gathers(self) -> list[list[int]]:
        """Parameters that the step before has updated, gathered under this step's first forwards."""
        if self.inputs.dp_overlap != "both" or not self.inputs.layout.zero:
            return []
        return [[self._collective(op, device) for op in traffic.gather] for device, traffic in enumerate(self.traffic)]

    def gate_forwards(self, tasks: PipelineTasks, gathers: Sequence[Sequence[int]]) -> None:
        """Let each stage's first forward wait, layer by layer, for its parameters."""
        for device, pieces in enumerate(gathers):
            stages = [s for s in range(self.schedule.num_stages) if self.schedule.placement[0, s] == device]
            for number, task in enumerate(pieces):
                # Pieces come in the order of the device's layers: stage after stage, layer after layer.
                place = number * len(stages) / len(pieces)
                stage = stages[int(place)]
                layers = max(1, len(self.pieces.layers[stage]))
                per_layer = int(tasks.units[tasks.first_forward(stage)]) // layers
                layer = min(layers - 1, int((place % 1) * layers))
                tasks.add_weight_edge(self.builder, task, stage, unit=layer * per_layer)

    def add_reductions(self, tasks: PipelineTasks) -> list[list[int]]:
        """Gradients of every device, each piece as soon as it is complete."""
        found: list[list[int]] = []
        for device, traffic in enumerate(self.traffic):
            found.append([])
            stages = [s for s in range(self.schedule.num_stages) if self.schedule.placement[0, s] == device]
            for op, done in traffic.reduce:
                task = self._collective(op, device)
                found[-1].append(task)
                # The last stage's backward comes first: buckets follow from the last layer of the device to the first.
                place = done * len(stages)
                stage = stages[len(stages) - 1 - min(len(stages) - 1, int(np.ceil(place - 1e-9)) - 1)]
                share = place - (np.ceil(place - 1e-9) - 1)
                tasks.add_gradient_edge(self.builder, task, stage, done=min(1.0, max(1e-9, share)))
        shared = embedding_reduction(self.inputs)
        if shared is not None:
            for device in (0, self.schedule.num_devices - 1):
                task = self._collective(shared, device)
                for stage in (0, self.schedule.num_stages - 1):
                    tasks.add_gradient_edge(self.builder, task, stage)
                found[device].append(task)
        return found

    def add_optimizers(self, tasks: PipelineTasks, reductions: Sequence[Sequence[int]]) -> list[int]:
        """The step of every device, behind all gradients of the job: their norm is of all of them."""
        found = []
        builder, layout = self.builder, self.inputs.layout
        for device in range(self.schedule.num_devices):
            local = stage_parameters(self.inputs.model, layout, device, self.inputs.job.stage_layers)
            graph = self.pieces.builder.optimizer(_own_parameters(local, layout))
            piece = self.pieces.graph(f"optimizer {local}", graph, follows=False)
            block = self._block(device, piece, 1, f"optim.step {device}")
            found.append(
                builder.add_blocks(
                    stream=tasks.compute_streams[device],
                    pool=self.pools[device],
                    host=device,
                    units=block.units,
                    unit_ps=block.unit_ps,
                    sm=1,
                    demands=block.demands,
                    op=block.op,
                    tag="optimizer",
                )
            )
        waits = [task for own in reductions for task in own]
        waits += [int(tasks.task[tasks.last_backward(stage)]) for stage in range(self.schedule.num_stages)]
        for optimizer in found:
            for task in dict.fromkeys(waits):
                builder.add_edge(task, optimizer)
        return found

    def add_last_gathers(self, optimizers: Sequence[int]) -> None:
        """Parameters gathered after the optimizer, at the end of the step."""
        for device, traffic in enumerate(self.traffic):
            for op in traffic.gather:
                self.builder.add_edge(optimizers[device], self._collective(op, device))

    # Inside

    def _collective(self, op: CollectiveOp, device: int) -> int:
        seconds, demands = self.prices.flow(op)
        units = _parts(seconds)
        return self.builder.add_flow(
            stream=self._dp_streams[device],
            pool=self.pools[device],
            host=device,
            units=units,
            unit_ps=ps_from_s(seconds / units),
            sm=min(self.prices.comm_sms(op.kind), self.inputs.cluster.device.num_sms - 1),
            demands={name: amount / units for name, amount in self._resources(demands, device, device).items()},
            op=op.name,
            tag=f"{op.kind} [{op.group}]",
        )

    def _block(self, device: int, piece: Piece, units: int, name: str) -> Block:
        """A piece as so many equal steps, or a multiple of them where one would be too long for the engine."""
        units *= _parts(piece.duration_s / units)
        demands: dict[int, float] = {}
        for resource, amount in piece.demands.items():
            number = self._resource(resource, piece.capacities[resource], device)
            if number is not None:
                demands[number] = demands.get(number, 0.0) + amount / units
        self.blocks[name] = piece
        return Block(units, ps_from_s(max(piece.duration_s, 1e-12) / units), demands, name)

    def _resources(self, demands: Sequence[Demand], source: int, target: int) -> dict[int, float]:
        found: dict[int, float] = {}
        for demand in demands:
            device = target if "_in[" in demand.resource else source
            number = self._resource(demand.resource, demand.capacity, device)
            if number is not None:
                found[number] = found.get(number, 0.0) + demand.amount
        return found

    def _resource(self, name: str, capacity: float, device: int) -> int | None:
        """Resource of a pipeline device for one of device 0; None for links that these devices do not share."""
        if not self.inputs.contention or not name.endswith("[0]"):
            return None
        return self.builder.add_resource(capacity, name.replace("[0]", f"[{device}]"))

    def _beside_communication(self) -> float:
        """Speed of a block while a collective holds SMs: the SMs left, and what is shared of HBM and cache."""
        if not self.inputs.contention:
            return 1.0
        num_sms = self.prices.cluster.device.num_sms
        left = (num_sms - min(self.prices.comm_sms("all_reduce"), num_sms - 1)) / num_sms
        return self.prices.overlap.gemm_speed * left


def _parts(seconds: float) -> int:
    """Equal parts of a task, each short enough for one unit of the engine even when it is taken at its slowest."""
    return max(1, math.ceil(seconds / LONGEST_UNIT_S))


def _own_parameters(local: LocalParameters, layout: Layout) -> float:
    """Parameters whose state a rank steps: its shards of them where the optimizer is sharded."""
    return local.dense / layout.dense_shards + local.expert / layout.expert_shards

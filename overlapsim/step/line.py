"""One pipeline of a step: what its stages, transfers and collectives cost on each of its devices."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from overlapsim.cost.base import Demand
from overlapsim.cost.prices import PriceBook
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.pipeline import PipelineSchedule
from overlapsim.schedule.pipeline_work import Block, StageWork, Transfer
from overlapsim.step.blocks import LONGEST_UNIT_S, Piece
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import StagePieces
from overlapsim.step.replicas import Replica, Station
from overlapsim.step.synchronisation import INNER, OUTER
from overlapsim.step.traffic import boundary_bytes, local_work
from overlapsim.units import ps_from_s
from overlapsim.workload.operators import CollectiveOp
from overlapsim.workload.rank_map import RankMap

STEPS_PER_LAYER: Final = 4
"""Equal steps of a block for each layer: the embedding, a layer and the logits end within half a step of their time."""


class Line:
    """The devices of one pipeline in a program under construction; what the pipeline asks for (`PipelineWork`).

    Parameters
    ----------
    inputs, schedule : the step
    replica : which pipeline, and what is degraded in it
    number : of the pipeline among those in the program
    builder : where tasks go
    pieces : blocks by station, shared between pipelines
    blocks : filled with what each block stands for, by its operator name
    largest : data-parallel collective of each device beside which its blocks run; None: none
    """

    def __init__(
        self,
        inputs: StepInputs,
        schedule: PipelineSchedule,
        replica: Replica,
        number: int,
        builder: ProgramBuilder,
        pieces: Mapping[Station, StagePieces],
        blocks: dict[str, Piece],
        largest: Sequence[CollectiveOp | None],
    ) -> None:
        self.inputs, self.schedule, self.replica, self.builder = inputs, schedule, replica, builder
        self.first_device = number * schedule.num_devices
        self.pieces = [pieces[station] for station in replica.stations]
        self._blocks = blocks
        self._name = f" of pipeline {number}" if number else ""
        self._ranks = RankMap(inputs.layout, inputs.rank_order).group("pp")
        num_sms = inputs.cluster.device.num_sms
        self.pools = [
            builder.add_pool(num_sms, derate=self._beside_communication(d, largest[d]), name=f"gpu{at}", device=at)
            for d, at in enumerate(range(self.first_device, self.first_device + schedule.num_devices))
        ]
        self._inner_streams: dict[int, int] = {}
        self._levels: dict[tuple[int, str], deque[int]] = defaultdict(deque)
        self._dp_streams = [builder.add_stream(priority=5, name=f"dp {d}") for d in range(schedule.num_devices)]

    def prices(self, device: int) -> PriceBook:
        """Prices of one device of the pipeline."""
        return self.pieces[device].prices

    # What the pipeline asks for

    def stage(self, device: int, stage: int) -> StageWork:
        """Blocks of a stage."""
        split = bool((self.schedule.kind >= 2).any())
        units = self._units(device, stage)
        get = self.pieces[device].stage
        forward = self.block(device, get(stage, "forward"), units, f"forward {stage}")
        backward = self.block(device, get(stage, "backward"), units, f"backward {stage}")
        if not split:
            return StageWork(forward, backward)
        return StageWork(
            forward,
            backward,
            self.block(device, get(stage, "input_grad"), units, f"input_grad {stage}"),
            self.block(device, get(stage, "weight_grad"), units, f"weight_grad {stage}"),
        )

    def pair(self, device: int, forward_stage: int, backward_stage: int) -> Block | None:
        """Block of an F&B pair."""
        piece = self.pieces[device].pair(forward_stage, backward_stage)
        units = self._units(device, backward_stage)
        return self.block(device, piece, units, f"pair {forward_stage} {backward_stage}")

    def transfer(self, source: int, target: int, from_stage: int, to_stage: int) -> Transfer | None:
        """Activations or gradients between two devices, with the gather of slices on arrival."""
        sent, gathered = boundary_bytes(self.inputs)
        layout, model = self.inputs.layout, self.inputs.model
        per_node = self.inputs.cluster.node.num_devices
        inside = self._ranks[source] // per_node == self._ranks[target] // per_node
        ranks, group = (2, "pair") if inside else (layout.pp, "pp")
        op = CollectiveOp("send_recv", max(1.0, sent), ranks, model.dtype, "embed", group=group)
        # The slower end sets the pace.
        seconds, demands = max(self.prices(source).flow(op), self.prices(target).flow(op), key=lambda flow: flow[0])
        if gathered:
            slices = CollectiveOp("all_gather", gathered, layout.tp, model.dtype, "embed", group="tp")
            seconds += self.prices(target).flow(slices)[0]
        units = parts(seconds)
        found = {name: amount / units for name, amount in self._resources(demands, source, target).items()}
        return Transfer(ps_from_s(seconds / units), units, demands=found)

    # What the step adds

    def collective(self, op: CollectiveOp, device: int, group: int = -1) -> int:
        """Add a collective of the data-parallel groups of one device; of a `group`, it waits for other pipelines.

        Copies within a node are of one pipeline: their steps wait for no other.
        """
        prices = self.prices(device)
        seconds, demands = prices.flow(op)
        # What a rank does itself to what is sent and received is a part of the collective: it waits for either end.
        for kernel in local_work(op):
            cost = prices.kernel(kernel)
            seconds, demands = seconds + cost.duration_s, (*demands, *cost.demands)
        units = parts(seconds)
        task = self.builder.add_flow(
            stream=self._stream(op, device),
            pool=self.pools[device],
            host=device,
            units=units,
            unit_ps=ps_from_s(seconds / units),
            sm=min(prices.comm_sms(op.kind), self.inputs.cluster.device.num_sms - 1),
            group=-1 if op.group == INNER else group,
            demands={name: amount / units for name, amount in self._resources(demands, device, device).items()},
            op=op.name,
            tag=f"{op.kind} [{op.group}]",
        )
        if op.group in (INNER, OUTER):
            self._order_levels(op, device, task)
        return task

    def block(self, device: int, piece: Piece, units: int, name: str) -> Block:
        """A piece as so many equal steps, or a multiple of them where one would be too long for the engine."""
        units *= parts(piece.duration_s / units)
        demands: dict[int, float] = {}
        for resource, amount in piece.demands.items():
            number = self._resource(resource, piece.capacities[resource], device)
            if number is not None:
                demands[number] = demands.get(number, 0.0) + amount / units
        self._blocks[name + self._name] = piece
        return Block(units, ps_from_s(max(piece.duration_s, 1e-12) / units), demands, name + self._name)

    # Inside

    def _stream(self, op: CollectiveOp, device: int) -> int:
        """Stream of a data-parallel collective: what stays within the node runs beside what leaves it."""
        if op.group != INNER:
            return self._dp_streams[device]
        if device not in self._inner_streams:
            self._inner_streams[device] = self.builder.add_stream(priority=5, name=f"dp within {device}")
        return self._inner_streams[device]

    def _order_levels(self, op: CollectiveOp, device: int, task: int) -> None:
        """Let the second level of a piece take what the first has left: gradients go outwards, parameters inwards."""
        first = OUTER if op.kind == "all_gather" else INNER
        if op.group == first:
            self._levels[device, first].append(task)
        else:
            self.builder.add_edge(self._levels[device, first].popleft(), task)

    def _units(self, device: int, stage: int) -> int:
        """Steps of a block: some for each layer where collectives start or are waited for within it."""
        if self.inputs.dp_overlap == "none":
            return 1
        return STEPS_PER_LAYER * max(1, len(self.pieces[device].layers[stage]))

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
        return self.builder.add_resource(capacity, name.replace("[0]", f"[{self.first_device + device}]"))

    def _beside_communication(self, device: int, largest: CollectiveOp | None) -> float:
        """Speed of a device's blocks while one of its data-parallel collectives runs."""
        if not self.inputs.contention or self.inputs.dp_overlap == "none" or largest is None:
            return 1.0
        stage = int(np.flatnonzero(self.schedule.placement[0] == device)[0])
        return self.pieces[device].speed_beside(stage, largest, gathers=self.inputs.dp_overlap == "both")


def parts(seconds: float) -> int:
    """Equal parts of a task, each short enough for one unit of the engine even when it is taken at its slowest."""
    return max(1, math.ceil(seconds / LONGEST_UNIT_S))

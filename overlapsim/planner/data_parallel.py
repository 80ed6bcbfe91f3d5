"""What data parallelism and the optimizer add behind a pipeline, and what sharded layers gather: least times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import numpy as np

from overlapsim.cost.prices import PriceBook
from overlapsim.planner.screen import SPLIT, Float, is_schedule
from overlapsim.planner.space import TWO_WAY, Space
from overlapsim.schedule.pipeline_kinds import SCHEDULES
from overlapsim.step.inputs import DP_OVERLAPS, StepInputs
from overlapsim.step.sharded import Entry, sharded_graph
from overlapsim.step.traffic import StageTraffic, stage_traffic, stream_seconds
from overlapsim.workload.build import GraphBuilder
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.model import Layer
from overlapsim.workload.operators import STEP_PREFIXES, CollectiveOp, Operator
from overlapsim.workload.stage_weights import LocalParameters, stage_parameters
from overlapsim.workload.stages import spread_layers

LEVELS: Final = 4
"""ZeRO levels."""
ORDERS: Final = 3
"""Orders of a pipeline: the first device ends last, another one may, and two copies of the model."""
COPIED: Final = tuple(name for name, kind in SCHEDULES.items() if kind.copies > 1)


class DataParallel:
    """Least times of data-parallel traffic for layouts of one request.

    Parameters
    ----------
    inputs : any step of the request
    """

    def __init__(self, inputs: StepInputs) -> None:
        self.inputs, self._kinds = inputs, tuple(inputs.model.kinds)
        self._after: dict[tuple[int, ...], Float] = {}
        self._steps: dict[float, float] = {}
        self._sharded: dict[tuple[object, ...], tuple[float, float]] = {}

    def after(self, space: Space, rows: np.ndarray, prices: PriceBook, builder: GraphBuilder) -> Float:
        """Seconds behind the last gradient of a pipeline, for candidates of one shape.

        The first device's reduction of what its last backward makes (all of
        it, where nothing is overlapped), the optimizer, and parameters
        gathered behind it, or before the first forward. Where weight
        gradients are put off, or come from both ends, the last gradient may
        be another device's: no reduction counts then.
        """
        return self._look_up(0, space, rows, prices, builder)

    def reduced(self, space: Space, rows: np.ndarray, prices: PriceBook, builder: GraphBuilder) -> Float:
        """Seconds from the first gradient that the first device reduces to the end of the step.

        All its reductions, one after another, then as in `after`.
        """
        return self._look_up(1, space, rows, prices, builder)

    def _look_up(self, which: int, space: Space, rows: np.ndarray, prices: PriceBook, builder: GraphBuilder) -> Float:
        c = space.columns
        vpps, schedule = c["vpp"][rows], c["schedule"][rows]
        found = np.zeros(len(rows))
        order = is_schedule(schedule, (*SPLIT, *TWO_WAY)) * 1 + is_schedule(schedule, COPIED)
        # Layers all alike and dealt evenly: the first device holds as many, whatever its chunks.
        alike = len(self._kinds) == 1 and not (space.model.num_layers % (c["pp"][rows] * vpps)).any()
        for vpp in [0] if alike else np.unique(vpps).tolist():
            mine = slice(None) if alike else np.flatnonzero(vpps == vpp)
            table = self._table(space, int(rows[mine][0]), prices, builder, vpp)[which]
            found[mine] = table[order[mine], c["zero"][rows[mine]], c["dp_overlap"][rows[mine]]]
        return found

    def sharded(self, layer: Layer, builder: GraphBuilder, prices: PriceBook) -> tuple[float, float]:
        """Seconds of one layer's gathers of parameters for a pass, and of the scatter of its gradients, at ZeRO 3."""
        layout = replace(builder.layout, zero=3)
        places = (prices.groups.get("shard"), prices.groups.get("expert_shard"))
        key = (id(layer), layout.tp, layout.ep, layout.etp, layout.dense_shards, layout.expert_shards, *places)
        if key not in self._sharded:
            chunks = spread_layers(self.inputs.model.num_layers, layout.pp * layout.vpp)
            job = Job(builder.sequence, builder.micro_batch, stage_layers=chunks)
            inputs = replace(self.inputs, layout=layout, job=job)
            builder = replace(builder, layout=layout)
            self._sharded[key] = (
                _moved(sharded_graph(inputs, builder, [Entry("layer", "forward", layer)]).operators, prices),
                _moved(sharded_graph(inputs, builder, [Entry("layer", "weight_grad", layer)]).operators, prices),
            )
        return self._sharded[key]

    def _table(self, space: Space, row: int, prices: PriceBook, builder: GraphBuilder, vpp: int) -> Float:
        """Seconds in both senses, by order of the pipeline, ZeRO level and overlap; `vpp` 0 stands for any."""
        layout = space.layout(row)
        key = (layout.tp, layout.sp, layout.cp, layout.ep, layout.etp, layout.pp, layout.dp, vpp)
        if key not in self._after:
            inputs = replace(
                self.inputs, layout=replace(layout, zero=0), job=replace(space.job(row), global_batch=None)
            )
            local = stage_parameters(space.model, layout, 0, inputs.job.stage_layers)
            table = np.zeros((2, ORDERS, LEVELS, len(DP_OVERLAPS)))
            for zero in range(LEVELS):
                own = replace(layout, zero=zero)
                if zero == 2:
                    table[:, :, 2] = table[:, :, 1]
                    continue
                table[:, :, zero] = self._optimizer(local, own, builder, prices)
                for number, overlap in enumerate(DP_OVERLAPS if zero < LEVELS - 1 else ()):
                    traffic = stage_traffic(replace(inputs, layout=own, dp_overlap=overlap), 0)
                    gathers = [(op, prices.flow(op)[0]) for op, _ in traffic.gather]
                    gathered_s = stream_seconds((op for op, _ in traffic.gather), lambda op: prices.flow(op)[0])
                    cell = table[:, :, zero, number]
                    cell[0, 0] += stream_seconds(_behind(traffic), lambda op: prices.flow(op)[0])
                    cell[1] += stream_seconds((op for op, _ in traffic.reduce), lambda op: prices.flow(op)[0])
                    if overlap != "both":
                        cell += gathered_s
                    elif gathers and not gathers[0][0].name.endswith("expert"):
                        # One copy of the model: nothing starts before the first parameters are there.
                        cell[0, :2] += gathers[0][1]
            self._after[key] = table
        return self._after[key]

    def _optimizer(self, local: LocalParameters, layout: Layout, builder: GraphBuilder, prices: PriceBook) -> float:
        own = local.dense / layout.dense_shards + local.expert / layout.expert_shards
        if own not in self._steps:
            graph = replace(builder, layout=layout).optimizer(own)
            self._steps[own] = sum(prices.operator_s(op) for op in graph.operators)
        return self._steps[own]


def _behind(traffic: StageTraffic) -> list[CollectiveOp]:
    """What is reduced behind the last gradient: the last piece of dense parameters, and what is issued after it."""
    for number, (op, done) in enumerate(traffic.reduce):
        # Experts are complete before the layer that holds them is done.
        if done > 1 - 1e-9 and not op.name.endswith("expert"):
            return [op for op, _ in traffic.reduce[number:]]
    return []


def _moved(operators: Iterable[Operator], prices: PriceBook) -> float:
    """Seconds of what moves parameters and gradients."""
    collectives = (op for op in operators if isinstance(op, CollectiveOp) and op.name.startswith(STEP_PREFIXES))
    return sum(prices.flow(op)[0] for op in collectives)

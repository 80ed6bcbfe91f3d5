"""The critical path of a pipeline: its blocks and transfers as the engine gets them, each as fast as alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from overlapsim.cost.prices import PriceBook
from overlapsim.planner.kernel_path import ends_of
from overlapsim.schedule.kernel_order import topological_order
from overlapsim.schedule.pipeline import PipelineSchedule
from overlapsim.schedule.pipeline_kinds import SCHEDULES, make_schedule
from overlapsim.schedule.pipeline_links import P2pMode, link
from overlapsim.schedule.pipeline_steps import price_steps
from overlapsim.schedule.pipeline_work import Block, StageWork, Transfer
from overlapsim.schedule.program import Int
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import StagePieces
from overlapsim.step.traffic import boundary_bytes
from overlapsim.workload.build import Which
from overlapsim.workload.operators import CollectiveOp
from overlapsim.workload.rank_map import RankMap

Pass = Which | Literal["pair"]
_ONE: Final = Block(1, 1)
_NAMES: Final[tuple[Which, ...]] = ("forward", "backward", "input_grad", "weight_grad")


@dataclass(frozen=True, eq=False)
class Skeleton:
    """What of a pipeline waits for what; no times.

    Attributes
    ----------
    schedule : whose actions they are
    order, ptr, before : of `kernel_path.ends_of`; nodes are steps, then transfers
    price_of : int64 array of shape (nodes,): number of each node's price among `blocks`, then `transfers`
    blocks : device, stage of the forward (-1: none) and of the backward, and name of the pass, of each price
    transfers : source and target device of each price
    gradients : nodes that make the last gradients of the stages of the first device
    """

    schedule: PipelineSchedule
    order: Int
    ptr: Int
    before: Int
    price_of: Int
    blocks: tuple[tuple[int, int, int, Pass], ...]
    transfers: tuple[tuple[int, int], ...]
    gradients: Int

    @classmethod
    def of(cls, schedule: PipelineSchedule, mode: P2pMode) -> Skeleton:
        """Follow what `lower_pipeline` makes of a schedule."""
        asked = _Asked()
        steps = price_steps(schedule, asked)
        links = link(schedule, steps, asked, mode)
        pairs = np.concatenate((links.line, links.wait, links.post))
        pairs = pairs[np.argsort(pairs[:, 1], kind="stable")]
        order = topological_order(links.num_nodes, pairs[:, 0].copy(), pairs[:, 1].copy())
        ptr = np.searchsorted(pairs[:, 1], np.arange(links.num_nodes + 1))
        count = len(steps.blocks)
        some = np.full(count, -1)
        some[steps.block_of[::-1]] = np.arange(steps.num)[::-1]
        blocks = [_what(schedule, int(steps.first[step]), int(steps.last[step])) for step in some.tolist()]
        return cls(
            schedule,
            order,
            ptr.astype(np.int64),
            pairs[:, 0].copy(),
            np.concatenate((steps.block_of, count + links.price_of)).astype(np.int64),
            tuple(blocks),
            tuple(asked.transfers),
            steps.of_action[schedule.gradient_index[schedule.placement[0] == 0][:, schedule.copy_of == 0].max(axis=1)],
        )


class _Asked:
    """Notes which transfers a schedule asks for."""

    def __init__(self) -> None:
        self.transfers: list[tuple[int, int]] = []

    def stage(self, device: int, stage: int) -> StageWork:
        """Every pass."""
        return StageWork(_ONE, _ONE, _ONE, _ONE)

    def pair(self, device: int, forward_stage: int, backward_stage: int) -> Block:
        """One block."""
        return _ONE

    def transfer(self, source: int, target: int, from_stage: int, to_stage: int) -> Transfer:
        """One chunk; noted."""
        self.transfers.append((source, target))
        return Transfer(1)


def _what(schedule: PipelineSchedule, first: int, last: int) -> tuple[int, int, int, Pass]:
    device = int(schedule.device[first])
    if first != last:
        return device, int(schedule.stage[first]), int(schedule.stage[last]), "pair"
    return device, int(schedule.stage[first]), int(schedule.stage[first]), _NAMES[int(schedule.kind[first])]


@dataclass(frozen=True)
class Path:
    """When what follows a pipeline may start if nothing is in another's way: the engine is no earlier.

    Attributes
    ----------
    end_s : last gradient of the pipeline
    gradients_s : the first device begins the first of the backwards that make its last gradients
    """

    end_s: float
    gradients_s: float


class PipelinePaths:
    """Critical paths of steps; the skeletons of pipelines are kept."""

    def __init__(self) -> None:
        self._skeletons: dict[tuple[object, ...], Skeleton] = {}

    def schedule(self, inputs: StepInputs) -> PipelineSchedule:
        """Schedule of a step, made once.

        Raises
        ------
        LayoutError
            If it does not exist.
        """
        return self._skeleton(inputs).schedule

    def path(self, inputs: StepInputs, prices: PriceBook) -> Path:
        """Follow a step from its first forward.

        Raises
        ------
        LayoutError
            If the schedule does not exist.
        StrategyError
            If the strategies do not go together, or with the step.
        """
        skeleton = self._skeleton(inputs)
        pieces = StagePieces(inputs, prices, skeleton.schedule)
        seconds = [
            (pieces.pair(forward, backward) if which == "pair" else pieces.stage(forward, which)).duration_s
            for _, forward, backward, which in skeleton.blocks
        ]
        ranks = RankMap(inputs.layout, inputs.rank_order).group("pp")
        node = inputs.cluster.node.num_devices
        ways = [ranks[source] // node == ranks[target] // node for source, target in skeleton.transfers]
        times = {inside: transfer_s(inputs, prices, inside=inside) for inside in set(ways)}
        seconds += [times[inside] for inside in ways]
        duration = np.floor(np.array(seconds) * 1e12).astype(np.int64)[skeleton.price_of]
        end = ends_of(skeleton.order, skeleton.ptr, skeleton.before, duration)
        last = skeleton.gradients
        return Path(float(end.max()) / 1e12, float((end - duration)[last].min()) / 1e12)

    def _skeleton(self, inputs: StepInputs) -> Skeleton:
        name, layout = inputs.schedule_name, inputs.layout
        key = (name, layout.pp, layout.vpp, inputs.num_micro_batches, inputs.p2p_mode)
        if key not in self._skeletons:
            own = SCHEDULES[name].stages_per_device is None
            schedule = make_schedule(
                name, layout.pp, inputs.num_micro_batches, stages_per_device=layout.vpp if own else None
            )
            self._skeletons[key] = Skeleton.of(schedule, inputs.p2p_mode)
        return self._skeletons[key]


def transfer_s(inputs: StepInputs, prices: PriceBook, *, inside: bool) -> float:
    """Seconds of a transfer between two stages, with the gather of slices on arrival, inside a node or between two."""
    sent, gathered = boundary_bytes(inputs)
    layout, dtype = inputs.layout, inputs.model.dtype
    ranks, group = (2, "pair") if inside else (layout.pp, "pp")
    seconds = prices.flow(CollectiveOp("send_recv", max(1.0, sent), ranks, dtype, "embed", group=group))[0]
    if gathered:
        seconds += prices.flow(CollectiveOp("all_gather", gathered, layout.tp, dtype, "embed", group="tp"))[0]
    return seconds

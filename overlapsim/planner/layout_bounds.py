"""Bounds of a space's candidates: by what the hardware can do for all of them, by prices for those of one shape."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt

from overlapsim.cost.prices import PriceBook
from overlapsim.planner.bounds import lower_bound_s
from overlapsim.planner.data_parallel import DataParallel
from overlapsim.planner.layer_times import Hides, LayerTimes, Times
from overlapsim.planner.pipeline_path import Path, transfer_s
from overlapsim.planner.screen import PAIRED, ROUNDING, Float, Parts, is_schedule, step_bounds
from overlapsim.planner.space import RECOMPUTES, Space
from overlapsim.planner.stage_counts import StageCounts
from overlapsim.step.inputs import StepInputs
from overlapsim.step.simulate import step_prices
from overlapsim.workload.build import GraphBuilder, Which
from overlapsim.workload.layout import Layout
from overlapsim.workload.layout_rules import Job
from overlapsim.workload.operators import GemmOp, GroupedGemmOp, KernelOp, Operator, OperatorGraph
from overlapsim.workload.stages import spread_layers

SLACK: Final = 0.999
"""Work that grows with tokens over that of one sequence so many times: weights of norms are read once."""
CHUNK: Final = 1 << 17
FAMILY: Final = ("tp", "sp", "cp", "ep", "etp", "sequence_parallel", "micro_batch")
LAYOUT: Final = ("tp", "sp", "cp", "ep", "etp", "pp", "dp", "sequence_parallel")
# Fields of `Parts`, in the order of the passes.
_PASSES: Final = ("forward", "backward", "input_grad", "weight_grad")
SHARDED: Final = 3
"""ZeRO level at which layers gather their parameters before each use."""
Rows = npt.NDArray[np.intp]


class LayoutBounds:
    """Bounds for the candidates of a space.

    Parameters
    ----------
    space : candidates
    inputs : any step of the request
    models : results of cost models, shared with the engine's runs
    """

    def __init__(self, space: Space, inputs: StepInputs, models: dict[object, object]) -> None:
        self.space, self.inputs, self.models = space, inputs, models
        c = space.columns
        first, self._pipeline = space.distinct(("pp", "vpp"))
        pipelines = list(zip(c["pp"][first].tolist(), c["vpp"][first].tolist(), strict=True))
        self._kinds = tuple(space.model.kinds)
        self._counts = StageCounts.of(space.model, pipelines)
        self._times, self._replicas = LayerTimes(), DataParallel(inputs)
        self._books: dict[tuple[int, ...], PriceBook] = {}

    def families(self) -> list[Rows]:
        """Rows whose layers are priced alike: one micro-batch, and one layout but for pipeline and replicas."""
        c = self.space.columns
        stage = self.space.world_size // c["pp"]
        node = self.inputs.cluster.node.num_devices
        # Stages of whole nodes, or whole stages to a node, put groups into nodes alike; others by their own size.
        place = np.where(stage % node == 0, 0, np.where(node % stage == 0, 1, 1 + stage))
        code = np.zeros(len(self.space), dtype=np.int64)
        for values in (*(c[name] for name in FAMILY), place):
            code = code * (int(values.max(initial=0)) + 1) + values
        order = np.argsort(code, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(code[order])) + 1) if len(order) else []

    def shapes(self, rows: Rows) -> list[Rows]:
        """Places in `rows`, rising rows of one family, of those that share pipeline and replicas."""
        pp, dp = self.space.columns["pp"][rows], self.space.columns["dp"][rows]
        cuts = np.flatnonzero((pp[1:] != pp[:-1]) | (dp[1:] != dp[:-1])) + 1
        return np.split(np.arange(len(rows)), cuts)

    def hardware(self, *, hides: Hides) -> Float:
        """Bounds of all candidates from FLOP, compulsory bytes and wires, whatever kernels and libraries do.

        Parameters
        ----------
        hides : what strategies may hide
        """
        found = np.empty(len(self.space))
        nothing, times = PriceBook(self.inputs.cluster, 1), LayerTimes(_hardware_s)
        for first, end in self._runs(LAYOUT):
            builder = self._builder(self.space.layout(first), 1)
            kinds = [times.layer(kind, builder, nothing) for kind in self._kinds]
            ends = times.ends(builder, nothing)
            for start in range(first, end, CHUNK):
                rows = np.arange(start, min(end, start + CHUNK))
                scale = SLACK * self.space.columns["micro_batch"][rows].astype(np.float64)
                parts = self._parts(rows, kinds, ends, hides=hides).scaled(scale)
                found[rows] = self._bounds(rows, parts)
        return found

    def layered(self, rows: Rows, *, hides: Hides) -> Float:
        """Bounds of candidates of one family from the prices of their layers alone."""
        return self._bounds(rows, self._layer_parts(rows, hides=hides))

    def priced(self, rows: Rows, *, hides: Hides) -> Float:
        """Bounds of candidates of one shape from the prices of all their operators."""
        row = int(rows[0])
        prices, builder = self.prices(row), self.builder(row)
        parts = self._layer_parts(rows, hides=hides)
        parts = self._sharded(rows, parts, builder, prices)
        return self._bounds(rows, self._around(rows, parts, prices, builder))

    def simulated(self, rows: Rows, kinds: Sequence[Mapping[Which, float]], *, hides: Hides) -> Float:
        """Bounds of candidates of one shape and recompute from the seconds of each kind of layer in the engine."""
        prices, builder = self.prices(int(rows[0])), self.builder(int(rows[0]))
        layers: dict[str, Any] = {
            name: tuple(np.array(kind[which]) for kind in kinds)
            for name, which in zip(_PASSES, get_args(Which), strict=True)
        }
        parts = replace(self._layer_parts(rows, hides=hides), **layers)
        return self._bounds(rows, self._around(rows, parts, prices, builder))

    def along(self, rows: Rows, path: Path) -> Float:
        """Bounds of candidates of one shape that share the critical path of their pipeline."""
        row = int(rows[0])
        prices, builder = self.prices(row), self.builder(row)
        behind = path.end_s + self._replicas.after(self.space, rows, prices, builder)
        reduced = path.gradients_s + self._replicas.reduced(self.space, rows, prices, builder)
        return np.maximum(behind, reduced) * ROUNDING

    def prices(self, row: int) -> PriceBook:
        """Prices with the groups of one candidate placed."""
        layout = replace(self.space.layout(row), vpp=1, zero=0, sequence_parallel=True)
        key = (layout.tp, layout.sp, layout.cp, layout.ep, layout.etp, layout.pp, layout.dp)
        if key not in self._books:
            self._books[key] = step_prices(self._asked(layout, row), self.models)
        return self._books[key]

    # Inside

    def _runs(self, names: Sequence[str]) -> list[tuple[int, int]]:
        """First and last row, and one, of rows behind each other that agree in some columns."""
        if not len(self.space):
            return []
        change = np.zeros(len(self.space) - 1, dtype=np.bool_)
        for name in names:
            values = self.space.columns[name]
            change |= values[1:] != values[:-1]
        cuts = [0, *(np.flatnonzero(change) + 1).tolist(), len(self.space)]
        return list(itertools.pairwise(cuts))

    def builder(self, row: int) -> GraphBuilder:
        """Maker of the graphs of one candidate, nothing computed again."""
        return self._builder(self.space.layout(row), int(self.space.columns["micro_batch"][row]))

    def _layer_parts(self, rows: Rows, *, hides: Hides) -> Parts:
        row = int(rows[0])
        prices, builder = self.prices(row), self.builder(row)
        kinds = [self._times.layer(kind, builder, prices) for kind in self._kinds]
        return self._parts(rows, kinds, self._times.ends(builder, prices), hides=hides)

    def _around(self, rows: Rows, parts: Parts, prices: PriceBook, builder: GraphBuilder) -> Parts:
        """The same with transfers, and what stands behind the pipeline."""
        transfer = np.array(self._transfer(int(rows[0]), prices) if builder.layout.pp > 1 else 0.0)
        after = self._replicas.after(self.space, rows, prices, builder)
        reduced = self._replicas.reduced(self.space, rows, prices, builder)
        return replace(parts, transfer=transfer, after=after, reduced=reduced)

    def _builder(self, layout: Layout, micro_batch: int) -> GraphBuilder:
        return GraphBuilder(self.space.model, layout, self.inputs.recipe, micro_batch, self.space.sequence)

    def _asked(self, layout: Layout, row: int) -> StepInputs:
        chunks = spread_layers(self.space.model.num_layers, layout.pp * layout.vpp)
        job = Job(self.space.sequence, int(self.space.columns["micro_batch"][row]), stage_layers=chunks)
        return replace(self.inputs, layout=layout, job=job, schedule="", dp_overlap="none")

    def _bounds(self, rows: Rows, parts: Parts) -> Float:
        c = self.space.columns
        micro_batches = self.space.global_batch / (c["dp"][rows].astype(float) * c["micro_batch"][rows])
        schedule, pp, vpp = (c[name][rows] for name in ("schedule", "pp", "vpp"))
        return step_bounds(parts, self._counts, self._pipeline[rows], schedule, pp, vpp, micro_batches)

    def _parts(self, rows: Rows, kinds: Sequence[dict[str, Times]], ends: dict[str, Times], *, hides: Hides) -> Parts:
        """Times of layers by what each candidate computes again; F&B pairs hide collectives like strategies do."""
        c = self.space.columns
        heads = 1 + self.space.model.num_mtp_layers
        recompute, paired = c["recompute"][rows], is_schedule(c["schedule"][rows], PAIRED)

        def take(times: Times) -> tuple[float, float]:
            return times.at_least(hides), times.computing

        def choose(tables: Sequence[Times]) -> Float:
            table = np.array([take(times) for times in tables]).T
            found: Float = table[paired.astype(np.intp), recompute if len(tables) > 1 else 0]
            return found

        def again(kind: dict[str, Times], name: str) -> Float:
            more = {"none": Times(), "full": kind["forward"]}
            return choose([kind[name] + more.get(which, kind.get(which, Times())) for which in RECOMPUTES])

        def end(name: str) -> float:
            # Pairs are those of layers.
            return ends[name].at_least("all" if hides == "all" else "nothing")

        return Parts(
            forward=tuple(choose([kind["forward"]]) for kind in kinds),
            backward=tuple(again(kind, "backward") for kind in kinds),
            input_grad=tuple(again(kind, "dgrad") for kind in kinds),
            weight_grad=tuple(choose([kind["wgrad"]]) for kind in kinds),
            embed_forward=np.array(end("embed forward")),
            embed_backward=np.array(end("embed backward")),
            head_forward=np.array(end("head forward") * heads),
            head_backward=np.array(end("head backward") * heads),
            transfer=np.array(0.0),
            after=np.array(0.0),
            reduced=np.array(0.0),
        )

    def _sharded(self, rows: Rows, parts: Parts, builder: GraphBuilder, prices: PriceBook) -> Parts:
        """Add what layers gather and scatter in each pass at ZeRO 3, on the compute stream; F&B pairs may hide it."""
        sharded = self.space.columns["zero"][rows] == SHARDED
        sharded &= ~is_schedule(self.space.columns["schedule"][rows], PAIRED)
        if not sharded.any():
            return parts
        moved = [self._replicas.sharded(kind, builder, prices) for kind in self._kinds]
        gathers, scatters = ([entry[side] * sharded for entry in moved] for side in (0, 1))

        def more(times: Sequence[Float], *added: Sequence[Float]) -> tuple[Float, ...]:
            return tuple(np.sum(entries, axis=0) for entries in zip(times, *added, strict=True))

        return replace(
            parts,
            forward=more(parts.forward, gathers),
            backward=more(parts.backward, gathers, scatters),
            input_grad=more(parts.input_grad, gathers),
            weight_grad=more(parts.weight_grad, scatters),
        )

    def _transfer(self, row: int, prices: PriceBook) -> float:
        """Seconds of a transfer between two stages, the least of those that there are."""
        layout = self.space.layout(row)
        stride, node = layout.world_size // layout.pp, prices.cluster.node.num_devices
        ways = [True] * (stride < node) + [False] * (stride * (layout.pp - 1) >= node)
        return min(transfer_s(self._asked(layout, row), prices, inside=inside) for inside in ways)


def _hardware_s(op: Operator, prices: PriceBook) -> float:
    """What no kernel beats, without what does not grow with tokens: weights are read once however many there are."""
    if isinstance(op, GemmOp):
        return op.flop / prices.cluster.device.peak(op.dtype, op.accumulate)
    if isinstance(op, KernelOp) and isinstance(op.work, GroupedGemmOp):
        return op.work.flop / max(prices.cluster.device.peak_flop_per_s.values())
    return lower_bound_s(OperatorGraph((op,)), prices.cluster)

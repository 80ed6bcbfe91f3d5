"""A step as one program of operator tasks: every block of an assembled step replaced by what it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlapsim.cost.prices import PriceBook
from overlapsim.engine import compiled
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.pipeline import PipelineSchedule
from overlapsim.schedule.program import BLOCKS, FLOW, Program
from overlapsim.step.assemble import StepProgram, assemble
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import StagePieces
from overlapsim.step.traffic import held_parameters
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import compose
from overlapsim.strategy.pairing import paired
from overlapsim.strategy.tasks import Site
from overlapsim.workload.operators import OperatorGraph


@dataclass(frozen=True)
class Expanded:
    """Operators of one block as the tasks of one GPU.

    Attributes
    ----------
    program : of one rank
    begins, ends : for each layer, in the order of the pass, tasks with which it begins, and all its tasks
    done : share of the pass's time at which each layer ends
    """

    program: Program
    begins: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    done: tuple[float, ...] = (1.0,)


def full_program(inputs: StepInputs, prices: PriceBook, schedule: PipelineSchedule) -> tuple[StepProgram, Program]:
    """The step with blocks, and the same step without any."""
    step = assemble(inputs, prices, schedule)
    return step, _Expansion(inputs, prices, schedule, step).program()


class _Expansion:
    def __init__(self, inputs: StepInputs, prices: PriceBook, schedule: PipelineSchedule, step: StepProgram) -> None:
        self.inputs, self.prices, self.schedule, self.step = inputs, prices, schedule, step
        self.pieces = StagePieces(inputs, prices, schedule)
        self.builder = ProgramBuilder()
        num_sms = inputs.cluster.device.num_sms
        derate = prices.overlap.gemm_speed if inputs.contention else 1.0
        self.pools = [
            self.builder.add_pool(num_sms, derate=derate, name=f"gpu{d}", device=d) for d in range(schedule.num_devices)
        ]
        self.streams: dict[tuple[int, str], int] = {}
        self.expanded: dict[str, Expanded] = {}
        # For each task of the step with blocks: its new tasks by layer, for waiting and for being waited for.
        self.begins: list[tuple[tuple[int, ...], ...]] = []
        self.ends: list[tuple[tuple[int, ...], ...]] = []
        self.done: list[tuple[float, ...]] = []

    def program(self) -> Program:
        old = self.step.program
        for task in range(old.num_tasks):
            if old.kind[task] == BLOCKS:
                self._add_block(task)
            else:
                self._add_flow(task)
        for edge in range(old.num_edges):
            self._add_edge(edge)
        return self.builder.freeze()

    # Tasks

    def _add_block(self, task: int) -> None:
        name = self.step.program.op[task]
        if name not in self.expanded:
            self.expanded[name] = self._expand(name)
        block, device = self.expanded[name], int(self.step.device[task])
        first = self._copy(block.program, device)
        self.done.append(block.done)
        self.begins.append(tuple(tuple(first + t for t in tasks) for tasks in block.begins))
        self.ends.append(tuple(tuple(first + t for t in tasks) for tasks in block.ends))

    def _copy(self, program: Program, device: int) -> int:
        """Add a block's tasks on a device."""
        first, demands = self.builder.num_tasks, self._demands
        for t in range(program.num_tasks):
            name = f"block {program.stream_name[program.stream[t]]}"
            common = {
                "stream": self._stream(device, name, int(program.stream_priority[program.stream[t]])),
                "pool": self.pools[device],
                "units": int(program.units[t]),
                "unit_ps": int(program.unit_ps[t]),
                "sm": int(program.sm[t]),
                "host": device,
                "demands": demands(program, t, device),
                "op": program.op[t],
                "tag": program.tag[t],
            }
            if program.kind[t] == FLOW:
                self.builder.add_flow(**common)
            else:
                self.builder.add_blocks(
                    **common, sm_quantum=int(program.sm_quantum[t]), persistent=bool(program.persistent[t])
                )
        for e in range(program.num_edges):
            self.builder.add_edge(
                first + int(program.edge_src[e]),
                first + int(program.edge_dst[e]),
                src_units=int(program.edge_src_units[e]),
                dst_unit=int(program.edge_dst_unit[e]),
                lag_ps=int(program.edge_lag_ps[e]),
            )
        return first

    def _demands(self, program: Program, task: int, device: int) -> dict[int, float]:
        found = {}
        for j in range(int(program.demand_ptr[task]), int(program.demand_ptr[task + 1])):
            resource = int(program.demand_resource[j])
            name = program.resource_name[resource]
            if self.inputs.contention and name.endswith("[0]"):
                number = self.builder.add_resource(
                    float(program.resource_capacity[resource]), name.replace("[0]", f"[{device}]")
                )
                found[number] = float(program.demand_amount[j])
        return found

    def _add_flow(self, task: int) -> None:
        old = self.step.program
        group = int(old.group[task])
        new = self.builder.add_flow(
            stream=self._stream(-1, f"{old.stream[task]}", int(old.stream_priority[old.stream[task]])),
            pool=self.pools[int(self.step.device[task])],
            units=int(old.units[task]),
            unit_ps=int(old.unit_ps[task]),
            sm=int(old.sm[task]),
            group=group,
            demands={
                self.builder.add_resource(
                    float(old.resource_capacity[old.demand_resource[j]]), old.resource_name[old.demand_resource[j]]
                ): float(old.demand_amount[j])
                for j in range(int(old.demand_ptr[task]), int(old.demand_ptr[task + 1]))
            },
            op=old.op[task],
            tag=old.tag[task],
        )
        self.done.append((1.0,))
        self.begins.append(((new,),))
        self.ends.append(((new,),))

    def _stream(self, device: int, name: str, priority: int) -> int:
        if (device, name) not in self.streams:
            self.streams[device, name] = self.builder.add_stream(priority=priority, name=name)
        return self.streams[device, name]

    def _add_edge(self, edge: int) -> None:
        old = self.step.program
        src, dst = int(old.edge_src[edge]), int(old.edge_dst[edge])
        units, unit = int(old.edge_src_units[edge]), int(old.edge_dst_unit[edge])
        ends, begins = self.ends[src], self.begins[dst]
        # The layer whose end is nearest to the share of the pass that the step with blocks waits for.
        layers = _nearest(self.done[src], units / int(old.units[src])) + 1
        sources = [t for tasks in ends[:layers] for t in tasks]
        gated = 0 if unit < 0 else _nearest((0.0, *self.done[dst][:-1]), unit / int(old.units[dst]))
        for source in sources:
            for target in begins[gated]:
                self.builder.add_edge(source, target, lag_ps=int(old.edge_lag_ps[edge]))

    # Graphs

    def _expand(self, name: str) -> Expanded:
        graphs = self._graphs(name)
        graph, ranges = joined(graphs)
        builder = ProgramBuilder()
        composition = self.pieces._composition(graph)
        composed = compose(Context(graph, self.prices), composition, Site(builder, self.prices))
        begins, ends = [], []
        for first, last in ranges:
            inside = range(first, last)
            starts = [i for i in inside if not any(first <= p for p in graph.producers(i))]
            begins.append(tuple(sorted({t for i in starts for t in composed.placement.entries[i]})))
            ends.append(tuple(sorted({t for i in inside for t in composed.placement.exits[i]})))
        program = builder.freeze()
        timeline = compiled.run(program, contention=self.inputs.contention)
        layer_ends = [int(timeline.t_end[list(tasks)].max()) for tasks in ends]
        return Expanded(program, tuple(begins), tuple(ends), tuple(end / layer_ends[-1] for end in layer_ends))

    def _graphs(self, name: str) -> list[OperatorGraph]:
        """Graphs of a block, a layer each; what stands at the ends of the model goes with the layer beside it."""
        what, _, rest = name.partition(" ")
        make = self.pieces.builder
        if what == "optim.step":
            own = float(self._own(int(rest)))
            return [make.optimizer(own)]
        if what == "pair":
            first, second = (self.pieces.layers[int(stage)] for stage in rest.split())
            graphs = [
                paired(make.layer(a, "forward"), make.layer(b, "backward"), self.prices.operator_s)
                for a, b in zip(first, second, strict=True)
            ]
            first_stage, last_stage = (int(stage) for stage in rest.split())
            top = self.schedule.num_stages - 1
            before = [make.embedding("forward")] * (first_stage == 0) + [make.head("backward")] * (last_stage == top)
            after = [make.head("forward")] * (first_stage == top) + [make.embedding("backward")] * (last_stage == 0)
            return _there(before + graphs + after)
        stage, which = int(rest), what
        layers = list(self.pieces.layers[stage])
        graphs = [make.layer(layer, which) for layer in layers]  # type: ignore[arg-type]
        head = [make.head(which)] * (stage == self.schedule.num_stages - 1)  # type: ignore[arg-type]
        embed = [make.embedding(which)] * (stage == 0)  # type: ignore[arg-type]
        if which == "forward":
            return _there(embed + graphs + head)
        return _there(head + graphs[::-1] + embed)

    def _own(self, device: int) -> float:
        layout, copies = self.inputs.layout, range(self.schedule.num_copies)
        held = [held_parameters(self.inputs, self.schedule, device, copy) for copy in copies]
        return sum(local.dense / layout.dense_shards + local.expert / layout.expert_shards for local in held)


def _nearest(places: Sequence[float], share: float) -> int:
    return min(range(len(places)), key=lambda number: abs(places[number] - share))


def _there(graphs: Sequence[OperatorGraph]) -> list[OperatorGraph]:
    return [graph for graph in graphs if graph.operators]


def joined(graphs: Sequence[OperatorGraph]) -> tuple[OperatorGraph, list[tuple[int, int]]]:
    """Graphs one after another, each behind the last operator of the one before; and where each lies."""
    operators, streams, edges, ranges = [], [], set(), []
    for graph in graphs:
        first = len(operators)
        fed = {b for _, b in graph.dependencies}
        if first:
            edges |= {(first - 1, first + i) for i in range(len(graph.operators)) if i not in fed}
        operators += graph.operators
        streams += [graph.stream_of(i) for i in range(len(graph.operators))]
        edges |= {(first + a, first + b) for a, b in graph.dependencies}
        ranges.append((first, len(operators)))
    return OperatorGraph(tuple(operators), tuple(sorted(edges)), tuple(streams)), ranges

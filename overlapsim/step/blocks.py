"""A block: the program of a layer's pass, run once in the engine, as one piece of work of a larger program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from overlapsim.engine import compiled
from overlapsim.engine.deadlock import raise_if_deadlocked
from overlapsim.engine.timeline import Timeline
from overlapsim.plan import Finding
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import Program
from overlapsim.step.breakdown import spans
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Composition, compose, find_pieces
from overlapsim.strategy.tasks import Site
from overlapsim.workload.operators import OperatorGraph


@dataclass(frozen=True)
class Piece:
    """What a block costs where it stands among others like it.

    Attributes
    ----------
    duration_s : from the end of the block before to its own end
    kinds_s : seconds of each kind (`categories.KINDS`) within it; the sum is the duration
    demands : amount by resource name over the whole block
    capacities : of those resources
    findings : what its strategies believe, and what is allowed in it and does not help
    """

    duration_s: float = 0.0
    kinds_s: Mapping[str, float] = field(default_factory=dict)
    demands: Mapping[str, float] = field(default_factory=dict)
    capacities: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def __add__(self, other: Piece) -> Piece:
        """Both, one after the other."""
        return Piece(
            self.duration_s + other.duration_s,
            _sum(self.kinds_s, other.kinds_s),
            _sum(self.demands, other.demands),
            {**self.capacities, **other.capacities},
            tuple(dict.fromkeys((*self.findings, *other.findings))),
        )

    def times(self, count: int) -> Piece:
        """The same block `count` times."""
        return Piece(
            self.duration_s * count,
            {kind: seconds * count for kind, seconds in self.kinds_s.items()},
            {name: amount * count for name, amount in self.demands.items()},
            self.capacities,
            self.findings,
        )


def _sum(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in dict.fromkeys((*first, *second))}


def simulate_piece(
    context: Context, composition: Composition, *, launch_s: float = 0.0, contention: bool = True, follows: bool = True
) -> Piece:
    """Run a graph's program and read what it costs.

    Parameters
    ----------
    context, composition : the graph, its prices, and the strategies in it
    launch_s : host time of a launch; the host of a block that follows others has run ahead as far as it can
    contention : False leaves HBM and link sharing out
    follows : whether the block stands behind another one like it; else the first launch is waited for

    Raises
    ------
    DeadlockError
        If the strategies' tasks wait for each other.
    """
    if not context.graph.operators:
        return Piece()
    before = 1 if follows and launch_s > 0 else 0
    graph = repeated(context.graph, before + 1)
    builder = ProgramBuilder()
    site = Site(builder, context.prices, launch_s=launch_s)
    composed = compose(Context(graph, context.prices), composition, site)
    program = builder.freeze()
    timeline = compiled.run(program, contention=contention, record=False)
    raise_if_deadlocked(timeline)
    start = _end_of_copy(timeline, program.num_tasks // 2) if before else 0
    kinds = spans(timeline, start, timeline.end_ps)
    amounts, capacities = _demands(program)
    share = 1.0 / (before + 1)
    return Piece(
        (timeline.end_ps - start) / 1e12,
        kinds,
        {name: share * amount for name, amount in amounts.items()},
        capacities,
        (*composed.findings, *_beliefs(context, composition)),
    )


def _beliefs(context: Context, composition: Composition) -> Iterator[Finding]:
    """What the strategies of pairs say of their choice."""
    for piece in find_pieces(context.graph, composition.pairs):
        chosen = piece.chosen
        part = Context(context.graph.part(piece.operators), context.prices)
        yield from chosen.strategy.findings(part, chosen.parameters)


def repeated(graph: OperatorGraph, count: int) -> OperatorGraph:
    """The graph `count` times in a row, each behind what ends the one before."""
    if count == 1:
        return graph
    size = len(graph.operators)
    last = size - 1
    starts = sorted(set(range(size)) - {dst for _, dst in graph.dependencies})
    inner = [(src + copy * size, dst + copy * size) for copy in range(count) for src, dst in graph.dependencies]
    joins = [(last + (copy - 1) * size, start + copy * size) for copy in range(1, count) for start in starts]
    streams = graph.streams * count
    return OperatorGraph(graph.operators * count, tuple(sorted((*inner, *joins))), streams)


def _end_of_copy(timeline: Timeline, tasks: int) -> int:
    """End of the first half of the tasks: of the first copy of a repeated graph."""
    return int(timeline.t_end[:tasks].max(initial=0))


def _demands(program: Program) -> tuple[dict[str, float], dict[str, float]]:
    per_task = np.repeat(program.units, np.diff(program.demand_ptr)) * program.demand_amount
    totals = np.bincount(program.demand_resource, per_task, minlength=len(program.resource_capacity))
    names = program.resource_name
    return (
        {name: float(total) for name, total in zip(names, totals, strict=True) if total > 0},
        {name: float(rate) for name, rate in zip(names, program.resource_capacity, strict=True)},
    )

"""A block: the program of a layer's pass, run once in the engine, as one piece of work of a larger program."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from overlapsim.cost.launch import LaunchStack
from overlapsim.cost.prices import PriceBook
from overlapsim.engine import compiled
from overlapsim.engine.deadlock import raise_if_deadlocked
from overlapsim.engine.timeline import Timeline
from overlapsim.errors import StrategyError
from overlapsim.plan import Finding
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import Program
from overlapsim.step.breakdown import spans
from overlapsim.step.run_graph import with_engine
from overlapsim.step.skew import Skew, may_wait_for_host, rank_tasks, spread_ranks
from overlapsim.strategy.base import Context
from overlapsim.strategy.compatibility import check_compatible
from overlapsim.strategy.compose import ArrangingStrategy, Composition, compose, find_pieces
from overlapsim.strategy.tasks import Site
from overlapsim.workload.adjacent import end_of_pass
from overlapsim.workload.operators import STEP_PREFIXES, CollectiveOp, OperatorGraph

PASSES: Final = 8
"""Copies of a block over which the hosts of its ranks drift apart. A step has more passes before a host waits for its
GPU: collectives then stand longer on the early ranks, and blocks end hardly later. Where hosts meet before each pass,
as many passes are drawn."""
LONGEST_UNIT_S: Final = 60.0
"""Longest unit of a task, a little below the engine's."""
BESIDE: Final = 8
"""Times a block's duration that a collective beside it lasts: no block is slowed that much."""


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

    def times(self, count: float) -> Piece:
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
    context: Context,
    composition: Composition,
    *,
    launch_s: float = 0.0,
    hosts: LaunchStack | None = None,
    contention: bool = True,
    follows: bool = True,
) -> Piece:
    """Run a graph's program and read what it costs.

    Parameters
    ----------
    context, composition : the graph, its prices, and the strategies in it
    launch_s : host time of a launch; the host of a block that follows others has run ahead as far as it can
    hosts : whose launches spread about `launch_s`. Where launches could be what all wait for, the ranks of the
        block's largest group are simulated, each with a host of its own (`skew`); None: hosts are in step
    contention : False leaves HBM and link sharing out
    follows : whether the block stands behind another one like it; else the first launch is waited for

    Raises
    ------
    DeadlockError
        If the strategies' tasks wait for each other.
    """
    if not context.graph.operators:
        return Piece()
    believed = tuple(_beliefs(context, composition))
    context, composition = _arranged_alone(context, composition, contention)
    copies = 2 if follows and launch_s > 0 else 1
    program, findings = _program(context, composition, copies, launch_s)
    timeline = compiled.run(program, contention=contention, record=False)
    raise_if_deadlocked(timeline)
    # Strategies that arrange blocks in a row as one leave no task by which to tell where the first one ends.
    mixed = bool(composition.arranging) and copies > 1
    start = _end_of_copies(timeline, 1, copies) if copies > 1 and not mixed else 0
    one = _program(context, composition, 1, launch_s)[0] if mixed else None
    if one is not None:
        start = compiled.run(one, contention=contention, record=False).end_ps
    duration_s, kinds = (timeline.end_ps - start) / 1e12, spans(timeline, start, timeline.end_ps)
    amounts, capacities = _demands(program)
    ranks = max((op.ranks for op in context.graph.of_type(CollectiveOp)), default=1)
    if hosts is not None and copies > 1 and ranks > 1 and may_wait_for_host(program, copies * duration_s, hosts):
        drift = 1 if hosts.meets_each_pass else PASSES
        many, _ = _program(context, composition, drift, launch_s)
        duration_s, kinds = _skewed(many, one, Skew.of(hosts, ranks), drift, contention)
    return Piece(
        duration_s,
        kinds,
        {name: amount / copies for name, amount in amounts.items()},
        capacities,
        (*findings, *believed),
    )


def simulate_turn(
    context: Context, composition: Composition, *, launch_s: float = 0.0, contention: bool = True
) -> tuple[Piece, Piece]:
    """Run a forward with its backward behind it, and read what each costs: one ends where the other begins.

    Strategies may move what the backward gathers under the forward; computation of pass ``fwd`` is the forward.

    Parameters
    ----------
    context, composition, launch_s, contention : as in `simulate_piece`
    """
    builder = ProgramBuilder()
    asked = with_engine(context, contention=contention)
    composed = compose(asked, composition, _site(builder, context.prices, composition, launch_s))
    program = builder.freeze()
    timeline = compiled.run(program, contention=contention, record=False)
    raise_if_deadlocked(timeline)
    forward = [
        task
        for position, op in enumerate(composed.graph.operators)
        if op.pass_ == "fwd" and not op.name.startswith(STEP_PREFIXES)
        for task in composed.placement.exits[position]
    ]
    turn = int(timeline.t_end[forward].max(initial=0))
    found = (*composed.findings, *_beliefs(context, composition))
    pieces = []
    for start, end in ((0, turn), (turn, timeline.end_ps)):
        amounts, capacities = _demands(program, (timeline.t_end > start) & (timeline.t_end <= end))
        pieces.append(Piece((end - start) / 1e12, spans(timeline, start, end), amounts, capacities, found))
    return pieces[0], pieces[1]


def speed_beside(
    context: Context, composition: Composition, flow: CollectiveOp, *, launch_s: float = 0.0, contention: bool = True
) -> float:
    """Speed of a block while a collective of another part of the step runs all the time, over its speed alone.

    The collective holds SMs, so that kernels need more waves, and takes its share of memory and links.

    Parameters
    ----------
    context, composition, launch_s, contention : as in `simulate_piece`
    flow : the collective
    """
    prices = context.prices
    context, composition = _arranged_alone(context, composition, contention)
    ends: list[int] = []
    seconds, demands = prices.flow(flow)
    for beside in (False, True):
        builder = ProgramBuilder()
        site = _site(builder, prices, composition, launch_s)
        if beside:
            # Far longer than the block, at the collective's own rates.
            long_s = BESIDE * ends[0] / 1e12
            rates = [replace(demand, amount=demand.amount * long_s / seconds) for demand in demands]
            gpu = site.gpu()
            stream = gpu.stream("beside")
            sms = min(prices.comm_sms(flow.kind), gpu.num_sms - 1)
            units = max(1, math.ceil(long_s / LONGEST_UNIT_S))
            gpu.add_transfer(long_s, rates, sms=sms, stream=stream, units=units, op=flow.name, tag="beside")
        compose(context, composition, site)
        timeline = compiled.run(builder.freeze(), contention=contention, record=False)
        raise_if_deadlocked(timeline)
        ends.append(int(timeline.t_end[1 if beside else 0 :].max(initial=1)))
    return min(1.0, ends[0] / ends[1])


def _arranged_alone(context: Context, composition: Composition, contention: bool) -> tuple[Context, Composition]:
    """The graph as the strategies that arrange one block at a time have it, and what is left of the composition."""
    own = [c for c in composition.arranging if isinstance(c.strategy, ArrangingStrategy) and c.strategy.per_block]
    if not own:
        return context, composition
    setting = replace(composition.setting, architecture=context.prices.cluster.device.architecture)
    if reasons := check_compatible(composition.strategies, setting):
        raise StrategyError(f"these strategies do not go together: {'; '.join(reasons)}")
    graph = context.graph
    for chosen in own:
        assert isinstance(chosen.strategy, ArrangingStrategy)
        chosen.strategy.check(chosen.parameters)
        asked = with_engine(Context(graph, context.prices, composition.pairs), contention=contention)
        graph = chosen.strategy.arrange(asked, chosen.parameters)
    rest = tuple(chosen for chosen in composition.arranging if chosen not in own)
    return Context(graph, context.prices), replace(composition, arranging=rest)


def _site(builder: ProgramBuilder, prices: PriceBook, composition: Composition, launch_s: float) -> Site:
    """A machine whose streams share as many hardware queues as the run is said to have."""
    return Site(builder, prices, num_queues=composition.setting.num_queues, launch_s=launch_s)


def _program(
    context: Context, composition: Composition, copies: int, launch_s: float
) -> tuple[Program, tuple[Finding, ...]]:
    """Tasks of a graph that is run `copies` times on one rank."""
    builder = ProgramBuilder()
    site = _site(builder, context.prices, composition, launch_s)
    composed = compose(Context(repeated(context.graph, copies), context.prices), composition, site)
    return builder.freeze(), composed.findings


def _skewed(
    program: Program, one: Program | None, skew: Skew, drift: int, contention: bool
) -> tuple[float, dict[str, float]]:
    """Duration of a copy in a program of `drift` ones, and its kinds on the average rank: the mean of `PASSES` copies.

    The first copy is left out, since hosts start in step, unless it is the only one: they meet before each. Where the
    copies are arranged as one it ends when `one` alone does.
    """
    total_s, total, draws = 0.0, dict[str, float](), PASSES // drift
    for draw in range(draws):
        spread = spread_ranks(program, replace(skew, seed=skew.seed + draw))
        timeline = compiled.run(spread, contention=contention, record=False)
        raise_if_deadlocked(timeline)
        own = [rank_tasks(spread, rank, skew) for rank in range(skew.ranks)]
        start = 0
        if drift > 1 and one is not None:
            alone = spread_ranks(one, replace(skew, seed=skew.seed + draw))
            start = min(timeline.end_ps - 1, compiled.run(alone, contention=contention, record=False).end_ps)
        elif drift > 1:
            start = max(int(timeline.t_end[tasks[: len(tasks) // drift]].max()) for tasks in own)
        total_s += (timeline.end_ps - start) / 1e12
        for tasks in own:
            total = _sum(total, spans(timeline, start, timeline.end_ps, tasks))
    share = 1.0 / (draws * max(1, drift - 1))
    return total_s * share, {kind: seconds * share / skew.ranks for kind, seconds in total.items()}


def _beliefs(context: Context, composition: Composition) -> Iterator[Finding]:
    """What strategies say of their choice."""
    for chosen in composition.arranging:
        yield from chosen.strategy.findings(context, chosen.parameters)
    for piece in find_pieces(context.graph, composition.pairs):
        chosen = piece.chosen
        part = Context(context.graph.part(piece.operators), context.prices)
        yield from chosen.strategy.findings(part, chosen.parameters)


def repeated(graph: OperatorGraph, count: int) -> OperatorGraph:
    """The graph `count` times in a row, each behind what ends the one before."""
    if count == 1:
        return graph
    size = len(graph.operators)
    last = end_of_pass(graph)
    last = size - 1 if last < 0 else last
    starts = sorted(set(range(size)) - {dst for _, dst in graph.dependencies})
    inner = [(src + copy * size, dst + copy * size) for copy in range(count) for src, dst in graph.dependencies]
    joins = [(last + (copy - 1) * size, start + copy * size) for copy in range(1, count) for start in starts]
    streams = graph.streams * count
    return OperatorGraph(graph.operators * count, tuple(sorted((*inner, *joins))), streams)


def _end_of_copies(timeline: Timeline, done: int, copies: int) -> int:
    """End of the first `done` of `copies` copies of a graph."""
    return int(timeline.t_end[: timeline.program.num_tasks // copies * done].max(initial=0))


def _demands(program: Program, tasks: npt.NDArray[np.bool_] | None = None) -> tuple[dict[str, float], dict[str, float]]:
    """Amounts that tasks (all by default) ask for by resource, and capacities."""
    units = program.units if tasks is None else program.units * tasks
    per_task = np.repeat(units, np.diff(program.demand_ptr)) * program.demand_amount
    totals = np.bincount(program.demand_resource, per_task, minlength=len(program.resource_capacity))
    names = program.resource_name
    return (
        {name: float(total) for name, total in zip(names, totals, strict=True) if total > 0},
        {name: float(rate) for name, rate in zip(names, program.resource_capacity, strict=True)},
    )

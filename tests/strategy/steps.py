"""Steps of known times for closed forms: kernels that take what they are given, collectives that take no SMs."""

from __future__ import annotations

from collections.abc import Sequence

from overlapsim.cost.prices import PriceBook
from overlapsim.engine import compiled, reference
from overlapsim.engine.timeline import Timeline
from overlapsim.hardware.loading import load_cluster
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import ArrangingStrategy
from overlapsim.strategy.registry import load_strategy
from overlapsim.strategy.tasks import Site
from overlapsim.workload.operators import CollectiveOp, KernelOp, Operator, OperatorGraph, TimedWork

RANKS = 8
MIB = 2.0**20


def prices(**more) -> PriceBook:
    """A node of eight H100 whose collectives hold no SMs."""
    return PriceBook(load_cluster("h100-sxm8"), RANKS, **{"collective_sms": 0, **more})


def kernel(seconds: float, name: str, pass_: str) -> KernelOp:
    return KernelOp(TimedWork(seconds), name, pass_)


def collective(kind, mib: float, name: str, pass_: str, ranks: int = RANKS) -> CollectiveOp:
    return CollectiveOp(kind, mib * MIB, ranks, name=name, pass_=pass_)


def graph_of(operators: Sequence[Operator], *dependencies: tuple[int, int]) -> OperatorGraph:
    return OperatorGraph(tuple(operators), tuple(sorted(dependencies)))


def run(strategy: str, context: Context, parameters, *, num_queues: int | None = None, contention=False) -> Timeline:
    """The arranged graph's tasks in both engines, which must agree."""
    chosen = load_strategy(strategy)
    assert isinstance(chosen, ArrangingStrategy)
    chosen.check(parameters)
    builder = ProgramBuilder()
    chosen.rewrite(context, parameters, Site(builder, context.prices, num_queues=num_queues))
    program = builder.freeze()
    timeline = compiled.run(program, contention=contention)
    if program.units.sum() < 4000:
        assert timeline.same_instants(reference.run(program, contention=contention))
    return timeline


def arranged(strategy: str, context: Context, parameters) -> OperatorGraph:
    chosen = load_strategy(strategy)
    assert isinstance(chosen, ArrangingStrategy)
    return chosen.arrange(context, parameters)


def labels(graph: OperatorGraph) -> list[str]:
    """Name and pass of each operator, in issue order."""
    return [f"{op.name} {op.pass_}" for op in graph.operators]

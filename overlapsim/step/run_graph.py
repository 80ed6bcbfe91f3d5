"""Running one graph in the engine: for whoever compares ways to issue it."""

from __future__ import annotations

from dataclasses import replace

from overlapsim.engine import compiled
from overlapsim.engine.deadlock import raise_if_deadlocked
from overlapsim.engine.timeline import Timeline
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import find_pieces, lower
from overlapsim.strategy.tasks import Site


def run_graph(context: Context, *, contention: bool = True) -> Timeline:
    """Run a graph's operators as they are issued: pairs by their strategies, all else as the library's kernels.

    Parameters
    ----------
    context : graph, prices and pairs
    contention : False leaves HBM and link sharing out

    Raises
    ------
    DeadlockError
        If tasks wait for each other.
    """
    builder = ProgramBuilder()
    lower(context, Site(builder, context.prices), tuple(find_pieces(context.graph, context.pairs)))
    timeline = compiled.run(builder.freeze(), contention=contention)
    raise_if_deadlocked(timeline)
    return timeline


def with_engine(context: Context, *, contention: bool = True) -> Context:
    """The context for strategies that ask the engine how long an order takes."""

    def seconds_of(asked: Context) -> float:
        return run_graph(asked, contention=contention).duration_s

    return replace(context, seconds_of=seconds_of)

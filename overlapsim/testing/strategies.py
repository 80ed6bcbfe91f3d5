"""The suite that every strategy must pass: physics, dependencies, refusals; for bundled and third-party strategies.

A package tests its own strategy with::

    @pytest.mark.parametrize(("check", "case"), conformance(load_strategy("mine")))
    def test_mine(check, case):
        check(load_strategy("mine"), case)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, Final, get_args

import msgspec
import numpy as np

from overlapsim.engine import compiled, reference
from overlapsim.engine.timeline import Timeline
from overlapsim.errors import StrategyError
from overlapsim.plan import Cause
from overlapsim.planner.bounds import lower_bound_s
from overlapsim.planner.candidates import propose
from overlapsim.planner.operator import build, simulate
from overlapsim.schedule.builder import ProgramBuilder
from overlapsim.schedule.program import BLOCKS, FLOW
from overlapsim.strategy.base import Context, Parameters, Strategy
from overlapsim.strategy.chains import Relation, is_gemm, read_chain
from overlapsim.strategy.compose import ArrangingStrategy, Chosen, Piece, lower
from overlapsim.strategy.registry import load_strategy
from overlapsim.strategy.tasks import Site
from overlapsim.testing.cases import RANKS, Case, cases
from overlapsim.workload.operators import (
    COMPUTE,
    CollectiveOp,
    GemmOp,
    GroupedGemmOp,
    KernelOp,
    Operator,
    OperatorGraph,
)

MOST_POINTS: Final = 3
CLOSE: Final = 1e-6


Check = Callable[[Strategy, Case], None]


def conformance(strategy: Strategy) -> list[tuple[Check, Case]]:
    """Every check with every case, for ``pytest.mark.parametrize``."""
    return [(check, case) for check in CHECKS for case in cases(strategy)]


def points(strategy: Strategy, context: Context) -> list[Parameters]:
    """The first few parameters that the strategy proposes; none where it does not apply."""
    if not strategy.applies_to(context).applies:
        return []
    return [p.parameters for p in itertools.islice(propose(strategy.parameters(context)), MOST_POINTS)]


def check_refuses_with_reasons(strategy: Strategy, case: Case) -> None:
    """It applies, or says why not with a known cause; unknown and mistyped parameters are refused by name."""
    answer = strategy.applies_to(case.context)
    assert answer.cause in get_args(Cause)
    assert answer.applies != bool(answer.reasons), f"{answer}: reasons go with refusals"
    assert all(reason.strip() for reason in answer.reasons)
    for wrong in ({"no_such_parameter": 1}, *_mistyped(strategy, case.context)):
        try:
            strategy.check(wrong)
        except StrategyError as error:
            assert strategy.name in str(error)
        else:
            raise AssertionError(f"{strategy.name} accepts parameters {wrong}")


def _mistyped(strategy: Strategy, context: Context) -> Iterator[Parameters]:
    for parameters in points(strategy, context)[:1]:
        for key in parameters:
            yield {**parameters, key: object}


def check_deterministic(strategy: Strategy, case: Case) -> None:
    """The same question gives the same proposals and the same program."""
    again = replace(case.context, prices=replace(case.context.prices, models={}))
    assert points(strategy, case.context) == points(strategy, again)
    for parameters in points(strategy, case.context):
        first, second = build(strategy, case.context, parameters), build(strategy, again, parameters)
        assert first == second and hash(first) == hash(second)


def check_bounds(strategy: Strategy, case: Case) -> None:
    """Never faster than the hardware allows, contention on or off; contention never gains."""
    bound = lower_bound_s(case.context.graph, case.context.prices.cluster)
    for parameters in points(strategy, case.context):
        alone = simulate(strategy, case.context, parameters, contention=False).duration_s
        assert alone >= bound * (1 - CLOSE), f"{parameters}: {alone} s is below {bound} s"
        assert simulate(strategy, case.context, parameters).duration_s >= bound * (1 - CLOSE)


def check_engines_agree(strategy: Strategy, case: Case) -> None:
    """Reference and compiled engine give the same instants."""
    for parameters in points(strategy, case.context)[:1]:
        program = build(strategy, case.context, parameters)
        if program.units.sum() <= _MOST_UNITS:
            assert reference.run(program).same_instants(compiled.run(program))


# The reference engine runs one process a CTA.
_MOST_UNITS: Final = 3000


def check_work_conserved(strategy: Strategy, case: Case) -> None:
    """SM time covers the FLOP at the peak; links carry what the collective must move, and no more than a ring does."""
    graph, prices = case.context.graph, case.context.prices
    device = prices.cluster.device
    gemms = [op.work if isinstance(op, KernelOp) else op for op in graph.operators if is_gemm(op)]
    flop_s = sum(
        op.flop / device.peak(op.dtype, op.accumulate) for op in gemms if isinstance(op, GemmOp | GroupedGemmOp)
    )
    serial = build(load_strategy("serial"), case.context, {})
    gathers = any(op.kind == "all_gather" for op in graph.of_type(CollectiveOp))
    for parameters in points(strategy, case.context):
        program = build(strategy, case.context, parameters)
        blocks = program.kind == BLOCKS
        sm_s = float(np.sum(program.units[blocks] * program.unit_ps[blocks])) / 1e12
        assert sm_s >= flop_s * device.num_sms * (1 - CLOSE), f"{parameters}: work is missing"
        moved = _wire_bytes(program)
        for link, amount in _wire_bytes(serial).items():
            # A switch that multicasts or reduces, or another algorithm, may halve what a GPU sends; none moves more.
            # A multicast sends a shard once, but what is gathered arrives whole.
            least = 0.45 if (link in _IN) == gathers else 0.0
            most = _MOST_BYTES if link in _OUT else np.inf
            assert least * amount <= moved.get(link, 0.0) <= amount * most, (
                f"{parameters}: {link} carries {moved.get(link, 0.0)} bytes where serial execution moves {amount}"
            )


# Ragged pieces are rounded up to whole tiles; an all-reduce split in two collectives rounds twice.
_MOST_BYTES: Final = 1.10
_OUT: Final = ("nvlink_out[0]", "pcie_up[0]")
_IN: Final = ("nvlink_in[0]", "pcie_down[0]")


def _wire_bytes(program: Any) -> dict[str, float]:
    """Bytes on the own links of device 0, out and in."""
    amounts: dict[str, float] = {}
    per_task = np.repeat(program.units, np.diff(program.demand_ptr)) * program.demand_amount
    for resource, amount in zip(program.demand_resource, per_task, strict=True):
        name = program.resource_name[resource]
        if name in (*_OUT, *_IN):
            amounts[name] = amounts.get(name, 0.0) + float(amount)
    return amounts


def check_dependencies(strategy: Strategy, case: Case) -> None:
    """Nothing is sent before it is computed, and nothing is computed from what has not arrived."""
    if isinstance(strategy, ArrangingStrategy):
        _check_arranged(strategy, case)
        return
    pair = read_chain(case.context.graph)
    if pair.relation == "independent":
        return
    for parameters in points(strategy, case.context):
        timeline = simulate(strategy, case.context, parameters, contention=False, record=True)
        p = timeline.program
        beside = {case.context.graph.operators[i].name for i in (*pair.near, *pair.far)}
        work, flows = _gemm_tasks(timeline, beside), _moving(p)
        computed_s, arrived_s = timeline.t_end[work].max(), timeline.t_end[flows].max()
        if pair.relation == "after":
            # Rows that this rank keeps need not be sent, and may be computed last.
            keeps = pair.collective.kind in ("reduce_scatter", "all_to_all")
            assert keeps or arrived_s >= computed_s, f"{parameters}: communication ends before the last tile is written"
        else:
            assert computed_s >= arrived_s, f"{parameters}: the GEMM ends before the last rows are there"
        _check_progress(timeline, work, flows, pair.relation, pair.collective.ranks)


def _gemm_tasks(timeline: Timeline, beside: Collection[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Compute tasks that do the multiplication: not waiters of one unit, nor the kernels `beside` it by name."""
    p = timeline.program
    return np.flatnonzero((p.kind == BLOCKS) & (p.units > 1) & ~np.isin(np.asarray(p.op), sorted(beside)))


def _moving(program: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Flows that put bytes on a link; all flows where none does.  Barriers and copies on one GPU move nothing."""
    flows = np.flatnonzero(program.kind == FLOW)
    task = np.repeat(np.arange(program.num_tasks), np.diff(program.demand_ptr))
    names = np.asarray(program.resource_name)[program.demand_resource].astype(str)
    linked = np.intersect1d(flows, task[~np.char.startswith(names, "hbm")])
    return linked if linked.size else flows


def _check_progress(timeline: Timeline, work: Any, flows: Any, relation: Relation, ranks: int) -> None:
    """At the start of every transfer (or piece of work) enough of the other side is done."""
    p, cohorts = timeline.program, timeline.cohorts
    assert cohorts is not None
    is_work = np.isin(cohorts.task, work)
    work_ps = p.unit_ps[cohorts.task[is_work]] * cohorts.units[is_work]
    total = float(work_ps.sum())
    size = np.repeat(np.arange(p.num_tasks), np.diff(p.demand_ptr))
    sent = np.zeros(p.num_tasks)
    linked = ~np.char.startswith(np.asarray(p.resource_name)[p.demand_resource].astype(str), "hbm")
    np.add.at(sent, size[linked], p.demand_amount[linked])
    is_flow = np.isin(cohorts.task, flows)
    bytes_ = sent[cohorts.task[is_flow]] * cohorts.units[is_flow]
    if not bytes_.sum():
        return
    share = bytes_ / bytes_.sum() * (ranks - 1) / ranks
    ends, starts = cohorts.end_ps, cohorts.start_ps
    if relation == "after":
        for at, done in zip(starts[is_flow], np.cumsum(share), strict=True):
            finished = work_ps[ends[is_work] <= at].sum() / total
            assert done <= finished + _SLACK, f"at {at} ps {done:.3f} of the output is sent and {finished:.3f} computed"
        return
    # Rows of this rank need no transfer.
    for at, done in zip(starts[is_work], np.cumsum(work_ps) / total, strict=True):
        there = 1 / ranks + share[ends[is_flow] <= at].sum()
        # The cohort that starts now works on rows that are there.
        before = done - work_ps.max() / total
        assert before <= there + _SLACK, f"at {at} ps {done:.3f} of the work runs and {there:.3f} of the rows are there"


# Ragged last pieces: fewer bytes than their share of the tiles, and the other way round.
_SLACK: Final = 0.06


def _check_arranged(strategy: ArrangingStrategy, case: Case) -> None:
    """Compute operators are all kept, and each still comes after everything it was computed from."""
    before = case.context.graph
    for parameters in points(strategy, case.context):
        after = strategy.arrange(case.context, parameters)
        kept = [op for op in after.operators if not isinstance(op, CollectiveOp)]
        old = [op for op in before.operators if not isinstance(op, CollectiveOp)]
        if "two_batch" in strategy.traits:
            assert np.isclose(_multiplied_flop(kept), _multiplied_flop(old)), f"{parameters}: work was lost or added"
        else:
            assert sorted(map(repr, kept)) == sorted(map(repr, old)), f"{parameters}: operators were lost or added"
        timeline = simulate(strategy, case.context, parameters)
        assert timeline.complete


def _multiplied_flop(operators: Collection[Operator]) -> float:
    """FLOP of GEMMs, plain and grouped: parts of a batch have those of the whole."""
    works = (op.work if isinstance(op, KernelOp) else op for op in operators if is_gemm(op))
    return sum(work.flop for work in works if isinstance(work, GemmOp | GroupedGemmOp))


def check_degenerate_is_serial(strategy: Strategy, case: Case) -> None:
    """Where nothing overlaps, it takes the serial time (vendor kernels, no latency)."""
    prices = case.context.prices.with_vendor_kernels().without_latency()
    context = replace(case.context, prices=prices)
    if not strategy.applies_to(context).applies:
        return
    parameters = strategy.degenerate(context)
    if parameters is None:
        return
    seconds = simulate(strategy, context, parameters, contention=False).duration_s
    serial = simulate(load_strategy("serial"), context, {}, contention=False).duration_s
    assert abs(seconds - serial) <= CLOSE * serial, f"{parameters}: {seconds} s, serial {serial} s"


def check_settings(strategy: Strategy, case: Case) -> None:
    """Settings and parameters survive a plan file; memory is a finite amount."""
    for parameters in points(strategy, case.context):
        strategy.check(msgspec.json.decode(msgspec.json.encode(parameters)))
        settings = strategy.settings(case.context, parameters)
        plain = msgspec.json.decode(msgspec.json.encode(settings))
        assert plain and all(isinstance(key, str) for key in plain)
        extra = strategy.extra_memory_bytes(case.context, parameters)
        assert 0 <= extra < float("inf")
        assert all(f.code and f.message for f in strategy.findings(case.context, parameters))


def check_composed(strategy: Strategy, case: Case) -> None:
    """Between two other operators it waits for the first, is waited for by the second, and never holds too many SMs."""
    if isinstance(strategy, ArrangingStrategy):
        return
    inner = case.context.graph
    count = len(inner.operators)
    # Few SMs and a stream of its own: only the placement can order the others against it.
    side = CollectiveOp("broadcast", 2.0**20, RANKS, name="mlp.norm")
    fed = {b for _, b in inner.dependencies}
    edges = [(a + 1, b + 1) for a, b in inner.dependencies]
    edges += [(0, i + 1) for i in range(count) if i not in fed] + [(i + 1, count + 1) for i in range(count)]
    streams = ("side", *(COMPUTE,) * count, "side")
    graph = OperatorGraph((side, *inner.operators, side), tuple(sorted(edges)), streams)
    piece = tuple(range(1, count + 1))
    for parameters in points(strategy, case.context)[:2]:
        builder = ProgramBuilder()
        context = Context(graph, case.context.prices)
        placed = lower(context, Site(builder, context.prices), (Piece(piece, Chosen(strategy, parameters)),))
        timeline = compiled.run(builder.freeze(), record=True)
        assert timeline.complete, f"{parameters}: deadlock beside other kernels"
        assert all(placed.entries[i] and placed.exits[i] for i in range(count + 2))
        (head,), (tail,) = placed.exits[0], placed.entries[count + 1]
        mine = np.setdiff1d(np.arange(timeline.program.num_tasks), [head, tail])
        assert timeline.t_start[mine].min() >= timeline.t_end[head], f"{parameters}: starts before its input is there"
        assert timeline.t_start[tail] >= timeline.t_end[mine].max(), f"{parameters}: is not waited for"
        _check_sm_budget(timeline)


def _check_sm_budget(timeline: Timeline) -> None:
    """SMs that are held at once never exceed the pool's."""
    p = timeline.program
    for pool, num_sms in enumerate(p.pool_num_sms):
        flows = np.flatnonzero((p.kind == FLOW) & (p.pool == pool))
        for at in timeline.t_resident[flows]:
            held = p.sm[flows][(timeline.t_resident[flows] <= at) & (timeline.t_end[flows] > at)].sum()
            assert held <= num_sms, f"communication holds {held} of {num_sms} SMs"


CHECKS: Final[tuple[Check, ...]] = (
    check_refuses_with_reasons,
    check_deterministic,
    check_bounds,
    check_engines_agree,
    check_work_conserved,
    check_dependencies,
    check_degenerate_is_serial,
    check_settings,
    check_composed,
)

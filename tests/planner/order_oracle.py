"""Proven bounds of operator orders by OR-Tools' CP-SAT, which only tests need."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from overlapsim.strategy.base import Context
from overlapsim.strategy.order_bound import heads_and_tails, loads_of
from overlapsim.strategy.order_search import SHARES
from overlapsim.strategy.ordering import lines_of
from overlapsim.workload.operators import CollectiveOp

TICKS_PER_S = 4e6
PARTS = 1000
"""Losses are whole numbers of thousandths."""


def none_within(context: Context, limit_s: float, effort: float) -> bool:
    """Prove that no order of a graph, with any numbers of SMs, ends within a time; False where no proof was found.

    Every operator has its line to itself. A kernel takes at least its time
    alone and what it loses beside each collective of one line: for the time
    that both run, the share of its speed that the engine takes away; counted
    in SM-seconds it loses the collective's SMs as well. Fewer SMs make a
    collective longer. All numbers are rounded down.

    Parameters
    ----------
    context : graph and prices
    limit_s : the time
    effort : CP-SAT's deterministic time
    """
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    graph, prices = context.graph, context.prices
    lines, (by_time, by_sms) = lines_of(graph, prices), loads_of(graph, prices)
    heads, tails = heads_and_tails(lines)
    model = cp_model.CpModel()
    count, horizon = len(lines.seconds), int(limit_s * TICKS_PER_S) + 1
    start = [model.new_int_var(0, horizon, f"s{i}") for i in range(count)]
    end = [model.new_int_var(0, horizon, f"e{i}") for i in range(count)]
    size = [model.new_int_var(int(lines.seconds[i] * TICKS_PER_S), horizon, f"d{i}") for i in range(count)]
    spans = [model.new_interval_var(start[i], size[i], end[i], f"i{i}") for i in range(count)]
    for line in range(len(lines.names)):
        model.add_no_overlap([spans[i] for i in range(count) if lines.line[i] == line])
    related = _related(lines.before)
    for dst, before in enumerate(lines.before):
        for src in before:
            model.add(start[dst] >= end[src])
    exchanges = [i for i, op in enumerate(graph.operators) if lines.line[i] and isinstance(op, CollectiveOp)]
    limits = {i: _limits(model, context, i, size[i]) for i in exchanges}
    kept = prices.overlap.gemm_speed
    for kernel in (i for i in range(count) if lines.line[i] == 0):
        for line in range(1, len(lines.names)):
            beside = [j for j in exchanges if lines.line[j] == line and not {(kernel, j), (j, kernel)} & related]
            shared = {j: _overlap(model, start, end, kernel, j, horizon) for j in beside}
            slowed = int((1 - kept) * PARTS)
            model.add(
                size[kernel] * PARTS
                >= int(by_time.seconds[kernel] * TICKS_PER_S) * PARTS + sum(slowed * shared[j] for j in beside)
            )
            lost = []
            for j in beside:
                taken = model.new_int_var(0, horizon * PARTS, f"l{kernel},{j}")
                for chosen, sms in limits[j]:
                    share = int((1 - kept * (1 - sms / prices.cluster.device.num_sms)) * PARTS)
                    model.add(taken >= share * shared[j]).only_enforce_if(chosen)
                lost.append(taken)
            model.add(size[kernel] * PARTS >= int(by_sms.seconds[kernel] * TICKS_PER_S) * PARTS + sum(lost))
    for i in range(count):
        model.add(start[i] >= int(heads[i] * TICKS_PER_S))
        model.add(end[i] + int(tails[i] * TICKS_PER_S) <= horizon)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.max_deterministic_time = effort
    return bool(solver.solve(model) == cp_model.INFEASIBLE)


def _limits(model: Any, context: Context, position: int, size: Any) -> list[tuple[Any, int]]:
    """Numbers of SMs that a collective may have: one of them is chosen, and none is faster than it allows."""
    op, prices = context.graph.operators[position], context.prices
    assert isinstance(op, CollectiveOp)
    full = prices.held_sms(op)
    found = []
    for sms in sorted({max(1, round(full * share)) for share in SHARES}):
        chosen = model.new_bool_var(f"n{position},{sms}")
        least = prices.operator_s(op) * prices.sm_slowdown(op, sms)
        model.add(size >= int(least * TICKS_PER_S)).only_enforce_if(chosen)
        found.append((chosen, sms))
    model.add_exactly_one([chosen for chosen, _ in found])
    return found


def _overlap(model: Any, start: Any, end: Any, one: int, other: int, horizon: int) -> Any:
    """Time that two operators run at once, or less."""
    shared = model.new_int_var(0, horizon, f"x{one},{other}")
    reasons = []
    for first, last in itertools.product((one, other), repeat=2):
        reason = model.new_bool_var("")
        model.add(shared >= end[first] - start[last]).only_enforce_if(reason)
        reasons.append(reason)
    model.add_at_least_one(reasons)
    return shared


def _related(before: tuple[tuple[int, ...], ...]) -> set[tuple[int, int]]:
    """Pairs of which the second needs the first."""
    above: list[set[int]] = []
    for producers in before:
        above.append({p for producer in producers for p in (producer, *above[producer])})
    return {(src, dst) for dst, found in enumerate(above) for src in found}

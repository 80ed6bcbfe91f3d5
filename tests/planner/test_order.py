"""Operator order of real layers in the engine, and of small ones against an exact solver."""

from __future__ import annotations

import random

import pytest

from overlapsim.cost.prices import PriceBook
from overlapsim.hardware.loading import load_cluster
from overlapsim.planner.order import order_operators
from overlapsim.strategy.base import Context
from overlapsim.strategy.compose import Chosen
from overlapsim.strategy.order_bound import order_bound_s
from overlapsim.strategy.ordering import Lines, best_order
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.build import GraphBuilder
from overlapsim.workload.layout import Layout
from overlapsim.workload.operators import CollectiveOp
from overlapsim.workload.presets import load_model
from overlapsim.workload.recipe import RECIPES
from overlapsim.workload.recompute import Recompute

UNITS = 1000
BEAM = 64


def optimum(lines: Lines) -> float:
    """Least end of the last operator, by OR-Tools' CP-SAT."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    lengths = [round(seconds * UNITS) for seconds in lines.seconds]
    horizon = sum(lengths)
    starts = [model.new_int_var(0, horizon, f"s{i}") for i in range(len(lengths))]
    spans = [
        model.new_fixed_size_interval_var(start, size, f"i{i}")
        for i, (start, size) in enumerate(zip(starts, lengths, strict=True))
    ]
    for line in range(len(lines.names)):
        model.add_no_overlap([span for span, own in zip(spans, lines.line, strict=True) if own == line])
    for position, before in enumerate(lines.before):
        for producer in before:
            model.add(starts[position] >= starts[producer] + lengths[producer])
    last = model.new_int_var(0, horizon, "last")
    model.add_max_equality(last, [start + size for start, size in zip(starts, lengths, strict=True)])
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return solver.objective_value / UNITS


def random_layer(seed: int) -> Lines:
    """A backward pass in small: a chain of gradients with communication in it, and weight gradients beside it."""
    dice = random.Random(seed)
    seconds, line, before = [], [], []
    previous = -1
    for _ in range(dice.randint(3, 6)):
        chain = [0] + ([dice.choice((1, 2))] if dice.random() < 0.7 else [])
        for kind in chain:
            before.append((previous,) if previous >= 0 else ())
            seconds.append(dice.randint(1, 20) / 4)
            line.append(kind)
            given, previous = previous, len(seconds) - 1
            if kind == 0 and dice.random() < 0.8:
                before.append((given,) if given >= 0 else ())
                seconds.append(dice.randint(1, 20) / 4)
                line.append(0)
    return Lines(tuple(seconds), tuple(line), tuple(before), ("compute", "ordered tp", "ordered ep"))


@pytest.mark.parametrize("seed", range(20))
def test_within_three_percent_of_the_optimum(seed: int) -> None:
    lines = random_layer(seed)
    best = optimum(lines)
    found = best_order(lines, BEAM)
    assert order_bound_s(lines) <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= found.seconds <= best * 1.03


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize(
    ("name", "layout", "sequence"),
    [("gpt3-175b", Layout(tp=8), 2048), ("internal-352b", Layout(sp=8, ep=8), 8192)],
    ids=["dense", "experts"],
)
def test_real_layers_are_never_slower_and_keep_their_bound(name: str, layout: Layout, sequence: int, which) -> None:
    model = load_model(name)[0]
    builder = GraphBuilder(model, layout, RECIPES["modern"], 1, sequence, Recompute.parse("sar"))
    context = Context(builder.layer(model.layers[0], which), PriceBook(load_cluster("h800-sxm8"), 8))
    result = order_operators(context, moves=20)
    assert result.bound_s * (1 - 1e-6) <= result.seconds <= result.given_s
    assert sorted(result.order) == list(range(len(context.graph.operators)))
    if which == "backward":
        assert result.seconds < 0.97 * result.given_s, "weight gradients and recomputation hide what is exchanged"
    assert result.timeline.complete and result.timeline.duration_s == result.seconds


def test_fused_pairs_stay_whole_and_all_else_is_ordered_round_them() -> None:
    """Collectives that run inside a GEMM's kernel keep their stream; the engine runs that kernel."""
    model = load_model("internal-352b")[0]
    builder = GraphBuilder(model, Layout(sp=8, ep=8), RECIPES["modern"], 1, 8192, Recompute.parse("sar"))
    graph, prices = builder.layer(model.layers[0], "backward"), PriceBook(load_cluster("h800-sxm8"), 8)
    strategy = load_strategy("fused_experts")
    where = ("moe.fc1", "dgrad")
    gemm = next(i for i, op in enumerate(graph.operators) if (op.name, op.pass_) == where)
    piece = strategy.piece(graph, gemm)
    assert piece is not None
    parameters = next(strategy.parameters(Context(graph.part(piece), prices)).points())
    context = Context(graph, prices, {where: Chosen(strategy, parameters)})
    result = order_operators(context, moves=100)
    (inside,) = (i for i in piece if isinstance(graph.operators[i], CollectiveOp))
    assert result.graph.stream_of(result.order.index(inside)) == "compute"
    assert inside not in result.sms_of
    found = enumerate(result.graph.operators)
    others = [i for i, op in found if isinstance(op, CollectiveOp) and result.order[i] != inside]
    assert others and all(result.graph.stream_of(i).startswith("ordered") for i in others)
    assert result.bound_s <= result.seconds < result.given_s
    assert result.bound_s < order_operators(Context(graph, prices), moves=0).bound_s

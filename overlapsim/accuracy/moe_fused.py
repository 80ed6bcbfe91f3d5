"""Fused kernels of a step: for each GEMM next to an exchange the best parameters alone, and which of them pay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from overlapsim.cost.launch import launch_stack
from overlapsim.cost.prices import PriceBook
from overlapsim.errors import StrategyError
from overlapsim.planner.candidates import propose
from overlapsim.step.blocks import simulate_piece
from overlapsim.step.inputs import StepInputs
from overlapsim.step.pieces import graph_builder
from overlapsim.step.simulate import simulate_step, step_prices
from overlapsim.strategy.base import Context, Parameters, Strategy
from overlapsim.strategy.compose import Chosen, Composition
from overlapsim.strategy.registry import load_strategy
from overlapsim.workload.operators import CollectiveOp, OperatorGraph

EXPERTS: Final = "fused_experts"
EXCHANGE: Final = "fused_exchange"
PAIRS: Final[Mapping[tuple[str, str], str]] = {
    ("moe.fc1", "fwd"): EXPERTS,
    ("moe.fc2", "fwd"): EXPERTS,
    ("moe.fc2", "dgrad"): EXPERTS,
    ("moe.fc1", "dgrad"): EXPERTS,
    ("attn.qkv", "fwd"): EXCHANGE,
    ("attn.out", "fwd"): EXCHANGE,
    ("attn.out", "dgrad"): EXCHANGE,
    ("attn.qkv", "dgrad"): EXCHANGE,
}
"""GEMMs that MegaScale-MoE fuses with what they exchange, by operator and pass."""
RUNS: Final = 12
"""Proposals of a strategy that are simulated."""


def fused_pairs(
    inputs: StepInputs, pairs: Mapping[tuple[str, str], str] = PAIRS, fixed: Mapping[str, Any] | None = None
) -> dict[tuple[str, str], Chosen]:
    """Strategy and parameters for each pair that the layers of a step have; refused ones are left out.

    Parameters
    ----------
    inputs : the step, whatever strategies it has
    pairs : strategy by operator and pass
    fixed : parameters that are given instead of chosen, where a strategy has them
    """
    prices, builder = step_prices(inputs), graph_builder(inputs)
    layer = inputs.model.layers[-1]
    graphs = [builder.layer(layer, "forward"), builder.layer(layer, "backward")]
    found = {}
    for where, name in pairs.items():
        strategy = load_strategy(name)
        for part in _parts(graphs, where, strategy):
            if (best := _best(strategy, where, part, prices, fixed or {})) is not None:
                found[where] = Chosen(strategy, best)
            break
    return found


def worthwhile(
    inputs: StepInputs, pairs: Mapping[tuple[str, str], Chosen], arranging: tuple[Chosen, ...]
) -> dict[tuple[str, str], Chosen]:
    """Those of `pairs` that make a layer's passes shorter in the order that `arranging` gives them, best first."""
    prices, builder, kept = step_prices(inputs), graph_builder(inputs), dict[tuple[str, str], Chosen]()
    layer = inputs.model.layers[-1]
    stack = launch_stack(inputs.stack, inputs.cluster.device)
    for which in ("forward", "backward"):
        graph = builder.layer(layer, "forward" if which == "forward" else "backward")
        context = Context(graph, prices)
        open_ = {where for where in pairs if any((op.name, op.pass_) == where for op in graph.operators)}

        def seconds(chosen: Mapping[tuple[str, str], Chosen], context: Context = context) -> float:
            composition = Composition(arranging, chosen)
            return simulate_piece(context, composition, launch_s=stack.host_s, hosts=stack).duration_s

        mine: dict[tuple[str, str], Chosen] = {}
        best = seconds(mine)
        while open_:
            timed = min((seconds({**mine, where: pairs[where]}), where) for where in open_)
            if timed[0] >= best:
                break
            best, mine[timed[1]] = timed[0], pairs[timed[1]]
            open_.remove(timed[1])
        kept |= mine
    return kept


def pruned(inputs: StepInputs) -> StepInputs:
    """The step without fused kernels that make it longer, whatever they gain within a layer."""
    seconds = simulate_step(inputs, ranges=False).step_time_s
    for where in tuple(inputs.composition.pairs):
        fewer = {key: chosen for key, chosen in inputs.composition.pairs.items() if key != where}
        other = replace(inputs, composition=replace(inputs.composition, pairs=fewer))
        if (shorter_s := simulate_step(other, ranges=False).step_time_s) < seconds:
            inputs, seconds = other, shorter_s
    return inputs


def _parts(graphs: list[OperatorGraph], where: tuple[str, str], strategy: Strategy) -> Iterator[OperatorGraph]:
    """What the strategy takes with the GEMM of this operator and pass."""
    for graph in graphs:
        for position, op in enumerate(graph.operators):
            if (op.name, op.pass_) == where and not isinstance(op, CollectiveOp):
                positions = strategy.piece(graph, position, set())
                if positions is not None:
                    yield graph.part(positions)


def _best(
    strategy: Strategy, where: tuple[str, str], part: OperatorGraph, prices: PriceBook, fixed: Mapping[str, Any]
) -> Parameters | None:
    ranks = max(op.ranks for op in part.of_type(CollectiveOp))
    context = Context(part, replace(prices, ranks=ranks))
    if not strategy.applies_to(context).applies:
        return None
    timed = []
    for proposal in _some(strategy, context, fixed):
        composition = Composition(pairs={where: Chosen(strategy, proposal)})
        try:
            timed.append((simulate_piece(context, composition).duration_s, repr(proposal), proposal))
        except StrategyError:
            continue
    return min(timed)[2] if timed else None


def _some(strategy: Strategy, context: Context, fixed: Mapping[str, Any]) -> Iterator[Parameters]:
    seen = set()
    for proposal in propose(strategy.parameters(context)):
        known = {key: value for key, value in fixed.items() if key in proposal.parameters}
        point = {**proposal.parameters, **known}
        if repr(point) in seen:
            continue
        seen.add(repr(point))
        yield point
        if len(seen) == RUNS:
            return

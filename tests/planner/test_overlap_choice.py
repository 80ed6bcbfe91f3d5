"""Strategies of a step's pairs: chosen where they save, kept by pair, none where there is nothing to hide."""

from __future__ import annotations

from dataclasses import replace

from overlapsim.planner.layer_times import PAIR_GROUPS
from overlapsim.planner.overlap_choice import OverlapChooser
from overlapsim.planner.pair_choice import PairChooser
from overlapsim.step.pieces import graph_builder
from overlapsim.step.simulate import step_prices, step_seconds
from overlapsim.strategy.compose import Composition
from overlapsim.workload.operators import GemmOp
from tests.step.steps import GPT, MODELS, MOE, ask

BIG = replace(GPT, hidden=4096, layers=GPT.layers[:2])


def test_pairs_of_a_layer_are_chosen_by_operator_and_pass() -> None:
    """Only GEMMs of the layers' graphs with a collective beside them; the step is faster for it."""
    inputs = ask(GPT, "tp=8", batch=16, micro=8, seq=2048)
    prices = step_prices(inputs, MODELS)
    composition = Composition(pairs=PairChooser().pairs(inputs, prices))
    builder = graph_builder(inputs)
    graphs = [builder.layer(inputs.model.layers[0], which) for which in ("forward", "backward")]  # type: ignore[arg-type]
    gemms = {(op.name, op.pass_) for graph in graphs for op in graph.of_type(GemmOp)}
    assert composition.pairs
    assert set(composition.pairs) <= gemms
    assert all(chosen.strategy.overlaps for chosen in composition.pairs.values())
    assert step_seconds(replace(inputs, composition=composition), prices) < step_seconds(inputs, prices)


def test_without_collectives_in_layers_there_is_nothing_to_choose() -> None:
    """Replicas alone."""
    inputs = ask(GPT, "dp=8")
    assert not OverlapChooser().composition(inputs, step_prices(inputs, MODELS)).strategies


def test_graphs_are_arranged_where_that_is_faster() -> None:
    """Experts' exchanges have no GEMM of a pair here; an order of operators hides some of them."""
    inputs = ask(MOE, "ep=8,dp=8", batch=16, micro=1, seq=2048)
    prices = step_prices(inputs, MODELS)
    composition = OverlapChooser().composition(inputs, prices)
    assert composition.strategies
    assert step_seconds(replace(inputs, composition=composition), prices) < step_seconds(inputs, prices)


def test_a_pair_is_planned_once() -> None:
    """Replicas and pipelines ask for the same pairs; another micro-batch has other ones."""
    chooser = PairChooser()
    counts = []
    for layout, micro in (("tp=2,dp=2", 1), ("tp=2,dp=4", 1), ("tp=2,pp=2,dp=2", 1), ("tp=2,dp=2", 2)):
        inputs = ask(GPT, layout, batch=16, micro=micro)
        chooser.pairs(inputs, step_prices(inputs, MODELS))
        counts.append(chooser.num_planned)
    assert counts[0] == counts[1] == counts[2] < counts[3]


def test_a_recompute_pass_has_pairs_of_its_own() -> None:
    """Full recompute runs the forward again in the backward, with the same strategies."""
    from overlapsim.workload.recompute import Recompute

    inputs = ask(GPT, "tp=8", batch=16, micro=8, seq=2048, recompute=Recompute("full"))
    pairs = PairChooser().pairs(inputs, step_prices(inputs, MODELS))
    again = {name: chosen for (name, pass_), chosen in pairs.items() if pass_ == "recompute"}
    first = {name: chosen for (name, pass_), chosen in pairs.items() if pass_ == "fwd"}
    assert again
    assert all(first[name].strategy is chosen.strategy for name, chosen in again.items())


def test_collectives_of_other_groups_beside_a_gemm_are_not_taken_for_its_own() -> None:
    """With context parallelism transfers of keys and values hang on the projections too: the step takes its pairs."""
    inputs = ask(GPT, "tp=4,cp=2", batch=16, micro=8, seq=2048)
    prices = step_prices(inputs, MODELS)
    composition = Composition(pairs=PairChooser().pairs(inputs, prices, PAIR_GROUPS))
    assert ("attn.qkv", "fwd") in composition.pairs
    assert step_seconds(replace(inputs, composition=composition), prices) < step_seconds(inputs, prices)
